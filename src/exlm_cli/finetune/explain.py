"""What each atom of a molecule adds to its prediction: the change of the prediction when the atom's tokens are masked.

Axes: N molecules, A atoms of one, C outputs, K seeds, V masked versions of all molecules.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from exlm_cli.data import IntArray
from exlm_cli.data.molecules import atom_spans
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import ConfigError
from exlm_cli.finetune.model import Finetuned
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import EncodedRows, FloatArray, Loss

LOG_ODDS = "log-odds"
"""Unit of the changes of labels and classes: a probability near 0 or 1 hardly moves, whatever is masked."""


@dataclass(frozen=True)
class AtomChanges:
    """What the atoms of a molecule add to its prediction.

    Attributes:
        smiles: What the model reads; atom a is the a-th that it names.
        predicted: (C,) mean prediction of the seeds: values in their units, or log-odds of labels and classes.
        changes: (A, C) the prediction minus that with the atom masked, mean over the seeds, in the same units; NaN for
            atoms beyond the sequence length, which the model does not read.
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
        raise ConfigError(f"{finetuned.run} reads text; explanations are of the atoms of molecules", "leave them out")


def explain_molecules(
    finetuned: Finetuned, encoded: EncodedRows, smiles: Sequence[str], progress: Progress
) -> list[AtomChanges]:
    """Mask the atoms of each molecule, one after the other, and predict it anew.

    Every token of an atom becomes a [MASK], as in pre-training; bonds, branches and ring closures stay. Nothing is
    drawn at random. Where a vocabulary has tokens of several atoms, these share the change of their token evenly. A
    model with `model.expand: input` read k copies of each mask in pre-training; here it reads one.

    Args:
        finetuned: A run on molecules.
        encoded: Molecules as the model reads them.
        smiles: SMILES of the first N of them, which are explained.
        progress: Shows how far it is.
    """
    sequences = encoded.token_ids[: len(smiles)]
    groups_N = [_masked_tokens(text, ids, finetuned.tokenizer) for text, ids in zip(smiles, sequences, strict=True)]
    token_ids: list[IntArray] = []
    of_row: list[int] = []
    for row, (ids, groups) in enumerate(zip(sequences, groups_N, strict=True)):
        for places in ((), *dict.fromkeys(group for group in groups if group)):
            masked = ids.copy()
            masked[list(places)] = finetuned.tokenizer.mask_id
            token_ids.append(masked)
            of_row.append(row)
    descriptors = None if encoded.descriptors is None else encoded.descriptors[of_row]
    versions = EncodedRows(tuple(token_ids), encoded.targets[of_row], descriptors=descriptors)
    predicted_VC = _predict(finetuned, versions, progress)
    found, first = [], 0
    for text, groups in zip(smiles, groups_N, strict=True):
        distinct = list(dict.fromkeys(group for group in groups if group))
        whole_C, masked_VC = predicted_VC[first], predicted_VC[first + 1 : first + 1 + len(distinct)]
        first += 1 + len(distinct)
        changes_AC = np.full((len(groups), len(whole_C)), np.nan)
        for group, masked_C in zip(distinct, masked_VC, strict=True):
            atoms = [atom for atom, own in enumerate(groups) if own == group]
            changes_AC[atoms] = (whole_C - masked_C) / len(atoms)
        found.append(AtomChanges(text, whole_C, changes_AC))
    return found


def _masked_tokens(smiles: str, token_ids: IntArray, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
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
        outputs = runner.predict(versions, progress, f"atoms, seed {seed}") if len(versions) else []
        of_seeds.append(_in_units(finetuned.results.loss, np.array(outputs)))
    return np.mean(of_seeds, axis=0)


def _in_units(loss: Loss, outputs_VC: FloatArray) -> FloatArray:
    """Return values and logits of labels as they are, and of C classes the log-odds of each against all others."""
    if loss != "classes":
        return outputs_VC
    columns = [
        outputs_VC[:, index] - logsumexp(np.delete(outputs_VC, index, axis=1), axis=1)
        for index in range(outputs_VC.shape[1])
    ]
    return np.stack(columns, axis=1)
