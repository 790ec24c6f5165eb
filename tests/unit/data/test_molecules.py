"""Which rows are molecules and which are not, only a metal's valence being forgiven, and how a molecule is spelled."""

import itertools
import re
from unittest.mock import Mock

import loky
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from rdkit import Chem
from rdkit.Chem.Descriptors import descList

from exlm_cli.data import molecules as molecules_module
from exlm_cli.data import spellings as spellings_module
from exlm_cli.data.bundled.molecules import generate_molecules
from exlm_cli.data.molecules import (
    Molecule,
    canonical_smiles,
    descriptors,
    find_invalid_smiles,
    fingerprints,
    hide_atoms,
    parse_molecule,
    read_molecules,
)
from exlm_cli.data.rows.records import Row
from exlm_cli.data.smiles import SMILES_TOKENS
from exlm_cli.data.spellings import other_spellings, read_smiles
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress

ALUMINIUM = "CC(=O)O[AlH3](O)O"  # line 2299 of Tox21: RDKit allows aluminium a valence of 3


_MOLECULES = (
    "CC(=O)Oc1ccccc1C(=O)O", "[Na+].[Cl-]", "F/C=C\\F", "C-1CC-1", "C" * 1000,
    "Cl[Co@OH12](C)(F)(O)(N)Br", "c1ccccn1->[Cu](Cl)Cl", "[Cl][Cu]([Cl])<-[n]1ccccc1",
)  # fmt: skip


_REFUSED = {
    "": "is empty",
    "CXC": "characters that are not SMILES tokens: 'X' at position 2",
    "C[13CH3": "characters that are not SMILES tokens: '[' at position 2, 'H' at position 6",
    "C1CC": "RDKit cannot parse it: it breaks the SMILES grammar",
    "CCO.[Na+]>>CC=O |f:0.1|": "a reaction, which is not supported",
    "CC>": "a reaction, which is not supported",
    "C(C)(C)(C)(C)C": "RDKit refuses it: Explicit valence for atom # 0 C, 5, is greater than permitted",
    "c1cccc1": "RDKit refuses it: Can't kekulize mol.  Unkekulized atoms: 0 1 2 3 4",
    "C" * 1001: "has 1,001 atoms; molecules of at most 1,000 are read",
    "C[C@H](N)O |&1:1|": "CXSMILES",
    "C[C@H](N)O\t|o1:1,r|": "CXSMILES",
}


def test_what_is_no_molecule_is_refused_with_the_reason_and_rdkit_is_silent(capfd):
    for row, reason in _REFUSED.items():
        assert str(find_invalid_smiles(row)).startswith(reason), row
    assert [find_invalid_smiles(smiles) for smiles in _MOLECULES] == [None] * len(_MOLECULES)
    assert capfd.readouterr() == ("", "")


def _read(texts, *, is_canonical=True, num_spellings=1):
    rows = (Row("a.smi", n, text) for n, text in enumerate(texts, 1))
    return list(read_smiles(rows, is_canonical=is_canonical, num_spellings=num_spellings))


def test_a_molecule_has_one_canonical_text_however_it_is_written():
    """It is RDKit's own; the text of a row that is read as written stays."""
    molecules = list(generate_molecules(60, seed=2))
    texts = [Chem.MolToRandomSmilesVect(Chem.MolFromSmiles(smiles), 1, randomSeed=7)[0] for smiles in molecules]
    assert [row.text for row in _read(texts)] == [Chem.CanonSmiles(text) for text in texts] == molecules
    assert [row.text for row in _read(texts, is_canonical=False)] == texts


def test_map_numbers_and_hydrogens_are_left_out_and_isotopes_kept():
    for written, canonical in {
        "[H:5][O:1][H:6]": "O",
        "[C@H:1]([F:2])([Cl:3])[Br:4]": "F[C@@H](Cl)Br",
        "c1:c:c:c:c:c:1": "c1ccccc1",
        "[2H]C": "[2H]C",
        "[H]C([H])([H])[H]": "C",
        "[Fe]<-[OH2:4]": "[OH2]->[Fe]",
    }.items():
        assert [row.text for row in _read([written])] == [canonical]
        assert [molecule.canonical for molecule in read_molecules([written], SilentProgress())] == [canonical]


