"""The loop on a least-squares task: exact resume from any step, accumulation, stopping, divergence, the record."""

import itertools
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from exlm_cli.config.sections import OptimConfig
from exlm_cli.cost.gpus import Gpu
from exlm_cli.data.sampler import EpochPlan, plan_epoch
from exlm_cli.errors import ConfigError, DivergedError, InterruptedRunError
from exlm_cli.run_dir import read_metrics
from exlm_cli.train import loop
from exlm_cli.train.checkpoint import newest_good_checkpoint
from exlm_cli.train.loop import TrainingLoop
from exlm_cli.train.optim import LossScale
from exlm_cli.train.task import Callback
from tests.killed import untimed_rows
from tests.unit.train.least_squares import NUM_SAMPLES, LeastSquares, loop_of, weights_of


def test_every_step_has_the_learning_rate_of_the_schedule_in_all_groups(tmp_path):
    """Three steps of warm-up to 0.05, then ten of linear decay."""
    task, rates = LeastSquares(), []
    fitting = loop_of(task, tmp_path)
    task.begin_step = lambda _: rates.append([group["lr"] for group in fitting.optimizer.param_groups])
    fitting.fit()
    expected = [0.05 * (step + 1) / 3 for step in range(3)] + [0.05 * (1 - step / 10) for step in range(10)]
    assert rates == [pytest.approx([rate] * 4) for rate in expected]  # matrices and others of encoder and heads


@pytest.mark.parametrize("step", [3, 9, 12])
def test_resuming_from_any_checkpoint_ends_with_the_same_bits_and_rows(tmp_path, step):
    whole = LeastSquares()
    loop_of(whole, tmp_path).fit()
    rows = untimed_rows(tmp_path)
    resumed = LeastSquares()
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.zero_()
    loop = loop_of(resumed, tmp_path)
    loop.resume(tmp_path / f"checkpoints/step-{step}")
    result = loop.fit()
    assert result.state.step == 13
    for mine, theirs in zip(weights_of(whole), weights_of(resumed), strict=True):
        assert torch.equal(mine, theirs)
    assert untimed_rows(tmp_path) == rows


def _overflowing(task: LeastSquares, steps: Callable[[int], bool]) -> None:
    """Let the gradients of some steps, counted from 0, overflow in the backward pass as they do in fp16."""
    step = itertools.count()
    at: list[int] = []
    task.begin_step = lambda _: at.append(next(step))  # type: ignore[method-assign]
    task.model[0].weight.register_hook(lambda g: g * math.inf if steps(at[-1]) else g)


def _in_fp16(monkeypatch: pytest.MonkeyPatch, growth_steps: int = 2000) -> dict[str, Any]:
    monkeypatch.setattr(LossScale, "GROWTH_STEPS", growth_steps)
    return {"precision": "fp16", "log_every_steps": 1}


@pytest.mark.parametrize("step", [3, 9])
def test_a_run_in_fp16_goes_on_with_its_loss_scale_to_the_same_bits_and_rows(tmp_path, monkeypatch, step):
    """It grows every fourth step, and one step overflows before each checkpoint."""
    settings = _in_fp16(monkeypatch, growth_steps=4)
    whole, resumed = LeastSquares(), LeastSquares()
    _overflowing(whole, lambda step: step in (0, 7))
    loop_of(whole, tmp_path, **settings).fit()
    rows = untimed_rows(tmp_path)
    scales = [row["loss_scale"] / LossScale.START for row in rows if row["kind"] == "train"]
    assert scales == [1, *[1 / 2] * 4, 1, 1, 1, *[1 / 2] * 4, 1]
    _overflowing(resumed, lambda count: step + count == 7)
    again = loop_of(resumed, tmp_path, **settings)
    again.resume(tmp_path / "checkpoints" / f"step-{step}")
    again.fit()
    assert all(torch.equal(a, b) for a, b in zip(weights_of(whole), weights_of(resumed), strict=True))
    assert untimed_rows(tmp_path) == rows


