"""Training loop: step, accumulate, validate, record, save. It knows no task.

Everything random in a step comes from (seed, step): data order and masks through the task, dropout through a generator
seeded anew each step. So a resumed run repeats the uninterrupted one bit by bit, and a checkpoint holds no RNG state.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exlm_cli.config.sections import LoopConfig, OptimConfig
from exlm_cli.cost.meter import Meter
from exlm_cli.data import IntArray
from exlm_cli.distributed.parallel import no_sync_unless_last
from exlm_cli.distributed.ranks import ALONE, Ranks
from exlm_cli.errors import CheckpointError, ConfigError, DivergedError, InterruptedRunError
from exlm_cli.files import fsync, hash_json, write_json
from exlm_cli.format import decimals, format_measure, format_number, format_percent
from exlm_cli.ops.precision import precision_on
from exlm_cli.progress import Bar, Progress
from exlm_cli.run_dir import DIVERGED_FILE, MetricsLog
from exlm_cli.train.checkpoint import (
    BestState,
    CheckpointState,
    LoopState,
    best_paths,
    load_model_weights,
    load_optimizer_state,
    load_state,
    remove_older,
    save_best,
    save_checkpoint,
)
from exlm_cli.train.optim import LossScale, build_optimizer, learning_rate, set_learning_rates, update_weights
from exlm_cli.train.process import FreedMemory, StopSignal
from exlm_cli.train.task import Callback, LoopResult, Selection, TrainTask

_REPORTED: Mapping[str, tuple[Callable[[float], str], str]] = {
    "loss": (format_measure, "loss {}"),
    "mask_accuracy": (format_percent, "{} of the masked tokens right"),
    "effective_states": (decimals(2), "{} states of a mask in use"),
}
"""How messages tell metrics of a validation; metrics.jsonl has all."""


_MOST_OVERFLOWS = 10
"""Steps in a row whose gradients may overflow at the lowest loss scale: with more it is not a matter of the scale."""


class _TakenStep(NamedTuple):
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
        label: str = "train",
        ranks: Ranks = ALONE,
    ) -> None:
        self.task, self.train, self.optim = task, train, optim
        self.seed, self.run, self.metrics, self.progress = seed, run, metrics, progress
        self.resume_command = resume_command
        self.callbacks, self.validate_at, self.count_microbatches = callbacks, validate_at, count_microbatches
        self.selection, self.label = selection, label
        self.ranks = ranks
        ranks.hint = f"continue with `{resume_command}`"
        self.optimizer = build_optimizer(task.model, optim)
        device = next(task.model.parameters()).device
        precision = precision_on(device, train.precision)
        self.loss_scale = LossScale(device) if precision == "fp16" else None
        self.meter = Meter(device, precision, ranks.size)
        self.state = LoopState()
        self._saved_best: int | None = None  # the best step that the newest checkpoint names
        self._plan = task.plan(0)
        self.total_steps = count_steps(train, len(self._plan))
        if optim.warmup_steps > self.total_steps:
            raise ConfigError(
                f"`optim.warmup_steps` {optim.warmup_steps} is more than the {self.total_steps} steps of this run",
                "lower it, or give `optim.warmup_ratio` instead",
            )
        self._refuse_small_steps()
        self._agreed_stop = 0  # signal that stops all of several ranks after the same step
        self._ahead: Iterator[Any] | None = None  # batches of the next step
        self._freed_memory = FreedMemory()
        self._validation: dict[str, float] = {}
        self._unread: list[_TakenStep] = []
        self._shown: dict[str, str] = {}  # beside the bar, from the last row of the log
        self._data_wait_s = 0.0  # in the step at work

    def resume(self, checkpoint: Path, *, changes: str = "") -> None:
        """Continue from a verified checkpoint.

        Args:
            checkpoint: Its folder.
            changes: A clause on what differs from the recipe that the run began with, for the error.

        Raises:
            CheckpointError: It belongs to other data, another recipe or another version of exlm.
        """
        saved = load_state(checkpoint)
        for name, value in self.task.identity.items():
            if saved.identity.get(name) != value:
                raise CheckpointError(
                    f"{checkpoint}: the {name} is not the one this run began with{changes if name == 'recipe' else ''}",
                    "an exact resume needs the same inputs and recipe; start a new run for changed ones",
                )
        load_model_weights(checkpoint, self.task.model)
        load_optimizer_state(checkpoint, self.task.model, self.optimizer)
        if self.loss_scale is not None and saved.loss_scale is not None:
            self.loss_scale.restore(saved.loss_scale)
        self.state = saved.loop
        self._saved_best = saved.loop.best_step
        self._validation = {name: math.nan if v is None else v for name, v in saved.validation.items()}
        self._plan = self.task.plan(self.state.epoch)
        if self.ranks.is_first:
            self.metrics.truncate_after(self.state.step)
            # a process that was killed while it deleted old checkpoints leaves some of them
            remove_older(self.run, self.state.step, self.train.keep_last)
            self._remove_unnamed_bests()

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
            while state.step < self.total_steps and not state.is_stopped:
                loss = self.advance(stop)
                if loss is not None:
                    self._record(bar, loss)
                number = stop.number if self.ranks.size == 1 else self._agreed_stop
                if number:
                    raise self._stopped(f"the checkpoint is {self._save()}", number)
        if not self._validation:
            self._validation = self.ranks.all_gather_object(self.task.validate())[0]
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
        self._unread.append(_TakenStep(state.step, state.epoch, indices, torch.cat([sums, of_update])))
        state.model_s += model_s + time.perf_counter() - start_s
        return sums[0] / sums[1]

    def _read_metrics(self) -> None:
        """Read the numbers of the steps since the last call and add them up; only here a step waits for the device.

        Raises:
            DivergedError: A loss of these steps is not finite, or none of a step's sequences has one, or a gradient
                norm is not finite and no lower loss scale can help; that step moved no weights.
        """
        if not self._unread:
            return
        state, start_s = self.state, time.perf_counter()
        steps, self._unread = self._unread, []
        rows = torch.stack([step.numbers for step in steps]).tolist()
        waited_s = time.perf_counter() - start_s
        state.elapsed_s += waited_s
        state.model_s += waited_s
        self.meter.add_time(waited_s)
        for step, (loss_sum, num_counted, num_infeasible, num_tokens, flops, norm, scale) in zip(
            steps, rows, strict=True
        ):
            if not num_counted:
                raise self._without_loss(step)
            if not math.isfinite(loss_sum):
                raise self._diverged("loss", loss_sum, step)
            if not math.isfinite(norm):
                self._count_overflow(norm, scale, step)
            else:
                state.overflows_at_lowest = 0
            state.interval_loss += loss_sum / num_counted
            state.interval_steps += 1
            state.num_infeasible += int(num_infeasible)
            state.num_tokens += int(num_tokens)
            self.meter.add_work(int(num_tokens), flops)
            self._grad_norm, self._scale = norm, scale

    def _count_overflow(self, norm: float, scale: float, step: _TakenStep) -> None:
        """Count a step whose gradients overflowed in fp16, after which the loss scale was lowered.

        Raises:
            DivergedError: There is no loss scale, or it was the lowest one too often.
        """
        state = self.state
        if self.loss_scale is not None:
            state.num_overflows += 1
            state.overflows_at_lowest = state.overflows_at_lowest + 1 if scale <= self.loss_scale.LOWEST else 0
        if self.loss_scale is None or state.overflows_at_lowest > _MOST_OVERFLOWS:
            raise self._diverged("gradient norm", norm, step)

    def _equalised_batches(self, indices: IntArray, stop: StopSignal) -> Iterator[tuple[Any, bool, bool]]:
        """Yield this rank's microbatches, then a dummy one while other ranks have more: all run equally many passes.

        Yields:
            A microbatch; whether it is this rank's own, whose loss counts; whether it is the last, which one process
            does not say.
        """
        batches, epoch = self.batches(indices), self.state.epoch
        if self.ranks.size == 1:
            yield from ((batch, True, False) for batch in batches)
            return
        assert self.count_microbatches is not None, "several ranks need it"
        # masks are hashed, so every rank can count for all
        shares = [share for share in self.ranks.shares_of(indices) if len(share)]
        num_passes = max(self.count_microbatches(share, epoch) for share in shares)
        dummy_batch = None
        for number in range(1, num_passes + 1):
            own = next(batches, None)
            if number == num_passes:
                # before the pass that reduces gradients: a dead rank is noticed here, and no device waits for it
                self._agreed_stop = self.ranks.all_reduce_max(stop.number or 0)
            if own is None and dummy_batch is None:
                dummy_batch = next(self.task.microbatches(indices[:1], epoch))
            yield dummy_batch if own is None else own, own is not None, number == num_passes
        assert next(batches, None) is None, "every rank counts the microbatches of all"

    def batches(self, indices: IntArray) -> Iterator[Any]:
        """Yield the microbatches of a step's samples; start preparing the next step's once the first is ready."""
        batches, self._ahead = self._ahead or self._own_batches(indices), None
        while True:
            start_s = time.perf_counter()
            batch = next(batches, None)
            self._data_wait_s += time.perf_counter() - start_s
            if batch is None:
                return
            if self._ahead is None:
                self._ahead = self._batches_of_next_step()
            yield batch

    def _batches_of_next_step(self) -> Iterator[Any] | None:
        """Return the batches of the next step; None where an epoch or the run ends with this step."""
        step = self.state.step_in_epoch + 1
        if step >= len(self._plan) or self.state.step + 1 >= self.total_steps:
            return None
        return self._own_batches(self._plan[step])

    def _own_batches(self, indices: IntArray) -> Iterator[Any]:
        """Return the batches of this rank's share of a step: none where the step has fewer samples than ranks."""
        share = self.ranks.shares_of(indices)[self.ranks.rank]
        return self.task.microbatches(share, self.state.epoch) if len(share) else iter(())

    def _refuse_small_steps(self) -> None:
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
        self._read_metrics()
        state = self.state
        start_s = time.perf_counter()
        self._validation = self.ranks.all_gather_object(self.task.validate())[0]
        further = self.validate_at()
        self._freed_memory.release()  # a validation frees tensors of more sizes than a step does
        state.validate_s += time.perf_counter() - start_s
        self._log({"kind": "valid", "step": state.step, **self._validation})
        for row in further:
            self._log({"kind": "valid_at", "step": state.step, **row})
        if self.selection is None:
            found = self._validation
            shown = ", ".join(text.format(write(found[n])) for n, (write, text) in _REPORTED.items() if n in found)
            self.progress.message(f"step {state.step}: validation {shown}")
            return
        value = self._validation[self.selection.metric]
        if self.selection.is_better(value, state.best_value):
            state.best_step, state.best_epoch, state.best_value = state.step, state.epoch, value
            state.stale_validations = 0
            self._keep_best()
        else:
            state.stale_validations += 1
        patience = self.selection.patience
        state.is_stopped = patience is not None and state.stale_validations >= patience
        if state.best_step is None and (state.is_stopped or state.step == self.total_steps):
            # the metric was never defined: keep the last weights
            state.best_step, state.best_epoch = state.step, state.epoch
            self._keep_best()

    def _keep_best(self) -> None:
        state = self.state
        content = BestState(step=state.step, epoch=state.epoch, value=state.best_value, identity=self.task.identity)

        def save() -> None:
            save_best(self.run, state.step, self.task.model, content, resume_command=self.resume_command)
            self._remove_unnamed_bests()

        self.ranks.on_rank_0(save)

    def _best_field(self) -> dict[str, str]:
        """Return the best validation so far for the bar."""
        if self.selection is None or self.state.best_value is None:
            return {}
        return {f"best {self.selection.metric}": format_number(self.state.best_value)}

    def _log_interval(self) -> None:
        self._read_metrics()
        state = self.state
        loss = state.interval_loss / state.interval_steps
        tokens_per_s, utilisation = self.meter.begin_row()
        self._shown = {"loss": f"{loss:.3f}", "speed": f"{tokens_per_s:,.0f} tokens/s"}
        if utilisation is not None:
            self._shown["utilisation"] = format_percent(utilisation)
        self._log(
            {
                "kind": "train",
                "step": state.step,
                "epoch": state.epoch,
                "loss": loss,
                "lr": learning_rate(state.step - 1, self.optim, self.total_steps),
                **({"grad_norm": self._grad_norm} if math.isfinite(self._grad_norm) else {}),
                "num_infeasible": state.num_infeasible,
                **self._scale_fields(),
                "tokens_per_s": round(tokens_per_s, 1),
                **({} if utilisation is None else {"utilisation": round(utilisation, 4)}),
                "peak_memory_bytes": self.meter.peak_memory_bytes,
                "elapsed_s": round(state.elapsed_s, 3),
                "data_wait_s": round(state.data_wait_s, 3),
            }
        )
        state.interval_loss, state.interval_steps = 0.0, 0

    def _scale_fields(self) -> dict[str, float]:
        """Return the fp16 fields of a row: the loss scale of its last step, and the number of steps lost so far."""
        if self.loss_scale is None:
            return {}
        return {"loss_scale": self._scale, "num_overflows": self.state.num_overflows}

    def _log(self, row: dict[str, Any]) -> None:
        if not self.ranks.is_first:
            return
        self.metrics.append(row)
        for callback in self.callbacks:
            callback.on_log(row)

    def _save(self) -> Path:
        self._read_metrics()
        return self.ranks.on_rank_0(self._write_checkpoint)

    def _write_checkpoint(self) -> Path:
        if self.metrics.path.exists():
            fsync(self.metrics.path)  # a resumption never writes the rows before its checkpoint again
        path = save_checkpoint(
            self.run,
            self.state.step,
            self.task.model,
            self.optimizer,
            CheckpointState(
                loop=self.state,
                loss_scale=None if self.loss_scale is None else self.loss_scale.state(),
                identity=self.task.identity,
                validation=dict(self._validation),
            ),
            keep_last=self.train.keep_last,
            resume_command=self.resume_command,
        )
        self._saved_best = self.state.best_step  # after the save: until then a resumption needs another best
        self._remove_unnamed_bests()
        for callback in self.callbacks:
            callback.on_save(self.state.step, path)
        return path

    def _remove_unnamed_bests(self) -> None:
        """Delete all best weights but the newest, and those that the newest checkpoint names."""
        named = {f"best-{self.state.best_step}", f"best-{self._saved_best}"}
        for best in best_paths(self.run):
            if best.name not in named:
                shutil.rmtree(best)

    def _stopped(self, saved: str, signal_number: int) -> InterruptedRunError:
        return InterruptedRunError(
            f"stopped at step {self.state.step} of {self.total_steps}; {saved}",
            f"continue with `{self.resume_command}`",
            signal_number,
        )

    def _diverged(self, what: str, value: float, step: _TakenStep) -> DivergedError:
        path = self._write_samples(step, value)
        return DivergedError(
            f"the {what} of step {step.step + 1} is {value}; its sample indices are in {path}",
            f"start a new run with a lower `optim.lr` (now {self.optim.lr:g}), or with `optim.clip_norm`"
            f"{'' if self.loss_scale is None else ', or with `train.precision=fp32`'}",
        )

    def _without_loss(self, step: _TakenStep) -> DivergedError:
        """Return the error of a step of which every loss is `inf`: there is nothing to predict, or all overflow."""
        path = self._write_samples(step, math.inf)
        return DivergedError(
            f"no sequence of step {step.step + 1} has a finite loss; its sample indices are in {path}",
            "if none of them has a token that the tokenizer knows, or a label, correct the data or raise "
            f"`train.batch_sequences`; otherwise lower `optim.lr` (now {self.optim.lr:g})",
        )

    def _write_samples(self, step: _TakenStep, value: float) -> Path:
        """Write the samples of a step that cannot be used, and return the path of the file."""
        path, samples = self.run / DIVERGED_FILE, step.indices.tolist()
        if self.ranks.is_first:
            write_json(path, {"step": step.step, "epoch": step.epoch, "value": str(value), "sample_index": samples})
        return path


def _end_of(callback: Callback) -> Callable[[object, BaseException | None, object], None]:
    """Return the exit function of a `with` block that ends a callback."""
    return lambda _kind, error, _trace: callback.on_end(error)


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
