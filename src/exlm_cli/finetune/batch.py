"""Padded batches of a task's examples, and their losses.

Axes: B examples, L tokens, R positions after repetition, C outputs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from exlm_cli.data import IntArray
from exlm_cli.tasks.base import EncodedSplit, Loss


@dataclass(frozen=True)
class TaskBatch:
    """Input and targets of one forward pass.

    Attributes:
        token_ids: Repeated tokens, [PAD] beyond `lengths`.
        lengths: Positions of each example after repetition, [CLS] and [SEP] included.
        targets: As in `EncodedSplit`, float64, NaN where missing.
        answerable: For spans, over tokens before repetition; False beyond the last one.
        sample_index: Index of each example in its split.
    """

    token_ids: Int64[Tensor, "B R"]
    lengths: Int64[Tensor, " B"]
    targets: Float[Tensor, "B C"]
    answerable: Bool[Tensor, "B L"] | None
    sample_index: Int64[Tensor, " B"]

    def to(self, device: torch.device) -> Self:
        """Return the same batch on `device`."""
        tensors = (getattr(self, field.name) for field in fields(self))
        moved: list[Any] = [None if t is None else t.to(device, non_blocking=True) for t in tensors]
        return type(self)(*moved)


def repeated_lengths(split: EncodedSplit, indices: IntArray, num_repeats: int) -> IntArray:
    """Return the (n,) positions of examples when every token between [CLS] and the last [SEP] is repeated."""
    lengths = np.array([len(split.token_ids[int(i)]) for i in indices], dtype=np.int64)
    return (lengths - 2) * num_repeats + 2


def collate(split: EncodedSplit, indices: IntArray, *, num_repeats: int, pad_id: int) -> TaskBatch:
    """Repeat and pad the examples of given indices on the CPU; repetition is that of pre-training (section 3.1)."""
    rows = [_repeat(split.token_ids[int(i)], num_repeats) for i in indices]
    answerable = None
    if split.answerable is not None:
        answerable = _padded([split.answerable[int(i)] for i in indices], False)
    return TaskBatch(
        _padded(rows, pad_id),
        torch.tensor([len(row) for row in rows]),
        torch.from_numpy(split.targets[indices]),
        answerable,
        torch.from_numpy(indices),
    )


def _repeat(token_ids: IntArray, num_repeats: int) -> IntArray:
    return np.concatenate([token_ids[:1], np.repeat(token_ids[1:-1], num_repeats), token_ids[-1:]])


def _padded(rows: Sequence[NDArray[Any]], value: int) -> Tensor:
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_value=value)


def batch_losses(loss: Loss, outputs: Tensor, batch: TaskBatch, weights: Tensor | None) -> Float[Tensor, " n"]:
    """Return the losses whose mean is the loss of a batch, nats or squared standard deviations, float32.

    For `binary` one loss for each label present, so that every label weighs the same (as in Uni-Mol). Otherwise one for
    each example, for `regression` the mean over its values present. Each example without labels adds `inf`, which the
    training loop counts and leaves out.

    Args:
        outputs: (B, C), or (B, L, 2) for `span`.
        batch: Batch with the targets; standardised ones for `regression`.
        weights: (C,) weight of each class, or of each label's positives; None: all 1.
    """
    match loss:
        case "binary":
            targets_BC = batch.targets.nan_to_num().to(outputs.dtype)
            losses_BC = F.binary_cross_entropy_with_logits(outputs, targets_BC, pos_weight=weights, reduction="none")
            is_present_BC = ~batch.targets.isnan()
            is_unlabelled_B = ~is_present_BC.any(1)
            return torch.cat([losses_BC[is_present_BC], torch.full_like(losses_BC[is_unlabelled_B, 0], math.inf)])
        case "regression":
            targets_BC = batch.targets.nan_to_num().to(outputs.dtype)
            return _mean_of_present((outputs - targets_BC).square(), batch.targets)
        case "classes":
            targets_B = batch.targets[:, 0].nan_to_num().long()
            losses_B = F.cross_entropy(outputs, targets_B, weight=weights, reduction="none")
            return _mean_of_present(losses_B[:, None], batch.targets)
        case "span":
            assert batch.answerable is not None, "a span task says which tokens an answer may begin or end at"
            log_probs_BL2 = outputs.masked_fill(~batch.answerable[..., None], -torch.inf).log_softmax(1)
            return -log_probs_BL2.gather(1, batch.targets.long()[:, None])[:, 0].mean(-1)


def _mean_of_present(losses_BC: Tensor, targets_BC: Tensor) -> Tensor:
    is_present_BC = ~targets_BC.isnan()
    total_B = torch.where(is_present_BC, losses_BC, 0.0).sum(1)
    num_B = is_present_BC.sum(1)
    return (total_B / num_B.clamp(min=1)).masked_fill(num_B == 0, math.inf)
