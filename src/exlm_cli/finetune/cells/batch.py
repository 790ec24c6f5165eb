"""Padded batches of a task's examples, and their losses.

Axes: B examples, L tokens, R positions after repetition, C outputs, D width, F descriptors, n losses of `binary`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from exlm_cli.data import IntArray
from exlm_cli.data.batch import DeviceBatch
from exlm_cli.tasks.base import EncodedRows, FloatArray, Loss


@dataclass(frozen=True)
class TaskBatch(DeviceBatch):
    """Input and targets of one forward pass.

    Attributes:
        token_ids: Repeated tokens, [PAD] beyond `lengths`.
        lengths: Positions of each example after repetition, [CLS] and [SEP] included.
        targets: As in `EncodedRows`, float64, NaN where missing.
        answerable: For spans, over tokens before repetition; False beyond the last one.
        sample_index: Index of each example in its split.
        label_index: As `index_labels` returns it.
        is_padded: Whether any example has [PAD], known to the host.
        num_tokens: Positions without padding, known to the host.
        descriptors: As in `EncodedRows`.
        states: States at [CLS], where the encoder is frozen and they are known.
    """

    token_ids: Int64[Tensor, "B R"]
    lengths: Int64[Tensor, " B"]
    targets: Float[Tensor, "B C"]
    answerable: Bool[Tensor, "B L"] | None
    sample_index: Int64[Tensor, " B"]
    label_index: Int64[Tensor, " n"]
    is_padded: bool
    num_tokens: int
    descriptors: Float[Tensor, "B F"] | None = None
    states: Float[Tensor, "B D"] | None = None


def repeated_lengths(split: EncodedRows, indices: IntArray, num_repeats: int) -> IntArray:
    """Return the (n,) positions of examples when every token between [CLS] and the last [SEP] is repeated."""
    lengths = np.array([len(split.token_ids[int(i)]) for i in indices], dtype=np.int64)
    return (lengths - 2) * num_repeats + 2


def collate(split: EncodedRows, indices: IntArray, *, num_repeats: int, pad_id: int) -> TaskBatch:
    """Repeat and pad the examples of given indices on the CPU; repetition is that of pre-training (section 3.1)."""
    rows = [_repeat(split.token_ids[int(i)], num_repeats) for i in indices]
    answerable = None
    if split.answerable is not None:
        answerable = _padded([split.answerable[int(i)] for i in indices], False)
    targets = split.targets[indices]
    lengths = [len(row) for row in rows]
    return TaskBatch(
        _padded(rows, pad_id),
        torch.tensor(lengths),
        torch.from_numpy(targets),
        answerable,
        torch.from_numpy(indices),
        index_labels(targets),
        is_padded=min(lengths) < max(lengths),
        num_tokens=sum(lengths),
        descriptors=None if split.descriptors is None else torch.from_numpy(split.descriptors[indices]),
    )


def index_labels(targets: FloatArray) -> Int64[Tensor, " n"]:
    """Return the indices of the labels present in the flat (B * C), then B * C once for each example without any."""
    is_present = ~np.isnan(targets)
    num_unlabelled = int((~is_present.any(1)).sum())
    return torch.from_numpy(np.append(np.flatnonzero(is_present), [targets.size] * num_unlabelled).astype(np.int64))


def _repeat(token_ids: IntArray, num_repeats: int) -> IntArray:
    pieces = [token_ids[:1], np.repeat(token_ids[1:-1], num_repeats), token_ids[-1:]]
    return np.concatenate(pieces, dtype=np.int64)  # tokens in files are smaller numbers


def _padded(rows: Sequence[NDArray[Any]], value: int) -> Tensor:
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_value=value)


def batch_losses(loss: Loss, outputs: Tensor, batch: TaskBatch, weights: Tensor | None) -> Float[Tensor, " n"]:
    """Return the losses whose mean is the loss of a batch, float32, in nats; `regression`: squared standard deviations.

    `binary` has one loss for each label present, so that every label weighs the same (as in Uni-Mol). Other losses have
    one for each example; for `regression` it is the mean over the values present. Each example without labels adds
    `inf`, which the training loop counts and leaves out.

    Args:
        outputs: (B, C), or (B, L, 2) for `span`.
        batch: Batch with the targets; standardised ones for `regression`.
        weights: (C,) weight of each class, or of each label's positives; None: all 1.
    """
    match loss:
        case "binary":
            targets_BC = batch.targets.nan_to_num().to(outputs.dtype)
            losses_BC = F.binary_cross_entropy_with_logits(outputs, targets_BC, pos_weight=weights, reduction="none")
            with_unlabelled = torch.cat([losses_BC.flatten(), losses_BC.new_full((1,), math.inf)])
            return with_unlabelled.index_select(0, batch.label_index)
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
