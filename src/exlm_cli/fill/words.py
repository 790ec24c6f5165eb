r"""How the column `filling` writes the tokens of masks, and which tokens a written word may be.

A word stands as it reads in place of its "[MASK]": `dogs` where a blank is before the mask. A token that joins the text
before it although a blank is before the mask is written `##s`; one that brings a blank where none is, `␣dogs`. Words of
several masks are parted by bars, `two|dogs`; a bar in a word is written `\|`.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache, cached_property

import numpy as np

from exlm_cli.data.tokenizer import MASK, PIECE_PREFIX, Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.format import printable

_BAR = re.compile(r"(?<!\\)\|")
BLANK = "\N{OPEN BOX}"


class MaskWords:
    """Words of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._surface = cache(self._find_surface)

    @property
    def is_of_molecules(self) -> bool:
        """Whether the texts are SMILES."""
        return self._tokenizer.kind == "smiles"

    def surface(self, token: int) -> str:
        """Return what a token adds to a text that goes on, a blank before it included."""
        return self._surface(token)

    def text_of(self, input_ids: Sequence[int]) -> str:
        """Return the text of filled tokens, without a blank at its beginning."""
        return self._tokenizer.decode(input_ids).removeprefix(" ")

    def write(self, text: str, tokens_by_mask: Sequence[Sequence[int]]) -> str:
        """Return the tokens of each mask of a text as words with bars between them."""
        words = []
        for tokens, has_blank in zip(tokens_by_mask, self.blanks_before(text), strict=True):
            surface = "".join(map(self._surface, tokens))
            words.append(_written(surface, has_blank).replace("|", "\\|"))
        return "|".join(words)

    def split(self, filling: str) -> list[str]:
        """Return the words of a cell of the column `filling`."""
        return [word.replace("\\|", "|").strip() for word in _BAR.split(filling)]

    def read(self, word: str, has_blank: bool) -> str:
        """Return what a written word adds to the text, as `surface` has it, in printable characters."""
        if has_blank and word.startswith(PIECE_PREFIX):
            return word.removeprefix(PIECE_PREFIX).replace(BLANK, " ")
        if word == BLANK or (word.startswith(BLANK) and not has_blank):
            return word.replace(BLANK, " ")
        return " " * has_blank + word.replace(BLANK, " ")

    def tokens_of(self, surface: str) -> list[int]:
        """Return the tokens of a word: one where the vocabulary has it, else those that the tokenizer finds.

        Raises:
            DataError: The vocabulary lacks a part of it.
        """
        if surface in self._tokens_by_surface:
            return [self._tokens_by_surface[surface][0]]
        ids = self._tokenizer.encode(surface)
        if not ids or self._tokenizer.unk_id in ids:
            raise DataError(f"the vocabulary of the model has no {surface!r}", "give a word that it has")
        return ids

    def tokens_at(self, surface: str, start: int, *, is_start: bool) -> Iterator[tuple[int, int]]:
        """Yield each token that a run of letters may go on with from a place on, and how many letters it is.

        `is_start`: The text begins there, so that a blank before the word does not count.
        """
        by_surface = self._tokens_by_surface
        for end in range(start + 1, min(len(surface), start + self._longest) + 1):
            piece = surface[start:end]
            tokens = by_surface.get(piece, ())
            if is_start and not start:
                other = piece[1:] if piece.startswith(" ") else f" {piece}"
                tokens = (*tokens, *by_surface.get(other, ()))
            yield from ((token, end - start) for token in tokens)

    @cached_property
    def _tokens_by_surface(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for token in [*np.flatnonzero(self._tokenizer.is_ordinary).tolist(), self._tokenizer.unk_id]:
            surface = printable(self._surface(token))
            found[surface] = (*found.get(surface, ()), token)
        return found

    @cached_property
    def _longest(self) -> int:
        return 1 + max(map(len, self._tokens_by_surface))

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
        if not whole or "\N{REPLACEMENT CHARACTER}" in whole:  # a special token, or part of a character
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
