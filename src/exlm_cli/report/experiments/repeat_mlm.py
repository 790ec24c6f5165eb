"""Report of a Repeated-MLM grid: tables of k by p, CSV, JSON, and Figures 3, 4, 5, 8 and 9.

Each figure is drawn twice: as the paper's table of k by p, and over p^k. Cells of equal p^k have equal colours, as in
the paper, which claims that points of one colour lie together over p^k, whatever their p.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_cli.config.sections import one_ratio
from exlm_cli.config.sweep import RepeatsAndRatio
from exlm_cli.experiments.results import CellRuns
from exlm_cli.format import NO_VALUE, format_count, format_fixed, format_percent, format_ratio
from exlm_cli.report import style
from exlm_cli.report.curves import plot_curves
from exlm_cli.report.experiments.seed_groups import (
    UNDECIDED,
    RankAgreement,
    SeedGroup,
    SweepReport,
    by_column,
    divergence_note,
    fewer_seeds_note,
    group_seeds,
    rank_agreement,
    read_curves,
    seed_note,
    share_groups,
    task_metrics,
    unlearned_note,
    write_report_files,
)
from exlm_cli.report.tables import Entry, Number, ReportTable, Row
from exlm_cli.run_dir import MetricsRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Grid = Mapping[RepeatsAndRatio, SeedGroup]
"""Cells by (k, p), in this order."""

_HEADINGS = {
    "entropy_bits": "Entropy, bits",
    "loss": "Loss, nats per target",
    "perplexity": "Perplexity",
    "mask_accuracy": "Mask accuracy, %",
}
"""Headings of the metrics that have a table, by their names in metrics.jsonl."""

_CELL_INCHES = (0.95, 0.55)
_PLOT_INCHES = (4.4, 3.0)
_DODGE = 0.012
"""Distance of points of equal p^k for neighbouring k, so that none hides another."""
_MIN_TICK_DISTANCE = 0.06


def write_grid_report(cells: Sequence[CellRuns], folder: Path, *, name: str, has_figures: bool) -> SweepReport:
    """Write `grid.csv`, `grid.md` and the figures `corruption`, `entropy`, one for each task, and `curves`.

    Arguments and errors are those of `report.experiments.sweeps.write_sweep_report`.
    """
    grid = grid_of(cells)
    tables, records = grid_tables(grid), _records(grid)
    files = write_report_files(folder, "grid", f"Repeated MLM: {name}", records, tables)
    if has_figures:
        files += write_grid_figures(grid, read_curves(cells), folder)
    agreement = {metric: asdict(found) for metric, found in agreements(grid).items()}
    return SweepReport(tables, {"cells": records, "agreement": agreement}, files)


def grid_of(cells: Sequence[CellRuns]) -> Grid:
    """Return the cells with their seeds together, in order of k and p."""
    groups = {
        (masking.num_repeats, one_ratio(masking.mask_ratio)): group
        for group in group_seeds(cells)
        for masking in [group.first.pretrain.masking]
    }
    return {pair: groups[pair] for pair in sorted(groups)}


def pooled_corruption(cell: SeedGroup) -> dict[str, float]:
    """Return a cell's counts of corrupted tokens, all seeds pooled; keys as in `experiments.cell.count_corrupted`."""
    import pandas as pd

    rows = pd.concat([each.pretrain_scores.assign(pretrain_seed=each.plan.seed) for each in cell.cells])
    rows = rows[rows.metric.str.startswith("corrupted_")]
    counts = rows.assign(metric=rows.metric.str.removeprefix("corrupted_"))
    by_seed = counts.pivot(index="pretrain_seed", columns="metric", values="value")
    num_tokens, expected = by_seed.num_tokens.sum(), by_seed.expected.iloc[0]
    divisor = max(1.0, num_tokens)
    return {
        "num_tokens": num_tokens,
        "expected": expected,
        "standard_error": math.sqrt(expected * (1 - expected) / divisor),
        "measured": (by_seed.measured * by_seed.num_tokens).sum() / divisor,
        "expected_with_floor": (by_seed.expected_with_floor * by_seed.num_tokens).sum() / divisor,
    }


