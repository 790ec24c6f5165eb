"""SMILES tokens against the examples of Schwaller et al. 2018."""

import pytest

from exlm_cli.data.smiles import train_smiles_vocabulary
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
    assert train_smiles_vocabulary(["OOON"], 3, 1, progress).vocab_size == 5  # special tokens are always in it


def test_rows_that_are_no_smiles_add_no_tokens():
    tokenizer = train_smiles_vocabulary(["smiles", "CCO", "=+cmd"], 100, 1, SilentProgress())
    assert [tokenizer.token_text(i) for i in range(5, tokenizer.vocab_size)] == ["C", "O"]
