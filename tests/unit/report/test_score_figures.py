"""What the figures draw is what scikit-learn works out; the same data give the same files."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn import metrics

from exlm_cli.errors import CheckpointError
from exlm_cli.report import score_figures
from exlm_cli.report.score_figures import SplitPredictions, draw_runs, write_score_figures
from exlm_cli.report.scores import FinetunedRun
from exlm_cli.tasks.base import write_outputs
from tests.unit.report.scored_runs import scored


def predictions_of(
    num_outputs: int, *, is_multi_class: bool = False, num_seeds: int = 3, num_rows: int = 60
) -> SplitPredictions:
    rng = np.random.default_rng(0)
    probabilities = rng.random((num_seeds, num_rows, num_outputs)).round(2)  # with ties
    if is_multi_class:
        probabilities /= probabilities.sum(-1, keepdims=True)
        targets = rng.integers(num_outputs, size=(num_rows, 1)).astype(float)
    else:
        targets = rng.integers(2, size=(num_rows, num_outputs)).astype(float)
    targets[::7] = np.nan
    names = tuple(f"name {i}" for i in range(num_outputs))
    return SplitPredictions(probabilities, targets, names, is_multi_class, "a title")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that draws predictions and returns the figures by name, before they are files."""

    def draw(predictions: SplitPredictions) -> dict[str, Figure]:
        figures: dict[str, Figure] = {}

        def keep(figure: Figure, folder: Path, stem: str) -> list[Path]:
            figures[stem] = figure
            return []

        monkeypatch.setattr(score_figures, "write_figure", keep)
        write_score_figures(predictions, tmp_path, "s")
        return figures

    return draw


def bold_lines(axes: Axes) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    for line in axes.lines:
        if "  " in str(line.get_label()):
            x, y = (np.asarray(values, dtype=float) for values in line.get_data())
            yield str(line.get_label()), x, y


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_curves_have_the_areas_of_scikit_learn_in_the_legend_and_under_the_line(drawn: Any, num_outputs: int) -> None:
    predictions = predictions_of(num_outputs)
    roc, precision = drawn(predictions)["s-curves"].axes
    for axes, score in ((roc, metrics.roc_auc_score), (precision, metrics.average_precision_score)):
        found = list(bold_lines(axes))
        assert len(found) == num_outputs
        for index, (label, x, y) in enumerate(found):
            is_known = ~np.isnan(predictions.targets[:, index])
            truth = predictions.targets[is_known, index]
            of_mean = score(truth, predictions.probabilities.mean(0)[is_known, index])
            of_seeds = np.mean([score(truth, seed[is_known, index]) for seed in predictions.probabilities])
            assert label == f"name {index}  {of_mean:.3f} ({of_seeds:.3f})"
            # precision is a staircase over a recall that falls
            assert abs(np.trapezoid(y, x)) == pytest.approx(of_mean, abs=1e-9)


def test_of_two_classes_the_second_is_asked_of_more_each_against_the_rest(drawn: Any) -> None:
    two = predictions_of(2, is_multi_class=True)
    ((name, truth, scores),) = two.curves()
    is_known = ~np.isnan(two.targets[:, 0])
    assert name == "name 1"
    np.testing.assert_array_equal(truth, two.targets[is_known, 0] == 1)
    np.testing.assert_array_equal(scores, two.probabilities[:, is_known, 1])
    three = predictions_of(3, is_multi_class=True)
    assert [name for name, _, _ in three.curves()] == ["name 0", "name 1", "name 2"]
    labels = [label for label, _, _ in bold_lines(drawn(three)["s-curves"].axes[0])]
    assert [label[:6] for label in labels] == ["name 0", "name 1", "name 2"]


def test_of_many_labels_the_mean_curve_is_named(drawn: Any) -> None:
    predictions = predictions_of(12)
    ((label, x, y),) = bold_lines(drawn(predictions)["s-curves"].axes[0])
    areas = []
    for index in range(12):
        is_known = ~np.isnan(predictions.targets[:, index])
        mean = predictions.probabilities.mean(0)[is_known, index]
        areas.append(metrics.roc_auc_score(predictions.targets[is_known, index], mean))
    assert label == f"mean of 12 labels  {np.mean(areas):.3f}"
    assert np.trapezoid(y, x) == pytest.approx(np.mean(areas), abs=5e-3)  # on a grid of 401 points