_PIECES = st.sampled_from([
    "C", "N", "O", "Cl", "P", "[Si]", "[Se]", "S(=O)(=O)", "C(=O)", "c1ccccc1", "n1ccccc1", "[nH]1cccc1", "[cH-]1cccc1",
    "[o+]1ccccc1", "[te]1cccc1", "C1CC1", "C1CC(C)C1", "C%(100)CC%(100)", "/C=C/", "\\C=C\\", "[C@H]", "[C@@H]",
    "[13CH2]", "[2H]", "[O-]", "[NH3+]", "[N+]", "[B-]", "[CH]", "[CH2:7]", "[H:3]", "*", "[#6]", "[#26]", "[Cu]",
    "[Fe+2]", "[Pt]", "[Zn]", "[Na+]", "[AlH3]", "[Pt@SP2]", "[Co@OH4]", "[As@TB1]",
])  # fmt: skip
_BONDS = st.sampled_from(["", "", "", "-", "=", "#", "~", "->", "<-", "."])
_SMILES = st.recursive(
    _PIECES,
    lambda inner: (
        st.builds("{}{}{}".format, inner, _BONDS, inner)
        | st.builds("{}({}{}){}".format, _PIECES, _BONDS.filter(lambda bond: bond != "."), inner, inner)
    ),
    max_leaves=8,
)


@given(_SMILES)
@example("[CH3:1][c:2]1[cH:3][cH:4][cH:5][cH:6][n:7]1")
@example("[O-][Pt@SP2]=[#6]")  # RDKit writes it as @SP1, that as @SP2
@example("[te]1cccc1(-[#26])[Fe+2]")  # RDKit makes one bond dative at each reading
@example(ALUMINIUM)
@example("[cH-]1cccc1.[cH-]1cccc1.[Fe+2]")
def test_what_we_write_of_any_molecule_we_read_as_the_same_molecule(smiles):
    """Its canonical SMILES has nothing but tokens, the same key and scaffold, a fingerprint, and no map number."""
    for reads_parents in (False, True):
        (molecule,) = read_molecules([smiles], SilentProgress(), has_chiral_scaffolds=True, reads_parents=reads_parents)
        assume(not molecule.problem)
        assert SMILES_TOKENS.fullmatch(molecule.canonical)
        assert not re.search(r":\d+]", molecule.canonical)
        (again,) = read_molecules([molecule.canonical], SilentProgress(), reads_parents=reads_parents)
        assert (again.problem, again.canonical, again.parent) == ("", molecule.canonical, molecule.parent)
        assert not again.is_parent
        assert fingerprints([molecule.canonical]).any()


# Other spellings

FULLERENE = (
    "c12c3c4c5c1c1c6c7c2c2c8c3c3c9c4c4c%10c5c5c1c1c6c6c%11c7c2c2c7c8c3c3c8c9c4c4c9c%10c5c5c1c1c6c6c%11c2c2c7c3c3c8c4c4c"
    "9c5c1c1c6c2c3c41"
)
CAGE = "COc1ccc(CN2C3[C@]4(CO)C5N(Cc6ccc(OC)cc6)C6[C@@](CO)(C2[C@]6(CO)[C@H]4c2ccccc2)[C@H](c2ccccc2)[C@]35CO)cc1"
_OF_METALS = re.compile("->|#26|Al|As|Co|Cu|Fe|Pt|Zn")


