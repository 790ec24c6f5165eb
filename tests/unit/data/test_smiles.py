r"""SMILES tokens against the examples of Schwaller et al. 2018, and RDKit as the judge of what is a molecule."""

import pytest

from exlm_cli.data.smiles import find_invalid_smiles, train_smiles_vocabulary
from exlm_cli.progress import SilentProgress
from tests.recorder import Recorder

TRICKY = [
    "C[C@@H](Cl)Br",
    "c1c[nH+]ccc1[N+](=O)[O-]",
    "C%12CCCCC%12",
    "F/C=C/F",
    "F/C=C\\F",
    "[13CH4].[Na+].[Cl-]",
    "C1=CC2=C(C=C1)C#N.OS(=O)(=O)P.Ic1ccsc1",
    "[Se]1cccc1",
    "CC~C:C$C?C*C>C",
]


def test_every_character_of_tricky_smiles_comes_back():
    tokenizer = train_smiles_vocabulary(TRICKY, 200, 1, SilentProgress())
    for smiles in TRICKY:
        ids = tokenizer.encode(smiles)
        assert tokenizer.decode(ids) == smiles
        assert tokenizer.special_ids.isdisjoint(ids)


@pytest.mark.parametrize(
    ("smiles", "tokens"),
    [
        ("CCl", ["C", "Cl"]),
        ("BrC", ["Br", "C"]),
        ("B(O)", ["B", "(", "O", ")"]),
        ("c1[nH+]c1", ["c", "1", "[nH+]", "c", "1"]),
        ("C%12C%12", ["C", "%12", "C", "%12"]),
        ("C[C@@H](F)/C=C\\O", ["C", "[C@@H]", "(", "F", ")", "/", "C", "=", "C", "\\", "O"]),
        ("Sc1sccn1", ["S", "c", "1", "s", "c", "c", "n", "1"]),
    ],
)
def test_tokens_are_atoms_bonds_and_closures(smiles, tokens):
    tokenizer = train_smiles_vocabulary([smiles], 100, 1, SilentProgress())
    assert [tokenizer.token_text(i) for i in tokenizer.encode(smiles)] == tokens


@pytest.mark.parametrize(
    ("row", "min_frequency", "size"),
    [("CCO", 2, 6), ("CCOO", 2, 7), ("C[MASK]C[PAD]", 1, 6)],
    ids=["rare", "frequent", "special tokens"],
)
def test_rare_and_special_tokens_are_not_collected(row, min_frequency, size):
    assert train_smiles_vocabulary([row], 100, min_frequency, SilentProgress()).vocab_size == size


def test_the_vocabulary_keeps_the_most_frequent_tokens_and_breaks_ties_by_spelling():
    progress = Recorder()
    tokenizer = train_smiles_vocabulary(["OOON", "NCF", "S"], 8, 1, progress)
    # O 3, N 2, then C, F and S once each: C comes first by spelling
    assert [tokenizer.token_text(i) for i in range(5, 8)] == ["O", "N", "C"]
    assert tokenizer.decode(tokenizer.encode("OF")) == "O[UNK]"
    assert "3 SMILES tokens; 2 rarer" in progress.said[0]


def test_rows_that_are_no_smiles_add_no_tokens():
    tokenizer = train_smiles_vocabulary(["smiles", "CCO", "=+cmd"], 100, 1, SilentProgress())
    assert [tokenizer.token_text(i) for i in range(5, tokenizer.vocab_size)] == ["C", "O"]


_MOLECULES = (
    "CC(=O)Oc1ccccc1C(=O)O", "[Na+].[Cl-]", "F/C=C\\F", "[999CH3]C", "[U+15]", "C-1CC-1", "C" * 1000,
    "Cl[Co@OH12](C)(F)(O)(N)Br",
)  # fmt: skip


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("", "is empty"),
        ("CXC", "characters that are not SMILES tokens: 'X' at position 2"),
        ("CzCyCz!", "characters that are not SMILES tokens: 'z' at position 2, 'y' at position 4, '!' at position 7"),
        ("CCO etha", "characters that are not SMILES tokens: ' ' at position 4, 'e' at position 5, 't' at position 6, "
         "'h' at position 7, 'a' at position 8"),
        ("C[13CH3", "characters that are not SMILES tokens: '[' at position 2, 'H' at position 6"),
        ("C1CC", "RDKit cannot parse it: it breaks the SMILES grammar"),
        ("[MASK]", "RDKit cannot parse it: it breaks the SMILES grammar"),
        ("C(C)(C)(C)(C)C", "RDKit refuses it: Explicit valence for atom # 0 C, 5, is greater than permitted"),
        ("c1cccc1", "RDKit refuses it: Can't kekulize mol.  Unkekulized atoms: 0 1 2 3 4"),
        ("C" * 1001, "has 1,001 atoms; molecules of at most 1,000 are read"),
        ("C[CH255]", "[CH255] has a number of hydrogens above 9"),
        ("[CH256]", "[CH256] has a number of hydrogens above 9"),  # RDKit reads it as [C]
        ("[Fe+256]", "[Fe+256] has a charge above 15"),
        ("[U-16]", "[U-16] has a charge above 15"),
        ("[65537C]", "[65537C] has an isotope above 999"),  # RDKit reads it as [1C]
        ("[#300]", "[#300] has an element above 118"),  # RDKit reads it as [Ru]
        (f"[CH{'9' * 5000}]", "[CH999999999999999999999999999999999999… has a number of hydrogens above 9"),
    ],
)  # fmt: skip
def test_what_is_no_molecule_is_refused_with_the_reason(row, reason, capfd):
    assert find_invalid_smiles(row) == reason
    assert [find_invalid_smiles(smiles) for smiles in _MOLECULES] == [None] * len(_MOLECULES)
    assert capfd.readouterr() == ("", "")
