"""Pictures of a run: labels, errors by distance to training rows, and predictions, these by scikit-learn's displays.

Axes: K seeds, N rows, C outputs. The bold curve is that of the seeds' mean probability, the faint ones are the seeds.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from exlm_cli.files import make_folder, write_together
from exlm_cli.finetune.evaluation.calibration import (
    NUM_BINS,
    PredictedRows,
    calibration_error,
    known_rows,
    read_scored_split,
)
from exlm_cli.finetune.evaluation.verdict import describe_predictor
from exlm_cli.finetune.predictions import read_rows
from exlm_cli.finetune.results import FinetunedRun
from exlm_cli.format import format_count, format_number_of, format_percent, number_repeated, shorten
from exlm_cli.report import style
from exlm_cli.tasks.base import FloatArray, Split

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Question = tuple[str, NDArray[np.bool_], Floats]

_PANEL_INCHES = 3.9
_MAX_COLOURED = 8
"""With more labels than this, the legend has their mean curve only, and their own curves are grey."""
_MAX_CHARACTERS = 26
_MAX_MATRICES = 12
_MAX_CLASSES = 20
_MANY_POINTS = 2000
"""More points than this are drawn smaller, and as a bitmap inside the SVG."""
_MAX_COLUMNS = 6
_MAX_BARS = 24
_MAX_BINS = 8
_MIN_IN_BIN = 10
_NUM_BARS = 30
_LOOKS = {"train": (style.SPINE_INK, 1.0), "valid": (style.RUN_COLOURS[2], 0.9), "test": (style.RUN_COLOURS[0], 0.9)}
_GRID = np.linspace(0.0, 1.0, 401)
_GUESS: dict[str, Any] = {"linestyle": ":", "color": style.FAINT_INK, "linewidth": 0.9}


def questions_of(rows: PredictedRows) -> list[Question]:
    """Return name, (n,) truth and (K, n) scores of each yes-or-no question whose truth has both answers.

    With two classes the question is the second one; with more, each against the rest; with labels, each label over the
    rows where it is known.
    """
    is_two = rows.loss == "classes" and len(rows.names) == 2
    found = []
    for index, name in enumerate(rows.names):
        is_known, truth_n = known_rows(rows.loss, rows.targets, index)
        if len(np.unique(truth_n)) == 2 and not (is_two and index == 0):
            found.append((name, truth_n == 1, rows.by_seed[:, is_known, index]))
    return found


def matrices_of(rows: PredictedRows) -> list[tuple[str, tuple[str, ...], NDArray[np.int64]]]:
    """Return name, C classes and (C, C) counts by truth and prediction: of all classes, or of each label.

    The prediction is the class that the seeds' mean finds likeliest, or 1 from a mean probability of 0.5 on.
    """
    is_classes = rows.loss == "classes"
    guessed = rows.mean.argmax(axis=1)[:, None] if is_classes else (rows.mean >= 0.5).astype(np.int64)
    named = [("", rows.names)] if is_classes else [(name, ("0", "1")) for name in rows.names]
    found = []
    for index, (name, classes) in enumerate(named):
        is_known = ~np.isnan(rows.targets[:, index])
        truth = rows.targets[is_known, index].astype(np.int64)
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
    predictions = [read_scored_split(run.run_dir, run.results) for run in drawn]
    names = number_repeated([run.name.replace("/", "-") for run in drawn])
    files: dict[Path, bytes] = {}
    for run, name, rows in zip(drawn, names, predictions, strict=True):
        split = run.results.scored_split
        files |= draw_run(run, rows, out or run.run_dir / "report", split if out is None else f"{name}-{split}")
    for folder in {path.parent for path in files}:
        make_folder(folder)
    write_together(files)
    return list(files)


def draw_run(run: FinetunedRun, rows: PredictedRows, folder: Path, stem: str) -> dict[Path, bytes]:
    """Draw the calibration of a run on its scored rows and, of a classifier, curves and confusion matrices."""
    split, predictors = run.results.scored_split, run.results.predictors
    count, seeds = format_count(len(rows.targets)), format_number_of(len(rows.by_seed), "seed")
    title = f"{run.name}: {run.results.task}, {split}, {run.results.split_words}, {count} rows, {seeds}"
    if predictors is not None:
        title += f", {describe_predictor(run.results.predictor, predictors)}"
    files = {} if rows.loss == "regression" else draw_scores(rows, title, folder, stem)
    is_own = "; fitted on the same rows" if split == "valid" else ""
    return files | draw_calibration(rows, f"{title}{is_own}", folder, stem)


def draw_scores(rows: PredictedRows, title: str, folder: Path, stem: str) -> dict[Path, bytes]:
    """Draw `<stem>-curves` and `<stem>-confusion`; the same predictions give the same bytes.

    There are no curves where no label has both classes, and no matrices where there are too many to read.

    Returns:
        Content of PNGs and SVGs in `folder`, by path.
    """
    files: dict[Path, bytes] = {}
    with style.drawing():
        for name, figure in (("curves", _draw_curves(rows, title)), ("confusion", _draw_confusion(rows, title))):
            if figure is not None:
                files |= style.figure_files(figure, folder, f"{stem}-{name}")
    return files


def draw_calibration(rows: PredictedRows, title: str, folder: Path, stem: str) -> dict[Path, bytes]:
    """Draw the reliability of probabilities before and after calibration, or values against the truth.

    The files are `<stem>-calibration` or, for values, `<stem>-predicted-against-true`. Each label or column has a
    panel. Of two classes, the second has one; of more, each class has one, against the rest. More than twelve labels or
    classes share one panel, which leaves out uncalibrated ones if any is calibrated. Of more than twelve columns of
    values, the first twelve are drawn.

    Returns:
        Content of a PNG and an SVG in `folder`, by path; nothing where no row has a label.
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
        return {}
    kind, captions = "calibration", [f"each point holds equally many rows; at most {NUM_BINS} points"]
    inches = (3.2, 3.3)
    if rows.loss == "regression":
        has_intervals = any(half_N is not None for *_, half_N in panels)
        lines = f"lines: {100 * rows.level:g} % intervals; orange: values outside them"
        kind, captions = "predicted-against-true", [lines] if has_intervals else []
        inches = (6.4, 5.6) if len(panels) == 1 else (4.0, 3.9)
    with style.drawing():
        figure, grid = style.new_panels(len(panels), 3, inches, title, captions)
        for axes, (name, predicted_N, target_N, calibrated_N) in zip(grid, panels, strict=True):
            if rows.loss == "regression":
                _draw_values(axes, name, predicted_N, target_N, calibrated_N)
            else:
                _draw_reliability(axes, name, target_N, {"as predicted": predicted_N, "calibrated": calibrated_N})
        return style.figure_files(figure, folder, f"{stem}-{kind}")


