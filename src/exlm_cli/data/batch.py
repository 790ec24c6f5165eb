"""Input of one forward pass.

Axes: B sequences, L expanded positions, S DAG nodes, T targets, N inner nodes and M targets of all sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from jaxtyping import Int64
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Masked, expanded and padded sequences; the same layout for ExLM and for MLM (where k = 1).

    Attributes:
        token_ids: Expanded input tokens; [PAD] beyond `lengths`.
        positions: Token index before expansion (but after repetition) and clone index: (i, 1)..(i, k) for the
            clones of a [MASK], (j, 0) for all other tokens (section 4.2).
        lengths: Number of expanded tokens of each sequence, with [CLS] and [SEP].
        node_index: Expanded position of every DAG node, in order: [CLS], the clones, the last [SEP]; 0 beyond.
        node_mask: Index of the masked token that a node belongs to (0..T-1); -1 for BOS, EOS and padding.
        state_lengths: Number of nodes of each sequence, k * T + 2.
        target_ids: Tokens to predict, in order; [PAD] beyond `target_lengths`.
        target_source: Index, before repetition, of the token that a target is a copy of; -1 beyond.
        target_lengths: Number of masked tokens of each sequence, at least 1.
        sample_index: Index of each sequence in its dataset.
        inner_index: Where the nodes that emit are in a flat (B * S); so no step waits for a device to count them.
        target_index: Where the targets are in a flat (B * T).
        is_padded: Whether any sequence has [PAD], known to the host.
        num_tokens: Tokens before expansion, with [CLS] and [SEP], known to the host.
    """

    token_ids: Int64[Tensor, "B L"]
    positions: Int64[Tensor, "B L 2"]
    lengths: Int64[Tensor, " B"]
    node_index: Int64[Tensor, "B S"]
    node_mask: Int64[Tensor, "B S"]
    state_lengths: Int64[Tensor, " B"]
    target_ids: Int64[Tensor, "B T"]
    target_source: Int64[Tensor, "B T"]
    target_lengths: Int64[Tensor, " B"]
    sample_index: Int64[Tensor, " B"]
    inner_index: Int64[Tensor, " N"]
    target_index: Int64[Tensor, " M"]
    is_padded: bool
    num_tokens: int

    def to(self, device: torch.device) -> Self:
        """Return the same batch on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Return the same batch in page-locked memory, which a CUDA device copies without stopping the host."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {
            f.name: change(tensor) for f in fields(self) if isinstance(tensor := getattr(self, f.name), Tensor)
        }
        return replace(self, **changed)
