"""A run on censored, weighted values of many decades: scores follow from its files, predictions come in both units."""

import math
from pathlib import Path

import numpy as np
import pytest

from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.finetune.prediction.predict import predict
from exlm_cli.finetune.scores import BOTH, MODEL, read_scores
from exlm_cli.progress import SilentProgress
from tests.unit.finetune.finetuned_runs import finetune, read_rows, write_rows
from tests.unit.finetune.synthetic import WORDS


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("assay")
    texts = [f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS][:240]
    values = np.random.default_rng(0).integers(-10, 50, len(texts)) / 10
    cells = [f"{'>' * (i % 5 == 1)}{'<' * (i % 10 == 5)}{10**value:.6g}" for i, value in enumerate(values)]
    rows = [[text, cell, str(1 + i % 2)] for i, (text, cell) in enumerate(zip(texts, cells, strict=True))]
    table = write_rows(folder / "assay.csv", ["text", "ic50", "w"], rows)
    task = {"name": "csv", "files": {"train": str(table)}, "text_column": "text", "label_columns": ["ic50"]}
    return finetune(folder, text_model, baseline=True, log10=True, weight_column="w", **task)


def error_of(predicted: float, cell: str) -> float:
    """Return the error of a logarithm, by the definition of a bound."""
    value = float(cell.lstrip("<>"))
    if (cell[0] == ">" and predicted > value) or (cell[0] == "<" and predicted < value):
        return 0.0
    return predicted - value


def test_scores_are_those_of_the_files_with_the_wrong_side_of_bounds_alone(run):
    rows = read_rows(run / "predictions-test.csv")
    assert {"<", ">"} <= {row["log10 ic50_true"][0] for row in rows}
    errors = np.array([error_of(float(row["log10 ic50_predicted"]), row["log10 ic50_true"]) for row in rows])
    scores = read_scores(run)
    assert scores.average("test", "rmse").mean == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-6)
    assert scores.average("test", "mae").mean == pytest.approx(np.abs(errors).mean(), rel=1e-6)
    exact = [row for row in rows if row["log10 ic50_true"][0] not in "<>"]
    both = np.array([[float(row[f"log10 ic50_{end}"]) for end in ("true", "predicted")] for row in exact])
    assert scores.average("test", "pearsonr").mean == pytest.approx(np.corrcoef(both.T)[0, 1], abs=1e-6)
    assert {MODEL, "tfidf", BOTH} == set(scores.table.model)


def test_new_rows_are_predicted_in_both_units_and_scored_by_their_bounds(run, tmp_path):
    texts = [" ".join((WORDS[i], WORDS[-1 - i])) for i in range(4)]
    cells = ["100", ">1e9", "<1e-9", ""]
    data = write_rows(tmp_path / "new.csv", ["text", "ic50"], [list(row) for row in zip(texts, cells, strict=True)])
    out = tmp_path / "out.csv"
    options = {"predictor": "model", "interval_level": 0.8, "progress": SilentProgress()}
    summary = predict(load_finetuned(run), data, out, folder=tmp_path, **options)  # type: ignore[arg-type]
    rows = read_rows(out)
    for end in ("predicted", "low_80", "high_80"):
        for row in rows:
            assert float(row[f"ic50_{end}"]) == pytest.approx(10 ** float(row[f"log10 ic50_{end}"]), rel=1e-6)
    assert [row["ic50"] for row in rows] == cells
    predicted = [float(row["log10 ic50_predicted"]) for row in rows[:3]]
    errors = [predicted[0] - 2, predicted[1] - 9, predicted[2] + 9]
    assert summary.metrics["rmse"] == pytest.approx(math.sqrt(np.mean(np.square(errors))), rel=1e-6)
    assert any(note.startswith("2 of 4 rows have bounds") for note in summary.notes)
