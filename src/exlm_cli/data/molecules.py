"""SMILES as molecules: which rows are molecules, which are the same one, parents, scaffolds, atoms and descriptors."""

import math
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data.rdkit_processes import SLOW_CHUNK_ROWS, behind_bar, map_in_order
from exlm_cli.data.smiles import SMILES_TOKEN, SMILES_TOKENS
from exlm_cli.errors import DataError
from exlm_cli.format import shorten
from exlm_cli.progress import Progress

if TYPE_CHECKING:
    from rdkit.Chem import Mol

_MAX_NAMED = 12
_SHOWN_CHARACTERS = 40

MAX_ATOMS = 1000
"""Atoms of the largest molecule that is read; RDKit's time for a scaffold grows with their cube."""

FINGERPRINT_RADIUS = 2
"""Bonds around each atom; the 4 in ECFP4 is the diameter, twice this."""
NUM_BITS = 2048
Fingerprints = NDArray[np.uint8]

RDKIT_ERRORS = (RuntimeError, ValueError)
"""What RDKit raises where it neither reads nor refuses a molecule."""

_NON_METALS = {
    "H", "B", "C", "N", "O", "F", "Si", "P", "S", "Cl", "Ge", "As", "Se", "Br", "Te", "I", "He", "Ne", "Ar", "Kr", "Xe",
}  # fmt: skip
_ATOM = re.compile(r"\[[^\]]+]|Br?|Cl?|[NOSPFIbcnops*]")

_CARBON = 6

_CXSMILES = re.compile(r"\S+\s+\|.*\|")
"""A SMILES and ChemAxon's extension, such as `C[C@H](N)O |&1:1|`, which says that the compound is a racemate."""

_ATOM_MAP = re.compile(r":\d+(?=])")
_UNSETTLED = re.compile(r"->|<-|@[A-Z]")
"""Dative bonds, which RDKit also makes while it reads, and chirality of metals."""
_STEREO_OR_ISOTOPE = re.compile(r"[@/\\]|\[\d")
_CHARGED_OR_PARTED = re.compile(r"[+-]\d*]|\.")


@dataclass(frozen=True)
class Molecule:
    """What RDKit finds in one row.

    Attributes:
        problem: Why it is not a molecule; empty where it is one.
        canonical: RDKit's canonical SMILES of what is read, with stereochemistry, without atom-map numbers; rows that
            share it are the same molecule.
        scaffold: The Bemis-Murcko scaffold of what is read, if that was asked for.
        has_odd_metal: RDKit refuses the valence of a metal in the row, and nothing else.
        parent: Canonical SMILES of the parent, by the steps of `parent_of`.
        num_fragments: Unconnected parts of the molecule in the row; a salt has several.
        is_parent: The parent is read, and it is not the molecule in the row.
        is_bare: It has carbon, no hydrogen on any carbon, and radicals: SMARTS such as `[#6]-[#6]` and SELFIES such as
            `[C][C]` are read so.
        compound: What all forms of one compound share, if that was asked for: the SMILES of RDKit's canonical tautomer
            of the parent without stereochemistry and isotopes. Where no other row has the same atoms, hydrogens and
            bonds between atoms, the tautomer is that of the row.
        skeleton: Atoms, hydrogens and bonds of that, without the orders of bonds.
    """

    problem: str = ""
    canonical: str = ""
    scaffold: str | None = None
    has_odd_metal: bool = False
    parent: str = ""
    num_fragments: int = 1
    is_parent: bool = False
    is_bare: bool = False
    compound: str = ""
    skeleton: str = ""


def read_molecules(
    smiles: Sequence[str],
    progress: Progress,
    *,
    has_chiral_scaffolds: bool | None = None,
    reads_parents: bool = False,
    finds_compounds: bool = False,
) -> list[Molecule]:
    """Read every row of a column; work out scaffolds with chirality, without it, or (None) not at all.

    A molecule with a metal of a valence that RDKit refuses is accepted: the benchmarks were made with older versions of
    RDKit, and the model reads its SMILES, not its valences.

    Args:
        reads_parents: Read the parent of each molecule instead of the molecule.
        finds_compounds: Work out which rows are forms of one compound.
    """
    read = partial(
        _read,
        has_chiral_scaffolds=has_chiral_scaffolds,
        reads_parents=reads_parents,
        finds_compounds=finds_compounds,
    )
    found = list(behind_bar(map_in_order(read, smiles, Molecule), "molecules", len(smiles), progress))
    return _join_tautomers(found, progress) if finds_compounds else found


