"""A Repeated-MLM grid and a sweep so small that a cell takes a tenth of a second, also without a process for it."""

import pickle
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from loky.backend.reduction import dumps

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sweep import SweepCell, SweepRecipe
from exlm_cli.experiments.cell import pretrain_and_measure
from exlm_cli.experiments.results import CellRuns
from exlm_cli.finetune.scores import scores_csv
from exlm_cli.progress import SilentProgress
from exlm_cli.train import workers
from tests.tiny import tiny_recipe

_TRAIN = {"max_steps": 6, "checkpoint_every_steps": 2, "validate_every_steps": 3, "log_every_steps": 1}


def tiny_grid(cache: Path, **changes: Any) -> SweepRecipe:
    """Return a grid of two cells on bundled text; keyword arguments replace top-level values."""
    pretrain = tiny_recipe(
        objective="mlm",
        data={"bundled_rows": 300, "cache_dir": str(cache), "sample_break": "none"},
        masking={"scheme": "bernoulli"},
        model={"rope": "none", "learned_positions": True, "max_length": 16, "dropout": 0.1},
        train=_TRAIN,
    )
    content = {"name": "tiny-grid", "cells": [[1, 0.3], [2, 0.5]], **_rest(pretrain)}
    return SweepRecipe.model_validate(content | changes)


def tiny_sweep(cache: Path) -> SweepRecipe:
    """Return a sweep over two variants of ExLM and the MLM on bundled text, scored at two mask ratios."""
    pretrain = tiny_recipe(
        data={"bundled_rows": 300, "cache_dir": str(cache)},
        model={"dropout": 0.1},
        train=_TRAIN | {"alignment_backend": "reference"},
    )
    mlm = {"objective": "mlm", "masking.num_states_per_mask": 1, "model.rope": "1d"}
    content = {
        "name": "tiny-sweep",
        "variants": {"exlm": {}, "mlm": mlm, "no-2d-rope": {"model.rope": "1d"}},
        "only": ["exlm", "mlm"],
        "entropy_ratios": [0.6],
        **_rest(pretrain),
    }
    return SweepRecipe.model_validate(content)


def run_cell(plan: SweepCell, folder: Path) -> CellRuns:
    """Pre-train and measure a cell in this process."""
    pretrain_and_measure(plan, folder, SilentProgress())
    return CellRuns(plan, folder)


def scores_of(cells: list[CellRuns]) -> list[bytes]:
    """Return every score of each cell, with its name."""
    return [scores_csv(cell.scores) for cell in cells]


class _ThisProcess(Executor):
    """Does what it gets at once, here, on the copies that a worker would get."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            given = pickle.loads(dumps((function, arguments, named)))
            future.set_result(given[0](*given[1], **given[2]))
        except BaseException as error:
            future.set_exception(error)
        return future


def work_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do the jobs of workers here: a process of their own imports torch for two seconds."""
    monkeypatch.setattr(workers, "start_processes", lambda *_, **__: nullcontext(_ThisProcess()))


def _rest(pretrain: PretrainRecipe) -> dict[str, Any]:
    finetune = load_recipe("repeat-mlm-finetune", kind=FinetuneRecipe)
    return {"device": "cpu", "pretrain": pretrain.model_dump(), "finetune": finetune.model_dump()}
