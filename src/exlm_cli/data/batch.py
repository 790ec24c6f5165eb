"""Batches: masked sequences whose [MASK]s are expanded into k states, with 2D positions and DAG nodes (section 4.2).

Axes: B sequences, L tokens before expansion, X expanded positions, S DAG nodes, T targets, N inner nodes and M masks or
targets of all sequences, P positions of all sequences without padding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from exlm_cli.config.sections import ObjectiveName
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
    """Base of batches: dataclasses whose tensors, also those in named tuples, move to a device together."""

    def to(self, device: torch.device) -> Self:
        """Return the same batch on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Return the same batch in page-locked memory, which a CUDA device copies without stopping the host."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changed[name] = change(value)
            elif isinstance(value, tuple):
                changed[name] = type(value)(*map(change, value))
        return replace(self, **changed)  # type: ignore[type-var]


class Packing(NamedTuple):
    """Order of the positions of a batch in one row without padding: context first, then further states of masks.

    With `model.mask_attention: first` the states of a mask beyond the first are further states; else there are none.

    Attributes:
        source: Where each packed position is in a flat (B * X).
        row: Place of each position among the packed ones; 0 for padding.
        cu_lengths: Sequence b has packed positions `cu_lengths[b]` to `cu_lengths[b + 1] - 1` of the context.
        further_place: Where each further state is in a flat (B * F), F being the most further states of a sequence.
        read: Packed positions of the R nodes: those of the context, sequence by sequence, then all further states.
        cu_read: Sequence b has entries `cu_read[b]` to `cu_read[b + 1] - 1` of the context nodes in `read`.
        node_row: Place of each node in `read`; 0 beyond `state_lengths`.
    """

    source: Int64[Tensor, " P"]
    row: Int64[Tensor, "B X"]
    cu_lengths: Int32[Tensor, " B+1"]
    further_place: Int64[Tensor, " further"]
    read: Int64[Tensor, " R"]
    cu_read: Int32[Tensor, " B+1"]
    node_row: Int64[Tensor, "B S"]


@dataclass(frozen=True)
class Batch(DeviceBatch):
    """Masked, expanded and padded sequences; the same layout for ExLM and for MLM (where k = 1).

    Attributes:
        token_ids: Expanded input tokens; [PAD] beyond `lengths`.
        positions: Token index before expansion (but after repetition) and clone index: (i, 1)..(i, k) for the
            clones of a [MASK], (j, 0) for all other tokens (section 4.2).
        lengths: Number of expanded tokens of each sequence, with [CLS] and [SEP].
        first_index: Expanded position of each token, for a [MASK] that of its first clone; 0 for padding.
        node_index: Expanded position of every DAG node, in order: [CLS], the clones, the last [SEP]; 0 beyond.
        node_mask: Index of the masked token that a node belongs to (0..T-1); -1 for BOS, EOS and padding.
        state_lengths: Number of nodes of each sequence, k * T + 2.
        target_ids: Tokens to predict, in order; [PAD] beyond `target_lengths`.
        target_source: Index, before repetition, of the token that a target is a copy of; -1 beyond.
        target_lengths: Number of masked tokens of each sequence; 0 where nothing is masked.
        sample_index: Index of each sequence in its dataset.
        inner_index: Indices of the emitting nodes in a flat (B * S); made on the host, so no step waits for a device.
        target_index: Indices of the targets in a flat (B * T).
        is_padded: Whether any sequence has [PAD], known to the host.
        has_even_context: Whether all sequences have the same number of tokens before expansion; known to the host.
            False where nothing is masked.
        is_even: Whether they also have the same number of masks; known to the host.
        num_tokens: Tokens before expansion, with [CLS] and [SEP], known to the host.
        packing: Order of the positions without padding; None where the encoder runs on the padded batch.
    """

    token_ids: Int64[Tensor, "B X"]
    positions: Int64[Tensor, "B X 2"]
    lengths: Int64[Tensor, " B"]
    first_index: Int64[Tensor, "B L"]
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
    has_even_context: bool
    is_even: bool
    num_tokens: int
    packing: Packing | None = None

    @property
    def node_clone(self) -> Int64[Tensor, "B S"]:
        """Clone index of each node: 1..k, 0 for BOS, EOS and padding."""
        clone: Tensor = self.positions[..., 1].gather(1, self.node_index)
        return clone


