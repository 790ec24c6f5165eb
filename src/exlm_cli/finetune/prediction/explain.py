"""What each atom of a molecule adds to its prediction: how the prediction changes as atoms are hidden.

Axes: N molecules, A atoms of one, G distinct groups of tokens of these atoms, C outputs, V masked versions of all
molecules.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from exlm_cli.data import IntArray
from exlm_cli.data.molecules import atom_spans, hide_atoms
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import ConfigError
from exlm_cli.finetune.cells.model import Finetuned
from exlm_cli.finetune.features import replace_molecules
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import EncodedRows, FloatArray, Loss


@dataclass(frozen=True)
class AtomChanges:
    """What the atoms of a molecule add to its prediction.

    Attributes:
        smiles: What the model reads; atom a is the a-th that it names.
        predicted: (C,) mean prediction of the seeds: values in their units, or log-odds of labels and classes.
        changes: (A, C) what each atom adds (`explain_molecules`), mean over the seeds, in the same units; NaN for atoms
            beyond the sequence length, which the model does not read.
    """

    smiles: str
    predicted: FloatArray
    changes: FloatArray


def require_molecules(finetuned: Finetuned) -> None:
    """Refuse a run that reads text.

    Raises:
        ConfigError: It does.
    """
    if finetuned.results.input_kind != "smiles":
        raise ConfigError(
            f"{finetuned.run} reads text; explanations are of the atoms of molecules", "leave `explain` out"
        )


def explain_molecules(
    finetuned: Finetuned, encoded: EncodedRows, smiles: Sequence[str], progress: Progress
) -> list[AtomChanges]:
    """Mask the atoms of each molecule, and predict it anew.

    The change of an atom is the mean of two: what the prediction loses when the atom alone is masked, and what it gains
    by the atom when all others are masked. The first alone misses atoms that the others give away, such as those of an
    aromatic ring. Every token of an atom becomes a [MASK], as in pre-training; bonds, branches and ring closures stay.
    Descriptors are those of the molecule in which these atoms are unknown (`hide_atoms`); numbers of
    `task.descriptor_columns` stay. Nothing is drawn at random. Where a vocabulary has tokens of several atoms, these
    share the change of their token evenly. A model with `model.expand: input` read k copies of each mask in
    pre-training; here it reads one.

    Args:
        finetuned: A run on molecules.
        encoded: Molecules as the model reads them.
        smiles: SMILES of the first N of them, which are explained.
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
    descriptors = encoded.descriptors
    if descriptors is not None:
        descriptors = replace_molecules(descriptors[of_row], smiles_V, finetuned.recipe.task, progress)
    versions = EncodedRows(tuple(token_ids), encoded.targets[of_row], descriptors=descriptors)
    predicted_VC = _predict(finetuned, versions, progress)
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


def _predict(finetuned: Finetuned, versions: EncodedRows, progress: Progress) -> FloatArray:
    """Return the (V, C) mean predictions of the seeds, in the units of `AtomChanges`."""
    of_seeds = []
    for seed, runner in finetuned.runners.items():
        outputs = runner.predict(versions, progress, f"atoms, seed {seed}")
        of_seeds.append(_in_units(finetuned.results.loss, np.array(outputs)))
    return np.asarray(np.mean(of_seeds, axis=0))


def _in_units(loss: Loss, outputs_VC: FloatArray) -> FloatArray:
    """Return values and logits of labels as they are, and of C classes the log-odds of each against all others."""
    if loss != "classes":
        return outputs_VC
    columns = [
        outputs_VC[:, index] - logsumexp(np.delete(outputs_VC, index, axis=1), axis=1)
        for index in range(outputs_VC.shape[1])
    ]
    return np.stack(columns, axis=1)
