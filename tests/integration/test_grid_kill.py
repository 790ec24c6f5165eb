"""`kill -9` of a grid, anywhere, then running it again: no number changes, and what was done is not done again.

Processes kill themselves at a chosen point, so nothing depends on timing.
"""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exlm_cli.config.cells import CellsRecipe
from exlm_cli.config.load import dump_recipe
from exlm_cli.experiments.cell import run_cell
from exlm_cli.experiments.sweep import run_grid
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import read_metrics
from tests.tiny_grids import tiny_grid, tiny_sweep

KILLED_CELL = """
import os, signal, sys
from pathlib import Path
from exlm_cli.experiments import cell as run_cell
from exlm_cli.config.load import load_recipe
from exlm_cli.config.repeat_mlm import RepeatMlmRecipe
from exlm_cli.progress import SilentProgress
from exlm_cli.train.pretrain import PretrainTask

where, count, recipe, folder = sys.argv[1:]
owner, name = {"step": (PretrainTask, "losses"), "measure": (run_cell, "measure_entropy"),
               "write": (run_cell, "write_json")}[where]
original, calls = getattr(owner, name), 0

def dying(*args, **kwargs):
    global calls
    calls += 1
    if calls == int(count):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)

setattr(owner, name, dying)
run_cell.run_cell(load_recipe(recipe, kind=RepeatMlmRecipe).plan()[1], Path(folder), SilentProgress())
"""

KILLED_GRID = """
import os, signal, sys
from pathlib import Path
from exlm_cli.experiments.sweep import run_grid
from exlm_cli.experiments.board import GridBoard
from exlm_cli.config.load import load_recipe, recipe_kind
from exlm_cli.progress import SilentProgress

recipe, out = sys.argv[1:]
GridBoard.finish = lambda self, plan, result: os.kill(os.getpid(), signal.SIGKILL)
loaded = load_recipe(recipe, kind=recipe_kind(recipe))
run_grid(loaded, out=Path(out), resume=None, jobs=2, progress=SilentProgress())
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def undisturbed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, [run_cell(plan, folder / plan.folder, SilentProgress()) for plan in tiny_grid(cache).plan()]


def _untimed(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "elapsed_s"}


def _rows(folder: Path) -> list[dict[str, Any]]:
    timed = {"elapsed_s", "tokens_per_s"}
    return [{k: v for k, v in row.items() if k not in timed} for row in read_metrics(folder / "pretrain/metrics.jsonl")]


def _kill(script: str, recipe: CellsRecipe, tmp_path: Path, *words: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    words = tuple(str(path) if word == "RECIPE" else word for word in words)
    killed = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "count", "kept"),
    [
        pytest.param("step", 1, 0, id="before the first step"),
        pytest.param("step", 6, 4, id="between checkpoints"),
        pytest.param("measure", 1, 6, id="between training and measuring"),
        pytest.param("write", 1, 6, id="before what was measured is written"),
        pytest.param("write", 2, 6, id="before the result is written"),
    ],
)
def test_a_killed_cell_ends_like_an_undisturbed_one(
    undisturbed: tuple[Path, list[dict[str, Any]]], cache: Path, tmp_path: Path, where: str, count: int, kept: int
) -> None:
    whole, results = undisturbed
    plan = tiny_grid(cache).plan()[1]
    cell = tmp_path / "cell"
    _kill(KILLED_CELL, tiny_grid(cache), tmp_path, where, str(count), "RECIPE", str(cell))
    assert not (cell / "result.json").exists()
    steps = [int(path.name.removeprefix("step-")) for path in (cell / "pretrain/checkpoints").glob("step-*")]
    assert max(steps, default=0) == kept
    assert _untimed(run_cell(plan, cell, SilentProgress())) == _untimed(results[1])
    assert _rows(cell) == _rows(whole / plan.folder)


@pytest.mark.slow
@pytest.mark.parametrize("build", [tiny_grid, tiny_sweep])
def test_a_grid_killed_with_a_cell_on_the_way_goes_on_where_it_was(
    build: Callable[[Path], CellsRecipe], cache: Path, tmp_path: Path
) -> None:
    recipe, whole = build(cache), tmp_path / "whole"
    results = [run_cell(plan, whole / plan.folder, SilentProgress()) for plan in recipe.plan()]
    run = tmp_path / "run"
    _kill(KILLED_GRID, recipe, tmp_path, "RECIPE", str(run))
    done = {path: path.stat().st_mtime_ns for path in run.glob("cells/*/*/result.json")}
    assert done
    # the process of the other cell dies with its parent, or is waited for
    again = run_grid(recipe, out=None, resume=run, jobs=2, progress=SilentProgress())
    assert [_untimed(cell) for cell in again.cells] == [_untimed(result) for result in results]
    for path, written_ns in done.items():
        assert path.stat().st_mtime_ns == written_ns
    for plan in recipe.plan():
        assert _rows(run / "cells" / plan.folder) == _rows(whole / plan.folder)
