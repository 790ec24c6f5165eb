"""Figures of several runs: where they go, and that none is drawn unless all can be."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exlm_cli.errors import CheckpointError
from exlm_cli.experiments.scores import FinetunedRun
from exlm_cli.finetune.results import write_predictions
from exlm_cli.report.score_report import collect_tables, draw_figures
from tests.unit.report.scored_runs import scored


def with_files(folder: Path, run: FinetunedRun) -> FinetunedRun:
    """Write the targets and the predictions of two seeds where a run has them."""
    truth = [np.array([float(i % 2)]) for i in range(8)]
    folder.mkdir()
    write_predictions(folder / "targets-test.csv", range(8), ["active"], truth)
    for seed in (1, 2):
        cell = folder / f"cells/single/seed-{seed}"
        cell.mkdir(parents=True)
        values = [np.array([(i * seed % 5) / 5]) for i in range(8)]
        write_predictions(cell / "predictions-test.csv", range(8), ["active"], values)
    return replace(run, folder=folder, results={**run.results, "grid_best": None})


def test_figures_go_into_each_run_or_named_by_run_into_one_folder(tmp_path: Path) -> None:
    runs = [with_files(tmp_path / name, scored(f"x/{name}", "csv", {"roc_auc": [0.5, 0.5]})) for name in "ab"]
    files, notes = draw_figures(runs, None)
    kinds = [f"{kind}.{suffix}" for kind in ("curves", "confusion") for suffix in ("png", "svg")]
    assert files == [run.folder / "report" / f"test-{kind}" for run in runs for kind in kinds]
    assert notes == []
    files, _ = draw_figures(runs, tmp_path / "all")
    assert [path.name for path in files] == [f"x-{name}-test-{kind}" for name in "ab" for kind in kinds]
    assert all(path.is_file() for path in files)


def test_a_damaged_run_stops_the_work_before_a_figure_of_another_is_written(tmp_path: Path) -> None:
    runs = [with_files(tmp_path / name, scored(name, "csv", {"roc_auc": [0.5, 0.5]})) for name in "ab"]
    (tmp_path / "b/cells/single/seed-2/predictions-test.csv").unlink()
    with pytest.raises(CheckpointError, match="not readable as predictions"):
        draw_figures(runs, None)
    assert not (tmp_path / "a/report").exists()


def test_values_and_answers_have_no_curves_and_an_old_run_says_why(tmp_path: Path) -> None:
    runs = [
        scored("values", "csv", {"rmse": [0.5]}, loss="regression"),
        scored("answers", "squad/v2", {"f1": [0.5]}, loss="span"),
        replace(scored("old", "csv", {"roc_auc": [0.5]}), folder=tmp_path),
    ]
    assert draw_figures(runs, None) == ([], ["old: no curves: the run is older than they are, and kept no targets"])


def test_tables_of_tasks_come_before_those_of_the_paper() -> None:
    tables = collect_tables([scored("a", "moleculenet/bace", {"roc_auc": [0.5]})], [])
    assert [table.name for table in tables] == ["scores-moleculenet-bace", "table-1"]