def _draw_reliability(axes: "Axes", name: str, target_N: Floats, probabilities: dict[str, Floats | None]) -> None:
    from sklearn.calibration import CalibrationDisplay

    looks = (
        {"color": style.RUN_COLOURS[1], "marker": "s", "linestyle": "--"},
        {"color": style.RUN_COLOURS[0], "marker": "o"},
    )
    for (label, probabilities_N), look in zip(probabilities.items(), looks, strict=True):
        if probabilities_N is not None:
            CalibrationDisplay.from_predictions(
                target_N, probabilities_N, n_bins=NUM_BINS, strategy="quantile", ax=axes, markersize=3.5, linewidth=1.3,
                name=f"{label}  {calibration_error(probabilities_N, target_N):.3f}", **look,
            )  # fmt: skip
    style.set_up_axes(axes, "mean probability", "share of positives", shorten(name, _MAX_CHARACTERS))
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    _place_legend(axes, "calibration error", "upper left")


def _draw_values(axes: "Axes", name: str, predicted_N: Floats, target_N: Floats, half_N: Floats | None) -> None:
    """Draw true values over predicted ones, with a line for the interval of each row, `half_N` on either side."""
    style.set_up_axes(axes, "predicted", "true", shorten(name, _MAX_CHARACTERS))
    axes.set_axisbelow(True)
    is_outside_N = np.abs(predicted_N - target_N) > (math.inf if half_N is None else half_N)
    ends = np.array([min(predicted_N.min(), target_N.min()), max(predicted_N.max(), target_N.max())])
    axes.plot(ends, ends, **_GUESS)
    is_many = len(target_N) > _MANY_POINTS
    if half_N is not None:
        axes.vlines(
            predicted_N, predicted_N - half_N, predicted_N + half_N, color=style.fade(style.RUN_COLOURS[0], 0.18),
            linewidth=0.4 if is_many else 1.2, rasterized=is_many, zorder=0.8,  # above the grid, below the points
        )  # fmt: skip
        inside = f"{format_percent(1 - float(is_outside_N.mean()))} of {format_count(len(target_N))} inside"
        axes.text(0.03, 0.97, inside, transform=axes.transAxes, va="top", fontsize=7.5, color=style.INK)
    colours = np.where(is_outside_N, style.RUN_COLOURS[1], style.RUN_COLOURS[0])
    size = 3.0 if is_many else 10.0
    axes.scatter(predicted_N, target_N, c=colours, s=size, alpha=0.6, linewidths=0, rasterized=is_many)