def expand(masked: MaskedSequences, num_states_per_mask: int, objective: ObjectiveName, *, pad_id: int) -> Batch:
    """Replace every masked position by k adjacent copies, list the DAG's nodes, and pad, all on the CPU.

    Clone c of the mask at position i gets the 2D position (i, c), c = 1..k; everything else gets (j, 0). For
    `objective="mlm"` all positions are (j, 0), and k must be 1.
    """
    k = num_states_per_mask
    num_sequences, longest_input = masked.input_ids.shape
    target_lengths = masked.is_masked.sum(1)
    lengths = masked.lengths + (k - 1) * target_lengths
    longest, max_masks = int(lengths.max()), int(target_lengths.max())
    is_padded = bool((lengths < longest).any())
    has_even_context = max_masks > 0 and int(masked.lengths.min()) == int(masked.lengths.max())

    # flat over all sequences: operations along a short last axis of k take several times as long
    num_inner = k * target_lengths
    sequence = np.arange(num_sequences)
    masks_before = np.cumsum(target_lengths) - target_lengths
    inner_N = np.arange(num_inner.sum()) - np.repeat(k * masks_before, num_inner)
    mask_M = np.arange(target_lengths.sum()) - np.repeat(masks_before, target_lengths)
    source_M = np.flatnonzero(masked.is_masked) - np.repeat(sequence * longest_input, target_lengths)
    position_N = np.repeat(source_M - mask_M, k) + inner_N
    place_N = position_N + np.repeat(sequence * longest, num_inner)
    clone_N = np.tile(np.arange(1, k + 1), len(mask_M))

    # the token index grows by one at each expanded position, except at further copies of a mask
    step_BX = np.ones((num_sequences, longest), dtype=np.int64)
    step_BX[:, 0] = 0
    step_BX.ravel()[place_N] = clone_N == 1
    token_BX = np.cumsum(step_BX, axis=1, out=step_BX)
    if is_padded:
        is_padding_BX = np.arange(longest) >= lengths[:, None]
        token_BX[is_padding_BX] = 0
    token_ids = masked.input_ids.ravel()[token_BX + sequence[:, None] * longest_input]
    if is_padded:
        token_ids[is_padding_BX] = pad_id
    positions = np.zeros((num_sequences, longest, 2), dtype=np.int64)
    positions[..., 0] = token_BX
    if objective == "exlm":
        positions.ravel()[2 * place_N + 1] = clone_N

    node_index = np.zeros((num_sequences, k * max_masks + 2), dtype=np.int64)
    node_mask = np.full_like(node_index, -1)
    inner_index = np.repeat(sequence * node_index.shape[1] + 1, num_inner) + inner_N
    node_index.ravel()[inner_index] = position_N
    node_mask.ravel()[inner_index] = np.repeat(mask_M, k)
    state_lengths = num_inner + 2
    node_index[sequence, state_lengths - 1] = lengths - 1

    first_index = np.arange(longest_input) + (k - 1) * (np.cumsum(masked.is_masked, axis=1) - masked.is_masked)
    # a shorter sequence may have more masks and be as long as another once expanded
    if int(masked.lengths.min()) < longest_input:
        first_index[np.arange(longest_input) >= masked.lengths[:, None]] = 0

    # a batch without masks still has one column of targets, all padding
    target_ids = np.full((num_sequences, max(1, max_masks)), pad_id, dtype=np.int64)
    target_source = np.full_like(target_ids, -1)
    target_index = np.repeat(sequence * target_ids.shape[1], target_lengths) + mask_M
    target_ids.ravel()[target_index] = masked.target_ids
    target_source.ravel()[target_index] = masked.target_source
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        lengths=torch.from_numpy(lengths),
        first_index=torch.from_numpy(first_index),
        node_index=torch.from_numpy(node_index),
        node_mask=torch.from_numpy(node_mask),
        state_lengths=torch.from_numpy(state_lengths),
        target_ids=torch.from_numpy(target_ids),
        target_source=torch.from_numpy(target_source),
        target_lengths=torch.from_numpy(target_lengths),
        sample_index=torch.from_numpy(masked.sample_index),
        inner_index=torch.from_numpy(inner_index),
        target_index=torch.from_numpy(target_index),
        is_padded=is_padded,
        has_even_context=has_even_context,
        is_even=has_even_context and int(target_lengths.min()) == max_masks,
        num_tokens=int(masked.lengths.sum()),
    )


def pack(batch: Batch, *, hides_further_states: bool) -> Batch:
    """Return a batch on the CPU with its `packing`; `hides_further_states`: the model has `mask_attention: first`."""
    num_sequences, longest = batch.token_ids.shape
    is_further_BX = (batch.positions[..., 1].numpy() > 1) & hides_further_states
    is_context_BX = (np.arange(longest) < batch.lengths.numpy()[:, None]) & ~is_further_BX
    source = np.concatenate([np.flatnonzero(is_context_BX), np.flatnonzero(is_further_BX)])
    row = np.zeros(num_sequences * longest, dtype=np.int64)
    row[source] = np.arange(len(source))
    num_further_B = is_further_BX.sum(1)
    shifts_B = np.arange(num_sequences) * num_further_B.max() - (np.cumsum(num_further_B) - num_further_B)

    node_index_BS = batch.node_index.numpy()
    place_BS = np.take_along_axis(row.reshape(num_sequences, longest), node_index_BS, axis=1)
    is_node_BS = np.arange(node_index_BS.shape[1]) < batch.state_lengths.numpy()[:, None]
    num_context = int(is_context_BX.sum())
    is_read_BS = is_node_BS & (place_BS < num_context)
    read_context = place_BS[is_read_BS]
    node_row_BS = np.where(is_node_BS, place_BS + (len(read_context) - num_context), 0)
    node_row_BS[is_read_BS] = np.arange(len(read_context))
    packing = Packing(
        source=torch.from_numpy(source),
        row=torch.from_numpy(row).view(num_sequences, longest),
        cu_lengths=_bounds(is_context_BX),
        further_place=torch.from_numpy(np.arange(num_further_B.sum()) + np.repeat(shifts_B, num_further_B)),
        read=torch.from_numpy(np.concatenate([read_context, np.arange(num_context, len(source))])),
        cu_read=_bounds(is_read_BS),
        node_row=torch.from_numpy(node_row_BS),
    )
    return replace(batch, packing=packing)


def _bounds(is_kept_BX: BoolArray) -> Int32[Tensor, " B+1"]:
    """Return where the kept entries of each sequence begin among all kept entries, and at the end their number."""
    return torch.from_numpy(np.append(0, np.cumsum(is_kept_BX.sum(1))).astype(np.int32))


def batch_from_masked_ids(
    input_ids: IntArray, *, mask_id: int, pad_id: int, num_states_per_mask: int, objective: ObjectiveName
) -> Batch:
    """Build a batch from tokens that already contain [MASK]; its targets are unknown and set to [PAD].

    `input_ids` are (B, L), [CLS] first, [SEP] last, [PAD] beyond; `num_states_per_mask` is 1 for an MLM.
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
    return expand(masked, num_states_per_mask, objective, pad_id=pad_id)
