"""Training curves of one run or of several laid over each other (Figure 9), from the rows of `metrics.jsonl`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_cli.errors import DataError
from exlm_cli.files import write_atomically
from exlm_cli.report.palette import FAINT_INK, INK, RUN_COLOURS
from exlm_cli.report.style import drawing, quieten, render_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

Row = Mapping[str, Any]
LineStyle = tuple[str, str]
"""Colour and line style."""

_LINE_STYLES = ("-", "--", ":", "-.")
_MOST_SMOOTHED = 12
"""Rows on either side that go into a smoothed point; the rows themselves stand faintly behind it."""
_LEAST_LOG_RATIO = 4.0
_MOST_COLUMNS = 4
_PANEL_INCHES = (3.5, 2.6)


@dataclass(frozen=True)
class _Panel:
    """One pair of axes: which figures of which rows it shows, each with what distinguishes it in words.

    Where the least possible value has a meaning, the axis begins at that `floor` and reaches `least_top` at least, so
    that a line that lies on the floor looks it.
    """

    title: str
    kind: str
    keys: tuple[tuple[str, str], ...]
    is_log: bool = False
    is_smoothed: bool = False
    floor: float | None = None
    least_top: float = 0.0


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
    _Panel("Effective states per mask", "valid", (("effective_states", ""),), floor=1.0, least_top=2.0),
    _Panel("Path entropy (bits per target)", "valid", (("path_entropy_bits", ""),), floor=0.0, least_top=0.5),
    _Panel(
        "Share of masks on the best path",
        "valid",
        (("masks_with_0_share", "yield no token"), ("masks_with_2plus_share", "yield 2 or more")),
        floor=0.0,
        least_top=0.1,
    ),
)


def plot_curves(
    rows_by_run: Mapping[str, Sequence[Row]], path: Path, styles: Mapping[str, LineStyle] | None = None
) -> list[Path]:
    """Write the curves as PNG and SVG.

    Args:
        rows_by_run: Rows of `metrics.jsonl` by the name a run has in the legend. What no row holds is not drawn.
        path: Of the two files; `.png` and `.svg` are put after it, in place of one of them.
        styles: Colour and line style of each run; none: as the runs come.

    Returns:
        The two files.

    Raises:
        DataError: No row holds anything to draw.
        CheckpointError: The file system refuses.
    """
    files = render_curves(rows_by_run, ("png", "svg"), styles)
    stem = path.stem if path.suffix.lower() in (".png", ".svg") else path.name
    written = []
    for name, data in files.items():
        written.append(path.with_name(f"{stem}.{name}"))
        write_atomically(written[-1], data)
    return written


def render_curves(
    rows_by_run: Mapping[str, Sequence[Row]],
    formats: Sequence[str],
    styles: Mapping[str, LineStyle] | None = None,
) -> dict[str, bytes]:
    """Draw the curves; the same rows give the same bytes. Arguments and errors are those of `plot_curves`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel for panel in _PANELS if any(_has_data(panel, rows) for rows in rows_by_run.values())]
    if not panels:
        raise DataError(
            f"nothing to draw: none of {len(rows_by_run)} runs has rows of training or validation",
            "let them run for `train.log_every_steps` steps",
        )
    if styles is None:
        styles = {name: (_run_colour(index), _run_style(index)) for index, name in enumerate(rows_by_run)}
    num_rows = math.ceil(len(panels) / _MOST_COLUMNS)
    num_columns = math.ceil(len(panels) / num_rows)
    num_legend_rows = math.ceil(len(rows_by_run) / num_columns)
    legend_inches = 0.1 + 0.24 * num_legend_rows
    with drawing():
        size = (_PANEL_INCHES[0] * num_columns, _PANEL_INCHES[1] * num_rows + legend_inches)
        figure = Figure(figsize=size, facecolor="white")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(
            num_rows, num_columns, left=0.5 / size[0], right=1 - 0.15 / size[0], bottom=0.45 / size[1],
            top=1 - (legend_inches + 0.3) / size[1], wspace=0.24, hspace=0.42,
        )  # fmt: skip
        for index, panel in enumerate(panels):
            axes = figure.add_subplot(grid[index // num_columns, index % num_columns])
            _draw_panel(axes, panel, rows_by_run, styles)
        handles = [_legend_line(*styles[name]) for name in rows_by_run]
        legend = figure.legend(
            handles, list(rows_by_run), loc="upper left", ncols=num_columns, frameon=False, bbox_to_anchor=(0, 1),
            borderaxespad=0.3,
        )  # fmt: skip
        for text in legend.get_texts():
            text.set_parse_math(False)
        return render_figure(figure, formats)


def _draw_panel(
    axes: "Axes", panel: _Panel, rows_by_run: Mapping[str, Sequence[Row]], styles: Mapping[str, LineStyle]
) -> None:
    axes.set_title(panel.title, fontsize=9.5, color=INK, loc="left")
    axes.set_xlabel("step", color=FAINT_INK)
    quieten(axes)
    axes.set_xlim(0, 1.02 * max(row["step"] for rows in rows_by_run.values() for row in rows))
    if panel.is_log and _ratio(panel, rows_by_run) >= _LEAST_LOG_RATIO:
        _count_in_decades(axes)
    # an MLM has no posterior-weighted entropy: then nothing within the panel needs telling apart
    keys = [
        (key, words) for key, words in panel.keys if any(_series(r, panel.kind, key)[0] for r in rows_by_run.values())
    ]
    for name, rows in rows_by_run.items():
        colour, run_style = styles[name]
        for number, (key, _) in enumerate(keys):
            steps, values = _series(rows, panel.kind, key)
            if not steps:
                continue
            style = _LINE_STYLES[number] if len(keys) > 1 else run_style
            if panel.is_smoothed:
                axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
                values = _mean_around(values, min(_MOST_SMOOTHED, len(values) // 20))
            marker = "o" if len(steps) <= 40 and not panel.is_smoothed else ""
            (line,) = axes.plot(steps, values, style, color=colour, linewidth=1.5, zorder=3)
            line.set(marker=marker, markersize=2.8)
    if panel.floor is not None:
        top = max(panel.least_top, axes.get_ylim()[1])
        # a little below the floor, so that a line on it is seen whole
        axes.set_ylim(panel.floor - 0.03 * (top - panel.floor), top)
    if len(keys) > 1:
        handles = [_legend_line(FAINT_INK, _LINE_STYLES[number]) for number in range(len(keys))]
        axes.legend(handles, [words for _, words in keys], fontsize=7.5, frameon=False, labelcolor=INK)


def _ratio(panel: _Panel, rows_by_run: Mapping[str, Sequence[Row]]) -> float:
    """How many times the least value of a panel goes into its largest."""
    values = [v for rows in rows_by_run.values() for key, _ in panel.keys for v in _series(rows, panel.kind, key)[1]]
    return max(values) / min(values)


def _count_in_decades(axes: "Axes") -> None:
    """Make the axis logarithmic, with numbers as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _series(rows: Sequence[Row], kind: str, key: str) -> tuple[list[int], list[float]]:
    """Return steps and values of the rows that hold a finite one."""
    held = [(int(row["step"]), float(row[key])) for row in rows if row.get("kind") == kind and _is_finite(row.get(key))]
    return [step for step, _ in held], [value for _, value in held]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _has_data(panel: _Panel, rows: Sequence[Row]) -> bool:
    return any(_series(rows, panel.kind, key)[0] for key, _ in panel.keys)


def _mean_around(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value and of `reach` values on either side, of as many on both where the ends are nearer."""
    means = []
    for index in range(len(values)):
        near = min(reach, index, len(values) - 1 - index)
        means.append(math.fsum(values[index - near : index + near + 1]) / (2 * near + 1))
    return means


def _run_style(index: int) -> str:
    """Line style of a run: the colours come round again with another one."""
    return _LINE_STYLES[index // len(RUN_COLOURS) % len(_LINE_STYLES)]


def _run_colour(index: int) -> str:
    return RUN_COLOURS[index % len(RUN_COLOURS)]


def _legend_line(colour: str, style: str) -> "Line2D":
    from matplotlib.lines import Line2D

    line = Line2D([], [], linewidth=1.8)
    line.set(color=colour, linestyle=style)
    return line