def _draw_curves(rows: PredictedRows, title: str) -> "Figure | None":
    from sklearn.metrics import PrecisionRecallDisplay, RocCurveDisplay

    questions = questions_of(rows)
    if not questions:
        return None
    captions = ["dotted: a random guess"]
    if len(questions) > _MAX_COLOURED:
        captions.insert(0, "grey: each label, for the seeds' mean prediction; bold: mean of the labels")
    elif len(rows.by_seed) > 1:
        captions.insert(0, "bold: the seeds' mean prediction; faint: single seeds, in brackets the mean of their areas")
    figure, (left, right) = style.new_panels(2, 2, (_PANEL_INCHES, _PANEL_INCHES + 0.15), title, captions)
    for axes, display in ((left, RocCurveDisplay), (right, PrecisionRecallDisplay)):
        _draw_panel(axes, questions, display)
    left.plot([0, 1], [0, 1], **_GUESS)
    style.set_up_axes(left, "false positive rate", "true positive rate", "ROC")
    _place_legend(left, "area under the curve", "lower right")
    style.set_up_axes(right, "recall", "precision", "Precision and recall")
    _place_legend(right, "average precision", "lower left")
    return figure


def _draw_panel(axes: "Axes", questions: Sequence[Question], display: Any) -> None:
    """Draw one curve for each question, and their mean where there are many."""
    is_many = len(questions) > _MAX_COLOURED
    shown = []
    for index, (name, truth, scores_KN) in enumerate(questions):
        colour = style.SPINE_INK if is_many else style.RUN_COLOURS[index % len(style.RUN_COLOURS)]
        faint = {"color": colour, "linewidth": 0.7, "alpha": 0.35, "label": None}
        of_seeds = []
        if len(scores_KN) > 1 and not is_many:
            of_seeds = [display.from_predictions(truth, seed, ax=axes, curve_kwargs=faint) for seed in scores_KN]
        bold = {"color": colour, "linewidth": 0.8 if is_many else 1.7, "alpha": 0.6 if is_many else 1.0, "label": None}
        of_mean = display.from_predictions(
            truth, scores_KN.mean(axis=0), ax=axes, curve_kwargs=bold,
            plot_chance_level=not is_many and display.__name__.startswith("Precision"),
            chance_level_kw=_GUESS | {"label": None, "color": style.FAINT_INK if len(questions) == 1 else colour},
        )  # fmt: skip
        shown.append(of_mean)
        if not is_many:
            mean = f" ({np.mean([_area(one) for one in of_seeds]):.3f})" if of_seeds else ""
            label = f"{shorten(name, _MAX_CHARACTERS)}  {_area(of_mean):.3f}{mean}"
            of_mean.line_.set_label(style.legend_label(label))
    if is_many:
        label = f"mean of {len(questions)} labels  {np.mean([_area(one) for one in shown]):.3f}"
        mean_G = np.mean([_on_grid(one) for one in shown], axis=0)
        axes.plot(_GRID, mean_G, color=style.RUN_COLOURS[0], linewidth=2.0, label=label)


def _area(display: Any) -> float:
    return float(display.roc_auc if hasattr(display, "roc_auc") else display.average_precision)


def _on_grid(display: Any) -> Floats:
    """Return the height of a curve over `_GRID`."""
    height: Floats
    if hasattr(display, "fpr"):
        height = np.interp(_GRID, display.fpr, display.tpr)
    else:  # precision is constant from one threshold to the next, and recall falls
        height = display.precision[::-1][np.searchsorted(display.recall[::-1], _GRID)]
    return height


def _place_legend(axes: "Axes", title: str, place: Literal["upper left", "lower left", "lower right"]) -> None:
    axes.legend(
        title=title, loc=place, fontsize=7.5, title_fontsize=7.5, frameon=True, framealpha=0.85, edgecolor="none"
    )