def grid_tables(grid: Grid) -> list[ReportTable]:
    """Return a table of k by p for the corrupted share and each metric, then how each metric depends on p^k."""
    notes = divergence_note(_by_words(grid))
    title = "Corrupted share, measured (expected: p^k)"
    tables = [_square(grid, "corruption", title, _show_corruption, tuple(notes))]
    for name in _present(grid):
        title = f"{_heading(name)}{seed_note([*grid.values()], name)}"
        fewer = tuple(_fewer_seeds_note(grid, [name]))
        tables.append(_square(grid, _file_name(name), title, partial(SeedGroup.show, metric=name), fewer))
    tables.append(_agreement_table(grid, "agreement", "Does it follow p^k or p?"))
    all_steps = Counter(cell.steps for cell in grid.values() if cell.steps is not None)
    if len(all_steps) > 1:
        title = "Steps, more where few tokens are masked in all copies"
        tables.append(_square(grid, "steps", title, _show_steps))
        steps, count = all_steps.most_common(1)[0]
        if count > 1:
            same = {pair: cell for pair, cell in grid.items() if cell.steps == steps}
            title = f"Does it follow p^k or p? The {count} cells with {format_count(steps)} steps"
            tables.append(_agreement_table(same, "agreement-same-steps", title))
    return tables


def agreements(grid: Grid) -> dict[str, RankAgreement]:
    """Return how each metric depends on p^k; cells without it are left out."""
    found = {}
    for name in _present(grid):
        values = {pair: of_cell for pair, cell in grid.items() if (of_cell := cell.values(name))}
        found[name] = rank_agreement(list(values), list(values.values()))
    return found


def write_grid_figures(grid: Grid, curves: Mapping[str, Sequence[MetricsRow]], folder: Path) -> list[Path]:
    """Write each figure as PNG and SVG into an existing folder; the same cells give the same bytes.

    Args:
        curves: Rows of `metrics.jsonl` of one seed, by the label of a cell.

    Raises:
        CheckpointError: A file cannot be written.
    """
    written = _draw_corruption(grid, folder)
    found = agreements(grid)
    for name in ("entropy_bits", *task_metrics([*grid.values()])):
        if any(cell.values(name) for cell in grid.values()):
            written += _draw_figure(grid, name, found[name].spearman, folder)
    colours, ks = _colours(grid), _axes_of(grid)[0]
    rows, styles = {}, {}
    for (k, p), cell in grid.items():
        if curves.get(cell.first.label):
            name = f"k = {k}, p = {format_ratio(p)}"
            rows[name] = curves[cell.first.label]
            styles[name] = colours[k, p], style.LINE_STYLES[ks.index(k) % len(style.LINE_STYLES)]
    caption = "training curves, first seed of each cell"
    return written + (plot_curves(rows, folder / "curves", styles, captions=[caption]) if rows else [])


def _records(grid: Grid) -> list[dict[str, Any]]:
    """Return each cell for programs; metrics are means over seeds, `<name>_std` their deviation."""
    names = list(dict.fromkeys(name for cell in grid.values() for name in cell.metrics))
    return [
        {
            "num_repeats": k,
            "mask_ratio": p,
            **{f"corrupted_{name}": value for name, value in pooled_corruption(cell).items()},
            **by_column({name: cell.spread(name) for name in names}),
            "steps": cell.steps,
            "seeds": cell.seeds,
            "diverged_seeds": cell.diverged_seeds,
        }
        for (k, p), cell in grid.items()
    ]


def _present(grid: Grid) -> list[str]:
    names = (*_HEADINGS, *task_metrics([*grid.values()]))
    return [name for name in names if any(name in cell.metrics for cell in grid.values())]


def _heading(metric: str) -> str:
    """Return a metric and its unit; accuracies of tasks are in percent too."""
    return _HEADINGS.get(metric, f"{metric}, %" if "accuracy" in metric else metric)


def _scale(metric: str) -> int:
    return 100 if "accuracy" in metric else 1


def _file_name(metric: str) -> str:
    return "entropy" if metric == "entropy_bits" else metric.replace("/", "-").replace(" ", "-")


def _axes_of(grid: Grid) -> tuple[list[int], list[float]]:
    return sorted({k for k, _ in grid}), sorted({p for _, p in grid})


