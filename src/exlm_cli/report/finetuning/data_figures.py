"""Pictures of a run's rows: the distribution of the labels in each split, and the error by distance to training rows.

Axes: N rows, C outputs.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exlm_cli.finetune.predictions import read_rows
from exlm_cli.finetune.results import FinetunedRun
from exlm_cli.format import format_count, shorten
from exlm_cli.report import style
from exlm_cli.report.finetuning.scored_rows import ShownRows
from exlm_cli.tasks.base import FloatArray, Split

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_COLUMNS = 6
_MAX_BARS = 24
_MAX_BINS = 8
_MIN_IN_BIN = 10
_NUM_BARS = 30
_MANY_POINTS = 2000
_MAX_CHARACTERS = 26
_LOOKS = {"train": (style.SPINE_INK, 1.0), "valid": (style.RUN_COLOURS[2], 0.9), "test": (style.RUN_COLOURS[0], 0.9)}


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
                _draw_values(axes, name, {split: of_split[:, index] for split, of_split in targets.items()})
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


def draw_errors(rows: ShownRows, folder: Path, what: str, origin: str) -> dict[Path, bytes]:
    """Draw `error-by-distance`: the error of each row over the similarity of the nearest training molecule, and means.

    Args:
        what: Name of the error, for the axis.
        origin: Part and split of the rows, in words.

    Returns:
        Content of a PNG and an SVG in `folder`, by path; nothing where no similarity or error is known.
    """
    if rows.predicted.similarity is None:
        return {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice")
        error_N = np.nanmean(rows.errors, axis=1)
    is_known_N = ~np.isnan(error_N)
    error_N, similarity_N = error_N[is_known_N], rows.predicted.similarity[is_known_N]
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


def _draw_values(axes: "Axes", name: str, values: Mapping[str, FloatArray]) -> None:
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