def _draw_confusion(rows: PredictedRows, title: str) -> "Figure | None":
    matrices = matrices_of(rows)
    num_classes = len(matrices[0][1])
    if len(matrices) > _MAX_MATRICES or num_classes > _MAX_CLASSES:
        return None
    side = max(1.9, 0.5 * num_classes + 1.2) if len(matrices) > 1 else max(3.4, 0.6 * num_classes + 1.6)
    decided = "the likeliest class" if rows.loss == "classes" else "1 where the probability is at least 0.5"
    whose = "the seeds' mean prediction, " if len(rows.by_seed) > 1 else ""
    caption = f"{whose}{decided}; percentages are shares of a row"
    figure, grid = style.new_panels(len(matrices), 4, (side, side), title, [caption])
    for axes, (name, classes, counts) in zip(grid, matrices, strict=True):
        _draw_matrix(axes, name, classes, counts)
    return figure


def _draw_matrix(axes: "Axes", name: str, classes: Sequence[str], counts: NDArray[np.int64]) -> None:
    """Draw counts on cells coloured by their share of the row."""
    from sklearn.metrics import ConfusionMatrixDisplay

    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    labels = [shorten(label, _MAX_CHARACTERS) for label in classes]
    shown = ConfusionMatrixDisplay(shares, display_labels=labels)
    shown.plot(ax=axes, cmap="Blues", colorbar=False, im_kw={"vmin": 0, "vmax": 1}, text_kw={"fontsize": 8})
    for cell, text in np.ndenumerate(shown.text_):
        text.set_text(f"{format_count(int(counts[cell]))}\n{format_percent(shares[cell], decimals=0)}")
    if max(map(len, labels)) > 4:
        axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right", rotation_mode="anchor")
    axes.set(xlabel="predicted", ylabel="true")
    axes.set_title(shorten(name, _MAX_CHARACTERS))


def draw_labels(run: FinetunedRun, folder: Path) -> dict[Path, bytes]:
    """Draw `labels`: histograms of values, or the shares of classes or of positives, of each split.

    Returns:
        Content of a PNG and an SVG in `folder`, by path.

    Raises:
        CheckpointError: The targets of a split are missing or altered.
    """
    results = run.results
    rows = read_rows(run.run_dir, results.loss, results.output_names)[results.split_seeds[0]]
    targets = {split: of_split.targets for split, of_split in rows.items()}
    own = results.of_splits[0].split_words
    own += f", the first of {len(results.split_seeds)}" if len(results.split_seeds) > 1 else ""
    sizes = ", ".join(f"{split} {format_count(len(of_split))}" for split, of_split in targets.items())
    captions = [f"{own}: {sizes}"]
    with style.drawing():
        if results.loss == "regression":
            names = results.output_names[:_MAX_COLUMNS]
            if len(results.output_names) > len(names):
                captions.append(f"the first {len(names)} of {len(results.output_names)} columns")
            width = 6.4 if len(names) == 1 else 3.4
            figure, panels = style.new_panels(len(names), 3, (width, 2.7), captions=captions)
            for index, (axes, name) in enumerate(zip(panels, names, strict=True)):
                _draw_histogram(axes, name, {split: of_split[:, index] for split, of_split in targets.items()})
        else:
            shares = {
                split: _shares(of_split, results.loss, len(results.output_names)) for split, of_split in targets.items()
            }
            names = results.output_names[:_MAX_BARS]
            if len(results.output_names) > len(names):
                captions.append(f"the first {len(names)} of {len(results.output_names)}")
            figure, (axes,) = style.new_panels(1, 1, (6.4, 0.9 + 0.34 * len(names)), captions=captions)
            _draw_shares(axes, names, shares, "share of rows" if results.loss == "classes" else "share of positives")
        return style.figure_files(figure, folder, "labels")


