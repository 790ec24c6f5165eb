"""What the figures draw is what scikit-learn works out; the same data give the same files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba_array
from sklearn import metrics
from sklearn.calibration import calibration_curve

from exlm_cli.errors import CheckpointError
from exlm_cli.files import write_json
from exlm_cli.finetune.evaluation.calibration import (
    CALIBRATION_FILE,
    Calibration,
    ConformalResiduals,
    PlattCurve,
    PredictedRows,
    calibration_error,
)
from exlm_cli.finetune.predictions import PREDICTIONS_FILE, PartRows, write_predictions, write_rows
from exlm_cli.finetune.results import FinetunedRun
from exlm_cli.report.finetuning.figures import (
    draw_calibration,
    draw_runs,
    draw_scores,
)
from exlm_cli.report.style import RUN_COLOURS
from tests.unit.report.results import predicted_rows, scored


def predictions_of(
    num_outputs: int, *, is_multi_class: bool = False, num_seeds: int = 3, num_rows: int = 60
) -> PredictedRows:
    rng = np.random.default_rng(0)
    probabilities = rng.random((num_seeds, num_rows, num_outputs)).round(2)  # with ties
    if is_multi_class:
        probabilities /= probabilities.sum(-1, keepdims=True)
        targets = rng.integers(num_outputs, size=(num_rows, 1)).astype(float)
    else:
        targets = rng.integers(2, size=(num_rows, num_outputs)).astype(float)
    targets[::7] = np.nan
    names = tuple(f"name {i}" for i in range(num_outputs))
    loss = "classes" if is_multi_class else "binary"
    return predicted_rows(loss, names, probabilities, targets, Calibration(outputs=(None,) * num_outputs))


def known(predictions: PredictedRows, index: int = 0) -> tuple[Any, Any]:
    """Return (n,) targets of a column and (K, n, C) probabilities of the rows where it is known."""
    is_known = ~np.isnan(predictions.targets[:, index])
    return predictions.targets[is_known, index].astype(int), predictions.by_seed[:, is_known]


def curve_of(probabilities: Any, truth: Any) -> Any:
    """Return mean probability and share of positives of scikit-learn's bins of equally many rows."""
    share, mean = calibration_curve(truth, probabilities, n_bins=10, strategy="quantile")
    return np.stack([mean, share], axis=1)


def bold_lines(axes: Axes) -> list[tuple[str, Any, Any]]:
    """Return label, x and y of the lines in the legend."""
    handles, labels = axes.get_legend_handles_labels()
    return [(label, *map(np.asarray, line.get_data())) for line, label in zip(handles, labels, strict=True)]


@pytest.mark.parametrize(("num_outputs", "num_seeds"), [(1, 3), (8, 1)])
def test_curves_have_the_areas_of_scikit_learn_in_the_legend_and_under_the_line(
    figures, tmp_path, num_outputs, num_seeds
):
    predictions = predictions_of(num_outputs, num_seeds=num_seeds)
    draw_scores(predictions, "a title", tmp_path, "s")
    scores = metrics.roc_auc_score, metrics.average_precision_score
    for axes, score in zip(figures["s-curves"].axes, scores, strict=True):
        found = bold_lines(axes)
        assert len(found) == num_outputs
        for index, (label, x, y) in enumerate(found):
            truth, probabilities = known(predictions, index)
            of_mean = score(truth, probabilities.mean(0)[:, index])
            of_seeds = np.mean([score(truth, seed[:, index]) for seed in probabilities])
            assert label == f"name {index}  {of_mean:.3f}" + (f" ({of_seeds:.3f})" if num_seeds > 1 else "")
            # precision is a staircase over recall, which falls
            area = metrics.auc(x, y) if score is metrics.roc_auc_score else -np.sum(np.diff(x) * y[:-1])
            assert area == pytest.approx(of_mean, abs=1e-9)
    guess, axes = figures["s-curves"].axes
    assert (guess.get_xlabel(), guess.get_ylabel()) == ("false positive rate", "true positive rate")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("recall", "precision")
    # whatever its recall, a random guess is right as often as there are positives
    levels = [[*line.get_ydata()] for line in axes.lines if line.get_linestyle() == ":"]
    np.testing.assert_allclose(levels, [[known(predictions, index)[0].mean()] * 2 for index in range(num_outputs)])


