"""Molecules of a column of SMILES: which rows are molecules, which are the same molecule, and their scaffolds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data.rdkit_processes import map_in_order
from exlm_cli.data.smiles import RDKIT_ERRORS, describe_failure, find_invalid_smiles, find_refused_text
from exlm_cli.progress import Progress

if TYPE_CHECKING:
    from rdkit.Chem import Mol

_NON_METALS = {
    "H", "B", "C", "N", "O", "F", "Si", "P", "S", "Cl", "Ge", "As", "Se", "Br", "Te", "I", "He", "Ne", "Ar", "Kr", "Xe",
}  # fmt: skip
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


def parse_molecule(smiles: str) -> tuple["Mol | None", bool]:
    """Return the molecule, or None, and whether it has a metal of a valence that RDKit refuses.

    RDKit's versions differ in the valences that a metal may have; the benchmarks were made with older ones. So a
    molecule in which only that is wrong is accepted: the model reads its SMILES, not its valences.
    """
    if find_refused_text(smiles) is not None:
        return None, False
    try:
        return _parse(smiles)
    except RDKIT_ERRORS:
        return None, False


def _parse(smiles: str) -> tuple["Mol | None", bool]:
    from rdkit import Chem, rdBase

    with rdBase.BlockLogs():
        molecule = Chem.MolFromSmiles(smiles)
        if molecule is not None:
            return molecule, False
        molecule = Chem.MolFromSmiles(smiles, sanitize=False)
        if molecule is None or not _has_only_odd_metals(molecule):
            return None, False
        Chem.SanitizeMol(molecule, Chem.SANITIZE_ALL ^ Chem.SANITIZE_PROPERTIES)
        molecule.UpdatePropertyCache(strict=False)
    return molecule, True


def read_molecules(
    smiles: Sequence[str], progress: Progress, *, has_chiral_scaffolds: bool | None = None
) -> list[Molecule]:
    """Read every row of a column; work out scaffolds with chirality, without it, or (None) not at all."""
    found = []
    read = partial(_read, has_chiral_scaffolds=has_chiral_scaffolds)
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
    """Return (N, K) ECFP4 bits, K = 2048; a row that is no molecule has none."""
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

    molecule, has_odd_metal = parse_molecule(smiles)
    if molecule is None:
        return Molecule(problem=find_invalid_smiles(smiles) or "RDKit cannot make a molecule of it")
    scaffold = None
    try:
        with rdBase.BlockLogs():
            if has_chiral_scaffolds is not None:
                scaffold = murcko_scaffold(molecule, has_chirality=has_chiral_scaffolds)
            return Molecule("", Chem.MolToSmiles(molecule), scaffold, has_odd_metal)
    except RDKIT_ERRORS as error:
        return Molecule(problem=describe_failure(error))


def _has_only_odd_metals(molecule: "Mol") -> bool:
    from rdkit import Chem

    problems = Chem.DetectChemistryProblems(molecule)
    return bool(problems) and all(
        problem.GetType() == "AtomValenceException"
        and molecule.GetAtomWithIdx(problem.GetAtomIdx()).GetSymbol() not in _NON_METALS
        for problem in problems
    )