def test_the_counts_of_a_confusion_matrix_are_those_of_scikit_learn(drawn: Any) -> None:
    predictions = predictions_of(3, is_multi_class=True)
    is_known = ~np.isnan(predictions.targets[:, 0])
    truth = predictions.targets[is_known, 0].astype(int)
    guessed = predictions.probabilities.mean(0)[is_known].argmax(1)
    wanted = metrics.confusion_matrix(truth, guessed)
    (axes,) = drawn(predictions)["s-confusion"].axes
    texts = [text.get_text() for text in axes.texts]
    assert [int(text.split("\n")[0]) for text in texts] == wanted.ravel().tolist()
    shares = wanted / wanted.sum(1, keepdims=True)
    assert [text.split("\n")[1] for text in texts] == [f"{100 * share:.0f} %" for share in shares.ravel()]


def test_labels_have_a_matrix_each_cut_at_a_half(drawn: Any) -> None:
    predictions = predictions_of(2)
    panels = drawn(predictions)["s-confusion"].axes
    for index, axes in enumerate(panels):
        is_known = ~np.isnan(predictions.targets[:, index])
        guessed = predictions.probabilities.mean(0)[is_known, index] >= 0.5
        wanted = metrics.confusion_matrix(predictions.targets[is_known, index], guessed)
        assert [int(text.get_text().split("\n")[0]) for text in axes.texts] == wanted.ravel().tolist()


def test_what_cannot_be_drawn_is_left_out(drawn: Any) -> None:
    one_class = predictions_of(1)
    one_class.targets[:] = 1.0
    assert set(drawn(one_class)) == {"s-confusion"}
    assert set(drawn(predictions_of(13))) == {"s-curves"}
    assert set(drawn(predictions_of(21, is_multi_class=True))) == {"s-curves"}
    single = drawn(predictions_of(1, num_seeds=1))["s-curves"]
    ((label, _, _),) = bold_lines(single.axes[0])
    assert "(" not in label


def test_files_are_the_same_for_the_same_data_and_names_are_no_commands_to_matplotlib(tmp_path: Path) -> None:
    plain = predictions_of(2, is_multi_class=True, num_rows=20)
    nasty = SplitPredictions(plain.probabilities, plain.targets, ("$x_1", "毒 " * 20), True, "$\\alpha & 日本")
    first = write_score_figures(nasty, tmp_path / "a", "test")
    assert [path.name for path in first] == [
        "test-curves.png", "test-curves.svg", "test-confusion.png", "test-confusion.svg",
    ]  # fmt: skip
    second = write_score_figures(nasty, tmp_path / "b", "test")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def with_files(folder: Path, run: FinetunedRun) -> FinetunedRun:
    """Write the targets and the predictions of two seeds to the directory of a run."""
    folder.mkdir()
    write_outputs(folder / "targets-test.csv", range(8), ["active"], [np.array([float(i % 2)]) for i in range(8)])
    for seed in (1, 2):
        cell = folder / f"cells/single/seed-{seed}"
        cell.mkdir(parents=True)
        values = [np.array([(i * seed % 5) / 5]) for i in range(8)]
        write_outputs(cell / "predictions-test.csv", range(8), ["active"], values)
    return replace(run, folder=folder)


def test_figures_go_into_each_run_or_named_by_run_into_one_folder(tmp_path: Path) -> None:
    runs = [with_files(tmp_path / name, scored(f"x/{name}", "csv", {"roc_auc": [0.5, 0.5]})) for name in "ab"]
    kinds = [f"{kind}.{suffix}" for kind in ("curves", "confusion") for suffix in ("png", "svg")]
    assert draw_runs(runs[:1], None) == [tmp_path / "a/report" / f"test-{kind}" for kind in kinds]
    files = draw_runs(runs, tmp_path / "all")
    assert [path.name for path in files] == [f"x-{name}-test-{kind}" for name in "ab" for kind in kinds]
    assert all(path.is_file() for path in files)


def test_a_damaged_run_stops_the_work_before_a_figure_of_another_is_written(tmp_path: Path) -> None:
    runs = [with_files(tmp_path / name, scored(name, "csv", {"roc_auc": [0.5, 0.5]})) for name in "ab"]
    broken = tmp_path / "b/cells/single/seed-2/predictions-test.csv"
    write_outputs(broken, [7], ["active"], [np.array([0.5])])
    with pytest.raises(CheckpointError, match="its rows are not those of"):
        draw_runs(runs, None)
    broken.unlink()
    with pytest.raises(CheckpointError, match="not readable as predictions"):
        draw_runs(runs, None)
    assert not (tmp_path / "a/report").exists()


def test_regression_and_spans_have_no_curves() -> None:
    runs = [
        scored("values", "csv", {"rmse": [0.5]}, loss="regression"),
        scored("answers", "squad/v2", {"f1": [0.5]}, loss="span"),
    ]
    assert draw_runs(runs, None) == []
