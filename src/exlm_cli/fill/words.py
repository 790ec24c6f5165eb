r"""How the column `filling` writes the tokens of masks, and which tokens a written word may be.

A word stands as it reads in place of its "[MASK]": `dogs` where a blank is before the mask. A token that joins the text
before it although a blank is before the mask is written `##s`; one that brings a blank where none is, `␣dogs`. Words of
several masks are parted by bars, `two|dogs`; a bar in a word is written `\|`.
"""

import re
from collections.abc import Sequence
from functools import cache, cached_property

from exlm_cli.data.tokenizer import MASK, PIECE_PREFIX, Tokenizer
from exlm_cli.format import printable

BLANK = "\N{OPEN BOX}"


class MaskWords:
    """Words of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._surface = cache(self._find_surface)

    def surface(self, token: int) -> str:
        """Return what a token adds to a text that goes on, a blank before it included."""
        return self._surface(token)

    def write(self, text: str, tokens_by_mask: Sequence[Sequence[int]]) -> str:
        """Return the tokens of each mask of a text as words with bars between them."""
        words = []
        for tokens, has_blank in zip(tokens_by_mask, self.blanks_before(text), strict=True):
            surface = "".join(map(self._surface, tokens))
            words.append(_written(surface, has_blank).replace("|", "\\|"))
        return "|".join(words)

    def blanks_before(self, text: str) -> list[bool]:
        """Return whether a blank is before each "[MASK]"; so is the beginning of a running text."""
        if self._tokenizer.kind == "smiles":
            return [False] * text.count(MASK)
        return [not found.start() or text[found.start() - 1].isspace() for found in re.finditer(re.escape(MASK), text)]

    def _find_surface(self, token: int) -> str:
        if self._tokenizer.kind == "smiles":
            return self._tokenizer.token_text(token)
        before = self._anchor
        whole = self._tokenizer.decode([*before, token]).removeprefix(self._tokenizer.decode(before))
        if "\N{REPLACEMENT CHARACTER}" in whole:  # part of a character
            return self._tokenizer.token_text(token)
        return whole

    @cached_property
    def _anchor(self) -> list[int]:
        return self._tokenizer.encode("a")


def _written(surface: str, has_blank: bool) -> str:
    core = surface.removeprefix(" ")
    shown = printable(core).replace(" ", BLANK) or BLANK
    if has_blank == (core != surface):
        return shown
    return f"{PIECE_PREFIX}{shown}" if has_blank else f"{BLANK}{shown}"
