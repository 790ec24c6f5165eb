"""Which tokens a search may put at masks, given those before.

Axis: C tokens that are allowed anywhere.
"""

from collections.abc import Hashable
from typing import Protocol

from exlm_cli.data import BoolArray, IntArray


class Allowed(Protocol):
    """Which tokens may follow each other, one for each mask that is filled; states begin with `start`."""

    start: Hashable
    tokens: IntArray
    """(C,) all that are allowed anywhere, ascending."""

    def at(self, position: int) -> BoolArray:
        """Return (C,) those that the mask of a position may have, whatever the others have."""

    def after(self, state: Hashable, position: int) -> BoolArray:
        """Return (C,) those that it may have in a state, so that the masks after it can be filled too."""

    def step(self, state: Hashable, position: int, column: int) -> Hashable:
        """Return the state behind the token of a column."""
