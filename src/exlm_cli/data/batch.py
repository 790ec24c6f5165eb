"""Batches: masked sequences as the encoder reads them, and the DAG nodes of their [MASK]s (section 4.2).

Axes: B sequences, L tokens before expansion, X positions of the encoder, S DAG nodes, T targets, N inner nodes and M
masks or targets of all sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from exlm_cli.data import BoolArray, IntArray


@dataclass(frozen=True)
class MaskedSequences:
    """Sequences after repetition and masking, before expansion.

    Attributes:
        input_ids: (B, L) tokens, [CLS] first and [SEP] last, with [MASK] (or a kept or random token) at masked
            positions, [PAD] beyond `lengths`.
        lengths: (B,) tokens of each sequence.
        is_masked: (B, L) True at the targets.
        target_ids: (M,) original tokens at these positions, sequence by sequence.
        target_source: (M,) index, in the sequence before repetition, of the token each target is a copy of; [CLS] is 0.
        sample_index: (B,) index of each sequence in its data set.
    """

    input_ids: IntArray
    lengths: IntArray
    is_masked: BoolArray
    target_ids: IntArray
    target_source: IntArray
    sample_index: IntArray


class DeviceBatch:
    """Base of batches: dataclasses whose tensors move to a device together."""

    def to(self, device: torch.device) -> Self:
        """Return the same batch on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Return the same batch in page-locked memory, which a CUDA device copies without stopping the host."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **changed)  # type: ignore[type-var]


@dataclass(frozen=True)
class Batch(DeviceBatch):
    """Masked and padded sequences; the same layout for MLM and both designs of ExLM.

    Attributes:
        token_ids: Input tokens of the encoder, X = L unless the k copies of each [MASK] are among them; [PAD] beyond
            `lengths`.
        positions: Token index before expansion and clone index: (i, 1)..(i, k) for the copies of a [MASK], (j, 0) for
            all other tokens (section 4.2). None where masks are not expanded in the input: position j is (j, 0).
        lengths: Input tokens of each sequence, with [CLS] and [SEP].
        node_index: Position of every DAG node in the input, in order: [CLS], the nodes of each mask, k or one, the last
            [SEP]; 0 beyond.
        node_mask: Index of the masked token that a node belongs to (0..T-1); -1 for BOS, EOS and padding.
        state_lengths: Number of nodes of each sequence, k * T + 2 or T + 2.
        target_ids: Tokens to predict, in order; [PAD] beyond `target_lengths`.
        target_source: Index, before repetition, of the token that a target is a copy of; -1 beyond.
        target_lengths: Number of masked tokens of each sequence; 0 where nothing is masked.
        sample_index: Index of each sequence in its dataset.
        inner_index: Indices of the emitting nodes in a flat (B * S); made on the host, so no step waits for a device.
        target_index: Indices of the targets in a flat (B * T).
        is_padded: Whether any sequence has [PAD], known to the host.
        is_even: Whether all sequences have the same number of masks; known to the host.
        num_tokens: Tokens before expansion, with [CLS] and [SEP], known to the host.
        flops: Those of training on it without its padding, known to the host; 0 where they are not counted.
    """

    token_ids: Int64[Tensor, "B X"]
    positions: Int64[Tensor, "B X 2"] | None
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
    is_even: bool
    num_tokens: int
    flops: float = 0.0

    @property
    def is_token(self) -> Bool[Tensor, "B X"] | None:
        """False at padding; None where there is none."""
        if not self.is_padded:
            return None
        return torch.arange(self.token_ids.shape[1], device=self.lengths.device) < self.lengths[:, None]

    def scatter_targets(self, values_M: Tensor) -> Tensor:
        """Return (M, ...) values of all targets by sequence, (B, T, ...), zero beyond `target_lengths`."""
        shape = (*self.target_ids.shape, *values_M.shape[1:])
        flat = values_M.new_zeros((self.target_ids.numel(), *values_M.shape[1:]))
        return flat.index_put((self.target_index,), values_M).view(shape)


