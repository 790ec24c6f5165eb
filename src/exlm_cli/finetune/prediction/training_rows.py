"""Hashes of a run's training and validation rows, and ECFP4 fingerprints: find known rows and similar molecules.

Axes: S splits, N training rows of any of them, V validation rows, R new rows, K bits.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data.molecules import NUM_BITS, Fingerprints, fingerprints
from exlm_cli.errors import CheckpointError
from exlm_cli.finetune.baselines.arrays import read_arrays, write_arrays
from exlm_cli.progress import Progress
from exlm_cli.run_dir import resume_command
from exlm_cli.tasks.base import DownstreamTask, FloatArray, Split

TRAINING_ROWS_FILE = "training_rows.npz"
_TYPES = {"hashes": ("uint64", 1), "bits": ("uint8", 2), "members": ("bool", 2), "validation_hashes": ("uint64", 1)}
"""Type and number of axes of each array of a file."""
_BLOCK = 2048
"""Molecules per block on each side of a matrix product of bits: 32 MB of float32."""


@dataclass(frozen=True)
class TrainingRows:
    """Hashes of a run's training and validation rows, and fingerprints of the training rows.

    Whoever has them can tell whether a given row is among them; fingerprints also reveal substructures.

    Attributes:
        hashes: (N,) uint64 of `DownstreamTask.training_keys`.
        bits: (N, K / 8) ECFP4 bits, eight in a byte; (0, K / 8) for text.
        members: (S, N) whether a row is a training row of each split.
        validation_hashes: (V,) uint64 of `DownstreamTask.validation_keys`.
    """

    hashes: NDArray[np.uint64]
    bits: Fingerprints
    members: NDArray[np.bool_]
    validation_hashes: NDArray[np.uint64]

    def splits_of(self, keys: Sequence[str]) -> NDArray[np.str_]:
        """Return (R,) the split of each new row: `train`, `valid` or `none`; `train` for a row of both."""
        hashes_R = _hash_all(keys)
        is_train_R, is_valid_R = (np.isin(hashes_R, known) for known in (self.hashes, self.validation_hashes))
        return np.where(is_train_R, "train", np.where(is_valid_R, "valid", "none"))

    def nearest_tanimoto(self, smiles: Sequence[str], progress: Progress) -> FloatArray:
        """Return (S, R) the largest Tanimoto similarity of each new molecule to a training molecule of each split.

        It is the number of bits that two molecules share over the number of bits that either has; 1 for the same bits.
        """
        nearest_SR = np.zeros((len(self.members), len(smiles)))
        with progress.bar("similarity", len(smiles)) as bar:
            for start in range(0, len(smiles), _BLOCK):
                new_rK = fingerprints(smiles[start : start + _BLOCK]).astype(np.float32)
                for first in range(0, len(self.bits), _BLOCK):
                    train_nK = np.unpackbits(self.bits[first : first + _BLOCK], axis=1).astype(np.float32)
                    shared_rn = new_rK @ train_nK.T  # whole numbers below 2^24 are exact in float32
                    either_rn = new_rK.sum(1)[:, None] + train_nK.sum(1) - shared_rn
                    similar_rn = shared_rn / np.maximum(either_rn, 1).astype(np.float64)
                    for nearest_R, is_member_N in zip(nearest_SR, self.members, strict=True):
                        own_rn = similar_rn[:, is_member_N[first : first + _BLOCK]]
                        into = nearest_R[start : start + _BLOCK]
                        np.maximum(into, own_rn.max(axis=1, initial=0.0), out=into)
                bar.update(min(start + _BLOCK, len(smiles)))
        return nearest_SR


def training_rows_of(tasks: Sequence[DownstreamTask]) -> TrainingRows:
    """Return the rows that a task is trained and validated on in any of its splits, each once if there are several."""
    training, validation = (
        list(keys[0] if len(keys) == 1 else dict.fromkeys(chain.from_iterable(keys)))
        for keys in ([task.training_keys for task in tasks], [task.validation_keys for task in tasks])
    )
    is_molecule = tasks[0].input_kind == "smiles"
    bits = fingerprints(training) if is_molecule else np.zeros((0, NUM_BITS), dtype=np.uint8)
    of_splits = [set(task.training_keys) for task in tasks]
    members = np.array([[key in own for key in training] for own in of_splits], dtype=np.bool_)
    members = members.reshape(len(tasks), len(training))
    return TrainingRows(_hash_all(training), np.packbits(bits, axis=1), members, _hash_all(validation))


def write_training_rows(run: Path, tasks: Sequence[DownstreamTask]) -> None:
    """Write `training_rows.npz`.

    Args:
        tasks: The task on each of its splits.

    Raises:
        CheckpointError: A file cannot be written.
    """
    write_arrays(run / TRAINING_ROWS_FILE, vars(training_rows_of(tasks)))


def similarity_to_training(task: DownstreamTask, progress: Progress) -> dict[Split, FloatArray]:
    """Return (N,) the similarity of each row of validation and test to the nearest training row, by part; of texts
    nothing.
    """
    if task.input_kind != "smiles":
        return {}
    known = training_rows_of([task])
    keys: dict[Split, Sequence[str]] = {"valid": task.validation_keys, "test": task.test_keys}
    return {split: known.nearest_tanimoto(keys[split], progress)[0] for split in task.splits if split in keys}


def read_training_rows(run: Path) -> TrainingRows:
    """Return the training and validation rows of a run.

    Raises:
        CheckpointError: The file is missing or altered.
    """
    path, hint = run / TRAINING_ROWS_FILE, f"`{resume_command('finetune', run)}` writes it again"
    rows = TrainingRows(**read_arrays(path, hint, _TYPES, "training rows"))
    num_rows = len(rows.hashes)
    has_sizes = len(rows.bits) in (0, num_rows) and rows.members.shape[1] == num_rows and len(rows.members) > 0
    if rows.bits.shape[1] != NUM_BITS // 8 or not has_sizes:
        raise CheckpointError(f"{path}: not readable as training rows: arrays of other shapes or types", hint)
    return rows


def _hash_all(keys: Sequence[str]) -> NDArray[np.uint64]:
    """Return 64 bits of the BLAKE2b hash of each text."""
    digests = (hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest() for key in keys)
    return np.array([int.from_bytes(digest) for digest in digests], dtype=np.uint64)
