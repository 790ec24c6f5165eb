"""What one forward pass eats. Axes: B sequences, L expanded positions, S DAG nodes, T targets."""

from dataclasses import dataclass, fields
from typing import Self

import torch
from jaxtyping import Int64
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Masked, expanded and padded sequences; the same layout for ExLM and for MLM (where k = 1).

    Attributes:
        token_ids: Expanded input tokens; [PAD] beyond `lengths`.
        positions: Token index in the original (repeated) sequence and clone index: (i, 1)..(i, k) for the clones of a
            [MASK], (j, 0) for everything else (section 4.2).
        lengths: Expanded tokens of each sequence, [CLS] and [SEP] included.
        node_index: Expanded position of every DAG node, in order: [CLS], the clones, the last [SEP]; 0 beyond.
        node_mask: Which masked token a node stands for (0..T-1); -1 for BOS, EOS and padding.
        state_lengths: Nodes of each sequence, k * T + 2.
        target_ids: Tokens to predict, in order; [PAD] beyond `target_lengths`.
        target_source: Index of the token a target is a copy of, before repetition; -1 beyond.
        target_lengths: Masked tokens of each sequence, at least 1.
        sample_index: Index of each sequence in its dataset.
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

    def to(self, device: torch.device) -> Self:
        """Return the same batch on `device`."""
        return type(self)(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})
