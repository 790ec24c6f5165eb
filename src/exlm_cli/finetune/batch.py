"""Encoded examples to padded batches. Axes: B examples, L tokens, R positions after repetition, C outputs."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from exlm_cli.data.masking import IntArray
from exlm_cli.tasks.base import EncodedSplit


@dataclass(frozen=True)
class TaskBatch:
    """What one forward pass of a task's model eats.

    Attributes:
        token_ids: Repeated tokens, [PAD] beyond `lengths`.
        lengths: Positions of each example after repetition, [CLS] and [SEP] included.
        targets: As in `EncodedSplit`, float64, NaN where missing.
        answerable: For spans, over tokens before repetition; False beyond.
        sample_index: Of each example in its split.
    """

    token_ids: Int64[Tensor, "B R"]
    lengths: Int64[Tensor, " B"]
    targets: Float[Tensor, "B C"]
    answerable: Bool[Tensor, "B L"] | None
    sample_index: Int64[Tensor, " B"]

    def to(self, device: torch.device) -> Self:
        """Return the same batch on `device`."""
        moved = (None if t is None else t.to(device, non_blocking=True) for t in self.__dict__.values())
        return type(self)(*moved)  # type: ignore[arg-type]


def repeated_lengths(split: EncodedSplit, indices: IntArray, num_repeats: int) -> IntArray:
    """Return the (n,) positions of examples when every token between [CLS] and the last [SEP] is repeated."""
    lengths = np.array([len(split.token_ids[int(i)]) for i in indices], dtype=np.int64)
    return (lengths - 2) * num_repeats + 2


def collate(split: EncodedSplit, indices: IntArray, *, num_repeats: int, pad_id: int) -> TaskBatch:
    """Repeat and pad the examples of given indices on the CPU; repetition is that of pre-training (section 3.1)."""
    rows = [_repeat(split.token_ids[int(i)], num_repeats) for i in indices]
    lengths = [len(row) for row in rows]
    token_ids = np.full((len(rows), max(lengths)), pad_id, dtype=np.int64)
    for padded, row in zip(token_ids, rows, strict=True):
        padded[: len(row)] = row
    answerable = None
    if split.answerable is not None:
        masks = [split.answerable[int(i)] for i in indices]
        answerable = np.zeros((len(rows), max(map(len, masks))), dtype=bool)
        for padded, mask in zip(answerable, masks, strict=True):
            padded[: len(mask)] = mask
    return TaskBatch(
        torch.from_numpy(token_ids),
        torch.tensor(lengths),
        torch.from_numpy(split.targets[indices]),
        None if answerable is None else torch.from_numpy(answerable),
        torch.from_numpy(indices),
    )


def _repeat(token_ids: IntArray, num_repeats: int) -> IntArray:
    if num_repeats == 1:
        return token_ids
    return np.concatenate([token_ids[:1], np.repeat(token_ids[1:-1], num_repeats), token_ids[-1:]])