@given(_SMILES)
@example(FULLERENE)
@example(CAGE)  # RDKit writes other stereoisomers of it, which are left out
@example("[Cl][Cu]([Cl])<-[n]1ccccc1")
@example("C/C=C/C[C@@H](N)C(=O)[O-].[2H]C[NH3+]")
def test_spellings_of_any_molecule_are_other_texts_of_it(smiles):
    """RDKit says so too, where it settles the bonds of metals as we do."""
    (row,) = _read([smiles], num_spellings=5)
    assume(row.problem is None)
    assert row.spellings == other_spellings(row.text, 5)
    assert len({row.text, *row.spellings}) == 1 + len(row.spellings)
    assert {read.text for read in _read(row.spellings)} <= {row.text}
    if not _OF_METALS.search(row.text):
        assert {Chem.CanonSmiles(spelling) for spelling in row.spellings} <= {row.text}


@pytest.mark.parametrize("smiles", ["CC=O", "[Na+].[Cl-]", "OC[C@H](F)Cl"])
def test_enough_spellings_are_all_that_orders_of_the_atoms_give(smiles):
    (row,) = _read([smiles], num_spellings=1000)
    molecule = Chem.MolFromSmiles(row.text)
    orders = itertools.permutations(range(molecule.GetNumAtoms()))
    found = {Chem.MolToSmiles(Chem.RenumberAtoms(molecule, order), canonical=False) for order in orders}
    assert set(row.spellings) == found - {row.text}


def test_spellings_depend_on_the_molecule_alone_and_further_ones_come_after_them(monkeypatch):
    """Not on how a row is written, on its place, on its neighbours or on the process."""
    molecules = list(generate_molecules(60, seed=2))
    spellings = {smiles: other_spellings(smiles, 5) for smiles in molecules}
    monkeypatch.setattr(spellings_module, "_SPELLED_CHUNK", 40)  # the first 32 rows in this process
    texts = [Chem.MolToRandomSmilesVect(Chem.MolFromSmiles(smiles), 1, randomSeed=7)[0] for smiles in molecules]
    monkeypatch.setattr(loky, "cpu_count", lambda: 2)
    assert {row.text: row.spellings for row in _read(texts[::-1], num_spellings=5)} == spellings
    for smiles, found in spellings.items():
        fewer = other_spellings(smiles, 3)
        assert found[: len(fewer)] == fewer


@pytest.mark.parametrize(
    ("salt", "parent"),
    [
        ("CCN.Cl", "CCN"),
        ("[Cl-:5].C[CH2:1][NH3+]", "CCN"),
        ("CC(=O)[O-].[Na+]", "CC(=O)O"),
        ("[NH3+]CC(=O)[O-]", "NCC(=O)O"),
        ("CC[NH3+].F[P-](F)(F)(F)(F)F", "CCN"),  # the larger fragment has no carbon
        ("C[N+](C)(C)C.[Br-]", "C[N+](C)(C)C"),  # no hydrogen can take this charge off
        ("C[C@H]([15NH3+])C(=O)O.[Cl-]", "C[C@H]([15NH2])C(=O)O"),
        ("CC(=O)O[Na]", "CC(=O)[O][Na]"),  # a bond to a metal stays
        (f"{ALUMINIUM}.[Na+]", "CC(=O)[O][AlH3]([OH])[OH]"),
    ],
)
def test_the_parent_is_the_largest_fragment_uncharged(salt, parent):
    as_given, standardised = (
        read_molecules([salt], SilentProgress(), has_chiral_scaffolds=False, reads_parents=reads_parents)[0]
        for reads_parents in (False, True)
    )
    assert (as_given.parent, standardised.parent, standardised.canonical) == (parent, parent, parent)
    assert (standardised.is_parent, as_given.is_parent) == (as_given.canonical != parent, False)
    assert as_given.num_fragments == standardised.num_fragments == salt.count(".") + 1
    (alone,) = read_molecules([parent], SilentProgress(), has_chiral_scaffolds=False)
    assert alone.scaffold == standardised.scaffold


def test_a_parent_that_is_no_molecule_is_the_reason_of_a_row_where_parents_are_read():
    """RDKit takes the charge off a cyclopentadienyl anion, and the ring is aromatic no more."""
    ferrocene = "[cH-]1cccc1.[cH-]1cccc1.[Fe+2]"
    (molecule,) = read_molecules([ferrocene], SilentProgress(), reads_parents=True)
    assert molecule.problem.startswith("RDKit fails on it: its parent is c1cccc1, and RDKit refuses it: Can't kekulize")
    (whole,) = read_molecules([ferrocene], SilentProgress())
    assert whole == Molecule(canonical=whole.canonical, parent=whole.canonical, num_fragments=3)


