"""The loop on a least-squares task: exact resume from any step, accumulation, stopping, divergence, the record."""

import itertools
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from torch import Tensor

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


def _overflowing(task: LeastSquares, steps: Callable[[int], bool]) -> None:
    """Let the gradients of some steps, counted from 0, overflow in the backward pass as they do in fp16."""
    step = itertools.count()
    at: list[int] = []
    task.begin_step = lambda _: at.append(next(step))  # type: ignore[method-assign]
    task.model[0].weight.register_hook(lambda g: g * math.inf if steps(at[-1]) else g)


FP16 = {"precision": "fp16", "log_every_steps": 1}


def test_a_run_in_fp16_goes_on_with_its_loss_scale_to_the_same_bits_and_rows(tmp_path, monkeypatch):
    """It grows every fourth step; one step overflows before each of the first two checkpoints; an epoch has 6 steps."""
    monkeypatch.setattr(LossScale, "GROWTH_STEPS", 4)
    whole = LeastSquares()
    _overflowing(whole, lambda step: step in (0, 7))
    loop_of(whole, tmp_path, **FP16).fit()
    rows = untimed_rows(tmp_path)
    of_steps = [row for row in rows if row["kind"] == "train"]
    scales = [row["loss_scale"] / LossScale.START for row in of_steps]
    assert scales == [1, *[1 / 2] * 4, 1, 1, 1, *[1 / 2] * 4, 1]
    assert [row["num_overflows"] for row in of_steps] == [1] * 7 + [2] * 6
    assert ["grad_norm" in row for row in of_steps] == [step not in (0, 7) for step in range(13)]
    for begin in (3, 9, 12):
        resumed = LeastSquares()
        _overflowing(resumed, lambda step, begin=begin: begin + step == 7)
        again = loop_of(resumed, tmp_path, **FP16)
        again.resume(tmp_path / "checkpoints" / f"step-{begin}")
        again.fit()
        assert all(torch.equal(a, b) for a, b in zip(weights_of(whole), weights_of(resumed), strict=True))
        assert untimed_rows(tmp_path) == rows


NO_LOWER_SCALE = round(math.log2(LossScale.START / LossScale.LOWEST)) + 11
"""One scale after the other down to the lowest, then eleven steps at it: a lower one would not help."""


@pytest.mark.parametrize(
    ("settings", "last", "hint"), [({}, 1, "`optim.clip_norm`"), (FP16, NO_LOWER_SCALE, "`--set train.precision=fp32`")]
)
def test_gradients_that_overflow_at_every_scale_end_the_run_before_the_weights_move(tmp_path, settings, last, hint):
    task = LeastSquares()
    before = weights_of(task)
    _overflowing(task, lambda step: True)
    with pytest.raises(DivergedError, match=rf"^the gradient norm of step {last} is (inf|nan); ") as caught:
        loop_of(task, tmp_path, max_steps=40, checkpoint_every_steps=100, **settings).fit()
    assert hint in caught.value.hint
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


def test_accumulation_gives_the_gradient_of_the_whole_step(tmp_path):
    def train(size: int) -> list[Tensor]:
        task, run = LeastSquares(size), tmp_path / str(size)
        task.model[1].p = 0.0
        run.mkdir()
        loop_of(task, run, max_steps=1).fit()
        return weights_of(task)

    in_pieces, whole = [train(size) for size in (1, 3)], train(4)
    for weights in in_pieces:
        torch.testing.assert_close(weights, whole)


def test_a_row_is_the_mean_over_its_steps_of_the_mean_over_sequences_with_a_loss(tmp_path):
    task = LeastSquares()
    steps = ((math.inf, 8.0, 4.0, 6.0), (7.0,) * 4, (1.0,) * 4)
    for losses, samples in zip(steps, task.plan(0), strict=False):
        task.loss_of_sample |= dict(zip(samples.tolist(), losses, strict=True))
    loop_of(task, tmp_path, max_steps=3).fit()
    rows = [row for row in untimed_rows(tmp_path) if row["kind"] == "train"]
    assert [row["loss"] for row in rows] == pytest.approx([6.5, 1.0])
    assert [row["num_infeasible"] for row in rows] == [1, 1]


