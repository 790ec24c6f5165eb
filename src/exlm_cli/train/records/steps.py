"""Numbers of the steps, which stay on the device until a row of the log is due: no step waits for them.

Only when they are read is it known whether a loss or a gradient was not finite, and the run ends: that step moved no
weights, and no checkpoint follows it.
"""

import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exlm_cli.config.sections import OptimConfig
from exlm_cli.cost.meter import Meter
from exlm_cli.data import IntArray
from exlm_cli.errors import DivergedError
from exlm_cli.files import write_json
from exlm_cli.run_dir import DIVERGED_FILE
from exlm_cli.train.checkpoint import LoopState
from exlm_cli.train.optim import LossScale

_MOST_OVERFLOWS = 10
"""Steps in a row whose gradients may overflow at the lowest loss scale: with more it is not a matter of the scale."""


class TakenStep(NamedTuple):
    """A step whose numbers are still on the device.

    Attributes:
        step: Counted from 0.
        epoch: Its epoch.
        indices: Its samples, those of all ranks.
        numbers: (7,) float64: sum of the losses, numbers of sequences with and without a loss, tokens, FLOPs, gradient
            norm, and the loss scale, 1 but for fp16.
    """

    step: int
    epoch: int
    indices: IntArray
    numbers: Tensor


class StepNumbers:
    """Reads the numbers of taken steps and adds them to the counters of a run.

    Args:
        meter: Gets the work of the steps, and the time waited for the device.
        optim: Section of the recipe; errors name its learning rate.
        loss_scale: Of fp16; None in other precisions.
        run: Folder of `diverged.json`.
        is_first: Whether this rank writes it.
    """

    def __init__(
        self, meter: Meter, optim: OptimConfig, loss_scale: LossScale | None, run: Path, *, is_first: bool
    ) -> None:
        self._meter, self._optim, self._loss_scale = meter, optim, loss_scale
        self._run, self._is_first = run, is_first
        self._unread: list[TakenStep] = []
        self._grad_norm = math.nan
        self._scale = 1.0

    def add(self, step: TakenStep) -> None:
        """Add a step, without waiting for the device."""
        self._unread.append(step)

    def read(self, state: LoopState) -> None:
        """Add the steps since the last call to the counters; only here a step waits for the device.

        Raises:
            DivergedError: A loss of these steps is not finite, or none of a step's sequences has one, or a gradient
                norm is not finite and no lower loss scale can help; that step moved no weights.
        """
        if not self._unread:
            return
        start_s = time.perf_counter()
        steps, self._unread = self._unread, []
        rows = torch.stack([step.numbers for step in steps]).tolist()
        waited_s = time.perf_counter() - start_s
        state.elapsed_s += waited_s
        state.model_s += waited_s
        self._meter.add_time(waited_s)
        for step, row in zip(steps, rows, strict=True):
            self._count(step, row, state)

    def row(self, state: LoopState, lr: float) -> dict[str, Any]:
        """Return the row of the log on the steps since the last one, at least one, and begin the next."""
        loss = state.interval_loss / state.interval_steps
        state.interval_loss, state.interval_steps = 0.0, 0
        tokens_per_s, utilisation = self._meter.begin_row()
        of_scale = {} if self._loss_scale is None else {"loss_scale": self._scale, "num_overflows": state.num_overflows}
        return {
            "kind": "train",
            "step": state.step,
            "epoch": state.epoch,
            "loss": loss,
            "lr": lr,
            **({"grad_norm": self._grad_norm} if math.isfinite(self._grad_norm) else {}),
            "num_infeasible": state.num_infeasible,
            **of_scale,
            "tokens_per_s": round(tokens_per_s, 1),
            **({} if utilisation is None else {"utilisation": round(utilisation, 4)}),
            "peak_memory_bytes": self._meter.peak_memory_bytes,
            "elapsed_s": round(state.elapsed_s, 3),
            "data_wait_s": round(state.data_wait_s, 3),
        }

    def _count(self, step: TakenStep, row: list[float], state: LoopState) -> None:
        loss_sum, num_counted, num_infeasible, num_tokens, flops, norm, scale = row
        if not num_counted:
            raise self._without_loss(step)
        if not math.isfinite(loss_sum):
            raise self._diverged("loss", loss_sum, step)
        if not math.isfinite(norm):
            self._count_overflow(norm, scale, step, state)
        else:
            state.overflows_at_lowest = 0
        state.interval_loss += loss_sum / num_counted
        state.interval_steps += 1
        state.num_infeasible += int(num_infeasible)
        state.num_tokens += int(num_tokens)
        self._meter.add_work(int(num_tokens), flops)
        self._grad_norm, self._scale = norm, scale

    def _count_overflow(self, norm: float, scale: float, step: TakenStep, state: LoopState) -> None:
        """Count a step whose gradients overflowed in fp16, after which the loss scale was lowered.

        Raises:
            DivergedError: There is no loss scale, or it was the lowest one too often.
        """
        if self._loss_scale is not None:
            state.num_overflows += 1
            state.overflows_at_lowest = state.overflows_at_lowest + 1 if scale <= self._loss_scale.LOWEST else 0
        if self._loss_scale is None or state.overflows_at_lowest > _MOST_OVERFLOWS:
            raise self._diverged("gradient norm", norm, step)

    def _diverged(self, what: str, value: float, step: TakenStep) -> DivergedError:
        path = self._write_samples(step, value)
        return DivergedError(
            f"the {what} of step {step.step + 1} is {value}; its sample indices are in {path}",
            f"start a new run with a lower `optim.lr` (now {self._optim.lr:g}), or with `optim.clip_norm`"
            f"{'' if self._loss_scale is None else ', or with `--set train.precision=fp32`'}",
        )

    def _without_loss(self, step: TakenStep) -> DivergedError:
        """Return the error of a step of which every loss is `inf`: there is nothing to predict, or all overflow."""
        path = self._write_samples(step, math.inf)
        return DivergedError(
            f"no sequence of step {step.step + 1} has a finite loss; its sample indices are in {path}",
            "if none of them has a token that the tokenizer knows, or a label, correct the data or raise "
            f"`train.batch_sequences`; otherwise lower `optim.lr` (now {self._optim.lr:g})",
        )

    def _write_samples(self, step: TakenStep, value: float) -> Path:
        """Write the samples of a step that cannot be used, and return the path of the file."""
        path, samples = self._run / DIVERGED_FILE, step.indices.tolist()
        if self._is_first:
            write_json(path, {"step": step.step, "epoch": step.epoch, "value": str(value), "sample_index": samples})
        return path