def test_a_step_that_overflows_in_fp16_is_skipped_and_counted(tmp_path, monkeypatch):
    task = LeastSquares()
    seen: list[list[Tensor]] = []
    watch = Callback()
    watch.on_step = lambda *_: seen.append(weights_of(task))  # type: ignore[method-assign]
    fitting = loop_of(task, tmp_path, **_in_fp16(monkeypatch), max_steps=4)
    fitting.callbacks = [watch]
    _overflowing(task, lambda step: step in (1, 2))
    fitting.fit()
    same = [all(torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(seen)]
    assert same == [True, True, False]  # the second and the third step moved nothing
    rows = [row for row in untimed_rows(tmp_path) if row["kind"] == "train"]
    assert [row["num_overflows"] for row in rows] == [0, 1, 2, 2]
    assert [row["loss_scale"] / LossScale.START for row in rows] == [1, 1, 1 / 2, 1 / 4]
    assert ["grad_norm" in row for row in rows] == [True, False, False, True]
    assert all(math.isfinite(row["loss"]) for row in rows)


def test_gradients_that_overflow_at_every_scale_end_the_run(tmp_path, monkeypatch):
    """One scale after the other down to the lowest, then eleven steps at it: a lower one would not help."""
    task = LeastSquares()
    before = weights_of(task)
    _overflowing(task, lambda step: True)
    last = round(math.log2(LossScale.START / LossScale.LOWEST)) + 11
    with pytest.raises(DivergedError, match=rf"^the gradient norm of step {last} is (inf|nan); ") as caught:
        loop_of(task, tmp_path, **_in_fp16(monkeypatch), max_steps=40, checkpoint_every_steps=100).fit()
    assert "`--set train.precision=fp32`" in caught.value.hint
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(task), strict=True))


class Clocked(LeastSquares):
    """A batch takes 2 s to make, of which nothing is ahead, and 3 s to compute, by a clock that only moves so."""

    now_s = 0.0

    def microbatches(self, indices: np.ndarray, epoch: int) -> Iterator[np.ndarray]:
        for batch in super().microbatches(indices, epoch):
            self.now_s += 2.0
            yield batch

    def losses(self, batch: np.ndarray) -> Tensor:
        self.now_s += 3.0
        return super().losses(batch)


def test_rows_have_the_time_waited_for_data_and_the_share_of_the_peak(tmp_path, monkeypatch):
    """Two batches a step: 4 of 10 s are waiting; 4 samples of 300 FLOPs each in 10 s, of 480 FLOP/s, are a quarter."""
    task = Clocked()
    fitting = loop_of(task, tmp_path, max_steps=4)
    fitting.meter.gpu = Gpu("a slow card", 480.0, 1.0, ())
    monkeypatch.setattr(loop.time, "perf_counter", lambda: task.now_s)
    result = fitting.fit()
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    found = [[row[name] for name in ("elapsed_s", "data_wait_s", "utilisation")] for row in rows]
    assert found == [[20.0, 8.0, 0.25], [40.0, 16.0, 0.25]]
    assert (result.state.data_wait_s, result.utilisation) == (16.0, 0.25)
    assert result.gpu is not None


