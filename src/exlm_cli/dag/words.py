"""The words that reports show of an inspection: the input with its masks, and what fills them."""

import math
import re

from exlm_cli.dag.fillings import Filling
from exlm_cli.dag.graph import printable
from exlm_cli.dag.inspect import Inspection
from exlm_cli.format import format_percent

MAX_MASKS_DRAWN = 40
"""Masks shown in pictures; a sentence with more is cut there, and the picture says so."""

_COLLAPSED = 1.05
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


def health(inspection: Inspection) -> str:
    """Say in one line how much of the DAG is in use, and that it has collapsed, if it has."""
    dag = inspection.dag
    if not dag.has_transitions:
        return "The masks of this model know nothing of each other, so there is no DAG to draw."
    in_use = inspection.states_in_use()
    mean = f"{in_use.mean():.2f} of {dag.num_states_per_mask} states in use per [MASK]"
    if dag.num_states_per_mask > 1 and in_use.max() < _COLLAPSED:
        return f"{mean}: this DAG has collapsed onto one path, and each [MASK] is filled on its own."
    share = format_percent(math.exp(inspection.log_prob_exact))
    return f"{mean}; {share} of the probability lies on paths with {_tokens(dag.num_masks)}."


def counted_fillings(inspection: Inspection) -> str:
    """Say among which fillings a share is meant."""
    if inspection.length == "any":
        return "of all fillings of any length"
    return f"of all fillings with {_tokens(inspection.dag.num_masks)}"


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


def _tokens(number: int) -> str:
    return f"{number} token" + ("s" if number > 1 else "")
