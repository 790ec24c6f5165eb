"""Interfaces of the training loop: task, selection of the best weights, callbacks, result. No torch."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from exlm_cli.config.base import Recipe
from exlm_cli.cost.gpus import Gpu
from exlm_cli.data import IntArray
from exlm_cli.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from exlm_cli.data.sampler import EpochPlan
    from exlm_cli.train.checkpoint import LoopState

BatchT = TypeVar("BatchT")


class TrainTask(Protocol[BatchT]):
    """A model, its batches and its loss."""

    @property
    def model(self) -> "nn.Module":
        """Module whose parameters are trained."""

    @property
    def module(self) -> "nn.Module":
        """Module that `losses` calls; the hooks of DDP fire in its forward pass."""

    @property
    def identity(self) -> dict[str, str]:
        """Hashes that must not change between a checkpoint and its resumption, by name (data fingerprint, recipe)."""

    def plan(self, epoch: int) -> "EpochPlan":
        """Return the steps of an epoch: the same ones for the same epoch, and equally many for each."""

    def begin_step(self, share_done: float) -> None:
        """Set what changes over training; called before each step with the share of the steps that are done."""

    def microbatches(self, indices: IntArray, epoch: int) -> Iterator[BatchT]:
        """Return the batches of one step, in a fixed order; called while the loop works on the step before."""

    def losses(self, batch: BatchT) -> "Tensor":
        """Return (n,) float32 losses of sequences, or of examples or labels; `inf` for one to leave out."""

    def count_tokens(self, batch: BatchT) -> int:
        """Return the input tokens of a batch before any expansion, without waiting for the device."""

    def count_flops(self, batch: BatchT) -> float:
        """Return the FLOPs of training on a batch, without waiting for the device; 0 where they are not counted."""

    def validate(self) -> dict[str, float]:
        """Return metrics on the validation set; leave the model in training mode."""


@dataclass(frozen=True)
class Selection:
    """How the best validation is chosen, and when training stops for lack of a better one.

    Attributes:
        metric: Name of a metric of `TrainTask.validate`; a validation where it is NaN is never the best.
        is_greater_better: False for errors.
        patience: Validations without a better one before training stops; None: training never stops early.
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


def require_arguments(recipe: Any, kind: type[Recipe], callbacks: Iterable[Any]) -> None:
    """Refuse arguments of other types in place of a recipe and of callbacks, before a run directory is made.

    Raises:
        ConfigError: `recipe` is not of the kind, or one of `callbacks` is not a `Callback`.
    """
    if not isinstance(recipe, kind):
        hint = f"`load_recipe(NAME, kind={kind.__name__})` reads one"
        raise ConfigError(f"the recipe is a {type(recipe).__name__}, not a {kind.__name__}", hint)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(f"{callback!r} is not a callback", "give objects whose class derives from `Callback`")


class Callback:
    """Base of objects that follow a training run; override the methods you need.

    Rank 0 alone calls them, between two steps. An exception ends the run: an `ExlmError` as a message, any other as a
    fault; the run continues from its last checkpoint with `resume`. A fine-tuning calls them for each of its cells, one
    after the other, each from `on_start` to `on_end`.
    """

    def on_start(self, folder: Path, step: int) -> None:
        """Training begins in `folder` after `step` finished steps: 0, or those of the checkpoint it continues."""

    def on_step(self, step: int, loss: "Tensor") -> None:
        """An optimiser step is done.

        Args:
            step: Its number, counted from 1.
            loss: () float64, mean loss of its sequences: nats per target in pre-training. `float(loss)` waits for the
                device; not finite where training will end at the next row of the log.
        """

    def on_log(self, row: Mapping[str, Any]) -> None:
        """A row was added to `metrics.jsonl`: `kind` (`train`, `valid` or `valid_at`), `step`, and metrics by name."""

    def on_validate(self, step: int, metrics: Mapping[str, float]) -> None:
        """The validation after a step is done; `metrics` are those of the row, such as `loss`."""

    def on_save(self, step: int, checkpoint: Path) -> None:
        """The checkpoint of a step is whole; a later one may delete it (`train.keep_last`)."""

    def on_end(self, error: BaseException | None) -> None:
        """Training has ended: at its last step, or with an error, an interruption included."""


@dataclass(frozen=True)
class LoopResult:
    """How a run ended.

    Attributes:
        checkpoint: Folder of the last checkpoint.
        validation: Metrics of the last validation.
        state: Counters at the end.
        best: Folder of the best weights; None without a selection.
        utilisation: Share of the peak of `gpu` that the steps of this process reached; None where it is not known.
        peak_memory_bytes: Most memory of this process, as `Meter` counts it.
    """

    checkpoint: Path
    validation: dict[str, float]
    state: "LoopState"
    best: Path | None
    gpu: Gpu | None
    utilisation: float | None
    peak_memory_bytes: int
