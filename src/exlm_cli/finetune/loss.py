"""Outputs and targets of a task to one loss for each example. Axes: B examples, C outputs, L tokens."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from exlm_cli.finetune.batch import TaskBatch
from exlm_cli.tasks.base import Loss


def example_losses(loss: Loss, outputs: Tensor, batch: TaskBatch, weights: Tensor | None) -> Float[Tensor, " B"]:
    """Return the loss of each example, nats or squared standard deviations, float32.

    The mean over an example's present labels; `inf` where none is present, which the training loop leaves out.

    Args:
        loss: Which.
        outputs: (B, C), or (B, L, 2) for `span`.
        batch: Its targets; for `regression` standardised.
        weights: (C,) of each class, or of each label's positives; None: all 1.
    """
    match loss:
        case "binary":
            targets_BC = batch.targets.nan_to_num().to(outputs.dtype)
            losses_BC = F.binary_cross_entropy_with_logits(outputs, targets_BC, pos_weight=weights, reduction="none")
            return _mean_of_present(losses_BC, batch.targets)
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