def test_of_many_labels_the_mean_curve_is_drawn(figures, tmp_path):
    predictions = predictions_of(12)
    draw_scores(predictions, "a title", tmp_path, "s")
    pairs = [known(predictions, index) for index in range(12)]
    for axes, score in zip(
        figures["s-curves"].axes, (metrics.roc_auc_score, metrics.average_precision_score), strict=True
    ):
        ((label, x, y),) = bold_lines(axes)
        mean = np.mean([score(truth, seeds.mean(0)[:, index]) for index, (truth, seeds) in enumerate(pairs)])
        assert label == f"mean of 12 labels  {mean:.3f}"
        if score is metrics.roc_auc_score:
            assert metrics.auc(x, y) == pytest.approx(mean, abs=5e-3)  # on a grid of 401 points


@pytest.mark.parametrize("is_multi_class", [True, False])
def test_confusion_matrices_are_those_of_scikit_learn(figures, tmp_path, is_multi_class):
    predictions = predictions_of(3, is_multi_class=is_multi_class)
    draw_scores(predictions, "a title", tmp_path, "s")
    panels = figures["s-confusion"].axes
    assert len(panels) == (1 if is_multi_class else 3)
    for index, axes in enumerate(panels):
        truth, probabilities = known(predictions, index)
        mean = probabilities.mean(0)
        wanted = metrics.confusion_matrix(truth, mean.argmax(1) if is_multi_class else mean[:, index] >= 0.5)
        shares = wanted / wanted.sum(1, keepdims=True)
        assert [text.get_text() for text in axes.texts] == [
            f"{count}\n{100 * share:.0f} %" for count, share in zip(wanted.ravel(), shares.ravel(), strict=True)
        ]
        # the true class is the row, from the top, and the predicted one the column
        assert [text.get_position() for text in axes.texts] == [(x, y) for y, x in np.ndindex(*wanted.shape)]
        np.testing.assert_allclose(axes.images[0].get_array(), shares)
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")
        assert axes.yaxis_inverted()


def test_names_are_no_commands_to_matplotlib(tmp_path):
    plain = predictions_of(2, is_multi_class=True, num_rows=20)
    nasty = replace(plain, names=("$x_1", "毒 " * 20))
    drawn = draw_scores(nasty, "$\\alpha & 日本", tmp_path, "test")
    names = ["test-curves.png", "test-curves.svg", "test-confusion.png", "test-confusion.svg"]
    assert [path.name for path in drawn] == names
    assert all(drawn.values())


def with_files(folder: Path, run: FinetunedRun) -> FinetunedRun:
    """Write the targets, the predictions of two seeds and a calibration to the directory of a run."""
    folder.mkdir()
    split = run.results.scored_split
    output = ConformalResiduals(residuals=((0.25,) * 20,)) if run.results.loss == "regression" else None
    write_json(folder / CALIBRATION_FILE, Calibration(outputs=(output,)))
    rows: Any = {split: np.arange(8)}
    parts: Any = {"valid": PartRows(np.array([90]), np.zeros((1, 1)))}
    parts[split] = PartRows(rows[split], np.arange(8.0)[:, None] % 2)
    write_rows(folder, run.results.loss, ["active"], {0: parts})
    for seed in (1, 2):
        cell = folder / f"cells/single/split-0/seed-{seed}"
        cell.mkdir(parents=True)
        write_predictions(cell, ["active"], {split: np.arange(8)[:, None] * seed % 5 / 5}, rows)
    return replace(run, run_dir=folder)


@pytest.mark.usefixtures("blank_figures")
def test_figures_go_into_each_run_or_named_by_run_into_one_folder(tmp_path):
    runs = [with_files(tmp_path / name, scored(f"x/{name}", "csv", {"roc_auc": [0.5, 0.5]})) for name in "ab"]
    kinds = [f"{kind}.{suffix}" for kind in ("curves", "confusion", "calibration") for suffix in ("png", "svg")]
    assert draw_runs(runs[:1], None) == [tmp_path / "a/report" / f"test-{kind}" for kind in kinds]
    # `x/a` and `x-a` would have the same files
    alike = draw_runs([runs[0], replace(runs[1], name="x-a")], tmp_path / "alike")
    assert [path.name for path in alike] == [f"{name}-test-{kind}" for name in ("x-a", "x-a-2") for kind in kinds]