def _join_tautomers(molecules: list[Molecule], progress: Progress) -> list[Molecule]:
    """Give tautomers one compound; RDKit's canonical tautomer, which is slow, is found where skeletons are alike."""
    by_skeleton: dict[str, dict[str, None]] = {}
    for molecule in molecules:
        by_skeleton.setdefault(molecule.skeleton, {})[molecule.compound] = None
    alike = [compound for compounds in by_skeleton.values() if len(compounds) > 1 for compound in compounds]
    if not alike:
        return molecules
    tautomers = map_in_order(_canonical_tautomer, alike, lambda _reason: "", chunk_rows=SLOW_CHUNK_ROWS)
    found = dict(zip(alike, behind_bar(tautomers, "tautomers", len(alike), progress), strict=True))
    return [replace(molecule, compound=found.get(molecule.compound) or molecule.compound) for molecule in molecules]


def _canonical_tautomer(smiles: str) -> str:
    from rdkit import Chem, rdBase
    from rdkit.Chem.MolStandardize import rdMolStandardize

    molecule, _ = parse_molecule(smiles)
    if molecule is None:
        return ""
    try:
        with rdBase.BlockLogs():
            return Chem.MolToSmiles(rdMolStandardize.TautomerEnumerator().Canonicalize(molecule))
    except RDKIT_ERRORS:
        return ""


def find_invalid_smiles(row: str) -> str | None:
    """Return the objection of `parse_molecule` to a row, or None if it is a usable SMILES."""
    return parse_molecule(row)[1]


def parse_molecule(row: str) -> tuple["Mol | None", str | None]:
    """Return the molecule of a SMILES, or None, and the objection to it: ours before RDKit reads it, or RDKit's.

    Atom-map numbers are left out. A molecule in which RDKit refuses the valence of a metal and nothing else is returned
    with the objection: RDKit's versions differ in the valences that a metal may have. RDKit's own log stays silent.
    """
    refused = _find_refused_text(row)
    if refused is not None:
        return None, refused
    try:
        return _parse(without_atom_maps(row))
    except RDKIT_ERRORS as error:
        return None, describe_failure(error)


def without_atom_maps(smiles: str) -> str:
    """Return a SMILES, also one with [MASK]s, without atom-map numbers: they say nothing about the molecule."""
    return _ATOM_MAP.sub("", smiles) if ":" in smiles else smiles


def canonical_smiles(molecule: "Mol") -> str:
    """Return RDKit's canonical SMILES of a molecule that `parse_molecule` read.

    `parse_molecule` reads it as a molecule with the same canonical SMILES. RDKit alone does not promise this: while it
    reads, it makes some bonds to metals dative, and it may number the arrangement around a metal of few neighbours
    anew. Here such a SMILES is read and written until it repeats.
    """
    from rdkit import Chem, rdBase

    with rdBase.BlockLogs():
        written = [Chem.MolToSmiles(molecule)]
    while _UNSETTLED.search(written[-1]):
        again, objection = parse_molecule(written[-1])
        if again is None:
            raise ValueError(f"its canonical SMILES {objection}")
        with rdBase.BlockLogs():
            text = Chem.MolToSmiles(again)
        if text in written:
            return min(written[written.index(text) :])
        written.append(text)
    return written[-1]


def parent_of(molecule: "Mol") -> "Mol":
    """Return the parent of a molecule: a base of its hydrochloride, an acid of its sodium salt.

    The steps are those of RDKit's MolStandardize: `FragmentParent` without its clean-up takes the largest fragment,
    by the number of atoms, one with carbon if there is one; then `Uncharger` adds or removes hydrogens until no charge
    is left that they can remove. Bonds, tautomers, isotopes and stereochemistry stay.

    Raises:
        ValueError: It has none that RDKit can read.
    """
    from rdkit import rdBase
    from rdkit.Chem.MolStandardize import rdMolStandardize

    parameters, uncharger = _standardisers()
    with rdBase.BlockLogs():
        fragment = rdMolStandardize.FragmentParent(molecule, parameters, skipStandardize=True)
        text = canonical_smiles(uncharger.uncharge(fragment))
    # read again: RDKit takes the charge off a cyclopentadienyl anion without a look at its rings
    parent, objection = parse_molecule(text)
    if parent is None:
        raise ValueError(f"its parent is {text}, and {objection}")
    return parent


@cache
def _standardisers() -> tuple[Any, Any]:
    from rdkit.Chem.MolStandardize import rdMolStandardize

    parameters = rdMolStandardize.CleanupParameters()
    parameters.preferOrganic = True  # type: ignore[assignment]  # its stub has the type of another attribute
    return parameters, rdMolStandardize.Uncharger()


def murcko_scaffold(molecule: "Mol", *, has_chirality: bool) -> str:
    """Return the Bemis-Murcko scaffold as SMILES; empty for a molecule without a ring."""
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    if not molecule.GetRingInfo().NumRings():
        return ""
    return cast(str, MurckoScaffoldSmiles(mol=molecule, includeChirality=has_chirality))  # type: ignore[no-untyped-call]


