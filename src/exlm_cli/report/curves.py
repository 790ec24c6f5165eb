"""Training curves of one or several runs over each other (Figure 9), from the rows of `metrics.jsonl`."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_cli.errors import DataError
from exlm_cli.report.style import (
    FAINT_INK,
    INK,
    LINE_STYLES,
    RUN_COLOURS,
    add_legend,
    drawing,
    new_figure,
    quieten,
    write_figure,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

Row = Mapping[str, Any]
LineStyle = tuple[str, str]
"""Colour and line style."""

_MAX_SMOOTHED = 12
"""Number of rows on either side that go into a smoothed point; the rows themselves are drawn faintly behind it."""
_MIN_LOG_RATIO = 4.0
_MAX_COLUMNS = 4
_PANEL_INCHES = (3.5, 2.5)


@dataclass(frozen=True)
class _Panel:
    """One pair of axes.

    Attributes:
        title: Above the axes.
        kind: Kind of the rows that it shows: `train` or `valid`.
        keys: Values of a row that it shows, each with its name in the legend of the panel.
        is_log: Use a logarithmic axis where the values differ much.
        is_smoothed: Draw a running mean over the values.
        floor: Smallest possible value, where it has a meaning: the axis begins there.
        min_top: The axis reaches this value, so that a line on the floor looks like one.
    """

    title: str
    kind: str
    keys: tuple[tuple[str, str], ...]
    is_log: bool = False
    is_smoothed: bool = False
    floor: float | None = None
    min_top: float = 0.0


_PANELS = (
    _Panel("Training loss (nats per target)", "train", (("loss", ""),), is_smoothed=True),
    _Panel("Validation loss (nats per target)", "valid", (("loss", ""),)),
    _Panel("Perplexity", "valid", (("perplexity", ""),), is_log=True),
    _Panel("Mask accuracy", "valid", (("mask_accuracy", ""),)),
    _Panel(
        "Entropy of predictions (bits)",
        "valid",
        (("entropy_bits", "mean over states"), ("entropy_posterior_bits", "posterior-weighted")),
    ),
    _Panel("Effective states per mask", "valid", (("effective_states", ""),), floor=1.0, min_top=2.0),
    _Panel("Path entropy (bits per target)", "valid", (("path_entropy_bits", ""),), floor=0.0, min_top=0.5),
    _Panel(
        "Share of masks on the best path",
        "valid",
        (("masks_with_0_share", "yield no token"), ("masks_with_2plus_share", "yield 2 or more")),
        floor=0.0,
        min_top=0.1,
    ),
)


def plot_curves(
    rows_by_run: Mapping[str, Sequence[Row]], path: Path, styles: Mapping[str, LineStyle] | None = None
) -> list[Path]:
    """Write the curves as PNG and SVG; the same rows give the same bytes.

    Args:
        rows_by_run: Rows of `metrics.jsonl` by the name of the run in the legend.
        path: The two files without their suffixes; a `.png` or `.svg` at its end is replaced. Its folder exists.
        styles: Colour and line style of each run; None: one after the other from the palette.

    Returns:
        The two files.

    Raises:
        DataError: No row holds anything to draw.
        CheckpointError: The file system refuses.
    """
    panels = [panel for panel in _PANELS if any(_has_data(panel, rows) for rows in rows_by_run.values())]
    if not panels:
        raise DataError(
            f"nothing to draw: none of {len(rows_by_run)} runs has rows of training or validation",
            "let them run for `train.log_every_steps` steps",
        )
    if styles is None:
        # after the last colour they begin again with another line style
        looks = itertools.cycle((colour, line) for line in LINE_STYLES for colour in RUN_COLOURS)
        styles = dict(zip(rows_by_run, looks, strict=False))
    num_rows = math.ceil(len(panels) / _MAX_COLUMNS)
    num_columns = math.ceil(len(panels) / num_rows)
    legend_inches = 0.2 + 0.24 * math.ceil(len(rows_by_run) / num_columns)
    with drawing():
        figure = new_figure(_PANEL_INCHES[0] * num_columns, _PANEL_INCHES[1] * num_rows + legend_inches)
        grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel, rows_by_run, styles)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        handles = [_legend_line(*styles[name]) for name in rows_by_run]
        add_legend(figure, handles, list(rows_by_run), loc="outside upper left", ncols=num_columns)
        stem = path.stem if path.suffix.lower() in (".png", ".svg") else path.name
        return write_figure(figure, path.parent, stem)


def _draw_panel(
    axes: "Axes", panel: _Panel, rows_by_run: Mapping[str, Sequence[Row]], styles: Mapping[str, LineStyle]
) -> None:
    axes.set_title(panel.title, fontsize=9.5, color=INK, loc="left")
    axes.set_xlabel("step", color=FAINT_INK)
    quieten(axes)
    axes.set_xlim(0, 1.02 * max(row["step"] for rows in rows_by_run.values() for row in rows))
    if panel.is_log:
        values = [
            v for rows in rows_by_run.values() for key, _ in panel.keys for v in _series(rows, panel.kind, key)[1]
        ]
        if max(values) / min(values) >= _MIN_LOG_RATIO:
            _count_in_decades(axes)
    # an MLM has no posterior-weighted entropy, so its panel has one line and needs no legend
    keys = [
        (key, words) for key, words in panel.keys if any(_series(r, panel.kind, key)[0] for r in rows_by_run.values())
    ]
    for name, rows in rows_by_run.items():
        colour, run_style = styles[name]
        for number, (key, _) in enumerate(keys):
            steps, values = _series(rows, panel.kind, key)
            if not steps:
                continue
            style = LINE_STYLES[number] if len(keys) > 1 else run_style
            if panel.is_smoothed:
                axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
                values = _mean_around(values, min(_MAX_SMOOTHED, len(values) // 20))
            marker = "o" if len(steps) <= 40 and not panel.is_smoothed else ""
            (line,) = axes.plot(steps, values, style, color=colour, linewidth=1.5, zorder=3)
            line.set(marker=marker, markersize=2.8)
    if panel.floor is not None:
        top = max(panel.min_top, axes.get_ylim()[1])
        # a little below the floor, so that a line on it is not cut
        axes.set_ylim(panel.floor - 0.03 * (top - panel.floor), top)
    if len(keys) > 1:
        handles = [_legend_line(FAINT_INK, LINE_STYLES[number]) for number in range(len(keys))]
        add_legend(axes, handles, [words for _, words in keys], fontsize=7.5)


def _count_in_decades(axes: "Axes") -> None:
    """Make the axis logarithmic, with plain numbers at its ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _series(rows: Sequence[Row], kind: str, key: str) -> tuple[list[int], list[float]]:
    """Return steps and values of the rows whose value is finite."""
    of_kind = [(int(row["step"]), row.get(key)) for row in rows if row.get("kind") == kind]
    held = [(step, float(v)) for step, v in of_kind if isinstance(v, int | float) and math.isfinite(v)]
    return [step for step, _ in held], [value for _, value in held]


def _has_data(panel: _Panel, rows: Sequence[Row]) -> bool:
    return any(_series(rows, panel.kind, key)[0] for key, _ in panel.keys)


def _mean_around(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and `reach` values on either side, fewer on both sides near the ends."""
    means = []
    for index in range(len(values)):
        near = min(reach, index, len(values) - 1 - index)
        means.append(math.fsum(values[index - near : index + near + 1]) / (2 * near + 1))
    return means


def _legend_line(colour: str, style: str) -> "Line2D":
    from matplotlib.lines import Line2D

    line = Line2D([], [], linewidth=1.8)
    line.set(color=colour, linestyle=style)
    return line