def test_a_molecule_that_rdkit_cannot_read_back_is_no_molecule(monkeypatch):
    """Its canonical SMILES is what fingerprints, descriptors and the model read; here RDKit writes an open ring."""
    monkeypatch.setattr(molecules_module, "canonical_smiles", lambda molecule: "C1CC")
    (found,) = read_molecules(["CCC"], SilentProgress())
    assert found.problem == "RDKit writes it as C1CC, which it cannot read back"


def test_what_rdkit_raises_is_the_reason_of_the_row(monkeypatch):
    error = RuntimeError("Pre-condition Violation\n\tvalence unknown\n")
    for function in ("MolFromSmiles", "MolToSmiles"):
        with monkeypatch.context() as patch:
            patch.setattr(Chem, function, Mock(side_effect=error))
            (read,) = read_molecules(["CCO"], SilentProgress())
            (row,) = _read(["CCO"])
        assert read.problem == row.problem == "RDKit fails on it: valence unknown"


@pytest.mark.parametrize(
    ("smiles", "atoms", "expected"),
    [
        ("CCO", [2], "CC*"),
        ("CCO", [0, 1, 2], "***"),
        ("Oc1ccccc1", [0], "*c1ccccc1"),
        ("Cc1ccccc1", [0, 2, 3, 4, 5, 6], "*C1=**=**=*1"),
        ("C[N+](C)(C)CC(=O)[O-]", [1], "C*(C)(C)CC(=O)[O-]"),
        ("C[C@H](N)O", [1], "C*(N)O"),
        ("F/C=C/Cl", [0], "*/C=C/Cl"),
        ("c1cc[nH]c1", [3], "C1=C*C=C1"),
        ("[H]O[H]", [1], "[H]*[H]"),
    ],
)
def test_hidden_atoms_are_unknown_and_all_others_keep_their_bonds_and_hydrogens(smiles, atoms, expected):
    """By hand; RDKit compares the two as molecules."""
    hidden, _ = parse_molecule(hide_atoms(smiles, atoms))
    wanted, _ = parse_molecule(expected)
    assert canonical_smiles(hidden) == canonical_smiles(wanted)
    assert canonical_smiles(hidden).count("*") == len(atoms)


DESCRIBED = ["CCO", "c1ccccc1C(=O)N", "C[C@H](N)C(=O)O", "[Na+].[Cl-]"]


def test_descriptors_are_those_of_rdkit_whichever_process_works_them_out(monkeypatch):
    monkeypatch.setattr(molecules_module, "SLOW_CHUNK_ROWS", 1)
    found = descriptors(2 * DESCRIBED, SilentProgress())
    theirs = [[function(Chem.MolFromSmiles(smiles)) for _, function in descList] for smiles in DESCRIBED]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, 2 * theirs, rtol=1e-6)


def test_what_is_no_molecule_has_no_descriptors_and_what_is_too_large_the_largest():
    """`Ipc` of a chain grows like the powers of a number: that of 180 carbons is above 3.4e38."""
    found = descriptors(["CCO", "no molecule", "C" * 180], SilentProgress())
    assert np.isnan(found[1]).all()
    assert not np.isnan(found[0]).any()
    ipc = [name for name, _ in descList].index("Ipc")
    assert found[2, ipc] == np.finfo(np.float32).max
    assert not np.isinf(found).any()


def test_fingerprints_of_what_is_no_molecule_are_refused():
    assert np.array_equal(fingerprints(["OCC", "[CH3:1]CO"])[0], fingerprints(["CCO"])[0])
    with pytest.raises(DataError, match="no fingerprint of `C1CC`: RDKit cannot parse it"):
        fingerprints(["CCO", "C1CC"])
