"""SMILES tokens against the examples of Schwaller et al. 2018; whatever RDKit writes has tokens and comes back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rdkit import Chem, rdBase

from exlm_cli.data.smiles import ELEMENTS, SMILES_TOKENS, train_smiles_vocabulary
from exlm_cli.progress import SilentProgress
from tests.recorder import Recorder

BARE = train_smiles_vocabulary([], 16, 1, SilentProgress())
"""Nothing but the letters, marks and pieces."""
RICH = train_smiles_vocabulary(["C[C@@H](F)C%12CC%12[NH3+].[13CH4].[Pt][Pt]"], 1000, 1, SilentProgress())


def _tokens(tokenizer, smiles):
    return [tokenizer.token_text(i) for i in tokenizer.encode(smiles)]


@pytest.mark.parametrize(
    ("smiles", "is_whole", "tokens"),
    [
        ("BrCCl", True, ["Br", "C", "Cl"]),
        ("C%12C%12", True, ["C", "%12", "C", "%12"]),
        ("C[C@@H](F)/C=C\\O", True, ["C", "[C@@H]", "(", "F", ")", "/", "C", "=", "C", "\\", "O"]),
        ("[NH3]->[Pt]", True, ["[NH3]", "->", "[Pt]"]),
        ("[13C@@H2+2]", False, ["[", "1", "3", "C", "@@", "H", "2", "+", "2", "]"]),
        ("[Co@OH12]", False, ["[", "Co", "@OH", "1", "2", "]"]),
        ("[CH3:42]", False, ["[", "C", "H", "3", ":", "4", "2", "]"]),
        ("C%(345)", False, ["C", "%", "(", "3", "4", "5", ")"]),
    ],
)
def test_tokens_are_atoms_bonds_and_closures_and_what_is_not_whole_in_the_vocabulary_is_spelled(
    smiles, is_whole, tokens
):
    tokenizer = train_smiles_vocabulary([smiles], 1000, 1, SilentProgress()) if is_whole else BARE
    assert _tokens(tokenizer, smiles) == tokens
    assert [smiles[start:end] for start, end in tokenizer.encode_with_offsets(smiles).offsets] == tokens


def test_elements_are_those_of_rdkit():
    table = Chem.GetPeriodicTable()
    assert list(ELEMENTS) == [table.GetElementSymbol(number) for number in range(1, 119)]


@given(
    st.integers(0, 118), st.integers(0, 999), st.integers(-15, 15), st.integers(0, 9), st.integers(0, 99),
    st.sampled_from(["", "@", "@@", "@TH1", "@AL2", "@SP3", "@TB20", "@OH30"]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_every_bracket_atom_that_rdkit_writes_has_tokens(number, isotope, charge, hydrogens, mapped, chirality):
    symbol = "*" if number == 0 else ELEMENTS[number - 1]
    given = (
        f"[{isotope or ''}{symbol}{chirality}{f'H{hydrogens}' if hydrogens else ''}"
        f"{f'{charge:+}' if charge else ''}{f':{mapped}' if mapped else ''}]"
    )
    with rdBase.BlockLogs():
        molecule = Chem.MolFromSmiles(given, sanitize=False)
    for smiles in (given, *([] if molecule is None else [Chem.MolToSmiles(molecule)])):
        for tokenizer in (BARE, RICH):
            ids = tokenizer.encode(smiles)
            assert tokenizer.decode(ids) == smiles
            assert tokenizer.unk_id not in ids


@pytest.mark.parametrize("text", ["C C", "CHg", "hello", "C4H", "C!", "[X]", "Na", "C]"])
def test_text_that_is_no_smiles_has_unknown_tokens(text):
    assert BARE.unk_id in BARE.encode(text)
    assert SMILES_TOKENS.fullmatch(text) is None or "[X]" in text


@pytest.mark.parametrize(
    ("row", "min_frequency", "whole"),
    [("[Na+][Na+][K+]", 2, {"[Na+]"}), ("C[MASK]C[PAD][CH3:1][foo]", 1, set())],
)
def test_rare_special_mapped_and_foreign_brackets_are_not_collected(row, min_frequency, whole):
    tokenizer = train_smiles_vocabulary([row], 1000, min_frequency, SilentProgress())
    assert {tokenizer.token_text(i) for i in range(BARE.vocab_size, tokenizer.vocab_size)} == whole


def test_the_vocabulary_keeps_the_most_frequent_tokens_and_breaks_ties_by_spelling():
    progress, room = Recorder(), BARE.vocab_size
    rows = ["[O-][O-][O-][N+]", "[N+][C-]F", "[S-]"]
    tokenizer = train_smiles_vocabulary(rows, room + 3, 1, progress)
    # [O-] 3, [N+] 2, then [C-] and [S-] once each: [C-] comes first by spelling
    assert [tokenizer.token_text(i) for i in range(room, room + 3)] == ["[O-]", "[N+]", "[C-]"]
    assert tokenizer.vocab_size == room + 3
    assert _tokens(tokenizer, "[O-][S-]") == ["[O-]", "[", "S", "-", "]"]
    assert f"{room + 3} tokens, 3 of them whole" in progress.said[0]
    assert "1 rarer ones" in progress.said[0]
    assert train_smiles_vocabulary(rows, 16, 1, progress).vocab_size == room  # pieces are always in it
