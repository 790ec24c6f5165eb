"""The words that reports show of an inspection: the input with its masks, and what fills them."""

import re

from exlm_cli.analysis.dag import printable
from exlm_cli.analysis.fillings import Filling
from exlm_cli.analysis.inspection import Inspection

MAX_MASKS_DRAWN = 40
"""Masks shown in pictures; a sentence with more is cut there, and the picture says so."""

NOTHING = "–"
"""Stands for a mask that yields no token."""


def sentence_words(inspection: Inspection) -> list[tuple[str, int]]:
    """Return the words of the input, each with the blank after it and with the mask it is, or -1."""
    words: list[tuple[str, int]] = []
    mask = 0
    for word in re.findall(r"\[MASK\]\s*|(?:(?!\[MASK\])\S)+\s*|\s+", inspection.dag.text):
        is_mask = word.startswith("[MASK]")
        words.append((printable(re.sub(r"\s+", " ", word)), mask if is_mask else -1))
        mask += is_mask
    return words


def filled_words(inspection: Inspection, filling: Filling) -> list[str]:
    """Return what each mask yields, as one printable word."""
    decode = inspection.dag.tokenizer.decode
    return [printable(decode(list(tokens)).strip(" ")) or NOTHING for tokens in filling.tokens_by_mask]


def counted_fillings(inspection: Inspection) -> str:
    """Say among which fillings a share is meant."""
    if inspection.length == "any":
        return "of all fillings of any length"
    num_masks = inspection.dag.num_masks
    return f"of all fillings with {num_masks} token{'s' if num_masks > 1 else ''}"


def note_on_cut(inspection: Inspection) -> str:
    """Say that pictures leave masks out, if they do."""
    num_left_out = inspection.dag.num_masks - MAX_MASKS_DRAWN
    if num_left_out <= 0:
        return ""
    return f"Only the first {MAX_MASKS_DRAWN} [MASK]s are drawn; the tables have the other {num_left_out}."


def note_on_proof(inspection: Inspection) -> str:
    """Say that the list of fillings may miss some, if it may."""
    if inspection.n_best.is_proven:
        return ""
    return "The search met its limit: fillings as probable as the last ones may be missing."
