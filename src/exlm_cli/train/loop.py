"""Training loop: step, accumulate, validate, record, save. It knows no task.

Everything random in a step comes from (seed, step): data order and masks through the task, dropout through a generator
seeded anew each step. So a resumed run repeats the uninterrupted one bit by bit, and a checkpoint holds no RNG state.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exlm_cli.config.sections import LoopConfig, OptimConfig
from exlm_cli.cost.meter import Meter
from exlm_cli.data import IntArray
from exlm_cli.data.sampler import in_background
from exlm_cli.distributed.parallel import no_sync_unless_last
from exlm_cli.distributed.ranks import ALONE, Ranks
from exlm_cli.errors import ConfigError, InterruptedRunError
from exlm_cli.files import hash_json
from exlm_cli.format import decimals, format_measure, format_number, format_percent
from exlm_cli.ops.precision import precision_on
from exlm_cli.progress import Bar, Progress
from exlm_cli.run_dir import MetricsLog
from exlm_cli.train.checkpoint import LoopState
from exlm_cli.train.optim import LossScale, build_optimizer, learning_rate, set_learning_rates, update_weights
from exlm_cli.train.process import FreedMemory, StopSignal
from exlm_cli.train.records.steps import StepNumbers, TakenStep
from exlm_cli.train.saver import Saver
from exlm_cli.train.task import Callback, LoopResult, Selection, TrainTask

_REPORTED: Mapping[str, tuple[Callable[[float], str], str]] = {
    "loss": (format_measure, "loss {}"),
    "mask_accuracy": (format_percent, "{} of the masked tokens right"),
    "effective_states": (decimals(2), "{} states of a mask in use"),
}
"""How messages tell metrics of a validation; metrics.jsonl has all."""


class _Ahead(NamedTuple):
    """A step whose batches are being made.

    Attributes:
        batches: Those of this rank.
        num_passes: Number of batches of the rank that has most; None for one process.
    """

    batches: Iterator[Any]
    num_passes: Future[int] | None


class TrainingLoop:
    """One run of one task.

    Args:
        task: What is trained.
        train, optim: Sections of the recipe; intervals of None are epochs.
        seed: Seed of the run.
        run: Run directory, for checkpoints.
        metrics: Log of the run.
        progress: Reports the steps.
        resume_command: Shown when the run is interrupted.
        callbacks: Follow the run, in this order.
        validate_at: Returns further rows of a validation, of `kind: valid_at`; every rank calls it.
        count_microbatches: Returns how many batches `task.microbatches` gives; several ranks need it.
        selection: Also keep the weights of the best validation, and stop early; None: the last weights are the result.
        validates_first: Also validate before the first step.
        label: Label of the bar.
        ranks: Those that train together; rank 0 alone writes.

    Raises:
        ConfigError: The warm-up is longer than the run, or a step has fewer sequences than there are ranks.
    """

    def __init__(
        self,
        task: TrainTask[Any],
        train: LoopConfig,
        optim: OptimConfig,
        *,
        seed: int,
        run: Path,
        metrics: MetricsLog,
        progress: Progress,
        resume_command: str,
        callbacks: Sequence[Callback] = (),
        validate_at: Callable[[], Sequence[Mapping[str, float]]] = tuple,
        count_microbatches: Callable[[IntArray, int], int] | None = None,
        selection: Selection | None = None,
        validates_first: bool = False,
        label: str = "train",
        ranks: Ranks = ALONE,
    ) -> None:
        self.task, self.train, self.optim = task, train, optim
        self.seed, self.run, self.metrics, self.progress = seed, run, metrics, progress
        self.resume_command = resume_command
        self.callbacks, self.validate_at, self.count_microbatches = callbacks, validate_at, count_microbatches
        self.selection, self.validates_first, self.label = selection, validates_first, label
        self.ranks = ranks
        ranks.hint = f"continue with `{resume_command}`"
        self.optimizer = build_optimizer(task.model, optim)
        device = next(task.model.parameters()).device
        precision = precision_on(device, train.precision)
        self.loss_scale = LossScale(device) if precision == "fp16" else None
        self.meter = Meter(device, precision, ranks.size)
        self.numbers = StepNumbers(self.meter, optim, self.loss_scale, run, is_first=ranks.is_first)
        self.saver = Saver(
            run,
            task,
            self.optimizer,
            self.loss_scale,
            metrics,
            keep_last=train.keep_last,
            resume_command=resume_command,
            ranks=ranks,
        )
        self.state = LoopState()
        self._plan = task.plan(0)
        self.total_steps = count_steps(train, len(self._plan))
        self._refuse_unfit_steps()
        self._agreed_stop = 0  # signal that stops all of several ranks after the same step
        self._ahead: _Ahead | None = None  # batches of the next step
        self._freed_memory = FreedMemory()
        self._validation: dict[str, float] = {}
        self._shown: dict[str, str] = {}  # beside the bar, from the last row of the log
        self._data_wait_s = 0.0  # in the step at work

    def resume(self, checkpoint: Path | None, *, changes: str = "") -> None:
        """Continue from a verified checkpoint, or begin again where none was saved; a refused one changes nothing.

        Args:
            checkpoint: Its folder.
            changes: A clause on what differs from the recipe that the run began with, for the error.

        Raises:
            CheckpointError: It belongs to other data, another recipe or another version of exlm.
        """
        if checkpoint is not None:
            saved = self.saver.load(checkpoint, changes)
            self.state = saved.loop
            self._validation = {name: math.nan if v is None else v for name, v in saved.validation.items()}
            self._plan = self.task.plan(self.state.epoch)
        self.saver.drop_later(self.state)

    def fit(self) -> LoopResult:
        """Train to the end.

        Raises:
            DivergedError: A loss or a gradient norm is not finite, or no sequence of a step has a loss; `diverged.json`
                names the step and its samples. The step did not move the weights, and no checkpoint follows it. In fp16
                a norm may be so, as long as a lower loss scale can help.
            InterruptedRunError: Stopped by a signal, after saving.
            CheckpointError: A checkpoint cannot be written.
            RankError: Another rank failed or was lost.
        """
        with ExitStack() as ends:
            for callback in self._followers:
                ends.push(_end_of(callback))
                callback.on_start(self.run, self.state.step)
            return self._fit(StopSignal())

    @property
    def _followers(self) -> Sequence[Callback]:
        return self.callbacks if self.ranks.is_first else ()

    def _fit(self, stop: StopSignal) -> LoopResult:
        state = self.state
        self.task.model.train()
        bars = self.progress.bar(self.label, self.total_steps, done=state.step)
        # torchrun sends SIGTERM when a rank dies: look for a dead rank before stopping
        with stop, self.ranks.translate_errors(), bars as bar:
            if self.validates_first and state.step == 0:
                self._validate()
            while state.step < self.total_steps and not state.is_stopped:
                loss = self.advance(stop)
                if loss is not None:
                    self._record(bar, loss)
                number = stop.number if self.ranks.size == 1 else self._agreed_stop
                if number:
                    raise self._stopped(f"the checkpoint is {self._save()}", number)
        self.ranks.on_all_ranks(lambda: None)  # rank 0 may still be writing
        final = self.run / "checkpoints" / f"step-{state.step}"
        best = None if state.best_step is None else self.run / "checkpoints" / f"best-{state.best_step}"
        meter = self.meter
        return LoopResult(final, self._validation, state, best, meter.gpu, meter.utilisation, meter.peak_memory_bytes)

    def advance(self, stop: StopSignal) -> Tensor | None:
        """Do one optimiser step without logging and without waiting for the device; benchmarks call this.

        Returns:
            Its loss, () float64 on the device; None if a signal came before the step was complete.
        """
        start_s = time.perf_counter()
        loss = self._step(stop)
        self._freed_memory.after_step()
        if loss is not None:
            state, busy_s = self.state, time.perf_counter() - start_s
            state.step += 1
            state.step_in_epoch += 1
            state.elapsed_s += busy_s
            state.data_wait_s += self._data_wait_s
            self.meter.add_time(busy_s)
        return loss

    def _step(self, stop: StopSignal) -> Tensor | None:
        state = self.state
        if state.step_in_epoch >= len(self._plan):
            state.epoch, state.step_in_epoch = state.epoch + 1, 0
            self._plan = self.task.plan(state.epoch)
        indices = self._plan[state.step_in_epoch]
        device = next(self.task.model.parameters()).device
        _seed_draws(dropout_seed(self.seed, state.step, self.ranks.rank), device)
        set_learning_rates(self.optimizer, state.step, self.optim, self.total_steps)
        self.task.begin_step(state.step / self.total_steps)
        self.optimizer.zero_grad(set_to_none=True)
        model_s = self._data_wait_s = flops = 0.0
        num_tokens = 0
        sums = torch.zeros(5, dtype=torch.float64, device=device)
        scale = None if self.loss_scale is None else self.loss_scale.value
        for batch, is_own, is_last in self._equalised_batches(indices, stop):
            start_s = time.perf_counter()
            with no_sync_unless_last(self.task.module, is_last=is_last):
                losses = self.task.losses(batch)
                is_counted = losses != math.inf
                batch_loss = torch.where(is_counted, losses, 0.0).sum()
                scaled_loss = batch_loss if scale is None else batch_loss * scale
                (scaled_loss if is_own else 0.0 * scaled_loss).backward()
            if is_own:
                numbers = (batch_loss.detach(), is_counted.sum(), (~is_counted).sum())
                sums[:3] += torch.stack([number.double() for number in numbers])
                num_tokens += self.task.count_tokens(batch)
                flops += self.task.count_flops(batch)
            model_s += time.perf_counter() - start_s
            if self.ranks.size == 1 and stop.number is not None:
                return None
        start_s = time.perf_counter()
        sums[3] += num_tokens
        sums[4] += flops
        sums = self.ranks.all_reduce_sum(sums)
        norm = update_weights(
            self.optimizer,
            list(self.task.model.parameters()),
            loss_sum=sums[0],
            num_counted=sums[1],
            num_ranks=self.ranks.size,
            clip_norm=self.optim.clip_norm,
            loss_scale=self.loss_scale,
        )
        of_update = torch.stack([norm.double(), sums.new_ones(()) if scale is None else scale.double()])
        self.numbers.add(TakenStep(state.step, state.epoch, indices, torch.cat([sums, of_update])))
        state.model_s += model_s + time.perf_counter() - start_s
        return sums[0] / sums[1]

    def _equalised_batches(self, indices: IntArray, stop: StopSignal) -> Iterator[tuple[Any, bool, bool]]:
        """Yield this rank's microbatches, then a dummy one while other ranks have more: all run equally many passes.

        Yields:
            A microbatch; whether it is this rank's own, whose loss counts; whether it is the last, which one process
            does not say.
        """
        made, self._ahead = self._ahead or self._make_ahead(indices), None
        batches = self.batches(made.batches)
        if made.num_passes is None:
            yield from ((batch, True, False) for batch in batches)
            return
        start_s = time.perf_counter()
        num_passes = made.num_passes.result()
        self._data_wait_s += time.perf_counter() - start_s
        dummy_batch = None
        for number in range(1, num_passes + 1):
            own = next(batches, None)
            if number == num_passes:
                # before the pass that reduces gradients: a dead rank is noticed here, and no device waits for it
                self._agreed_stop = self.ranks.all_reduce_max(stop.number or 0)
            if own is None and dummy_batch is None:
                dummy_batch = next(self.task.microbatches(indices[:1], self.state.epoch))
            yield dummy_batch if own is None else own, own is not None, number == num_passes
        assert next(batches, None) is None, "every rank counts the microbatches of all"

    def batches(self, made: Iterator[Any]) -> Iterator[Any]:
        """Yield the microbatches of a step; start preparing the next step's once the first is ready."""
        while True:
            start_s = time.perf_counter()
            batch = next(made, None)
            self._data_wait_s += time.perf_counter() - start_s
            if batch is None:
                return
            step = self.state.step_in_epoch + 1
            # nothing is prepared beyond an epoch or the run
            if self._ahead is None and step < len(self._plan) and self.state.step + 1 < self.total_steps:
                self._ahead = self._make_ahead(self._plan[step])
            yield batch

    def _make_ahead(self, indices: IntArray) -> _Ahead:
        """Begin to make the batches of a step in threads: none where it has fewer samples than ranks."""
        epoch, shares = self.state.epoch, self.ranks.shares_of(indices)
        own = shares[self.ranks.rank]
        batches = self.task.microbatches(own, epoch) if len(own) else iter(())
        count = self.count_microbatches
        if self.ranks.size == 1:
            return _Ahead(batches, None)
        assert count is not None, "several ranks need it"
        # masks are hashed, so every rank can count for all
        return _Ahead(batches, in_background(lambda: max(count(share, epoch) for share in shares if len(share))))

    def _refuse_unfit_steps(self) -> None:
        if self.optim.warmup_steps > self.total_steps:
            raise ConfigError(
                f"`optim.warmup_steps` {self.optim.warmup_steps} is more than the {self.total_steps} steps of this run",
                "lower it, or give `optim.warmup_ratio` instead",
            )
        largest = max(map(len, self._plan))
        if largest < self.ranks.size:
            raise ConfigError(
                f"a step has at most {largest} sequences, fewer than the {self.ranks.size} ranks",
                "start fewer ranks, or raise `train.batch_sequences` or `train.batch_tokens`",
            )

    def _record(self, bar: Bar, loss: Tensor) -> None:
        """Log, validate and save, each if it is due after this step."""
        state = self.state
        step, is_last = state.step, state.step == self.total_steps
        for callback in self._followers:
            callback.on_step(step, loss)
        if step % self.train.log_every_steps == 0 or is_last:
            self._log_interval()
        bar.update(step, **self._shown, **self._best_field())
        is_validated = self._is_due(self.train.validate_every_steps) or is_last
        if is_validated:
            self._validate()
            bar.update(step, **self._shown, **self._best_field())
        if state.is_stopped and state.interval_steps:
            self._log_interval()
        if self._is_due(self.train.checkpoint_every_steps) or is_last or state.is_stopped:
            self._save()
        for callback in self._followers if is_validated else ():
            callback.on_validate(step, self._validation)  # after the checkpoint: it may end the run

    def _is_due(self, every_steps: int | None) -> bool:
        """Return whether an action is due that happens every so many steps or, for None, at the end of each epoch."""
        if every_steps is None:
            return self.state.step_in_epoch >= len(self._plan)
        return self.state.step % every_steps == 0

    def _validate(self) -> None:
        """Validate; with a selection, keep the weights if they are the best."""
        self.numbers.read(self.state)
        state = self.state
        start_s = time.perf_counter()
        self._validation = self.ranks.all_gather_object(self.task.validate())[0]
        further = self.validate_at()
        self._freed_memory.release()  # a validation frees tensors of more sizes than a step does
        state.validate_s += time.perf_counter() - start_s
        self._log({"kind": "valid", "step": state.step, **self._validation})
        for row in further:
            self._log({"kind": "valid_at", "step": state.step, **row})
        if self.selection is not None:
            self._select(self.selection)
            return
        found = self._validation
        shown = ", ".join(text.format(write(found[n])) for n, (write, text) in _REPORTED.items() if n in found)
        self.progress.message(f"step {state.step}: validation {shown}")

    def _select(self, selection: Selection) -> None:
        """Keep the weights if no validation was better, and stop the run where too many were worse."""
        state, value = self.state, self._validation[selection.metric]
        is_best = selection.is_better(value, state.best_value)
        if is_best:
            state.best_step, state.best_epoch, state.best_value = state.step, state.epoch, value
        state.stale_validations = 0 if is_best else state.stale_validations + 1
        state.is_stopped = selection.patience is not None and state.stale_validations >= selection.patience
        if state.best_step is None and (state.is_stopped or state.step == self.total_steps):
            # the metric was never defined: keep the last weights
            state.best_step, state.best_epoch = state.step, state.epoch
        if state.best_step == state.step:
            self.saver.keep_best(state)

    def _best_field(self) -> dict[str, str]:
        """Return the best validation so far for the bar."""
        if self.selection is None or self.state.best_value is None:
            return {}
        return {f"best {self.selection.metric}": format_number(self.state.best_value)}

    def _log_interval(self) -> None:
        self.numbers.read(self.state)
        step = self.state.step
        row = self.numbers.row(self.state, learning_rate(step - 1, self.optim, self.total_steps))
        self._shown = {"loss": f"{row['loss']:.3f}", "speed": f"{row['tokens_per_s']:,.0f} tokens/s"}
        if "utilisation" in row:
            self._shown["utilisation"] = format_percent(row["utilisation"])
        self._log(row)

    def _log(self, row: dict[str, Any]) -> None:
        if not self.ranks.is_first:
            return
        self.metrics.append(row)
        for callback in self.callbacks:
            callback.on_log(row)

    def _save(self) -> Path:
        self.numbers.read(self.state)
        path = self.saver.save(self.state, self._validation)
        for callback in self._followers:
            callback.on_save(self.state.step, path)
        return path

    def _stopped(self, saved: str, signal_number: int) -> InterruptedRunError:
        return InterruptedRunError(
            f"stopped at step {self.state.step} of {self.total_steps}; {saved}",
            f"continue with `{self.resume_command}`",
            signal_number,
        )


def _end_of(callback: Callback) -> Callable[[object, BaseException | None, object], None]:
    """Return the exit function of a `with` block that ends a callback, and lets every error pass."""

    def end(_kind: object, error: BaseException | None, _trace: object) -> None:
        callback.on_end(error)

    return end


def count_steps(train: LoopConfig, steps_in_epoch: int) -> int:
    """Return the optimiser steps of a whole run whose recipe limits steps, epochs or both."""
    of_epochs = math.inf if train.max_epochs is None else train.max_epochs * steps_in_epoch
    return int(min(of_epochs, math.inf if train.max_steps is None else train.max_steps))


def _seed_draws(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`.

    `torch.manual_seed` also visits every other kind of device, and formats the stack for each.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


def dropout_seed(seed: int, step: int, rank: int = 0) -> int:
    """Return the 63-bit seed of a step's dropout, a hash so that neighbouring seeds, steps and ranks share no stream.

    Rank 0 draws what one process alone would.
    """
    digest = bytes.fromhex(hash_json(["dropout", seed, step] + ([rank] if rank else [])))
    return int.from_bytes(digest[:8], "little") >> 1