def draw_errors(
    errors_NC: FloatArray, similarity_N: FloatArray | None, folder: Path, what: str, origin: str
) -> dict[Path, bytes]:
    """Draw `error-by-distance`: the error of each row over the similarity of the nearest training molecule, and means.

    Args:
        errors_NC: NaN where the truth is not known.
        similarity_N: To the nearest training molecule; None: not known.
        what: Name of the error, for the axis.
        origin: Part and split of the rows, in words.

    Returns:
        Content of a PNG and an SVG in `folder`, by path; nothing where no similarity or error is known.
    """
    if similarity_N is None:
        return {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice")
        error_N = np.nanmean(errors_NC, axis=1)
    is_known_N = ~np.isnan(error_N)
    error_N, similarity_N = error_N[is_known_N], similarity_N[is_known_N]
    if not len(error_N):
        return {}
    has_interval = len(error_N) >= _MIN_IN_BIN
    bars = "bars: mean of equally many rows" + (", and its 95 % interval" if has_interval else "")
    captions = [f"each point is a row of {origin}; {bars}"]
    with style.drawing():
        figure, (axes,) = style.new_panels(1, 1, (6.4, 3.4), captions=captions)
        style.set_up_axes(axes, "Tanimoto similarity of the nearest training molecule (right: far from all)", what)
        is_many = len(error_N) > _MANY_POINTS
        axes.scatter(
            similarity_N, error_N, s=3 if is_many else 9, color=style.RUN_COLOURS[0], alpha=0.35, linewidths=0,
            rasterized=is_many,
        )  # fmt: skip
        for part in _bins(similarity_N):
            mean, half = float(error_N[part].mean()), 1.96 * float(error_N[part].std()) / len(part) ** 0.5
            ends = float(similarity_N[part].max()), float(similarity_N[part].min())
            axes.plot(ends, (mean, mean), color=style.RUN_COLOURS[1], linewidth=2.2, solid_capstyle="butt")
            middle = sum(ends) / 2
            if has_interval:
                axes.plot((middle, middle), (mean - half, mean + half), color=style.RUN_COLOURS[1], linewidth=1.1)
        axes.set_xlim(1.02, max(0.0, float(similarity_N.min()) - 0.02))
        axes.set_ylim(bottom=0)
        return style.figure_files(figure, folder, "error-by-distance")


def _bins(similarity_N: FloatArray) -> list[FloatArray]:
    """Return the rows of each bin, those nearest to the training rows first."""
    num_bins = max(1, min(_MAX_BINS, len(similarity_N) // _MIN_IN_BIN))
    return np.array_split(np.argsort(-similarity_N, kind="stable"), num_bins)


def _draw_histogram(axes: "Axes", name: str, values: Mapping[str, FloatArray]) -> None:
    known = {split: column[~np.isnan(column)] for split, column in values.items()}
    together = np.concatenate(list(known.values()))
    style.set_up_axes(axes, shorten(name, _MAX_CHARACTERS), "share of rows")
    if not len(together):
        return
    edges = np.histogram_bin_edges(together, bins=_NUM_BARS)
    for split, column in known.items():
        if not len(column):
            continue
        share = np.histogram(column, edges)[0] / len(column)
        colour, strength = _LOOKS[split]
        if split == "train":
            axes.stairs(share, edges, fill=True, color=style.fade(colour, strength), label=split)
        else:
            axes.stairs(share, edges, color=colour, linewidth=1.5, label=split)
    style.add_legend(axes, *axes.get_legend_handles_labels())


def _draw_shares(axes: "Axes", names: tuple[str, ...], shares: Mapping[Split, FloatArray], what: str) -> None:
    style.set_up_axes(axes, what)
    place, height = np.arange(len(names)), 0.8 / len(shares)
    for number, (split, share) in enumerate(shares.items()):
        colour, _ = _LOOKS[split]
        axes.barh(
            place + (number - (len(shares) - 1) / 2) * height, share[: len(names)], height, color=colour, label=split
        )
    axes.set_yticks(place, [shorten(name, _MAX_CHARACTERS) for name in names])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
    # beside the bars, which may be as long as the axis
    style.add_legend(axes, *axes.get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.01, 0.5))


def _shares(targets_NC: FloatArray, loss: str, num_outputs: int) -> FloatArray:
    """Return the (C,) share of rows of each class, or of positives among the known targets of each label."""
    if loss == "classes":
        known_N = targets_NC[~np.isnan(targets_NC[:, 0]), 0].astype(np.int64)
        return np.bincount(known_N, minlength=num_outputs) / max(1, len(known_N))
    is_known_NC = ~np.isnan(targets_NC)
    return np.asarray(np.nan_to_num(targets_NC).sum(axis=0) / np.maximum(1, is_known_NC.sum(axis=0)))