@pytest.mark.parametrize("microbatch", [1, 3])
def test_accumulation_gives_the_gradient_of_the_whole_step(tmp_path, microbatch):
    def train(size: int, run: Path) -> list[Tensor]:
        task = LeastSquares(size)
        task.model[1].p = 0.0
        run.mkdir()
        loop_of(task, run, max_steps=1).fit()
        return weights_of(task)

    for mine, theirs in zip(train(microbatch, tmp_path / "a"), train(2, tmp_path / "b"), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_sequences_without_a_loss_are_counted_and_left_out_of_the_mean(tmp_path):
    task = LeastSquares()
    first_step = task.plan(0)[0]
    task.loss_of_sample = {int(first_step[0]): math.inf, int(first_step[1]): 8.0, int(first_step[2]): 4.0,
                           int(first_step[3]): 6.0}  # fmt: skip
    loop_of(task, tmp_path, max_steps=1, log_every_steps=1).fit()
    row = untimed_rows(tmp_path)[0]
    assert row["loss"] == pytest.approx(6.0)
    assert row["num_infeasible"] == 1


@pytest.mark.parametrize(
    ("value", "samples", "message", "hint"),
    [
        (math.nan, slice(2, 3), "the loss of step 2 is nan", "`optim.lr`"),
        (math.inf, slice(None), "no sequence of step 2 has a finite loss", "a token"),
    ],
)
def test_a_step_without_a_loss_stops_the_run_and_names_its_samples(tmp_path, value, samples, message, hint):
    """`inf` is also the loss of a sequence in which there is nothing to predict, so that it alone is not divergence."""
    task = LeastSquares()
    second_step = task.plan(0)[1]
    task.loss_of_sample = dict.fromkeys(second_step[samples].tolist(), value)
    with pytest.raises(DivergedError, match=rf"^{message}; .*diverged.json$") as caught:
        loop_of(task, tmp_path).fit()
    assert hint in caught.value.hint
    saved = json.loads((tmp_path / "diverged.json").read_text())
    assert (saved["sample_index"], saved["step"]) == (second_step.tolist(), 1)


def test_a_gradient_that_is_not_a_number_stops_the_run_before_the_weights_move(tmp_path):
    task = LeastSquares()
    before = weights_of(task)
    task.model[0].weight.register_hook(lambda g: g * math.inf)
    with pytest.raises(DivergedError, match=r"^the gradient norm of step 1 is (inf|nan); "):
        loop_of(task, tmp_path).fit()
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(task), strict=True))


@pytest.mark.parametrize(
    ("intervals", "saved"),
    [
        ({"log_every_steps": 10}, ["step-3"]),
        ({"log_every_steps": 100, "validate_every_steps": 100, "checkpoint_every_steps": 100}, []),
    ],
)
def test_a_bad_step_between_two_rows_is_named_and_reaches_no_checkpoint(tmp_path, intervals, saved):
    """Step 4 is found at the next checkpoint, validation or row; the steps after it have trained on."""
    task = LeastSquares()
    fourth_step = task.plan(0)[3]
    task.loss_of_sample = {int(fourth_step[0]): math.nan}
    with pytest.raises(DivergedError, match=r"^the loss of step 4 is nan; "):
        loop_of(task, tmp_path, **intervals).fit()
    assert json.loads((tmp_path / "diverged.json").read_text())["sample_index"] == fourth_step.tolist()
    assert [path.name for path in (tmp_path / "checkpoints").glob("*")] == saved
    assert all(weight.isfinite().all() for weight in weights_of(task))


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_resumed_run_ends_with_the_same_bits(tmp_path, number, exit_code):
    whole = LeastSquares()
    (tmp_path / "whole").mkdir()
    loop_of(whole, tmp_path / "whole").fit()

    run = tmp_path / "stopped"
    run.mkdir()
    stopped = LeastSquares()
    stopped.at_microbatch = lambda count: os.kill(os.getpid(), number) if count == 11 else None
    with pytest.raises(InterruptedRunError, match=r"^stopped at step 5 of 13; the checkpoint is .*step-5$") as caught:
        loop_of(stopped, run).fit()
    assert caught.value.exit_code == exit_code
    assert caught.value.hint == "continue with `exlm pretrain --resume RUN`"

    resumed = LeastSquares()
    loop = loop_of(resumed, run)
    loop.resume(newest_good_checkpoint(run, pytest.fail))
    loop.fit()
    assert all(torch.equal(a, b) for a, b in zip(weights_of(whole), weights_of(resumed), strict=True))
    assert untimed_rows(run) == untimed_rows(tmp_path / "whole")


def test_epochs_limit_the_steps_and_a_longer_warm_up_is_refused(tmp_path):
    assert loop_of(LeastSquares(), tmp_path, max_steps=None, max_epochs=2).total_steps == 12
    assert loop_of(LeastSquares(), tmp_path, max_steps=7, max_epochs=2).total_steps == 7
    assert loop_of(LeastSquares(), tmp_path, max_steps=None, max_epochs=100_000).total_steps == 600_000
    with pytest.raises(ConfigError, match=r"^`optim.warmup_steps` 7 is more than the 6 steps"):
        loop_of(LeastSquares(), tmp_path, warmup_steps=7, max_steps=None, max_epochs=1)


