"""Which validation's weights the loop keeps, when no better one ends it, and what a kill in between leaves."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from exlm_cli.config.finetune import FinetuneTrainConfig
from exlm_cli.config.sections import OptimConfig
from exlm_cli.train import checkpoint
from exlm_cli.train.checkpoint import load_model_weights, newest_good_checkpoint
from exlm_cli.train.loop import TrainingLoop
from exlm_cli.train.task import Callback, Selection
from tests.killed import interrupted_at_call, untimed_rows
from tests.unit.train.least_squares import LeastSquares, build_loop, weights_of


class Scored(LeastSquares):
    """Validation figures from a list, one after the other, by the steps done; the data decide nothing."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = scores
        self.num_validations = 0

    def validate(self) -> dict[str, float]:
        self.num_validations += 1
        return {"loss": 0.0, "score": self.scores[self.num_validations - 1]}


def _selecting(task: LeastSquares, run: Path, selection: Selection, **train: Any) -> TrainingLoop:
    content = FinetuneTrainConfig.model_validate({"max_epochs": 5, "log_every_steps": 2, **train})
    return build_loop(task, run, content, OptimConfig(lr=0.05, warmup_ratio=0.1), selection=selection)


STEPS_PER_EPOCH = 6  # 22 samples, four a step
GREATER = Selection("score", is_greater_better=True)


@pytest.mark.parametrize(
    ("scores", "is_greater_better", "patience", "epochs", "best_epoch"),
    [
        ([0.1, 0.5, 0.3, 0.5, 0.2], True, None, 5, 2),
        ([0.5, 0.1, 0.3, 0.1, 0.2], False, None, 5, 2),
        ([math.nan, 0.5, math.nan, 0.4, 0.3], True, None, 5, 2),
        ([math.nan] * 5, True, None, 5, 5),
        ([0.1, 0.5, 0.4, 0.3, 0.9], True, 2, 4, 2),
        ([0.1, 0.5, 0.4, 0.6, 0.5], True, 2, 5, 4),
        ([math.nan] * 5, True, 3, 3, 3),
    ],
)
def test_the_first_best_epoch_is_kept_and_training_stops_when_none_was_better_for_too_long(
    tmp_path, scores, is_greater_better, patience, epochs, best_epoch
):
    weights: dict[int, list[Tensor]] = {}
    task = Scored(scores)
    loop = _selecting(task, tmp_path, Selection("score", is_greater_better, patience), log_every_steps=5)
    watch = Callback()
    watch.on_validate = lambda step, _: weights.update({step: weights_of(task)})  # type: ignore[method-assign]
    loop.callbacks = [watch]
    result = loop.fit()
    last, best_step = STEPS_PER_EPOCH * epochs, STEPS_PER_EPOCH * best_epoch
    assert sorted(weights) == list(range(STEPS_PER_EPOCH, last + 1, STEPS_PER_EPOCH))
    assert (result.state.step, result.state.best_step, result.state.best_epoch) == (last, best_step, best_epoch - 1)
    assert result.best == tmp_path / f"checkpoints/best-{best_step}"
    kept = LeastSquares()
    load_model_weights(result.best, kept.model)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(kept), weights[best_step], strict=True))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [f"best-{best_step}", f"step-{last}"]
    assert max(row["step"] for row in untimed_rows(tmp_path) if row["kind"] == "train") == last


RISING = [number / 10 for number in range(6)]
"""A better score at each validation of two epochs, three of them in each."""
OFTEN: dict[str, Any] = {"max_epochs": 2, "validate_every_steps": 2}


def test_of_the_best_weights_those_of_the_last_checkpoint_and_the_newest_stay(tmp_path):
    kept: list[list[str]] = []
    loop = _selecting(Scored(RISING), tmp_path, GREATER, **OFTEN)
    watch = Callback()
    watch.on_validate = lambda *_: kept.append(_bests(tmp_path))  # type: ignore[method-assign]
    loop.callbacks = [watch]
    loop.fit()
    assert kept == [["best-2"], ["best-4"], ["best-6"], ["best-6", "best-8"], ["best-10", "best-6"], ["best-12"]]


def _bests(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("best-*"))


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [(checkpoint, "_write_whole", (1, 4, 5, 7, 8)), (shutil, "rmtree", (5, 15, 18, 21, 22))],
)
def test_a_run_killed_while_it_writes_or_deletes_best_weights_ends_like_an_undisturbed_one(
    tmp_path, owner, name, calls
):
    """The weights of six validations and two checkpoints are written; the calls are those around a checkpoint."""
    (tmp_path / "whole").mkdir()
    whole = _selecting(Scored(RISING), tmp_path / "whole", GREATER, **OFTEN).fit()
    for call in calls:
        run = tmp_path / f"killed-{call}"
        run.mkdir()
        with interrupted_at_call(owner, name, call):
            _selecting(Scored(RISING), run, GREATER, **OFTEN).fit()
        loop = _selecting(Scored(RISING), run, GREATER, **OFTEN)
        last = newest_good_checkpoint(run, pytest.fail)
        if last is None:
            loop.resume(None)
        else:
            loop.resume(last)
            assert loop.state.best_step is not None
            assert f"best-{loop.state.best_step}" in _bests(run)
            loop.task.num_validations = loop.state.step // 2  # type: ignore[attr-defined]
        result = loop.fit()
        assert whole.best is not None
        assert result.best is not None
        for end in ((whole.best, result.best), (whole.checkpoint, result.checkpoint)):
            one, other = ((path / "model.safetensors").read_bytes() for path in end)
            assert one == other
        assert untimed_rows(run) == untimed_rows(tmp_path / "whole")
        assert _bests(run) == ["best-12"]
