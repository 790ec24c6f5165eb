"""The words that reports show of an inspection: the input with its masks, and what fills them."""

import re

from exlm_cli.analysis.fillings import Filling
from exlm_cli.analysis.inspection import Inspection

NOTHING = "–"
"""Stands for a mask that yields no token."""


def sentence_words(inspection: Inspection) -> list[tuple[str, int]]:
    """Return the words of the input, each with the blank after it and with the mask it is, or -1."""
    words: list[tuple[str, int]] = []
    mask = 0
    for word in re.findall(r"\[MASK\]\s*|(?:(?!\[MASK\])\S)+\s*|\s+", inspection.dag.text):
        is_mask = word.startswith("[MASK]")
        words.append((re.sub(r"\s+", " ", word), mask if is_mask else -1))
        mask += is_mask
    return words


def filled_words(inspection: Inspection, filling: Filling) -> list[str]:
    """Return what each mask yields, as one word."""
    decode = inspection.dag.tokenizer.decode
    return [decode(list(tokens)).strip() or NOTHING for tokens in filling.tokens_by_mask]


def counted_fillings(inspection: Inspection) -> str:
    """Say among which fillings a share is meant."""
    if inspection.length == "any":
        return "of all fillings of any length"
    num_masks = inspection.dag.num_masks
    return f"of all fillings with {num_masks} token{'s' if num_masks > 1 else ''}"
