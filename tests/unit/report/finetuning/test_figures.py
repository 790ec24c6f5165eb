"""What the figures draw is what scikit-learn works out."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_rgba_array
from sklearn import metrics

from exlm_cli.errors import CheckpointError
from exlm_cli.finetune.evaluation.calibration import (
    Calibration,
    ConformalResiduals,
    PlattCurve,
    calibration_error,
)
from exlm_cli.finetune.predictions import PREDICTIONS_FILE
from exlm_cli.finetune.results import FinetunedRun, read_results
from exlm_cli.report.finetuning import figures as figures_module
from exlm_cli.report.finetuning.figures import draw_calibration, draw_errors, draw_runs, draw_scores, matrices_of
from exlm_cli.report.style import RUN_COLOURS
from tests.unit.report.results import predicted_rows, scored


def predictions_of(num_outputs, *, is_multi_class=False, num_seeds=3):
    rng = np.random.default_rng(0)
    probabilities = rng.random((num_seeds, 60, num_outputs)).round(2)  # with ties
    if is_multi_class:
        probabilities /= probabilities.sum(-1, keepdims=True)
        targets = rng.integers(num_outputs, size=(60, 1)).astype(float)
    else:
        targets = rng.integers(2, size=(60, num_outputs)).astype(float)
    targets[::7] = np.nan
    names = tuple(f"name {i}" for i in range(num_outputs))
    loss = "classes" if is_multi_class else "binary"
    return predicted_rows(loss, names, probabilities, targets, Calibration(outputs=(None,) * num_outputs))


def known(predictions, index=0):
    """Return (n,) targets of a column and (K, n, C) probabilities of the rows where it is known."""
    is_known = ~np.isnan(predictions.targets[:, index])
    return predictions.targets[is_known, index].astype(int), predictions.by_seed[:, is_known]


def labels_of(axes):
    return axes.get_legend_handles_labels()[1]


@pytest.mark.parametrize(("num_outputs", "num_seeds"), [(1, 3), (3, 1), (9, 3)])
def test_curves_have_the_areas_of_scikit_learn_over_known_rows(figures, tmp_path, num_outputs, num_seeds):
    """Of the seeds' mean prediction, in brackets the mean of single seeds; of many labels their mean curve alone."""
    predictions = predictions_of(num_outputs, num_seeds=num_seeds)
    draw_scores(predictions, "a title", tmp_path, "s")
    for axes, score in zip(
        figures["s-curves"].axes, (metrics.roc_auc_score, metrics.average_precision_score), strict=True
    ):
        expected, areas = [], []
        for index in range(num_outputs):
            truth, probabilities = known(predictions, index)
            areas.append(score(truth, probabilities.mean(0)[:, index]))
            of_seeds = np.mean([score(truth, seed[:, index]) for seed in probabilities])
            expected.append(f"name {index}  {areas[-1]:.3f}" + (f" ({of_seeds:.3f})" if num_seeds > 1 else ""))
        is_many = num_outputs > 8
        assert labels_of(axes) == ([f"mean of 9 labels  {np.mean(areas):.3f}"] if is_many else expected)
        if is_many and score is metrics.roc_auc_score:
            ((line,), _) = axes.get_legend_handles_labels()
            assert metrics.auc(*line.get_data()) == pytest.approx(np.mean(areas), abs=5e-3)  # on a grid of 401 points
    # whatever its recall, a random guess is right as often as there are positives
    levels = [[*line.get_ydata()] for line in figures["s-curves"].axes[1].lines if line.get_linestyle() == ":"]
    positives = [[known(predictions, index)[0].mean()] * 2 for index in range(num_outputs if not is_many else 0)]
    np.testing.assert_allclose(levels, positives)


@pytest.mark.parametrize("is_multi_class", [True, False])
def test_confusion_matrices_are_those_of_scikit_learn(is_multi_class):
    predictions = predictions_of(3, is_multi_class=is_multi_class)
    found = matrices_of(predictions)
    assert len(found) == (1 if is_multi_class else 3)
    for index, (_, _, counts) in enumerate(found):
        truth, probabilities = known(predictions, index)
        mean = probabilities.mean(0)
        wanted = metrics.confusion_matrix(truth, mean.argmax(1) if is_multi_class else mean[:, index] >= 0.5)
        np.testing.assert_array_equal(counts, wanted)


