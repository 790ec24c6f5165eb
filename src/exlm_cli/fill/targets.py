"""Which tokens may stand at masks where these must be words of a list; words may be several tokens.

Axis: C tokens that a word has.
"""

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from exlm_cli.data import BoolArray, IntArray
from exlm_cli.errors import DataError
from exlm_cli.fill.words import MaskWords

_BEGIN = -1
"""A node of no trie: a word may begin here."""
State = frozenset[int]


class Targets:
    """Words in tries, one for words with a blank before them and one for those without; an `Allowed` of the search.

    Words follow each other within a segment, which they fill: a run of neighbouring masks, or a place that holds one.

    Args:
        words: Of the tokenizer.
        targets: Words that may stand at masks.
        blanks: Whether a blank is before the mask of each position.
        begins_text: Whether the first mask begins the text, where a blank does not count.
        segments: How many masks each segment has.
        is_single: Whether a segment holds one word.

    Raises:
        DataError: The vocabulary lacks a part of a word, or no words fill a segment.
    """

    start: Hashable = frozenset({_BEGIN})

    def __init__(
        self,
        words: MaskWords,
        targets: Sequence[str],
        blanks: Sequence[bool],
        segments: Sequence[int],
        *,
        begins_text: bool,
        is_single: bool,
    ) -> None:
        self._is_single = is_single
        self._roots = [int(has_blank) for has_blank in blanks]
        self._left = [length - at for length in segments for at in range(1, length + 1)]
        self._first = [at == 0 for length in segments for at in range(length)]
        if begins_text:
            self._roots[0] = 2
        # the roots: words without a blank, with one, and both
        self._children: list[dict[int, int]] = [{}, {}, {}]
        self._ends: set[int] = set()
        self._known: dict[tuple[int, int], bool] = {}
        self._anywhere: dict[int, BoolArray] = {}
        for root in set(self._roots):
            for has_blank in (False, True) if root == 2 else (bool(root),):
                for target in targets:
                    self._add(root, words.tokens_of(words.read(target, has_blank)))
        self.tokens: IntArray = np.unique([token for children in self._children for token in children])
        self._column = {token: column for column, token in enumerate(self.tokens.tolist())}
        for position, is_first in enumerate(self._first):
            if is_first and not self._fills(_BEGIN, position - 1):
                masks = self._left[position] + 1
                raise DataError(
                    f"no target is as long as its masks: {masks} next to each other",
                    "give targets of as many tokens, or `--max-tokens N` for one mask in the place of each",
                )

    def at(self, position: int) -> BoolArray:
        """Return (C,) the tokens that the mask of a position may have, whatever the others have."""
        if position not in self._anywhere:
            self._anywhere[position] = self.after(frozenset(range(len(self._children))) | {_BEGIN}, position)
        return self._anywhere[position]

    def after(self, state: Hashable, position: int) -> BoolArray:
        """Return (C,) the tokens that it may have in a state, so that the masks after it can be filled too."""
        assert isinstance(state, frozenset)
        found = np.zeros(len(self.tokens), dtype=bool)
        found[[self._column[token] for token, _ in self._steps(state, position)]] = True
        return found

    def step(self, state: Hashable, position: int, column: int) -> Hashable:
        """Return the state behind the token of a column."""
        assert isinstance(state, frozenset)
        if self._left[position] == 0:
            return frozenset({_BEGIN})
        token = int(self.tokens[column])
        return frozenset(child for known, child in self._steps(state, position) if known == token)

    def _add(self, root: int, tokens: Sequence[int]) -> None:
        node = root
        for token in tokens:
            if token not in self._children[node]:
                self._children[node][token] = len(self._children)
                self._children.append({})
            node = self._children[node][token]
        self._ends.add(node)

    def _steps(self, state: State, position: int) -> Iterator[tuple[int, int]]:
        """Yield each token that words allow in a state, with the node behind it, if the segment can be filled then."""
        begins = _BEGIN in state or (not self._is_single and not self._ends.isdisjoint(state))
        for node in (state - {_BEGIN}) | ({self._roots[position]} if begins else set()):
            for token, child in self._children[node].items():
                if self._fills(child, position):
                    yield token, child

    def _fills(self, node: int, position: int) -> bool:
        """Return whether words can fill a segment up to its end when a node is reached at a position."""
        if node != _BEGIN and self._left[position] == 0:
            return node in self._ends
        key = node, position
        if key not in self._known:
            children = self._children[self._roots[position + 1] if node == _BEGIN else node].values()
            self._known[key] = any(self._fills(child, position + 1) for child in children) or (
                not self._is_single and node in self._ends and self._fills(_BEGIN, position)
            )
        return self._known[key]