@pytest.mark.parametrize(
    ("value", "samples", "intervals", "message", "hint", "saved"),
    [
        (math.nan, slice(2, 3), {"log_every_steps": 10}, "the loss of step 4 is nan", "`optim.lr`", ["step-3"]),
        (
            math.inf, slice(None), {"log_every_steps": 100, "validate_every_steps": 100, "checkpoint_every_steps": 100},
            "no sequence of step 4 has a finite loss", "a token", [],
        ),
    ],
)  # fmt: skip
def test_a_step_without_a_loss_ends_the_run_names_its_samples_and_reaches_no_checkpoint(
    tmp_path, value, samples, intervals, message, hint, saved
):
    """It is found at the next checkpoint, validation or row; the steps after it have trained on.

    `inf` is also the loss of a sequence in which there is nothing to predict, so that it alone is not divergence.
    """
    task = LeastSquares()
    fourth_step = task.plan(0)[3]
    task.loss_of_sample = dict.fromkeys(fourth_step[samples].tolist(), value)
    with pytest.raises(DivergedError, match=rf"^{message}; .*diverged.json$") as caught:
        loop_of(task, tmp_path, **intervals).fit()
    assert hint in caught.value.hint
    diverged = json.loads((tmp_path / "diverged.json").read_text())
    assert (diverged["sample_index"], diverged["step"]) == (fourth_step.tolist(), 3)
    assert [path.name for path in (tmp_path / "checkpoints").glob("*")] == saved
    assert all(weight.isfinite().all() for weight in weights_of(task))


def test_a_signal_saves_and_the_resumed_run_ends_with_the_same_bits_and_rows(tmp_path):
    whole = LeastSquares()
    (tmp_path / "whole").mkdir()
    loop_of(whole, tmp_path / "whole").fit()

    run = tmp_path / "stopped"
    run.mkdir()
    stopped = LeastSquares()
    stopped.at_microbatch = lambda count: os.kill(os.getpid(), signal.SIGTERM) if count == 11 else None
    with pytest.raises(InterruptedRunError, match=r"^stopped at step 5 of 13; the checkpoint is .*step-5$") as caught:
        loop_of(stopped, run).fit()
    assert caught.value.exit_code == 143
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


def test_callbacks_follow_each_step_validation_and_checkpoint_and_an_exception_of_one_ends_the_run(tmp_path):
    settings = {"max_steps": 6, "validate_every_steps": 3, "log_every_steps": 1}
    bad, watch, error = Mock(Callback()), Mock(Callback()), ConfigError("enough", "go on")
    bad.on_step.side_effect = [None, None, None, error]
    fitting = loop_of(LeastSquares(), tmp_path, **settings)
    fitting.callbacks = [bad, watch]
    with pytest.raises(ConfigError, match="enough"):
        fitting.fit()
    again = loop_of(LeastSquares(), tmp_path, **settings)
    again.resume(tmp_path / "checkpoints/step-3")
    again.callbacks = [watch]
    again.fit()
    three_steps = ["on_start", *["on_step", "on_log"] * 3, "on_log", "on_save", "on_validate", "on_end"]
    assert [name for name, *_ in watch.mock_calls] == three_steps * 2
    assert watch.on_start.call_args_list == [call(tmp_path, 0), call(tmp_path, 3)]
    assert watch.on_end.call_args_list == [call(error), call(None)]
    assert [told.args for told in watch.on_save.call_args_list] == [
        (step, tmp_path / f"checkpoints/step-{step}") for step in (3, 6)
    ]
    losses = {told.args[0]: float(told.args[1]) for told in watch.on_step.call_args_list}
    rows = [row for row in untimed_rows(tmp_path) if row["kind"] == "train"]
    assert losses == {row["step"]: row["loss"] for row in rows}


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


def test_a_run_of_epochs_of_tokens_has_one_schedule_also_where_it_is_resumed(tmp_path):
    by_tokens = {"batch_sequences": None, "batch_tokens": 30, "max_steps": None, "max_epochs": 4}
    task = Uneven()
    fitting = loop_of(task, tmp_path, **by_tokens)
    steps = fitting.total_steps
    assert task.planned == [0]
    rates = _rates(fitting, task)
    assert task.planned == [0, 1, 2, 3]
    assert task.seen.tolist() == [4] * NUM_SAMPLES  # each sample once an epoch
    assert fitting.state.step == fitting.total_steps == len(rates) == steps
    # three steps of warm-up, then the same fall at each step
    expected = [(at / steps, 0.05 * (min(1, (at + 1) / 3) if at < 3 else (steps - at) / (steps - 3))) for at in rates]
    np.testing.assert_allclose(list(rates.values()), expected, rtol=1e-12)
    for step in (3, 21):
        resumed = Uneven()
        again = loop_of(resumed, tmp_path, **by_tokens)
        again.resume(tmp_path / "checkpoints" / f"step-{step}")
        assert again.total_steps == steps
        assert _rates(again, resumed) == {at: rate for at, rate in rates.items() if at >= step}
        assert all(torch.equal(a, b) for a, b in zip(weights_of(task), weights_of(resumed), strict=True))
