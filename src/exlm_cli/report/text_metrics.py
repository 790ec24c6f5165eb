"""How wide words are, so that figures and HTML are laid out without asking a renderer."""

import unicodedata
from collections.abc import Sequence

# advance widths of DejaVu Sans, thousandths of the font size, for the printable ASCII characters from the blank on
_ADVANCES = (
    318, 401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337, 636, 636, 636, 636, 636,
    636, 636, 636, 636, 636, 337, 337, 838, 838, 838, 531, 1000, 684, 686, 698, 770, 632, 575, 775, 752, 295,
    295, 656, 557, 863, 748, 787, 603, 787, 695, 635, 611, 732, 684, 989, 685, 611, 685, 390, 337, 390, 838,
    500, 500, 613, 635, 550, 635, 615, 352, 635, 634, 278, 278, 579, 278, 974, 634, 612, 635, 635, 411, 521,
    392, 634, 592, 818, 592, 592, 525, 636, 337, 636, 838,
)  # fmt: skip
_FIRST = 32
_OTHER_ADVANCE, _FULL_WIDTH_ADVANCE = 700, 1000
_BOLD = 1.17  # letters of DejaVu Sans Bold are 7 % (m) to 23 % (i) wider; words lie between


def text_width(text: str, font: float, *, is_bold: bool = False) -> float:
    """Width of a text in the unit of `font`: exact for ASCII in DejaVu Sans, close for bold and other letters."""
    return font * sum(map(_advance, text)) / 1000 * (_BOLD if is_bold else 1.0)


def shorten_word(word: str, most: int) -> str:
    """Cut a word to `most` letters, the last of them an ellipsis."""
    return word if len(word) <= most else word[: most - 1] + "…"


def fit_word(word: str, font: float, width: float) -> str:
    """Cut a word so that it is at most `width` wide, with an ellipsis where it was cut; at least one letter stays."""
    most = len(word)
    while most > 1 and text_width(shorten_word(word, most), font) > width:
        most -= 1
    return shorten_word(word, most)


def flow_words(words: Sequence[str], font: float, width: float) -> list[tuple[float, int]]:
    """Set words in lines of at most `width`; return where each begins: its x and its line, from 0.

    A word that ends without a blank sticks to the next one, as punctuation does.
    """
    places: list[tuple[float, int]] = []
    x, line = 0.0, 0
    for word in words:
        if x > 0 and x + text_width(word.rstrip(), font) > width:
            x, line = 0.0, line + 1
        places.append((x, line))
        x += text_width(word, font)
    return places


def _advance(letter: str) -> int:
    index = ord(letter) - _FIRST
    if 0 <= index < len(_ADVANCES):
        return _ADVANCES[index]
    return _FULL_WIDTH_ADVANCE if unicodedata.east_asian_width(letter) in "WF" else _OTHER_ADVANCE
