"""Numbers that RDKit works out of molecules: its descriptors, and ECFP4 fingerprints."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data.molecules import parse_molecule
from exlm_cli.data.rdkit_processes import SLOW_CHUNK_ROWS, behind_bar, map_in_order
from exlm_cli.errors import DataError
from exlm_cli.format import shorten
from exlm_cli.progress import Progress

FINGERPRINT_RADIUS = 2
"""Bonds around each atom; the 4 in ECFP4 is the diameter, twice this."""
NUM_BITS = 2048

_SHOWN_CHARACTERS = 40

Fingerprints = NDArray[np.uint8]


def descriptors(smiles: Sequence[str], progress: Progress) -> NDArray[np.float32]:
    """Return (N, D) the descriptors of `rdkit.Chem.Descriptors.descList`, in its order.

    NaN where RDKit has no value, as in every column of a row that is not a molecule. What float32 cannot hold, like the
    `Ipc` of a large molecule, becomes its largest number.
    """
    from rdkit.Chem.Descriptors import descList

    values_ND = np.full((len(smiles), len(descList)), np.nan)
    described = map_in_order(_describe, smiles, _undescribed, chunk_rows=SLOW_CHUNK_ROWS)
    for row, values_D in enumerate(behind_bar(described, "descriptors", len(smiles), progress)):
        if values_D:
            values_ND[row] = values_D
    limit = np.finfo(np.float32).max
    return values_ND.clip(-limit, limit).astype(np.float32)


def _describe(smiles: str) -> tuple[float, ...]:
    from rdkit import rdBase
    from rdkit.Chem.Descriptors import CalcMolDescriptors

    molecule, _ = parse_molecule(smiles)
    if molecule is None:
        return ()
    with rdBase.BlockLogs():
        found = CalcMolDescriptors(molecule, missingVal=math.nan, silent=True)  # type: ignore[no-untyped-call]
    return tuple(float(value) for value in found.values())


def _undescribed(reason: str) -> tuple[float, ...]:
    """Return the values of a molecule on which RDKit hangs or crashes: none."""
    del reason
    return ()


def fingerprints(smiles: Sequence[str], *, has_counts: bool = False) -> Fingerprints:
    """Return (N, K) ECFP4 bits, K = 2048, or how often each is set, up to 255.

    Raises:
        DataError: A row is not a molecule.
    """
    from rdkit.Chem import rdFingerprintGenerator

    generator = rdFingerprintGenerator.GetMorganGenerator(radius=FINGERPRINT_RADIUS, fpSize=NUM_BITS)
    bits = np.zeros((len(smiles), NUM_BITS), dtype=np.uint8)
    for row, text in enumerate(smiles):
        molecule, objection = parse_molecule(text)
        if molecule is None:
            raise DataError(f"no fingerprint of `{shorten(text, _SHOWN_CHARACTERS)}`: {objection}", "leave the row out")
        bits[row] = (
            generator.GetCountFingerprintAsNumPy(molecule).clip(max=255)
            if has_counts
            else generator.GetFingerprintAsNumPy(molecule)
        )
    return bits
