"""`exlm eval` of a sweep and of a Repeated-MLM grid: the report again, the paper's numbers beside ours, mistakes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from exlm_cli.cli.app import main
from exlm_cli.config.cells import CellsRecipe
from exlm_cli.config.load import dump_recipe, load_recipe
from exlm_cli.config.repeat_mlm import RepeatMlmRecipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.run_dir import update_run_json
from tests.unit.report.grids import paper_results
from tests.unit.report.sweeps import sweep_results

Capture = pytest.CaptureFixture[str]


def _write_run(run: Path, recipe: CellsRecipe, results: Sequence[dict[str, Any]]) -> None:
    """Leave what a grid leaves, without its models."""
    run.mkdir()
    (run / "recipe.yaml").write_text(dump_recipe(recipe))
    update_run_json(run, {"command": recipe.command, "num_cells": len(recipe.plan())})
    for result in results:
        cell = run / "cells" / result["label"] / f"seed-{result['seed']}"
        cell.mkdir(parents=True)
        (cell / "result.json").write_text(json.dumps(result))


@pytest.fixture
def sweep(folder: Path) -> Path:
    _write_run(folder / "run", load_recipe("table-2", kind=SweepRecipe), sweep_results("table-2"))
    return folder / "run"


def test_a_sweep_is_told_in_the_papers_shape_beside_its_numbers(sweep: Path, capsys: Capture) -> None:
    assert main(["eval", "run"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = [line.split() for line in captured.out.splitlines()]
    for source in ("paper", "ours"):
        assert [source, "Vanilla", "MLM", "83.6", "90.0", "90.3", "54.7"] in [line[:7] for line in lines]
    # however wide the terminal is
    unwrapped = " ".join(captured.out.split())
    assert "ours Vanilla MLM++: seeds 1 x 3, parameters 1.4 M, pre-training 600 steps of 4,096 sequences" in unwrapped
    assert sorted(path.name for path in (sweep / "report").iterdir()) == ["sweep.csv", "sweep.md"]


def test_tables_are_written_where_and_as_asked(sweep: Path, folder: Path, capsys: Capture) -> None:
    assert main(["eval", "run", "--format", "latex", "--out", "paper", "--json", "--no-figures"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {Path(path).name for path in result["files"]} == {"sweep.csv", "sweep.md", "variants.tex", "table-2.tex"}
    assert r"\begin{tabular}{ll" in (folder / "paper" / "table-2.tex").read_text()
    assert len(result["variants"]) == 5
    assert not (sweep / "report").exists()


def test_what_is_done_of_a_sweep_is_told_with_what_is_not(sweep: Path, capsys: Capture) -> None:
    (sweep / "cells" / "exlm" / "seed-1" / "result.json").unlink()
    assert main(["eval", "run"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "4 of 5 cells are done; `exlm pretrain --resume run` does the others\n"
    ours = [line.split()[1:3] for line in captured.out.splitlines() if line.startswith("ours ") and ":" not in line]
    assert ours == [["ExLM", "w/o"], ["ExLM", "w/o"], ["Vanilla", "MLM"], ["Vanilla", "MLM++"]]


def test_without_a_run_the_newest_grid_is_taken_and_none_of_its_cells(
    sweep: Path, folder: Path, capsys: Capture
) -> None:
    (folder / "runs").mkdir()
    sweep.rename(folder / "runs/sweep")
    for name in ("cells/exlm/seed-1/pretrain", "../unfinished"):
        run = folder / "runs/sweep" / name
        (run / "checkpoints/step-1").mkdir(parents=True)
        update_run_json(run, {"command": "pretrain"})
    update_run_json(folder / "runs/unfinished", {"command": "pretrain", "num_cells": 4})
    (folder / "runs/unfinished/recipe.yaml").touch()
    assert main(["eval", "--no-figures"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "run: runs/sweep, the newest one\n"
    assert "Vanilla MLM++: seeds" in " ".join(captured.out.split())
    assert main(["eval", "--entropy"]) == 2
    assert capsys.readouterr().err == (
        "error: no run was given, and there is none with a checkpoint under runs/\n\n"
        "hint: make one with `exlm pretrain --recipe quickstart-text`; a cell of a grid is given by its path\n"
    )


def test_a_repeat_mlm_grid_is_told_again(folder: Path, capsys: Capture) -> None:
    results = [r | {"label": f"k{r['num_repeats']}-p{r['mask_ratio']:g}"} for r in paper_results()]
    _write_run(folder / "run", load_recipe("repeat-mlm", kind=RepeatMlmRecipe), results)
    assert main(["eval", "run", "--no-figures"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith("# Repeated MLM: repeat-mlm\n")
    assert "| 8 |  |  |  | 79.2 | 82.8 |" in captured.out
    assert sorted(path.name for path in (folder / "run" / "report").iterdir()) == ["grid.csv", "grid.md"]
    assert main(["eval", "run", "--format", "latex"]) == 2
    assert capsys.readouterr().err.startswith("error: `--format` is not for a run of `exlm repeat-mlm`\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "run2"], "error: a sweep or a grid is told alone\n"),
        (["run", "--entropy"], "error: run: a run of `exlm pretrain --sweep`; runs of `exlm pretrain` and `exlm fine"),
        (["run", "--data", "x.txt"], "error: run: a run of `exlm pretrain --sweep`; runs of `exlm pretrain` and `exlm"),
    ],
)
def test_a_mistake_is_one_line(sweep: Path, words: list[str], said: str, capsys: Capture) -> None:
    assert main(["eval", *words]) == 2
    assert capsys.readouterr().err.startswith(said)


def test_a_sweep_of_which_nothing_is_done_or_a_cell_is_damaged_is_told(folder: Path, capsys: Capture) -> None:
    _write_run(folder / "run", load_recipe("table-2", kind=SweepRecipe), [])
    assert main(["eval", "run"]) == 2
    assert capsys.readouterr().err == (
        "error: run: none of its 5 cells is done\n\nhint: continue with `exlm pretrain --resume run`\n"
    )
    damaged = folder / "run" / "cells" / "exlm" / "seed-1"
    damaged.mkdir(parents=True)
    (damaged / "result.json").write_text("{")
    assert main(["eval", "run"]) == 2
    assert "result.json: not readable as JSON: " in capsys.readouterr().err
