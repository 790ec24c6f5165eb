"""Input of one forward pass, and the collator that builds it.

Axes: B sequences, L expanded positions, S DAG nodes, T targets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import Objective
from exlm_cli.data.corpus.shards import TokenDataset
from exlm_cli.data.expansion import ExpandedSequence, expand
from exlm_cli.data.masking import IntArray, MaskedSequence, SpecialTokens, mask_sequence, sample_rng


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


def build_collator(
    dataset: TokenDataset, recipe: PretrainRecipe, special: SpecialTokens, epoch: int
) -> Callable[[IntArray], Batch]:
    """Return a function that masks, expands and pads sequences of a data set.

    It takes the (B,) indices of sequences, and its batch, on the CPU, depends on them and on `epoch` alone.
    """

    def make(indices: IntArray) -> Batch:
        masked = (
            mask_sequence(dataset[int(i)], recipe.masking, special, sample_rng(recipe.seed, epoch, int(i)))
            for i in indices
        )
        expanded = [expand(m, recipe.masking.num_states_per_mask, recipe.objective) for m in masked]
        return collate(expanded, indices.tolist(), special.pad)

    return make


def collate(sequences: Sequence[ExpandedSequence], sample_index: Sequence[int], pad_id: int) -> Batch:
    """Pad expanded sequences to one `Batch` on the CPU; every axis has at least one entry."""
    lengths = [len(s.token_ids) for s in sequences]
    num_nodes = [len(s.node_index) for s in sequences]
    num_targets = [len(s.target_ids) for s in sequences]
    longest, max_nodes, max_targets = max(lengths), max(num_nodes), max(1, *num_targets)
    return Batch(
        token_ids=_pad([s.token_ids for s in sequences], longest, pad_id),
        positions=torch.stack(
            [_pad([s.positions[:, axis] for s in sequences], longest, 0) for axis in range(2)], dim=-1
        ),
        lengths=torch.tensor(lengths),
        node_index=_pad([s.node_index for s in sequences], max_nodes, 0),
        node_mask=_pad([s.node_mask for s in sequences], max_nodes, -1),
        state_lengths=torch.tensor(num_nodes),
        target_ids=_pad([s.target_ids for s in sequences], max_targets, pad_id),
        target_source=_pad([s.target_source for s in sequences], max_targets, -1),
        target_lengths=torch.tensor(num_targets),
        sample_index=torch.tensor(list(sample_index)),
    )


def batch_from_masked_ids(
    input_ids: IntArray, *, mask_id: int, pad_id: int, num_states_per_mask: int, objective: Objective
) -> Batch:
    """Build a batch of one from tokens that already contain [MASK]; its targets are unknown and set to [PAD].

    `input_ids` are (L,), [CLS] first and [SEP] last; `num_states_per_mask` is 1 for an MLM.
    """
    positions = np.flatnonzero(input_ids == mask_id)
    masked = MaskedSequence(
        input_ids=input_ids,
        masked_positions=positions,
        target_ids=np.full(len(positions), pad_id, dtype=np.int64),
        target_source=positions,
    )
    return collate([expand(masked, num_states_per_mask, objective)], [0], pad_id)


def _pad(rows: Sequence[IntArray], width: int, value: int) -> Tensor:
    padded = np.full((len(rows), width), value, dtype=np.int64)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(padded)