def atom_spans(smiles: str) -> list[tuple[int, int]]:
    """Return the characters [start, end) of each atom that a SMILES names, in its order, which is RDKit's.

    RDKit joins a hydrogen that is written as an atom, such as the first of `[H]O`, to its neighbour while it reads.
    """
    return [found.span() for found in _ATOM.finditer(smiles)]


def read_all_atoms(smiles: str) -> "Mol | None":
    """Return the molecule of a SMILES with every atom that it names, in its order; None if it is none."""
    from rdkit import Chem, rdBase

    molecule, _ = parse_molecule(smiles)
    if molecule is None or molecule.GetNumAtoms() == len(atom_spans(smiles)):
        return molecule
    parameters = Chem.SmilesParserParams()
    parameters.removeHs = False  # type: ignore[assignment]  # its stub has the type of another attribute
    with rdBase.BlockLogs():
        return Chem.MolFromSmiles(without_atom_maps(smiles), parameters)


def hide_atoms(smiles: str, atoms: Collection[int]) -> str:
    """Return a SMILES in which some of the atoms that it names are unknown, `*`; their bonds and other atoms stay.

    Unknown atoms have no hydrogens, charge or arrangement.
    """
    from rdkit import Chem, rdBase

    molecule = read_all_atoms(smiles)
    if molecule is None or not atoms:
        return smiles
    with rdBase.BlockLogs():
        Chem.Kekulize(molecule, clearAromaticFlags=True)  # a ring with unknown atoms may be no aromatic one
        hidden = Chem.RWMol(molecule)
        for index in atoms:
            hidden.ReplaceAtom(index, Chem.Atom(0))
        return Chem.MolToSmiles(hidden, kekuleSmiles=True)


def descriptors(smiles: Sequence[str], progress: Progress) -> NDArray[np.float32]:
    """Return (N, D) the descriptors of `rdkit.Chem.Descriptors.descList`, in its order.

    NaN where RDKit has no value, as in every column of a row that is not a molecule. What float32 cannot hold, like the
    `Ipc` of a large molecule, becomes its largest number.
    """
    from rdkit.Chem.Descriptors import descList

    values_ND = np.full((len(smiles), len(descList)), np.nan)
    described = map_in_order(_descriptors_of, smiles, lambda _reason: (), chunk_rows=SLOW_CHUNK_ROWS)
    for row, values_D in enumerate(behind_bar(described, "descriptors", len(smiles), progress)):
        if values_D:
            values_ND[row] = values_D
    limit = np.finfo(np.float32).max
    return values_ND.clip(-limit, limit).astype(np.float32)


def _descriptors_of(smiles: str) -> tuple[float, ...]:
    from rdkit import rdBase
    from rdkit.Chem.Descriptors import CalcMolDescriptors

    molecule, _ = parse_molecule(smiles)
    if molecule is None:
        return ()
    with rdBase.BlockLogs():
        found = CalcMolDescriptors(molecule, missingVal=math.nan, silent=True)  # type: ignore[no-untyped-call]
    return tuple(float(value) for value in found.values())


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


def _read(smiles: str, has_chiral_scaffolds: bool | None, reads_parents: bool, finds_compounds: bool) -> Molecule:
    from rdkit import rdBase

    molecule, objection = parse_molecule(smiles)
    if molecule is None:
        return Molecule(problem=objection or "")
    scaffold = None
    try:
        whole = canonical_smiles(molecule)
        if parse_molecule(whole)[0] is None:
            return Molecule(
                problem=f"RDKit writes it as {shorten(whole, _SHOWN_CHARACTERS)}, which it cannot read back"
            )
        parent_molecule, parent = _find_parent(molecule, whole, is_read=reads_parents)
        compound, skeleton = _find_compound(parent_molecule, parent) if finds_compounds else ("", "")
        molecule = parent_molecule if reads_parents else molecule
        with rdBase.BlockLogs():
            if has_chiral_scaffolds is not None:
                scaffold = murcko_scaffold(molecule, has_chirality=has_chiral_scaffolds)
    except RDKIT_ERRORS as error:
        return Molecule(problem=describe_failure(error))
    return Molecule(
        canonical=parent if reads_parents else whole,
        scaffold=scaffold,
        has_odd_metal=objection is not None,
        parent=parent,
        num_fragments=whole.count(".") + 1,
        is_parent=reads_parents and parent != whole,
        is_bare="[" in smiles and _is_bare(molecule),
        compound=compound,
        skeleton=skeleton,
    )