@pytest.mark.usefixtures("blank_figures")
def test_a_damaged_run_stops_the_work_before_a_figure_of_another_is_written(tmp_path):
    runs = [with_files(tmp_path / name, scored(name, "csv", {"roc_auc": [0.5, 0.5]})) for name in "ab"]
    cell = tmp_path / "b/cells/single/split-0/seed-2"
    write_predictions(cell, ["active"], {"test": np.array([[0.5]])}, {"test": np.array([7])})
    with pytest.raises(CheckpointError, match="its rows are not those of the split"):
        draw_runs(runs, None)
    (cell / PREDICTIONS_FILE).unlink()
    with pytest.raises(CheckpointError, match=PREDICTIONS_FILE):
        draw_runs(runs, None)
    assert not (tmp_path / "a/report").exists()


def test_values_have_intervals_and_spans_no_figure(figures, tmp_path):
    """Targets are 0 and 1 in turn, the seeds' mean predictions multiples of 0.1: five of eight are within 0.25."""
    run = with_files(tmp_path / "run", scored("v", "csv", {"rmse": [0.5, 0.5]}, loss="regression"))
    span = scored("s", "squad/v2", {"f1": [0.5]}, loss="span")
    draw_runs([run, span], None)
    assert list(figures) == ["test-predicted-against-true"]
    (axes,) = figures["test-predicted-against-true"].axes
    means = [np.mean([i % 5, 2 * i % 5]) / 5 for i in range(8)]
    inside = np.array([abs(mean - i % 2) <= 0.25 for i, mean in enumerate(means)])
    assert axes.texts[0].get_text() == f"{100 * inside.mean():.1f} % of 8 inside"
    points = np.array([[mean, i % 2] for i, mean in enumerate(means)])
    bars, drawn = axes.collections
    np.testing.assert_allclose(drawn.get_offsets(), points)
    colours = [RUN_COLOURS[0] if is_inside else RUN_COLOURS[1] for is_inside in inside]
    np.testing.assert_allclose(drawn.get_facecolors()[:, :3], to_rgba_array(colours)[:, :3])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")
    # a line of each row reaches 0.25 below and above the diagonal
    ends = np.array([path.vertices for path in bars.get_paths()])
    np.testing.assert_allclose(ends, [[[mean, mean - 0.25], [mean, mean + 0.25]] for mean in means])


def test_reliability_is_drawn_before_and_after_calibration(figures, tmp_path):
    """Points are those of scikit-learn; thirteen labels share one panel, and of two classes the second is drawn."""
    rng = np.random.default_rng(0)
    curve = PlattCurve(num_rows=9, least=0.0, most=1.0, slope=0.5, intercept=0.0)
    for loss, names in (("binary", ("a", "b")), ("binary", tuple("abcdefghijklm")), ("classes", ("no", "yes"))):
        targets = rng.integers(2, size=(60, 1 if loss == "classes" else len(names))).astype(float)
        mean = rng.dirichlet(np.ones(len(names)), 60) if loss == "classes" else rng.random((60, len(names)))
        rows = predicted_rows(loss, names, mean[None], targets, Calibration(outputs=(curve,) * len(names)))
        draw_calibration(rows, "t", tmp_path, f"{loss}-{len(names)}")
    panels = {stem: [axes.get_title(loc="left") for axes in figure.axes] for stem, figure in figures.items()}
    assert panels == {
        "binary-2-calibration": ["a", "b"], "binary-13-calibration": ["13 labels together"],
        "classes-2-calibration": ["yes"],
    }  # fmt: skip
    _, before, after = figures["classes-2-calibration"].axes[0].lines
    assert figures["classes-2-calibration"].axes[0].get_xlabel() == "mean probability"
    np.testing.assert_allclose(before.get_xydata(), curve_of(mean[:, 1], targets[:, 0]))
    odds = (mean[:, 1] / mean[:, 0]) ** 0.5  # a slope of 1/2 is the root of the odds
    np.testing.assert_allclose(after.get_xydata(), curve_of(odds / (1 + odds), targets[:, 0]))
    errors = [calibration_error(probabilities, targets[:, 0]) for probabilities in (mean[:, 1], odds / (1 + odds))]
    assert [line.get_label() for line in (before, after)] == [
        f"as predicted  {errors[0]:.3f}",
        f"calibrated  {errors[1]:.3f}",
    ]
