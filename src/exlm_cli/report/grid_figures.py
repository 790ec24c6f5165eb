"""Pictures of a Repeated-MLM grid: Figures 4 (corrupted share), 5 (entropy), 3 and 8 (accuracy), 9 (curves).

Cells of equal p^k have equal colours, as in the paper. Each figure stands twice: as the paper's table of k by p, and
over p^k, where the paper's claim is that points of one colour lie together whatever their p.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exlm_cli.experiments.statistics import share_groups
from exlm_cli.files import write_atomically
from exlm_cli.report.cell_rows import in_words, show_figure
from exlm_cli.report.curves import LineStyle, Row, render_curves
from exlm_cli.report.grid_table import GridRow, agreements, task_figures
from exlm_cli.report.style import FAINT_INK, INK, corruption_colour, drawing, ink_on, quieten, render_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = ("png", "svg")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINE_STYLES = ("-", "--", ":", "-.")
_CELL_INCHES = (0.95, 0.55)
_PLOT_INCHES = (4.4, 3.0)
_DODGE = 0.012
"""How far points of equal p^k stand apart for neighbouring k, so that none hides another."""
_LEAST_TICK_DISTANCE = 0.06


def render_grid_figures(
    rows: Sequence[GridRow], curves: Mapping[tuple[int, float], Sequence[Row]], formats: Sequence[str] = _FORMATS
) -> dict[str, bytes]:
    """Draw every figure of a grid; the same rows give the same bytes.

    Args:
        rows: Cells.
        curves: Rows of `metrics.jsonl` of one seed by cell (k, p).
        formats: File formats of matplotlib.

    Returns:
        Files by name: `corruption`, `entropy`, one for each fine-tuned figure, `curves`.
    """
    files: dict[str, bytes] = {}
    files |= _named("corruption", _render_corruption(rows, formats))
    found = agreements(rows)
    for name in ("entropy_bits", *task_figures(rows)):
        if any(not math.isnan(row.mean(name)) for row in rows):
            spearman = found[name].spearman
            title = in_words(name) + ("" if math.isnan(spearman) else f"; rank correlation with $p^k$ {spearman:.2f}")
            file = "entropy" if name == "entropy_bits" else name.replace("/", "-").replace(" ", "-")
            files |= _named(file, _render_figure(rows, name, title, formats))
    drawn = [row for row in rows if curves.get(row.cell)]
    if drawn:
        styles = _cell_styles(rows)
        by_name = {_cell_name(row): curves[row.cell] for row in drawn}
        files |= _named("curves", render_curves(by_name, formats, {_cell_name(row): styles[row.cell] for row in drawn}))
    return files


def write_grid_figures(
    rows: Sequence[GridRow], curves: Mapping[tuple[int, float], Sequence[Row]], folder: Path
) -> list[Path]:
    """Write every figure as PNG and SVG into a folder that exists.

    Raises:
        CheckpointError: The file system refuses.
    """
    files = render_grid_figures(rows, curves)
    for name, data in files.items():
        write_atomically(folder / name, data)
    return [folder / name for name in files]


def _named(stem: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{stem}.{suffix}": data for suffix, data in files.items()}


def _render_corruption(rows: Sequence[GridRow], formats: Sequence[str]) -> dict[str, bytes]:
    """Draw the measured shares, and how far each is from p^k in standard errors' own unit."""
    texts, points, floors = {}, {}, {}
    for row in rows:
        counted = {key: 100 * value for key, value in row.corrupted.items()}
        texts[row.cell] = f"{counted['measured']:.2f}%\n±{counted['standard_error']:.2f}"
        points[row.cell] = (counted["measured"] - counted["expected"], counted["standard_error"])
        floors[row.cell] = counted["expected_with_floor"] - counted["expected"]
    title = "Corrupted semantics, measured ± standard error"
    return _render(rows, texts, points, title, "measured - $p^k$ (percentage points)", formats, expected=floors)


def _render_figure(rows: Sequence[GridRow], name: str, title: str, formats: Sequence[str]) -> dict[str, bytes]:
    texts, points = {}, {}
    for row in rows:
        mean, deviation = row.mean(name), row.deviation(name)
        if math.isnan(mean):
            texts[row.cell] = row.why_missing(name).replace(" ", "\n")
            continue
        scale = 100 if "accuracy" in name else 1
        points[row.cell] = (scale * mean, 0.0 if math.isnan(deviation) else scale * deviation)
        spread = "" if math.isnan(deviation) else f"\n±{show_figure(name, deviation)}"
        texts[row.cell] = show_figure(name, mean) + spread
    unit = f"{in_words(name)} (%)" if "accuracy" in name else in_words(name)
    return _render(rows, texts, points, title, unit, formats)