def _is_bare(molecule: "Mol") -> bool:
    carbons = [atom for atom in molecule.GetAtoms() if atom.GetAtomicNum() == _CARBON]
    if not carbons or any(atom.GetTotalNumHs() for atom in carbons):
        return False
    return any(atom.GetNumRadicalElectrons() for atom in molecule.GetAtoms())


def _find_compound(parent: "Mol", canonical: str) -> tuple[str, str]:
    """Return the canonical SMILES of a parent without stereochemistry and isotopes, and its skeleton."""
    from rdkit import Chem, rdBase
    from rdkit.Chem import rdMolHash

    flat = parent
    with rdBase.BlockLogs():
        if _STEREO_OR_ISOTOPE.search(canonical):
            plain, _ = parse_molecule(Chem.MolToSmiles(parent, isomericSmiles=False))
            flat, canonical = (parent, canonical) if plain is None else (plain, canonical_smiles(plain))
        functions = rdMolHash.HashFunction
        graph, formula = (rdMolHash.MolHash(Chem.Mol(flat), f) for f in (functions.ElementGraph, functions.MolFormula))
    return canonical, f"{graph} {formula}"


def _find_parent(molecule: "Mol", canonical: str, *, is_read: bool) -> tuple["Mol", str]:
    """Return the parent and its canonical SMILES: the molecule itself where nothing is removed.

    A failure of RDKit is raised where the parent is read; else such a molecule is its own parent.
    """
    if not _CHARGED_OR_PARTED.search(canonical):
        return molecule, canonical
    try:
        parent = parent_of(molecule)
        return parent, canonical_smiles(parent)
    except RDKIT_ERRORS:
        if is_read:
            raise
        return molecule, canonical


def _find_refused_text(row: str) -> str | None:
    """Return why a row is refused before RDKit reads it; None if it is not.

    It is empty, a reaction, CXSMILES, has characters that the regular expression does not cover (named with their
    positions, counted from 1), or has more atoms than `MAX_ATOMS`.
    """
    if not row:
        return "is empty"
    if ">" in row and _is_reaction(row):
        return "a reaction, which is not supported"
    if _CXSMILES.match(row):
        return "CXSMILES, which is not supported: the part between bars may say that it is several molecules"
    if not SMILES_TOKENS.fullmatch(row):
        return _describe_unknown(row)
    num_atoms = len(atom_spans(row)) if len(row) > MAX_ATOMS else 0
    return f"has {num_atoms:,} atoms; molecules of at most {MAX_ATOMS:,} are read" if num_atoms > MAX_ATOMS else None


def _is_reaction(row: str) -> bool:
    """Return whether the SMILES in a row, before any blank, has a `>` that is no part of a dative bond."""
    first = row.split(maxsplit=1)[:1]
    return any(SMILES_TOKENS.fullmatch(smiles) and ">" in SMILES_TOKEN.findall(smiles) for smiles in first)


def _parse(row: str) -> tuple["Mol | None", str | None]:
    from rdkit import Chem, rdBase

    with rdBase.BlockLogs():
        molecule = Chem.MolFromSmiles(row)
        if molecule is not None:
            return molecule, None
        molecule = Chem.MolFromSmiles(row, sanitize=False)
        if molecule is None:
            return None, "RDKit cannot parse it: it breaks the SMILES grammar"
        problems = Chem.DetectChemistryProblems(molecule)
        objection = f"RDKit refuses it: {'; '.join(problem.Message() for problem in problems) or 'no reason given'}"
        is_of_metal = [
            problem.GetType() == "AtomValenceException"
            and molecule.GetAtomWithIdx(problem.GetAtomIdx()).GetSymbol() not in _NON_METALS
            for problem in problems
        ]
        if not (is_of_metal and all(is_of_metal)):
            return None, objection
        with suppress(*RDKIT_ERRORS):
            Chem.SanitizeMol(molecule, Chem.SANITIZE_ALL ^ Chem.SANITIZE_PROPERTIES)
            molecule.UpdatePropertyCache(strict=False)
            return molecule, objection
    return None, objection


def _describe_unknown(row: str) -> str:
    # "C" is itself a token, so any other character that is left is part of no token
    rest = SMILES_TOKEN.sub(lambda token: "C" * len(token[0]), row)
    unknown = [character for character in dict.fromkeys(rest) if character != "C"]
    named = ", ".join(f"{character!r} at position {rest.index(character) + 1}" for character in unknown[:_MAX_NAMED])
    more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
    return f"characters that are not SMILES tokens: {named}{more}"


def describe_failure(error: Exception) -> str:
    """Return an exception of RDKit as the reason why a row is not used."""
    return f"RDKit fails on it: {(str(error).strip().splitlines() or [type(error).__name__])[-1].strip()}"
