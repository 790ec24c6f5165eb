"""Numbers that RDKit works out of molecules, for baselines and for the head of a model; each molecule is read once.

Axes: N rows, F numbers of a row, Q quantiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from exlm_cli.config.tasks import Descriptors, TaskSection
from exlm_cli.data.molecules import NUM_BITS, descriptors, fingerprints
from exlm_cli.files import hash_json
from exlm_cli.format import format_number_of, name_some
from exlm_cli.model.heads import NUM_QUANTILES
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import EncodedSplit, FloatArray
from exlm_cli.tasks.rows.task import ScoredRows

Features = NDArray[Any]
FeatureKind = Descriptors | Literal["ecfp4-counts"]
"""What the head or a baseline may read of a molecule."""
_BLOCK = 256
"""Columns whose quantiles are worked out at once."""


@dataclass(frozen=True)
class FeatureStore:
    """Features of every molecule of a table, worked out once however many splits, seeds and models there are."""

    by_kind: dict[FeatureKind, dict[str, Features]] = field(default_factory=dict)

    def features(self, kind: FeatureKind, smiles: Sequence[str], progress: Progress) -> Features:
        """Return (N, F) features of one or more molecules, NaN where there is none."""
        known = self.by_kind.setdefault(kind, {})
        if new := [text for text in dict.fromkeys(smiles) if text not in known]:
            is_rdkit2d, has_counts = kind == "rdkit2d", kind == "ecfp4-counts"
            found_NF = descriptors(new, progress) if is_rdkit2d else fingerprints(new, has_counts=has_counts)
            known |= zip(new, found_NF, strict=True)
        return np.stack([known[text] for text in smiles])

    def of_rows(self, encoded: Sequence[EncodedSplit], config: TaskSection, progress: Progress) -> list[Features]:
        """Return features of the molecules of several splits, for each of `task.descriptors`."""
        smiles = [text for split in encoded if isinstance(split, ScoredRows) for (text,) in split.texts]
        return [self.features(kind, smiles, progress) for kind in config.molecule_descriptors]


def descriptor_names(config: TaskSection) -> tuple[str, ...]:
    """Return the names of what the head reads beside the encoder's state, in order."""
    names = [name for kind in config.molecule_descriptors for name in feature_names(kind)]
    return (*names, *(f"column {name}" for name in config.number_columns))


def descriptor_identity(config: TaskSection) -> dict[str, str]:
    """Return a hash of the names, for the identity of a checkpoint; nothing where there are no descriptors."""
    names = descriptor_names(config)
    return {"descriptors": hash_json(names)} if names else {}


def feature_names(kind: FeatureKind) -> list[str]:
    """Return the names of F features of a molecule."""
    if kind != "rdkit2d":
        return [f"{kind} bit {bit}" for bit in range(NUM_BITS)]
    from rdkit.Chem.Descriptors import descList

    return [name for name, _ in descList]


def with_descriptors(
    encoded: EncodedSplit, config: TaskSection, store: FeatureStore, progress: Progress
) -> EncodedSplit:
    """Return rows with all numbers that the head reads: `task.descriptors`, then `task.descriptor_columns`."""
    if not config.molecule_descriptors or not len(encoded):
        return encoded
    parts = store.of_rows([encoded], config, progress)
    if encoded.descriptors is not None:
        parts.append(encoded.descriptors)
    return replace(encoded, descriptors=np.concatenate(parts, axis=1))


def replace_molecules(
    descriptors_NF: Features, smiles: Sequence[str], config: TaskSection, store: FeatureStore, progress: Progress
) -> Features:
    """Return what the head reads (`with_descriptors`) of other molecules; numbers of `task.descriptor_columns` stay."""
    parts = [store.features(kind, smiles, progress) for kind in config.molecule_descriptors]
    num_columns = len(config.number_columns)
    return np.concatenate([*parts, descriptors_NF[:, descriptors_NF.shape[1] - num_columns :]], axis=1)


def fit_quantiles(training_NF: Features) -> FloatArray:
    """Return (F, Q) quantiles of the training rows, as `model.heads.DescriptorRanks` holds them; 0 without a value."""
    places = np.linspace(0, 1, NUM_QUANTILES)
    quantiles_FQ = np.zeros((training_NF.shape[1], NUM_QUANTILES))
    for start in range(0, len(quantiles_FQ), _BLOCK):
        block_Nf = training_NF[:, start : start + _BLOCK].astype(np.float64)
        has_values = ~np.isnan(block_Nf).all(axis=0)
        # rounding may put a quantile of equal values below its neighbour
        found_Qf = np.maximum.accumulate(np.nanquantile(block_Nf[:, has_values], places, axis=0), axis=0)
        quantiles_FQ[start : start + _BLOCK][has_values] = found_Qf.T
    return quantiles_FQ


def describe_descriptors(training_NF: Features, quantiles_FQ: FloatArray, config: TaskSection) -> str:
    """Return a sentence on what the head reads, what it leaves out, and what becomes of missing values."""
    names, missing_N = descriptor_names(config), np.isnan(training_NF.astype(np.float32, copy=False))
    with_missing = np.flatnonzero(missing_N.any(axis=0))
    constant = np.flatnonzero(quantiles_FQ[:, 0] == quantiles_FQ[:, -1])
    parts = [*config.molecule_descriptors, *(f"`{name}`" for name in config.number_columns)]
    said = f"descriptors: {format_number_of(len(names), 'number')} a row ({', '.join(parts)}), as ranks among the "
    said += "training rows"
    if len(constant):
        listed = name_some((names[index] for index in constant), limit=3)
        said += f"; constant there and left out: {len(constant):,} ({listed})"
    if len(with_missing):
        listed = name_some((names[index] for index in with_missing), limit=3)
        said += f"; {format_number_of(int(missing_N.sum()), 'missing value')} become the median ({listed})"
    return said
