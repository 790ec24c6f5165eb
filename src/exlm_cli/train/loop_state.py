"""What the training loop is given, where it stands, and what it hands back."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from exlm_cli.config.sections import LoopConfig
from exlm_cli.data.masking import IntArray
from exlm_cli.data.sampler import EpochPlan

BatchT = TypeVar("BatchT")


class TrainTask(Protocol[BatchT]):
    """What the loop needs of a task."""

    @property
    def model(self) -> nn.Module:
        """The module whose parameters are trained."""

    @property
    def identity(self) -> dict[str, str]:
        """What must not change between a checkpoint and its resumption, by name (data fingerprint, recipe hash)."""

    def plan(self, epoch: int) -> EpochPlan:
        """The steps of an epoch; the same for the same epoch, always."""

    def microbatches(self, indices: IntArray, epoch: int) -> Iterator[BatchT]:
        """The batches of one step, in a fixed order; the loop asks for a step's while it works on the one before."""

    def losses(self, batch: BatchT) -> Tensor:
        """(n,) float32 loss of every sequence; `inf` where a sequence has none and is to be left out."""

    def count_tokens(self, batch: BatchT) -> int:
        """Input tokens that the batch stands for, before any expansion."""

    def validate(self) -> dict[str, float]:
        """Figures on the validation set; leaves the model in training mode."""


@dataclass(frozen=True)
class Selection:
    """Which validation is the best one, and when to give up waiting for a better one.

    Attributes:
        metric: Of `TrainTask.validate`; where it is not a number, the validation is no better than any other.
        is_greater_better: False for errors.
        patience: Validations without a better one after which training stops; None: never.
    """

    metric: str
    is_greater_better: bool
    patience: int | None = None

    def is_better(self, value: float, best: float | None) -> bool:
        """Return whether a value beats the best so far; an equal one does not."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value > best if self.is_greater_better else value < best


@dataclass
class LoopState:
    """Where a run stands; saved with every checkpoint.

    The best validation is that of step `best_step`; `stale_validations` have followed it. `elapsed_s` is the time spent
    in steps, `model_s` the part of it in the model and the optimiser, `validate_s` the time spent in validations.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    elapsed_s: float = 0.0
    interval_loss: float = 0.0
    interval_steps: int = 0
    num_infeasible: int = 0
    num_tokens: int = 0
    model_s: float = 0.0
    validate_s: float = 0.0
    best_step: int | None = None
    best_epoch: int | None = None
    best_value: float | None = None
    stale_validations: int = 0
    is_stopped: bool = False


@dataclass(frozen=True)
class LoopResult:
    """How a run ended.

    Attributes:
        steps: Optimiser steps done.
        checkpoint: The last one.
        validation: Figures of the last validation.
        elapsed_s: Time spent in steps.
        state: Where the run stood at its end.
        best: Where the best weights are; None where there was no selection.
    """

    steps: int
    checkpoint: Path
    validation: dict[str, float]
    elapsed_s: float
    state: LoopState
    best: Path | None = None


def count_steps(task: TrainTask[Any], train: LoopConfig) -> int:
    """Return the optimiser steps of a whole run."""
    limits = []
    if train.max_steps is not None:
        limits.append(train.max_steps)
    if train.max_epochs is not None:
        limits.append(sum(len(task.plan(epoch)) for epoch in range(train.max_epochs)))
    return min(limits)