def _render(
    rows: Sequence[GridRow],
    texts: Mapping[tuple[int, float], str],
    points: Mapping[tuple[int, float], tuple[float, float]],
    title: str,
    unit: str,
    formats: Sequence[str],
    expected: Mapping[tuple[int, float], float] | None = None,
) -> dict[str, bytes]:
    """Draw the table of k by p beside the points over p^k, with a bar where each is expected."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ks, ratios = sorted({row.num_repeats for row in rows}), sorted({row.mask_ratio for row in rows})
    table_width, table_height = _CELL_INCHES[0] * len(ratios), _CELL_INCHES[1] * len(ks)
    height = max(table_height + 0.9, _PLOT_INCHES[1] + 1.0)
    width = 0.7 + table_width + 0.9 + _PLOT_INCHES[0] + 0.2
    with drawing(font_size=9.0):
        figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(figure)
        figure.text(0.12 / width, 1 - 0.14 / height, title, fontsize=11, color=INK, va="top")
        table_bottom = height - 0.85 - table_height
        table = figure.add_axes((0.7 / width, table_bottom / height, table_width / width, table_height / height))
        _draw_table(table, rows, ks, ratios, texts)
        left = 0.7 + table_width + 0.9
        plot = figure.add_axes((left / width, 0.5 / height, _PLOT_INCHES[0] / width, (height - 1.0) / height))
        _draw_points(plot, rows, ks, points, unit, expected or {})
        return render_figure(figure, formats)


def _draw_table(
    axes: "Axes",
    rows: Sequence[GridRow],
    ks: Sequence[int],
    ratios: Sequence[float],
    texts: Mapping[tuple[int, float], str],
) -> None:
    from matplotlib.patches import Rectangle

    colours = _cell_colours(rows)
    axes.set(xlim=(0, len(ratios)), ylim=(len(ks), 0))
    for y, k in enumerate(ks):
        for x, ratio in enumerate(ratios):
            colour = colours.get((k, ratio), "#EEF0F2")
            patch = Rectangle((x, y), 1, 1)
            patch.set(facecolor=colour, edgecolor="white", linewidth=1.5)
            axes.add_patch(patch)
            text = texts.get((k, ratio), "")
            axes.text(x + 0.5, y + 0.5, text, color=ink_on(colour), ha="center", va="center", fontsize=9)
    axes.set_xticks([x + 0.5 for x in range(len(ratios))], [f"{100 * ratio:g}%" for ratio in ratios])
    axes.set_yticks([y + 0.5 for y in range(len(ks))], [str(k) for k in ks])
    axes.tick_params(length=0, colors=INK, labeltop=True, labelbottom=False)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("mask ratio p", color=FAINT_INK)
    axes.set_ylabel("repeats k", color=FAINT_INK)
    axes.spines[:].set_visible(False)


def _draw_points(
    axes: "Axes",
    rows: Sequence[GridRow],
    ks: Sequence[int],
    points: Mapping[tuple[int, float], tuple[float, float]],
    unit: str,
    expected: Mapping[tuple[int, float], float],
) -> None:
    from matplotlib.lines import Line2D

    colours = _cell_colours(rows)
    axes.set_xlabel("corrupted semantics $p^k$", color=FAINT_INK)
    axes.set_ylabel(unit, color=FAINT_INK)
    quieten(axes)
    axes.set_axisbelow(True)
    shares = {row.cell: row.corrupted["expected"] for row in rows}
    ticks = _spaced(sorted(shares.values()))
    axes.set_xticks(ticks, [f"{100 * share:.3g}%" for share in ticks])
    for cell, (value, error) in points.items():
        x = shares[cell] + _DODGE * (ks.index(cell[0]) - (len(ks) - 1) / 2)
        if cell in expected:
            (bar,) = axes.plot([x - _DODGE / 2, x + _DODGE / 2], [expected[cell]] * 2, "-")
            bar.set(color=FAINT_INK, linewidth=1.5, zorder=2)
        axes.errorbar(
            x, value, yerr=error or None, markersize=7, capsize=3, linewidth=1.2, linestyle="none",
            markeredgecolor="white", markeredgewidth=0.6, zorder=3, color=colours[cell], marker=_marker(ks, cell[0]),
        )  # fmt: skip
    handles = []
    for k in ks:
        handle = Line2D([], [], linestyle="none", marker=_marker(ks, k), markersize=6)
        handle.set_color(FAINT_INK)
        handles.append(handle)
    words = [f"k = {k}" for k in ks]
    if expected:
        handles.append(Line2D([], [], color=FAINT_INK, linewidth=1.5))
        words.append("expected")
    axes.legend(handles, words, fontsize=8, frameon=False, labelcolor=INK)


def _cell_colours(rows: Sequence[GridRow]) -> dict[tuple[int, float], str]:
    groups = share_groups([row.corrupted["expected"] for row in rows])
    return {
        row.cell: corruption_colour(group, max(groups) + 1) for row, group in zip(rows, groups, strict=True)
    }  # fmt: skip


def _cell_styles(rows: Sequence[GridRow]) -> dict[tuple[int, float], LineStyle]:
    """Colour by p^k and line style by k."""
    ks = sorted({row.num_repeats for row in rows})
    return {
        cell: (colour, _LINE_STYLES[ks.index(cell[0]) % len(_LINE_STYLES)])
        for cell, colour in _cell_colours(rows).items()
    }


def _marker(ks: Sequence[int], k: int) -> str:
    return _MARKERS[ks.index(k) % len(_MARKERS)]


def _cell_name(row: GridRow) -> str:
    return f"k={row.num_repeats}, p={100 * row.mask_ratio:g}%"


def _spaced(shares: Sequence[float]) -> list[float]:
    """Leave out shares too close to the one before to be read beside it."""
    kept: list[float] = []
    for share in shares:
        if not kept or share > kept[-1] + _LEAST_TICK_DISTANCE:
            kept.append(share)
    return kept