def _square(
    grid: Grid, name: str, title: str, entry_of: Callable[[SeedGroup], Entry], notes: tuple[str, ...] = ()
) -> ReportTable:
    """Return a table with k downwards and p across."""
    ks, ratios = _axes_of(grid)
    rows = tuple((str(k), *(entry_of(grid[k, p]) if (k, p) in grid else "" for p in ratios)) for k in ks)
    return ReportTable(name, title, ("k \\ p", *map(format_ratio, ratios)), (rows,), notes)


def _show_corruption(cell: SeedGroup) -> Entry:
    shares = pooled_corruption(cell)
    return Number(shares["measured"], partial(format_percent, decimals=2), expected=shares["expected"])


def _show_steps(cell: SeedGroup) -> Entry:
    return Number(math.nan if cell.steps is None else cell.steps, format_count)


def _agreement_table(grid: Grid, name: str, title: str) -> ReportTable:
    rows: list[Row] = []
    by_metric = agreements(grid)
    for metric, found in by_metric.items():
        spreads = found.standard_error, found.spread_equal_share, found.spread_equal_ratio
        numbers = found.spearman, found.spearman_of_groups, *(_scale(metric) * spread for spread in spreads)
        cells = (Number(number, "{:.3g}".format) for number in numbers)
        rows.append((_heading(metric), *cells, found.follows or NO_VALUE))
    columns = (
        "metric", "Spearman with p^k", "equal p^k as ties", "standard error", "spread at equal p^k",
        "spread at equal p", "follows",
    )  # fmt: skip
    notes = [
        f"`follows` names the smaller spread; it is {UNDECIDED} where the two differ by no more than twice the "
        "standard error of a cell's mean over seeds",
    ]
    if any(math.isnan(found.standard_error) for found in by_metric.values()):
        notes.append("with one seed there is no noise to compare with, so `follows` names the smaller spread")
    notes += _fewer_seeds_note(grid, by_metric)
    notes += unlearned_note(_by_words(grid))
    return ReportTable(name, title, columns, (tuple(rows),), tuple(notes))


def _fewer_seeds_note(grid: Grid, names: Iterable[str]) -> list[str]:
    return fewer_seeds_note(_by_words(grid), {name: _heading(name).partition(",")[0] for name in names})


def _by_words(grid: Grid) -> dict[str, SeedGroup]:
    return {f"k = {k}, p = {p:g}": cell for (k, p), cell in grid.items()}


def _draw_corruption(grid: Grid, folder: Path) -> list[Path]:
    """Draw the measured shares, and how far each is from p^k in percentage points."""
    texts, points, floors = {}, {}, {}
    for pair, cell in grid.items():
        shares = pooled_corruption(cell)
        error = 100 * shares["standard_error"]
        texts[pair] = f"{format_percent(shares['measured'], 2)}\n±{format_fixed(error, 2)}"
        points[pair] = (100 * (shares["measured"] - shares["expected"]), error)
        floors[pair] = 100 * (shares["expected_with_floor"] - shares["expected"])
    title = "Corrupted semantics, measured ± standard error"
    unit = "measured - p^k (percentage points)"
    return _draw(grid, texts, points, title, unit, folder / "corruption", expected=floors)


def _draw_figure(grid: Grid, name: str, spearman: float, folder: Path) -> list[Path]:
    texts, points = {}, {}
    scale = _scale(name)
    for pair, cell in grid.items():
        spread = cell.spread(name)
        texts[pair] = str(cell.show(name)).replace(" ± ", "\n±").replace(" ", "\n")
        if spread.num:
            points[pair] = (scale * spread.mean, 0.0 if math.isnan(spread.std) else scale * spread.std)
    heading = _heading(name)
    title = heading if math.isnan(spearman) else f"{heading}; rank correlation with p^k {format_fixed(spearman, 2)}"
    return _draw(grid, texts, points, title, heading, folder / _file_name(name))


