"""Words of the column `filling`: what stands at a mask, read in the place of its [MASK]."""

import pytest

from exlm_cli.data.tokenizer import Tokenizer, train_bpe
from exlm_cli.fill.words import MaskWords
from exlm_cli.progress import SilentProgress
from tests.tiny import word_level


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["two dogs|cats do"] * 9, 300, 2, SilentProgress())


@pytest.mark.parametrize(
    ("text", "pieces", "written"),
    [
        ("two [MASK] play", [" dogs"], "dogs"),
        ("two [MASK] [MASK] play", [" do", "|"], r"do|##\|"),
        ("un[MASK] or [MASK]", ["do", "do"], "do|##do"),
        ("un[MASK]", [" dogs"], "␣dogs"),
        ("[MASK] play", ["two"], "##two"),
        ("[MASK] play", [" "], "␣"),
        ("an [MASK] line", ["\n"], r"##\n"),
    ],
)
def test_words_read_in_the_place_of_their_mask(tokenizer, text, pieces, written):
    words = MaskWords(tokenizer)
    tokens = [tokenizer.encode(piece) for piece in pieces]
    assert words.write(text, tokens) == written


def test_tokens_of_molecules_are_written_as_they_are():
    tokenizer = word_level(["C", "Cl", "("])
    ids = [tokenizer.encode("Cl"), tokenizer.encode("(")]
    assert MaskWords(tokenizer).write("[MASK]C[MASK]", ids) == "Cl|("
