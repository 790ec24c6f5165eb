"""States of a frozen encoder, worked out once: they are the same in every epoch, and for every seed and grid point.

Axes: N examples of a split, D width.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from exlm_cli.tasks.base import EncodedRows


@dataclass(frozen=True)
class FrozenStates:
    """States at [CLS] of the splits of a task, in the memory of the host."""

    _known: list[tuple[EncodedRows, torch.dtype | None, Float[Tensor, "N D"]]] = field(default_factory=list)

    def find(self, rows: EncodedRows, precision: torch.dtype | None) -> Float[Tensor, "N D"] | None:
        """Return the states of these very rows in a precision of autocast; None where they are not known yet."""
        return next((states for known, of, states in self._known if known is rows and of == precision), None)

    def keep(self, rows: EncodedRows, precision: torch.dtype | None, states: Float[Tensor, "N D"]) -> None:
        """Add the states of rows."""
        self._known.append((rows, precision, states))