def _draw(
    grid: Grid,
    texts: Mapping[RepeatsAndRatio, str],
    points: Mapping[RepeatsAndRatio, tuple[float, float]],
    title: str,
    unit: str,
    path: Path,
    expected: Mapping[RepeatsAndRatio, float] | None = None,
) -> list[Path]:
    """Draw the table of k by p beside the points over p^k, with a bar where each is expected."""
    ks, ratios = _axes_of(grid)
    table_width, table_height = _CELL_INCHES[0] * len(ratios), _CELL_INCHES[1] * len(ks)
    size = (0.7 + table_width + 0.9 + _PLOT_INCHES[0], max(table_height + 0.5, _PLOT_INCHES[1] + 0.5))
    with style.drawing(font_size=9.0):
        figure = style.new_figure(*size, title)
        table, plot = figure.subplots(1, 2, width_ratios=(table_width, _PLOT_INCHES[0]))
        table.set_box_aspect(table_height / table_width)
        table.set_anchor("N")
        _draw_table(table, grid, texts)
        style.set_up_axes(plot, "corrupted semantics p^k", unit)
        _draw_points(plot, grid, points, expected or {})
        return style.write_figure(figure, path.parent, path.name)


def _draw_table(axes: "Axes", grid: Grid, texts: Mapping[RepeatsAndRatio, str]) -> None:
    from matplotlib.patches import Rectangle

    colours, (ks, ratios) = _colours(grid), _axes_of(grid)
    axes.set(xlim=(0, len(ratios)), ylim=(len(ks), 0))
    for y, k in enumerate(ks):
        for x, ratio in enumerate(ratios):
            colour = colours.get((k, ratio), "#EEF0F2")
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
            text, ink = texts.get((k, ratio), ""), style.ink_on(colour)
            axes.text(x + 0.5, y + 0.5, text, color=ink, ha="center", va="center", fontsize=9)
    axes.set_xticks([x + 0.5 for x in range(len(ratios))], list(map(format_ratio, ratios)))
    axes.set_yticks([y + 0.5 for y in range(len(ks))], list(map(str, ks)))
    axes.tick_params(length=0, colors=style.INK, labeltop=True, labelbottom=False)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("mask ratio p", color=style.FAINT_INK)
    axes.set_ylabel("repeats k", color=style.FAINT_INK)
    axes.spines[:].set_visible(False)


def _draw_points(
    axes: "Axes",
    grid: Grid,
    points: Mapping[RepeatsAndRatio, tuple[float, float]],
    expected: Mapping[RepeatsAndRatio, float],
) -> None:
    from matplotlib.lines import Line2D

    colours, (ks, _) = _colours(grid), _axes_of(grid)
    markers = {k: style.MARKERS[index % len(style.MARKERS)] for index, k in enumerate(ks)}
    axes.set_axisbelow(True)
    ticks = _spaced(sorted(p**k for k, p in grid))
    axes.set_xticks(ticks, [format_ratio(float(f"{share:.3g}")) for share in ticks])
    for (k, p), (value, error) in points.items():
        x = p**k + _DODGE * (ks.index(k) - (len(ks) - 1) / 2)
        if (k, p) in expected:
            ends, level = [x - _DODGE / 2, x + _DODGE / 2], expected[k, p]
            axes.plot(ends, [level, level], "-", color=style.FAINT_INK, linewidth=1.5, zorder=2)
        axes.errorbar(
            x, value, yerr=error or None, markersize=7, capsize=3, linewidth=1.2, linestyle="none",
            markeredgecolor="white", markeredgewidth=0.6, zorder=3, color=colours[k, p], marker=markers[k],
        )  # fmt: skip
    looks: dict[str, Any] = {f"k = {k}": {"linestyle": "none", "marker": markers[k], "markersize": 6} for k in ks}
    if expected:
        looks["expected"] = {"linewidth": 1.5}
    handles = [Line2D([], [], color=style.FAINT_INK, **look) for look in looks.values()]
    style.add_legend(axes, handles, list(looks), fontsize=8)


def _colours(grid: Grid) -> dict[RepeatsAndRatio, str]:
    """Return a colour for each group of equal p^k, by (k, p)."""
    groups = share_groups([p**k for k, p in grid])
    return {pair: style.corruption_colour(group, max(groups) + 1) for pair, group in zip(grid, groups, strict=True)}


def _spaced(shares: Sequence[float]) -> list[float]:
    """Return the shares without those too close to the one before for both to be read."""
    kept: list[float] = []
    for share in shares:
        if not kept or share > kept[-1] + _MIN_TICK_DISTANCE:
            kept.append(share)
    return kept
