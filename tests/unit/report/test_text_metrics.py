"""Widths against matplotlib's own reading of DejaVu Sans."""

import string

import pytest
from matplotlib.font_manager import findfont
from matplotlib.ft2font import FT2Font

from exlm_cli.report.text_metrics import fit_word, flow_words, shorten_word, text_width


def test_widths_of_ascii_are_those_of_the_font() -> None:
    font = FT2Font(findfont("DejaVu Sans"))
    font.set_size(1000, 72)
    for letter in string.printable[:-5]:
        advance = font.load_char(ord(letter)).linearHoriAdvance / 65536
        assert text_width(letter, 1000) == pytest.approx(advance, abs=1.0)


def test_other_letters_have_a_width_too() -> None:
    assert text_width("ü", 10) == 7
    assert text_width("字", 10) == 10


def test_words_are_cut_with_an_ellipsis() -> None:
    assert shorten_word("internationalisation", 6) == "inter…"
    assert shorten_word("short", 6) == "short"
    cut = fit_word("internationalisation", 10, 40)
    assert cut.endswith("…")
    assert text_width(cut, 10) <= 40
    assert fit_word("word", 10, 0) == "…"


def test_words_flow_into_lines() -> None:
    words = ["aaaa ", "bbbb ", "cccc"]
    width = text_width("aaaa bbbb", 10)
    places = flow_words(words, 10, width)
    assert [line for _, line in places] == [0, 0, 1]
    assert places[1][0] == pytest.approx(text_width("aaaa ", 10))
    assert places[2][0] == 0
    assert flow_words([], 10, width) == []