class Uneven(LeastSquares):
    """Steps of at most 30 tokens, of one to nine samples."""

    def __init__(self) -> None:
        super().__init__(microbatch=4)
        self.lengths = np.random.default_rng(0).integers(3, 20, NUM_SAMPLES)
        self.planned: list[int] = []
        self.seen = np.zeros(NUM_SAMPLES, dtype=int)

    def plan(self, epoch: int) -> EpochPlan:
        self.planned.append(epoch)
        return plan_epoch(self.lengths, seed=1, epoch=epoch, batch_sequences=None, batch_tokens=30, bucket_steps=1)

    def microbatches(self, indices: np.ndarray, epoch: int) -> Iterator[np.ndarray]:
        self.seen[indices] += 1
        return super().microbatches(indices, epoch)


def _rates(fitting: TrainingLoop, task: LeastSquares) -> dict[int, tuple[float, float]]:
    """Train, and return the share done and the learning rate at each step."""
    found = {}
    task.begin_step = lambda share: found.update({fitting.state.step: (share, fitting.optimizer.param_groups[0]["lr"])})
    fitting.fit()
    return found


BY_TOKENS: dict[str, Any] = {"batch_sequences": None, "batch_tokens": 30, "max_steps": None, "max_epochs": 4}


def test_a_run_of_epochs_of_tokens_has_one_schedule_which_ends_with_its_last_step(tmp_path):
    task = Uneven()
    fitting = loop_of(task, tmp_path, **BY_TOKENS)
    steps = fitting.total_steps
    assert task.planned == [0]
    rates = _rates(fitting, task)
    assert task.planned == [0, 1, 2, 3]
    assert task.seen.tolist() == [4] * NUM_SAMPLES  # each sample once an epoch
    assert fitting.state.step == fitting.total_steps == len(rates) == steps
    # three steps of warm-up, then the same fall at each step
    expected = [(at / steps, 0.05 * (min(1, (at + 1) / 3) if at < 3 else (steps - at) / (steps - 3))) for at in rates]
    np.testing.assert_allclose(list(rates.values()), expected, rtol=1e-12)


@pytest.mark.parametrize("step", [3, 21])
def test_a_run_of_epochs_of_tokens_goes_on_with_the_same_rates_and_bits(tmp_path, step):
    whole, resumed = Uneven(), Uneven()
    rates = _rates(loop_of(whole, tmp_path, **BY_TOKENS), whole)
    again = loop_of(resumed, tmp_path, **BY_TOKENS)
    total_steps = again.total_steps
    again.resume(tmp_path / "checkpoints" / f"step-{step}")
    assert again.total_steps == total_steps
    assert _rates(again, resumed) == {at: rate for at, rate in rates.items() if at >= step}
    assert all(torch.equal(a, b) for a, b in zip(weights_of(whole), weights_of(resumed), strict=True))


def test_clipping_bounds_the_update_and_the_logged_norm_is_the_unclipped_one(tmp_path):
    task = LeastSquares()
    norms: list[float] = []
    step = torch.optim.AdamW.step

    def spy(self, *args, **kwargs):
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in task.model.parameters())))
        return step(self, *args, **kwargs)

    loop = loop_of(task, tmp_path, max_steps=2, log_every_steps=1)
    loop.optim = OptimConfig(lr=0.05, clip_norm=0.01)
    loop.optimizer.step = spy.__get__(loop.optimizer)  # type: ignore[method-assign]
    loop.fit()
    assert norms == pytest.approx([0.01, 0.01], rel=1e-3)
    assert all(row["grad_norm"] > 0.01 for row in untimed_rows(tmp_path) if row["kind"] == "train")


def test_a_row_of_the_log_has_the_mean_loss_of_its_steps(tmp_path):
    task = LeastSquares()
    for value, samples in zip((4.0, 7.0, 1.0), task.plan(0), strict=False):
        task.loss_of_sample |= dict.fromkeys(samples.tolist(), value)
    loop_of(task, tmp_path, max_steps=3, log_every_steps=2).fit()
    assert [row["loss"] for row in untimed_rows(tmp_path) if row["kind"] == "train"] == pytest.approx([5.5, 1.0])