def expand(masked: MaskedSequences, num_states_per_mask: int, *, expands_input: bool, pad_id: int) -> Batch:
    """Give every mask its nodes in the DAG, and pad, all on the CPU.

    Args:
        masked: Sequences before expansion.
        num_states_per_mask: k.
        expands_input: Replace every [MASK] of the input by k adjacent copies with the 2D positions (i, 1)..(i, k), each
            a node. Else the input stays as it is, and a mask has one node.
        pad_id: Id of [PAD].
    """
    k = num_states_per_mask if expands_input else 1
    num_sequences, longest_input = masked.input_ids.shape
    target_lengths = masked.is_masked.sum(1)
    max_masks = int(target_lengths.max())

    # flat over all sequences: operations along a short last axis of k take several times as long
    num_inner = k * target_lengths
    sequence = np.arange(num_sequences)
    masks_before = np.cumsum(target_lengths) - target_lengths
    inner_N = np.arange(num_inner.sum()) - np.repeat(k * masks_before, num_inner)
    mask_M = np.arange(target_lengths.sum()) - np.repeat(masks_before, target_lengths)
    source_M = np.flatnonzero(masked.is_masked) - np.repeat(sequence * longest_input, target_lengths)
    position_N = np.repeat(source_M, k)
    if expands_input:
        position_N += inner_N - np.repeat(mask_M, k)
        lengths = masked.lengths + (k - 1) * target_lengths
        place_N = position_N + np.repeat(sequence * int(lengths.max()), num_inner)
        token_ids, positions = _with_copies(masked, lengths, place_N, k, pad_id)
    else:
        lengths, token_ids, positions = masked.lengths, masked.input_ids, None

    nodes = (num_sequences, k * max_masks + 2)
    inner_index = np.repeat(sequence * nodes[1] + 1, num_inner) + inner_N
    node_index = _scatter(nodes, inner_index, position_N, 0)
    state_lengths = num_inner + 2
    node_index[sequence, state_lengths - 1] = lengths - 1

    # a batch without masks still has one column of targets, all padding
    targets = (num_sequences, max(1, max_masks))
    target_index = np.repeat(sequence * targets[1], target_lengths) + mask_M
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=None if positions is None else torch.from_numpy(positions),
        lengths=torch.from_numpy(lengths),
        node_index=torch.from_numpy(node_index),
        node_mask=torch.from_numpy(_scatter(nodes, inner_index, np.repeat(mask_M, k), -1)),
        state_lengths=torch.from_numpy(state_lengths),
        target_ids=torch.from_numpy(_scatter(targets, target_index, masked.target_ids, pad_id)),
        target_source=torch.from_numpy(_scatter(targets, target_index, masked.target_source, -1)),
        target_lengths=torch.from_numpy(target_lengths),
        sample_index=torch.from_numpy(masked.sample_index),
        inner_index=torch.from_numpy(inner_index),
        target_index=torch.from_numpy(target_index),
        is_padded=int(lengths.min()) < token_ids.shape[1],
        is_even=int(target_lengths.min()) == max_masks,
        num_tokens=int(masked.lengths.sum()),
    )


def _scatter(shape: tuple[int, int], index: IntArray, values: IntArray, fill: int) -> IntArray:
    """Return an array of values at places that are counted flat, `fill` at the others."""
    filled = np.full(shape, fill, dtype=np.int64)
    filled.ravel()[index] = values
    return filled


def _with_copies(
    masked: MaskedSequences, lengths: IntArray, place_N: IntArray, num_copies: int, pad_id: int
) -> tuple[IntArray, IntArray]:
    """Return the (B, X) tokens with k copies of each mask, and their (B, X, 2) positions.

    Args:
        masked: Sequences before expansion.
        lengths: (B,) tokens of each sequence after expansion.
        place_N: Places of the copies in a flat (B * X).
        num_copies: k.
        pad_id: Id of [PAD].
    """
    num_sequences, longest = len(lengths), int(lengths.max())
    clone_N = np.tile(np.arange(1, num_copies + 1), len(place_N) // num_copies)
    # the token index grows by one at each expanded position, except at further copies of a mask
    step_BX = np.ones((num_sequences, longest), dtype=np.int64)
    step_BX[:, 0] = 0
    step_BX.ravel()[place_N] = clone_N == 1
    token_BX = np.cumsum(step_BX, axis=1, out=step_BX)
    is_padding_BX = np.arange(longest) >= lengths[:, None]
    token_BX[is_padding_BX] = 0
    token_ids = masked.input_ids.ravel()[token_BX + np.arange(num_sequences)[:, None] * masked.input_ids.shape[1]]
    token_ids[is_padding_BX] = pad_id
    positions = np.zeros((num_sequences, longest, 2), dtype=np.int64)
    positions[..., 0] = token_BX
    positions.ravel()[2 * place_N + 1] = clone_N
    return token_ids, positions


def batch_from_masked_ids(
    input_ids: IntArray, *, mask_id: int, pad_id: int, num_states_per_mask: int, expands_input: bool
) -> Batch:
    """Build a batch from tokens that already contain [MASK]; its targets are unknown and set to [PAD].

    `input_ids` are (B, L), [CLS] first, [SEP] last, [PAD] beyond; other arguments as for `expand`.
    """
    is_masked = input_ids == mask_id
    target_source = is_masked.nonzero()[1]
    masked = MaskedSequences(
        input_ids=input_ids,
        lengths=(input_ids != pad_id).sum(1),
        is_masked=is_masked,
        target_ids=np.full_like(target_source, pad_id),
        target_source=target_source,
        sample_index=np.arange(len(input_ids)),
    )
    return expand(masked, num_states_per_mask, expands_input=expands_input, pad_id=pad_id)
