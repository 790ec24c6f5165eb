"""Molecules of a column of SMILES: which rows are molecules, which are the same molecule, and their scaffolds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data.rdkit_processes import map_in_order
from exlm_cli.data.smiles import RDKIT_ERRORS, describe_failure, parse_molecule
from exlm_cli.progress import Progress

if TYPE_CHECKING:
    from rdkit.Chem import Mol

_BAR_EVERY_ROWS = 64

FINGERPRINT_RADIUS = 2
"""Bonds around each atom; ECFP4 counts them on both sides."""
NUM_BITS = 2048

Fingerprints = NDArray[np.uint8]


@dataclass(frozen=True)
class Molecule:
    """One row.

    Attributes:
        problem: Why it is not a molecule; empty where it is one.
        canonical: RDKit's canonical SMILES, stereochemistry included; rows that share it are the same molecule.
        scaffold: Its Bemis-Murcko scaffold, if that was asked for.
        has_odd_metal: RDKit refuses the valence of a metal in it, and nothing else.
    """

    problem: str = ""
    canonical: str = ""
    scaffold: str | None = None
    has_odd_metal: bool = False


def read_molecules(
    smiles: Sequence[str], progress: Progress, *, has_chiral_scaffolds: bool | None = None
) -> list[Molecule]:
    """Read every row of a column; work out scaffolds with chirality, without it, or (None) not at all.

    A molecule with a metal of a valence that RDKit refuses is accepted: the benchmarks were made with older versions of
    RDKit, and the model reads its SMILES, not its valences.
    """
    read = partial(_read, has_chiral_scaffolds=has_chiral_scaffolds)
    found = []
    with progress.bar("molecules", len(smiles)) as bar:
        for number, molecule in enumerate(map_in_order(read, smiles, Molecule), start=1):
            found.append(molecule)
            if number % _BAR_EVERY_ROWS == 0:
                bar.update(number)
        bar.update(len(smiles))
    return found


def murcko_scaffold(molecule: "Mol", *, has_chirality: bool) -> str:
    """Return the Bemis-Murcko scaffold as SMILES; empty for a molecule without a ring."""
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    if not molecule.GetRingInfo().NumRings():
        return ""
    return cast(str, MurckoScaffoldSmiles(mol=molecule, includeChirality=has_chirality))  # type: ignore[no-untyped-call]


def fingerprints(smiles: Sequence[str]) -> Fingerprints:
    """Return (N, K) ECFP4 bits, K = 2048; a row that is not a molecule has none."""
    from rdkit.Chem import rdFingerprintGenerator

    generator = rdFingerprintGenerator.GetMorganGenerator(radius=FINGERPRINT_RADIUS, fpSize=NUM_BITS)
    bits = np.zeros((len(smiles), NUM_BITS), dtype=np.uint8)
    for row, text in enumerate(smiles):
        molecule, _ = parse_molecule(text)
        if molecule is not None:
            bits[row] = generator.GetFingerprintAsNumPy(molecule)
    return bits


def _read(smiles: str, has_chiral_scaffolds: bool | None) -> Molecule:
    from rdkit import Chem, rdBase

    molecule, objection = parse_molecule(smiles)
    if molecule is None:
        return Molecule(problem=objection or "")
    scaffold = None
    try:
        with rdBase.BlockLogs():
            if has_chiral_scaffolds is not None:
                scaffold = murcko_scaffold(molecule, has_chirality=has_chiral_scaffolds)
            return Molecule("", Chem.MolToSmiles(molecule), scaffold, has_odd_metal=objection is not None)
    except RDKIT_ERRORS as error:
        return Molecule(problem=describe_failure(error))