def test_the_true_class_of_a_matrix_is_the_row_and_the_predicted_one_the_column(figures, tmp_path):
    predictions = predictions_of(3, is_multi_class=True, num_seeds=1)
    draw_scores(predictions, "a title", tmp_path, "s")
    ((_, _, counts),) = matrices_of(predictions)
    (axes,) = figures["s-confusion"].axes
    assert [(text.get_position(), int(text.get_text().partition("\n")[0])) for text in axes.texts] == [
        ((x, y), counts[y, x]) for y, x in np.ndindex(3, 3)
    ]
    np.testing.assert_allclose(axes.images[0].get_array(), counts / counts.sum(1, keepdims=True))
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.yaxis_inverted()) == ("predicted", "true", True)
    of_one = replace(predictions, targets=np.zeros((60, 1)))
    draw_scores(of_one, "a title", tmp_path, "of-one-class")
    assert {*figures} == {"s-curves", "s-confusion", "of-one-class-confusion"}, "one class has no curve"


def test_figures_go_into_each_run_or_named_by_run_into_one_folder_and_a_damaged_run_stops_the_work(
    molecules, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        figures_module, "draw_run", lambda run, rows, folder, stem: {folder / f"{stem}-curves.svg": b""}
    )
    folders = [shutil.copytree(molecules, tmp_path / name) for name in "ab"]
    runs = [FinetunedRun(f"x/{folder.name}", folder, read_results(folder)) for folder in folders]
    assert draw_runs(runs, None) == [folder / "report/test-curves.svg" for folder in folders]
    # `x/a` and `x-a` would have the same files
    alike = draw_runs([runs[0], replace(runs[1], name="x-a")], tmp_path / "alike")
    assert [path.name for path in alike] == ["x-a-test-curves.svg", "x-a-2-test-curves.svg"]
    next(folders[1].rglob(PREDICTIONS_FILE)).unlink()
    with pytest.raises(CheckpointError, match=PREDICTIONS_FILE):
        draw_runs(runs, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert draw_runs([scored("s", "squad/v2", {"f1": [0.5]}, loss="span")], None) == []


def test_values_have_intervals_and_those_outside_have_another_colour(figures, tmp_path):
    """Targets are 0 and 1 in turn, the seeds' mean predictions multiples of 0.1: five of eight are within 0.25."""
    seeds = np.array([[i * seed % 5 / 5 for i in range(8)] for seed in (1, 2)])[..., None]
    calibration = Calibration(outputs=(ConformalResiduals(residuals=((0.25,) * 20,)),))
    rows = predicted_rows("regression", ("y",), seeds, np.arange(8.0)[:, None] % 2, calibration)
    draw_calibration(rows, "t", tmp_path, "test")
    (axes,) = figures["test-predicted-against-true"].axes
    means = [np.mean([i % 5, 2 * i % 5]) / 5 for i in range(8)]
    inside = np.array([abs(mean - i % 2) <= 0.25 for i, mean in enumerate(means)])
    assert axes.texts[0].get_text() == f"{100 * inside.mean():.1f} % of 8 inside"
    bars, drawn = axes.collections
    np.testing.assert_allclose(drawn.get_offsets(), [[mean, i % 2] for i, mean in enumerate(means)])
    colours = to_rgba_array(np.where(inside, RUN_COLOURS[0], RUN_COLOURS[1]))
    np.testing.assert_allclose(drawn.get_facecolors()[:, :3], colours[:, :3])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")
    ends = np.array([path.vertices for path in bars.get_paths()])
    np.testing.assert_allclose(ends[..., 1], [[mean - 0.25, mean + 0.25] for mean in means])


def test_reliability_is_drawn_before_and_after_calibration(figures, tmp_path):
    """Thirteen labels share one panel, and of two classes the second is drawn."""
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
    odds = (mean[:, 1] / mean[:, 0]) ** 0.5  # a slope of 1/2 is the root of the odds
    errors = [calibration_error(probabilities, targets[:, 0]) for probabilities in (mean[:, 1], odds / (1 + odds))]
    (axes,) = figures["classes-2-calibration"].axes
    names = ("as predicted", "calibrated")
    assert labels_of(axes)[-2:] == [f"{name}  {error:.3f}" for name, error in zip(names, errors, strict=True)]


@pytest.mark.parametrize(("num_rows", "num_lines"), [(9, 1), (10, 2)])
def test_the_mean_of_fewer_than_ten_errors_has_no_interval(figures, tmp_path, num_rows, num_lines):
    """A line for the mean of the only bin, and one for its interval."""
    draw_errors(np.ones((num_rows, 1)), np.ones(num_rows), tmp_path, "error", "test")
    (axes,) = figures["error-by-distance"].axes
    assert len(axes.lines) == num_lines
