"""Figures of a run's predictions: ROC and precision-recall curves, confusion matrices, calibration, intervals.

Axes: K seeds, N rows, C outputs. The bold curve is that of the seeds' mean probability, the faint ones are the seeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from exlm_cli.files import make_folder
from exlm_cli.finetune.calibration import NUM_BINS, CalibratedRows, calibration_error, read_scored_split, reliability
from exlm_cli.finetune.results import read_split_outputs
from exlm_cli.format import format_count, format_number_of, format_percent, number_repeated, shorten
from exlm_cli.report import style
from exlm_cli.report.scores import FinetunedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Question = tuple[str, NDArray[np.bool_], Floats]

_PANEL_INCHES = 3.9
_MAX_COLOURED = 8
"""With more labels than this, the legend has their mean curve only, and their own curves are grey."""
_MAX_LETTERS = 26
_MAX_MATRICES = 12
_MAX_CLASSES = 20
_MANY_POINTS = 2000
"""More points than this are drawn smaller, and as a bitmap inside the SVG."""
_GRID = np.linspace(0.0, 1.0, 401)


@dataclass(frozen=True)
class SplitPredictions:
    """Predictions of a run's seeds for the rows of one split.

    Attributes:
        probabilities: (K, N, C), of labels (`binary`) or classes.
        targets: (N, C) 0, 1 or NaN; (N, 1) class index for `classes`.
        names: C labels or classes.
        is_multi_class: Outputs are classes of which one is right.
    """

    probabilities: Floats
    targets: Floats
    names: tuple[str, ...]
    is_multi_class: bool
    title: str

    def curves(self) -> list[Question]:
        """Return name, (n,) truth and (K, n) scores of each yes-or-no question whose truth has both answers.

        With two classes the question is the second one; with more, each against the rest; with labels, each label over
        the rows where it is known.
        """
        found = []
        for index, name in enumerate(self.names):
            if self.is_multi_class and len(self.names) == 2 and index == 0:
                continue
            target = self.targets[:, 0 if self.is_multi_class else index]
            is_known = ~np.isnan(target)
            truth = target[is_known] == (index if self.is_multi_class else 1)
            if len(np.unique(truth)) == 2:
                found.append((name, truth, self.probabilities[:, is_known, index]))
        return found

    def matrices(self) -> list[tuple[str, tuple[str, ...], NDArray[np.int64]]]:
        """Return name, C classes and (C, C) counts by truth and prediction: of all classes, or of each label.

        The prediction is the class that the seeds' mean finds likeliest, or 1 from a mean probability of 0.5 on.
        """
        mean_NC = self.probabilities.mean(axis=0)
        guessed = mean_NC.argmax(axis=1)[:, None] if self.is_multi_class else (mean_NC >= 0.5).astype(np.int64)
        named = [("", self.names)] if self.is_multi_class else [(name, ("0", "1")) for name in self.names]
        found = []
        for index, (name, classes) in enumerate(named):
            is_known = ~np.isnan(self.targets[:, index])
            truth = self.targets[is_known, index].astype(np.int64)
            counts = np.zeros((len(classes), len(classes)), dtype=np.int64)
            np.add.at(counts, (truth, guessed[is_known, index]), 1)
            found.append((name, classes, counts))
        return found


def draw_runs(runs: Sequence[FinetunedRun], out: Path | None) -> list[Path]:
    """Draw the calibration of fine-tuned runs, and curves and confusion matrices of classifiers; spans have none.

    Args:
        out: Folder; None: `report/` of each run.

    Returns:
        The files.

    Raises:
        CheckpointError: Predictions are missing or altered, or a file cannot be written.
    """
    drawn = [run for run in runs if run.results.loss != "span"]
    # read all before the first file is written
    predictions = [(read_split_predictions(run), read_scored_split(run.folder, run.results)) for run in drawn]
    names = number_repeated([run.name.replace("/", "-") for run in drawn])
    files: list[Path] = []
    for run, name, (of_run, calibrated) in zip(drawn, names, predictions, strict=True):
        split, folder = run.results.scored_split, out or run.folder / "report"
        stem = split if out is None else f"{name}-{split}"
        if calibrated.loss != "regression":
            files += write_score_figures(of_run, folder, stem)
        is_own = "; fitted on the same rows" if split == "valid" else ""
        files += write_calibration_figure(calibrated, f"{of_run.title}{is_own}", folder, f"{stem}-calibration")
    return files


def read_split_predictions(run: FinetunedRun) -> SplitPredictions:
    """Read the predictions of every seed of the best grid point for the reported split.

    Raises:
        CheckpointError: A file is missing or altered.
    """
    results, split = run.results, run.results.scored_split
    rows, by_seed, targets = read_split_outputs(run.folder, results, split)
    seeds = format_number_of(len(by_seed), "seed")
    title = f"{run.name}: {results.task}, {split}, {format_count(len(rows))} rows, {seeds}"
    return SplitPredictions(by_seed, targets, results.output_names, results.loss == "classes", title)


def write_score_figures(predictions: SplitPredictions, folder: Path, stem: str) -> list[Path]:
    """Write `<stem>-curves` and `<stem>-confusion` as PNG and SVG; the same predictions give the same bytes.

    There are no curves where no label has both classes, and no matrices where there are too many to read.

    Raises:
        CheckpointError: A file cannot be written.
    """
    make_folder(folder)
    written = []
    with style.drawing():
        for name, figure in (("curves", _draw_curves(predictions)), ("confusion", _draw_confusion(predictions))):
            if figure is not None:
                written += style.write_figure(figure, folder, f"{stem}-{name}")
    return written


def write_calibration_figure(rows: CalibratedRows, title: str, folder: Path, stem: str) -> list[Path]:
    """Write `<stem>` as PNG and SVG: reliability of probabilities before and after calibration, or intervals of values.

    Each label or column has a panel. Of two classes, the second has one; of more, each class has one, against the rest.
    More than twelve labels or classes share one panel, which leaves out uncalibrated ones if any is calibrated. Of more
    than twelve columns of values, the first twelve are drawn.

    Raises:
        CheckpointError: A file cannot be written.
    """
    is_two = rows.loss == "classes" and len(rows.names) == 2
    chosen = [1] if is_two else list(range(len(rows.names)))
    found = [(rows.names[index], *rows.of_output(index)) for index in chosen]
    panels = [panel for panel in found if len(panel[2])]
    if rows.loss != "regression" and len(panels) > _MAX_MATRICES:
        joined = [panel for panel in panels if panel[3] is not None] or panels
        before_N, target_N = (np.concatenate([panel[i] for panel in joined]) for i in (1, 2))
        after = [panel[3] for panel in joined if panel[3] is not None]
        panels = [(f"{len(joined)} labels together", before_N, target_N, np.concatenate(after) if after else None)]
    panels = panels[:_MAX_MATRICES]
    if not panels:
        return []
    captions = [f"each point holds equally many rows; at most {NUM_BINS} points; dotted: perfect calibration"]
    if rows.loss == "regression":
        captions = [f"lines: {100 * rows.level:g} % intervals; orange: values outside them"]
    make_folder(folder)
    columns = min(3, len(panels))
    size = math.ceil(len(panels) / columns)
    with style.drawing():
        figure = style.new_figure(max(3.9, 3.2 * columns), 3.3 * size, title, captions)
        grid = figure.subplots(size, columns, squeeze=False).ravel()
        for axes, (name, predicted_N, target_N, calibrated_N) in zip(grid, panels, strict=False):
            if rows.loss == "regression":
                _draw_values(axes, name, predicted_N, target_N, calibrated_N)
            else:
                _draw_reliability(axes, name, predicted_N, target_N, calibrated_N)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        return style.write_figure(figure, folder, stem)


def _draw_reliability(axes: "Axes", name: str, before_N: Floats, target_N: Floats, after_N: Floats | None) -> None:
    style.set_up_axes(axes, "mean probability", "share of positives", shorten(name, _MAX_LETTERS), title_size=9)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    axes.plot([0, 1], [0, 1], linestyle=":", color=style.FAINT_INK, linewidth=0.9)
    lines = (("as predicted", before_N, 1, "s--"), ("calibrated", after_N, 0, "o-"))
    for name, probabilities_N, colour, look in lines:
        if probabilities_N is not None:
            mean_B, share_B, _ = reliability(probabilities_N, target_N).T
            label = f"{name}  {calibration_error(probabilities_N, target_N):.3f}"
            axes.plot(
                mean_B, share_B, look, color=style.RUN_COLOURS[colour], markersize=3.5, linewidth=1.3, label=label
            )
    _add_legend(axes, "calibration error", "upper left")


def _draw_values(axes: "Axes", name: str, predicted_N: Floats, target_N: Floats, half_N: Floats | None) -> None:
    style.set_up_axes(axes, "predicted", "true", shorten(name, _MAX_LETTERS), title_size=9)
    axes.set_axisbelow(True)
    ends = np.array([min(predicted_N.min(), target_N.min()), max(predicted_N.max(), target_N.max())])
    axes.plot(ends, ends, linestyle=":", color=style.FAINT_INK, linewidth=0.9)
    is_outside_N = np.abs(predicted_N - target_N) > (math.inf if half_N is None else half_N)
    if half_N is not None:
        is_many = len(target_N) > _MANY_POINTS
        axes.vlines(
            predicted_N, predicted_N - half_N, predicted_N + half_N, color=style.fade(style.RUN_COLOURS[0], 0.18),
            linewidth=0.4 if is_many else 1.2, rasterized=is_many,
        )  # fmt: skip
        inside = format_percent(1 - float(is_outside_N.mean()))
        axes.text(
            0.03, 0.97, f"{inside} of {format_count(len(target_N))} inside", transform=axes.transAxes, va="top",
            fontsize=7.5, color=style.INK,
        )  # fmt: skip
    size = 10.0 if len(target_N) <= _MANY_POINTS else 3.0
    for chosen_N, colour in ((~is_outside_N, style.RUN_COLOURS[0]), (is_outside_N, style.RUN_COLOURS[1])):
        axes.scatter(
            predicted_N[chosen_N], target_N[chosen_N], s=size, color=colour, alpha=0.6, linewidths=0,
            rasterized=len(target_N) > _MANY_POINTS,
        )  # fmt: skip


def _draw_curves(predictions: SplitPredictions) -> "Figure | None":
    questions = predictions.curves()
    if not questions:
        return None
    captions = ["dotted: a random guess"]
    if len(questions) > _MAX_COLOURED:
        captions.insert(0, "grey: each label, for the seeds' mean prediction; bold: mean of the labels")
    elif len(predictions.probabilities) > 1:
        captions.insert(0, "bold: the seeds' mean prediction; faint: single seeds, in brackets the mean of their areas")
    figure = style.new_figure(2 * _PANEL_INCHES, _PANEL_INCHES + 0.15, predictions.title, captions)
    left, right = figure.subplots(1, 2)
    style.set_up_axes(left, "false positive rate", "true positive rate", "ROC")
    _draw_panel(left, questions, is_roc=True)
    left.plot([0, 1], [0, 1], linestyle=":", color=style.FAINT_INK, linewidth=0.9)
    style.set_up_axes(right, "recall", "precision", "Precision and recall")
    _draw_panel(right, questions, is_roc=False)
    if len(questions) <= _MAX_COLOURED:
        for index, (_, truth, _) in enumerate(questions):
            colour = style.FAINT_INK if len(questions) == 1 else style.RUN_COLOURS[index % len(style.RUN_COLOURS)]
            right.axhline(float(truth.mean()), linestyle=":", color=colour, linewidth=0.9)
    return figure


def _draw_panel(axes: "Axes", questions: Sequence[Question], *, is_roc: bool) -> None:
    """Draw one curve for each question, and their mean where there are many."""
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    many = len(questions) > _MAX_COLOURED
    areas, on_grid = [], []
    for index, (name, truth, scores_KN) in enumerate(questions):
        colour = style.SPINE_INK if many else style.RUN_COLOURS[index % len(style.RUN_COLOURS)]
        of_seeds = [] if many else [_curve(truth, scores, is_roc=is_roc) for scores in scores_KN]
        for x, y, _ in of_seeds:
            axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.35)
        x, y, area = _curve(truth, scores_KN.mean(axis=0), is_roc=is_roc)
        areas.append(area)
        on_grid.append(np.interp(_GRID, x, y))
        (line,) = axes.plot(x, y, color=colour, linewidth=0.8 if many else 1.7, alpha=0.6 if many else 1.0)
        if not many:
            mean = math.fsum(area for _, _, area in of_seeds) / len(of_seeds)
            line.set_label(
                f"{shorten(name, _MAX_LETTERS)}  {area:.3f}" + (f" ({mean:.3f})" if len(of_seeds) > 1 else "")
            )
    if many:
        label = f"mean of {len(questions)} labels  {math.fsum(areas) / len(areas):.3f}"
        axes.plot(_GRID, np.mean(on_grid, axis=0), color=style.RUN_COLOURS[0], linewidth=2.0, label=label)
    title, place = ("area under the curve", "lower right") if is_roc else ("average precision", "lower left")
    _add_legend(axes, title, place)


def _add_legend(axes: "Axes", title: str, place: str) -> None:
    style.add_legend(
        axes, *axes.get_legend_handles_labels(), title=title, loc=place, fontsize=7.5, title_fontsize=7.5,
        frameon=True, framealpha=0.85, edgecolor="none",
    )  # fmt: skip


def _curve(truth: NDArray[np.bool_], scores: Floats, *, is_roc: bool) -> tuple[Floats, Floats, float]:
    """Return x, rising, and y of a curve, and the area under it."""
    from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score, roc_curve

    if is_roc:
        false_positives, true_positives, _ = roc_curve(truth, scores)
        return false_positives, true_positives, float(roc_auc_score(truth, scores))
    precision, recall, _ = precision_recall_curve(truth, scores)
    # precision is constant from one threshold to the next, and recall falls
    steps = np.repeat(recall, 2)[:0:-1], np.repeat(precision, 2)[-2::-1]
    return *steps, float(average_precision_score(truth, scores))


def _draw_confusion(predictions: SplitPredictions) -> "Figure | None":
    matrices = predictions.matrices()
    num_classes = len(matrices[0][1])
    if len(matrices) > _MAX_MATRICES or num_classes > _MAX_CLASSES:
        return None
    columns = min(4, len(matrices))
    rows = math.ceil(len(matrices) / columns)
    side = max(1.9, 0.5 * num_classes + 1.2) if len(matrices) > 1 else max(3.2, 0.6 * num_classes + 1.6)
    decided = "the likeliest class" if predictions.is_multi_class else "1 where the probability is at least 0.5"
    whose = "the seeds' mean prediction, " if len(predictions.probabilities) > 1 else ""
    captions = [f"{whose}{decided}; percentages are shares of a row"]
    figure = style.new_figure(max(3.4, columns * side), rows * side + 0.2, predictions.title, captions)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, classes, counts) in zip(grid, matrices, strict=False):
        _draw_matrix(axes, name, classes, counts)
    for axes in grid[len(matrices) :]:
        axes.set_visible(False)
    return figure


def _draw_matrix(axes: "Axes", name: str, classes: Sequence[str], counts: NDArray[np.int64]) -> None:
    """Draw counts on cells coloured by their share of the row."""
    from matplotlib.patches import Rectangle

    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    for row, column in np.ndindex(*counts.shape):
        colour = style.fade(style.RUN_COLOURS[0], 0.06 + 0.94 * float(shares[row, column]))
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
        text = f"{format_count(int(counts[row, column]))}\n{format_percent(shares[row, column], decimals=0)}"
        ink = style.ink_on(colour)
        axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=8, parse_math=False)
    labels = [shorten(label, _MAX_LETTERS) for label in classes]
    is_slanted = max(map(len, labels)) > 4
    slant: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if is_slanted else {}
    axes.set(xlim=(-0.5, len(classes) - 0.5), ylim=(len(classes) - 0.5, -0.5), aspect="equal")
    axes.set_xticks(range(len(classes)), labels, parse_math=False, **slant)
    axes.set_yticks(range(len(classes)), labels, parse_math=False)
    axes.tick_params(colors=style.FAINT_INK, length=0)
    axes.set_xlabel("predicted", color=style.FAINT_INK)
    axes.set_ylabel("true", color=style.FAINT_INK)
    axes.spines[:].set_visible(False)
    axes.set_title(shorten(name, _MAX_LETTERS), fontsize=9, color=style.INK, loc="left", parse_math=False)
