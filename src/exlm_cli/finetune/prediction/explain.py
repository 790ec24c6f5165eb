"""What each atom of a molecule adds to its prediction: how what predicts changes its answer as atoms are hidden.

Axes: N molecules, A atoms of one, G distinct groups of tokens of these atoms, C outputs, V masked versions of all
molecules.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exlm_cli.data import IntArray
from exlm_cli.data.molecules import atom_spans, hide_atoms
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.finetune.cells.model import Finetuned
from exlm_cli.finetune.features import FeatureStore, replace_molecules
from exlm_cli.finetune.prediction.predict import predict_outputs
from exlm_cli.finetune.scores import Predictor
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import EncodedRows, FloatArray


@dataclass(frozen=True)
class AtomChanges:
    """What the atoms of a molecule add to its prediction.

    Attributes:
        smiles: What the model reads; atom a is the a-th that it names.
        predicted: (C,) prediction, as `exlm predict` gives it: values in their units, or probabilities.
        changes: (A, C) what each atom adds (`explain_molecules`), in the same units; NaN for atoms beyond the sequence
            length, which the model does not read.
    """

    smiles: str
    predicted: FloatArray
    changes: FloatArray


def explain_molecules(
    finetuned: Finetuned, encoded: EncodedRows, smiles: Sequence[str], predictor: Predictor, progress: Progress
) -> list[AtomChanges]:
    """Hide the atoms of each molecule from all that predicts, and predict it anew.

    The change of an atom is the mean of two: what the prediction loses when the atom alone is hidden, and what it gains
    by the atom when all others are hidden. The first alone misses atoms that the others give away, such as those of an
    aromatic ring. For the encoder every token of a hidden atom becomes a [MASK], as in pre-training; bonds, branches
    and ring closures stay. Descriptors and the features of a baseline are those of the molecule in which these atoms
    are unknown (`hide_atoms`); numbers of `task.descriptor_columns` stay. Nothing is drawn at random. Where a
    vocabulary has tokens of several atoms, these share the change of their token evenly. An ExLM without a chain read k
    copies of each mask in pre-training; here it reads one.

    Args:
        finetuned: A run on molecules.
        encoded: Molecules as the model reads them.
        smiles: SMILES of the first N of them, which are explained.
        predictor: What predicts (`check_options`).
        progress: Shows how far it is.
    """
    if not smiles:
        return []
    sequences = encoded.token_ids[: len(smiles)]
    atoms_N = [_tokens_of_atoms(text, ids, finetuned.tokenizer) for text, ids in zip(smiles, sequences, strict=True)]
    token_ids: list[IntArray] = []
    smiles_V: list[str] = []
    of_row: list[int] = []
    for row, (text, ids, atoms) in enumerate(zip(smiles, sequences, atoms_N, strict=True)):
        for places in _hidden_places(_distinct(atoms)):
            token_ids.append(ids.copy())
            token_ids[-1][places] = finetuned.tokenizer.mask_id
            smiles_V.append(
                hide_atoms(text, [atom for atom, own in enumerate(atoms) if not set(places).isdisjoint(own)])
            )
            of_row.append(row)
    descriptors, store = encoded.descriptors, FeatureStore()
    if descriptors is not None:
        descriptors = replace_molecules(descriptors[of_row], smiles_V, finetuned.recipe.task, store, progress)
    versions = EncodedRows(tuple(token_ids), encoded.targets[of_row], descriptors=descriptors)
    texts = [(text,) for text in smiles_V]
    predicted_VC = np.mean(predict_outputs(finetuned, versions, texts, predictor, store, progress), axis=0)
    found, first = [], 0
    for text, atoms in zip(smiles, atoms_N, strict=True):
        groups = _distinct(atoms)
        whole_C, empty_C = predicted_VC[first], predicted_VC[first + 1]
        without_GC, alone_GC = np.split(predicted_VC[first + 2 : first + 2 + 2 * len(groups)], 2)
        first += 2 + 2 * len(groups)
        change_GC = (whole_C - without_GC + alone_GC - empty_C) / 2
        changes_AC = np.full((len(atoms), len(whole_C)), np.nan)
        for group, change_C in zip(groups, change_GC, strict=True):
            sharing = [atom for atom, own in enumerate(atoms) if own == group]
            changes_AC[sharing] = change_C / len(sharing)
        found.append(AtomChanges(text, whole_C, changes_AC))
    return found


def _hidden_places(groups: list[tuple[int, ...]]) -> list[list[int]]:
    """Return what is masked of a sequence: nothing, all of G groups of places, each group, and all but each group."""
    every = sorted({place for group in groups for place in group})
    return [[], every, *map(list, groups), *([place for place in every if place not in group] for group in groups)]


def _distinct(atoms: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the places of atoms that are not cut off, once for atoms of the same tokens."""
    return list(dict.fromkeys(places for places in atoms if places))


def _tokens_of_atoms(smiles: str, token_ids: IntArray, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the places in a sequence of the tokens of each atom; none for an atom that is cut off."""
    offsets = tokenizer.encode_with_offsets(smiles).offsets[: len(token_ids) - 2]
    return [
        tuple(place for place, (start, end) in enumerate(offsets, start=1) if start < last and end > begin)
        for begin, last in atom_spans(smiles)
    ]
