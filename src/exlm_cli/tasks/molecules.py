"""SMILES of a table: which rows are molecules, which of them are one molecule, and what their scaffolds are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exlm_cli.data.smiles import find_invalid_smiles, find_unknown_characters
from exlm_cli.progress import Progress
from exlm_cli.tasks.scaffold import murcko_scaffold

if TYPE_CHECKING:
    from rdkit.Chem import Mol

_NON_METALS = frozenset(
    (
        "H", "B", "C", "N", "O", "F", "Si", "P", "S", "Cl", "Ge", "As", "Se", "Br", "Te", "I",
        "He", "Ne", "Ar", "Kr", "Xe",
    )
)  # fmt: skip
_BAR_EVERY_ROWS = 64


@dataclass(frozen=True)
class Molecule:
    """What is known of one row.

    Attributes:
        problem: Why it is no molecule; None where it is one.
        canonical: RDKit's canonical SMILES, stereochemistry included; rows that share it are one molecule.
        scaffold: Its Bemis-Murcko scaffold, where it was asked for.
        has_odd_metal: RDKit refuses the valence of a metal in it, and nothing else.
    """

    problem: str | None = None
    canonical: str = ""
    scaffold: str | None = None
    has_odd_metal: bool = False


def parse_molecule(smiles: str) -> tuple["Mol | None", bool]:
    """Return the molecule, or None where it is none, and whether it has a metal of a valence that RDKit refuses.

    Which valences a metal may have has changed from one RDKit to the next; the benchmarks were made with older ones. So
    a molecule in which only that is wrong is taken as it is written: the model reads its SMILES, not its valences.
    """
    from rdkit import Chem, rdBase

    if find_unknown_characters(smiles) is not None:
        return None, False
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
    smiles: Sequence[str], progress: Progress, *, chiral_scaffolds: bool | None = None
) -> list[Molecule]:
    """Read every row of a column.

    Args:
        smiles: The column.
        progress: Shown how far it is.
        chiral_scaffolds: Work out scaffolds, with chirality or without; None: no scaffolds.
    """
    found = []
    with progress.bar("molecules", len(smiles)) as bar:
        for number, row in enumerate(smiles, start=1):
            found.append(_read(row, chiral_scaffolds))
            if number % _BAR_EVERY_ROWS == 0:
                bar.update(number)
        bar.update(len(smiles))
    return found


def written_for_model(smiles: Sequence[str], molecules: Sequence[Molecule], *, canonical: bool) -> tuple[str, ...]:
    """Return what the model reads of each row: the SMILES as they stand, or RDKit's canonical ones.

    A model of SMILES reads how a molecule is written too. In ClinTox that gives the label away: most molecules that
    failed in trials are written without aromatic letters, and whether a `c` is in it alone has a ROC-AUC of 0.87.
    """
    if not canonical:
        return tuple(smiles)
    return tuple(molecule.canonical or text for text, molecule in zip(smiles, molecules, strict=True))


def repeated_molecules(rows: Iterable[int], molecules: Sequence[Molecule]) -> list[list[int]]:
    """Return groups of rows that are one molecule, each ascending, in the order of their first rows."""
    by_canonical: dict[str, list[int]] = {}
    for row in rows:
        by_canonical.setdefault(molecules[row].canonical, []).append(row)
    return [group for group in by_canonical.values() if len(group) > 1]


def _read(smiles: str, chiral_scaffolds: bool | None) -> Molecule:
    from rdkit import Chem, rdBase

    molecule, has_odd_metal = parse_molecule(smiles)
    if molecule is None:
        return Molecule(problem=find_invalid_smiles(smiles))
    with rdBase.BlockLogs():
        scaffold = None
        if chiral_scaffolds is not None:
            scaffold = murcko_scaffold(molecule, has_chirality=chiral_scaffolds)
        return Molecule(None, Chem.MolToSmiles(molecule), scaffold, has_odd_metal)


def _has_only_odd_metals(molecule: "Mol") -> bool:
    from rdkit import Chem

    problems = Chem.DetectChemistryProblems(molecule)
    return bool(problems) and all(
        problem.GetType() == "AtomValenceException"
        and molecule.GetAtomWithIdx(problem.GetAtomIdx()).GetSymbol() not in _NON_METALS
        for problem in problems
    )
