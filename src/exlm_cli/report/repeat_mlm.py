"""Report of a Repeated-MLM grid: tables of k by p, CSV, JSON, and Figures 3, 4, 5, 8 and 9.

Each figure is drawn twice: as the paper's table of k by p, and over p^k, where the paper's claim is that points of one
colour lie together whatever their p. Cells of equal p^k have equal colours, as in the paper.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_cli.config.sweep import RepeatsAndRatio
from exlm_cli.experiments.results import RepeatMlmResult
from exlm_cli.experiments.statistics import RankAgreement, rank_agreement, share_groups
from exlm_cli.format import NO_VALUE, format_ratio
from exlm_cli.report.curves import LineStyle, Row, plot_curves
from exlm_cli.report.seed_groups import (
    SeedGroup,
    csv_number,
    divergences,
    figure_cells,
    figure_columns,
    group_seeds,
    read_curves,
    seed_note,
    show_figure,
    task_figures,
    write_report_files,
)
from exlm_cli.report.style import (
    FAINT_INK,
    INK,
    LINE_STYLES,
    MARKERS,
    add_legend,
    corruption_colour,
    drawing,
    ink_on,
    new_figure,
    quieten,
    write_figure,
)
from exlm_cli.report.sweeps import SweepReport
from exlm_cli.report.tables import ReportTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GridCell = SeedGroup[RepeatMlmResult]

FIGURES = {
    "entropy_bits": "Entropy, bits",
    "loss": "Loss, nats per target",
    "perplexity": "Perplexity",
    "mask_accuracy": "Mask accuracy",
}
"""Validation figures of every table, by their names in metrics.jsonl."""

_CELL_INCHES = (0.95, 0.55)
_PLOT_INCHES = (4.4, 3.0)
_DODGE = 0.012
"""Distance of points of equal p^k for neighbouring k, so that none hides another."""
_MIN_TICK_DISTANCE = 0.06


def write_grid_report(
    run: Path, results: Sequence[RepeatMlmResult], folder: Path, *, name: str, has_figures: bool = True
) -> SweepReport:
    """Write `grid.csv`, `grid.md` and the figures `corruption`, `entropy`, one for each task, and `curves`.

    Arguments and errors are those of `report.sweeps.write_sweep_report`.
    """
    cells = grid_cells(results)
    tables = grid_tables(cells)
    files = write_report_files(folder, "grid", f"Repeated MLM: {name}", csv_table(cells), tables)
    if has_figures:
        files += write_grid_figures(cells, read_curves(run, results), folder)
    agreement = {figure: asdict(found) for figure, found in agreements(cells).items()}
    return SweepReport(tables, {"cells": list(map(_as_json, cells)), "agreement": agreement}, files)


def grid_cells(results: Sequence[RepeatMlmResult]) -> list[GridCell]:
    """Return the cells with their seeds together, in order of k and p."""
    return sorted(group_seeds(results), key=pair_of)


def pair_of(cell: GridCell) -> RepeatsAndRatio:
    """Return k and p of a cell."""
    return cell.first.num_repeats, cell.first.mask_ratio


def pooled_corruption(cell: GridCell) -> dict[str, float]:
    """Return the counts of a cell's corrupted tokens, all seeds pooled; keys as in `experiments.results.Corruption`."""
    counts = [result.corruption for result in cell.results if result.corruption is not None]
    num_tokens, expected = sum(count.num_tokens for count in counts), counts[0].expected
    divisor = max(1, num_tokens)
    return {
        "num_tokens": num_tokens,
        "expected": expected,
        "standard_error": math.sqrt(expected * (1 - expected) / divisor),
        "measured": math.fsum(count.measured * count.num_tokens for count in counts) / divisor,
        "expected_with_floor": math.fsum(count.expected_with_floor * count.num_tokens for count in counts) / divisor,
    }


def csv_table(cells: Sequence[GridCell]) -> tuple[list[str], list[list[Any]]]:
    """Return header and rows of the CSV, one a cell; figures are means over seeds, `<name>_std` their deviation."""
    names = [*FIGURES, *task_figures(cells)]
    shares = ("expected", "measured", "standard_error", "expected_with_floor")
    header = ["num_repeats", "mask_ratio", *(f"corrupted_{key}" for key in shares), *figure_columns(names)]
    header += ["steps", "seeds", "diverged_seeds"]
    rows: list[list[Any]] = []
    for cell in cells:
        (k, p), corrupted = pair_of(cell), pooled_corruption(cell)
        counted = [csv_number(corrupted[key]) for key in shares]
        seeds = [" ".join(map(str, some)) for some in (cell.seeds, cell.diverged_seeds)]
        rows.append([k, f"{p:g}", *counted, *figure_cells(cell, names), cell.model.steps, *seeds])
    return header, rows


def grid_tables(cells: Sequence[GridCell]) -> list[ReportTable]:
    """Return a table of k by p for the corrupted share and each figure, then how each figure depends on p^k."""
    tables = [_square(cells, "corruption", "Corrupted share, measured (expected: p^k)", _corruption_text)]
    for name in _present(cells):
        title = f"{in_words(name)}{seed_note(cells)}"
        tables.append(_square(cells, _file_name(name), title, partial(SeedGroup.show, name=name)))
    tables.append(_agreement_table(cells, "agreement", "Does it follow p^k or p?"))
    all_steps = Counter(cell.model.steps for cell in cells if cell.model.steps is not None)
    if len(all_steps) > 1:
        title = "Steps, more where few tokens are masked in all copies"
        tables.append(_square(cells, "steps", title, lambda cell: str(cell.model.steps or NO_VALUE)))
        steps, count = all_steps.most_common(1)[0]
        if count > 1:
            same = [cell for cell in cells if cell.model.steps == steps]
            title = f"Does it follow p^k or p, of the {count} cells of {steps:,} steps?"
            tables.append(_agreement_table(same, "agreement-same-steps", title))
    return tables


def agreements(cells: Sequence[GridCell]) -> dict[str, RankAgreement]:
    """Return how each figure depends on p^k; cells without the figure are left out."""
    found = {}
    for name in _present(cells):
        held = [cell for cell in cells if not math.isnan(cell.mean(name))]
        found[name] = rank_agreement(list(map(pair_of, held)), [cell.mean(name) for cell in held])
    return found


def in_words(name: str) -> str:
    """Return a figure as a title."""
    return FIGURES.get(name, name)


def write_grid_figures(cells: Sequence[GridCell], curves: Mapping[str, Sequence[Row]], folder: Path) -> list[Path]:
    """Write each figure as PNG and SVG into an existing folder; the same cells give the same bytes.

    Args:
        cells: Cells of the grid.
        curves: Rows of `metrics.jsonl` of one seed, by the label of a cell.
        folder: Where.

    Raises:
        CheckpointError: The file system refuses.
    """
    written = _write_corruption(cells, folder)
    found = agreements(cells)
    for name in ("entropy_bits", *task_figures(cells)):
        if any(not math.isnan(cell.mean(name)) for cell in cells):
            written += _write_figure(cells, name, found[name].spearman, folder)
    names = {cell.first.label: f"k = {k}, p = {format_ratio(p)}" for cell in cells for k, p in [pair_of(cell)]}
    rows = {names[label]: of_label for label, of_label in curves.items() if of_label}
    if rows:
        styles = _curve_styles(cells)
        written += plot_curves(rows, folder / "curves", {names[label]: style for label, style in styles.items()})
    return written


def _as_json(cell: GridCell) -> dict[str, Any]:
    """Return a cell for programs; figures are means over seeds."""
    return {
        "num_repeats": cell.first.num_repeats,
        "mask_ratio": cell.first.mask_ratio,
        "seeds": cell.seeds,
        "diverged_seeds": cell.diverged_seeds,
        **{f"corrupted_{name}": value for name, value in pooled_corruption(cell).items()},
        **{name: cell.mean(name) for name in cell.figures},
    }


def _present(cells: Sequence[GridCell]) -> list[str]:
    return [name for name in (*FIGURES, *task_figures(cells)) if any(name in cell.figures for cell in cells)]


def _file_name(figure: str) -> str:
    return "entropy" if figure == "entropy_bits" else figure.replace("/", "-").replace(" ", "-")


def _square(cells: Sequence[GridCell], name: str, title: str, text_of: Callable[[GridCell], str]) -> ReportTable:
    """Return a table with k downwards and p across; what diverged is named below it."""
    ks, ratios = _axes_of(cells)
    texts = {pair_of(cell): text_of(cell) for cell in cells}
    rows = tuple((str(k), *(texts.get((k, p), "") for p in ratios)) for k in ks)
    diverged = divergences(cells, ["k = {}, p = {:g}".format(*pair_of(cell)) for cell in cells])
    notes = (f"diverged: {diverged}",) if diverged and name == "corruption" else ()
    return ReportTable(name, title, ("k \\ p", *map(format_ratio, ratios)), (rows,), notes)


def _axes_of(cells: Sequence[GridCell]) -> tuple[list[int], list[float]]:
    pairs = list(map(pair_of, cells))
    return sorted({k for k, _ in pairs}), sorted({p for _, p in pairs})


def _corruption_text(cell: GridCell) -> str:
    corrupted = pooled_corruption(cell)
    return f"{100 * corrupted['measured']:.2f}% ({100 * corrupted['expected']:.2f}%)"


def _agreement_table(cells: Sequence[GridCell], name: str, title: str) -> ReportTable:
    rows = []
    for figure, found in agreements(cells).items():
        follows = "p^k" if found.follows_share else "p" if found.follows_ratio else NO_VALUE
        numbers = (found.spearman, found.spearman_of_groups, found.spread_equal_share, found.spread_equal_ratio)
        texts = (NO_VALUE if math.isnan(number) else f"{number:.3g}" for number in numbers)
        rows.append((in_words(figure), *texts, follows))
    columns = (
        "figure", "Spearman with p^k", "equal p^k as ties", "spread at equal p^k", "spread at equal p", "follows",
    )  # fmt: skip
    return ReportTable(name, title, columns, (tuple(rows),))


def _write_corruption(cells: Sequence[GridCell], folder: Path) -> list[Path]:
    """Draw the measured shares, and how far each is from p^k in percentage points."""
    texts, points, floors = {}, {}, {}
    for cell in cells:
        percent = {key: 100 * value for key, value in pooled_corruption(cell).items()}
        texts[pair_of(cell)] = f"{percent['measured']:.2f}%\n±{percent['standard_error']:.2f}"
        points[pair_of(cell)] = (percent["measured"] - percent["expected"], percent["standard_error"])
        floors[pair_of(cell)] = percent["expected_with_floor"] - percent["expected"]
    title = "Corrupted semantics, measured ± standard error"
    unit = "measured - $p^k$ (percentage points)"
    return _draw(cells, texts, points, title, unit, folder, "corruption", expected=floors)


def _write_figure(cells: Sequence[GridCell], name: str, spearman: float, folder: Path) -> list[Path]:
    texts, points = {}, {}
    scale = 100 if "accuracy" in name else 1
    for cell in cells:
        mean, deviation = cell.mean(name), cell.deviation(name)
        if math.isnan(mean):
            texts[pair_of(cell)] = cell.why_missing(name).replace(" ", "\n")
            continue
        points[pair_of(cell)] = (scale * mean, 0.0 if math.isnan(deviation) else scale * deviation)
        spread = "" if math.isnan(deviation) else f"\n±{show_figure(name, deviation)}"
        texts[pair_of(cell)] = show_figure(name, mean) + spread
    unit = f"{in_words(name)} (%)" if "accuracy" in name else in_words(name)
    correlation = "" if math.isnan(spearman) else f"; rank correlation with p^k {spearman:.2f}"
    return _draw(cells, texts, points, f"{in_words(name)}{correlation}", unit, folder, _file_name(name))


def _draw(
    cells: Sequence[GridCell],
    texts: Mapping[RepeatsAndRatio, str],
    points: Mapping[RepeatsAndRatio, tuple[float, float]],
    title: str,
    unit: str,
    folder: Path,
    stem: str,
    expected: Mapping[RepeatsAndRatio, float] | None = None,
) -> list[Path]:
    """Draw the table of k by p beside the points over p^k, with a bar where each is expected."""
    ks, ratios = _axes_of(cells)
    table_width, table_height = _CELL_INCHES[0] * len(ratios), _CELL_INCHES[1] * len(ks)
    size = (0.7 + table_width + 0.9 + _PLOT_INCHES[0], max(table_height + 0.5, _PLOT_INCHES[1] + 0.5))
    with drawing(font_size=9.0):
        figure = new_figure(*size, title)
        table, plot = figure.subplots(1, 2, width_ratios=(table_width, _PLOT_INCHES[0]))
        table.set_box_aspect(table_height / table_width)
        table.set_anchor("N")
        _draw_table(table, cells, ks, ratios, texts)
        _draw_points(plot, cells, ks, points, unit, expected or {})
        return write_figure(figure, folder, stem)


def _draw_table(
    axes: "Axes",
    cells: Sequence[GridCell],
    ks: Sequence[int],
    ratios: Sequence[float],
    texts: Mapping[RepeatsAndRatio, str],
) -> None:
    from matplotlib.patches import Rectangle

    colours = _cell_colours(cells)
    axes.set(xlim=(0, len(ratios)), ylim=(len(ks), 0))
    for y, k in enumerate(ks):
        for x, ratio in enumerate(ratios):
            colour = colours.get((k, ratio), "#EEF0F2")
            patch = Rectangle((x, y), 1, 1)
            patch.set(facecolor=colour, edgecolor="white", linewidth=1.5)
            axes.add_patch(patch)
            text = texts.get((k, ratio), "")
            axes.text(x + 0.5, y + 0.5, text, color=ink_on(colour), ha="center", va="center", fontsize=9)
    axes.set_xticks([x + 0.5 for x in range(len(ratios))], list(map(format_ratio, ratios)))
    axes.set_yticks([y + 0.5 for y in range(len(ks))], [str(k) for k in ks])
    axes.tick_params(length=0, colors=INK, labeltop=True, labelbottom=False)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("mask ratio p", color=FAINT_INK)
    axes.set_ylabel("repeats k", color=FAINT_INK)
    axes.spines[:].set_visible(False)


def _draw_points(
    axes: "Axes",
    cells: Sequence[GridCell],
    ks: Sequence[int],
    points: Mapping[RepeatsAndRatio, tuple[float, float]],
    unit: str,
    expected: Mapping[RepeatsAndRatio, float],
) -> None:
    from matplotlib.lines import Line2D

    colours = _cell_colours(cells)
    axes.set_xlabel("corrupted semantics $p^k$", color=FAINT_INK)
    axes.set_ylabel(unit, color=FAINT_INK)
    quieten(axes)
    axes.set_axisbelow(True)
    shares = {(k, p): p**k for k, p in map(pair_of, cells)}
    ticks = _spaced(sorted(shares.values()))
    axes.set_xticks(ticks, [f"{100 * share:.3g}%" for share in ticks])
    for pair, (value, error) in points.items():
        x = shares[pair] + _DODGE * (ks.index(pair[0]) - (len(ks) - 1) / 2)
        if pair in expected:
            (bar,) = axes.plot([x - _DODGE / 2, x + _DODGE / 2], [expected[pair]] * 2, "-")
            bar.set(color=FAINT_INK, linewidth=1.5, zorder=2)
        axes.errorbar(
            x, value, yerr=error or None, markersize=7, capsize=3, linewidth=1.2, linestyle="none",
            markeredgecolor="white", markeredgewidth=0.6, zorder=3, color=colours[pair], marker=_marker(ks, pair[0]),
        )  # fmt: skip
    handles = [Line2D([], [], linestyle="none", marker=_marker(ks, k), markersize=6, color=FAINT_INK) for k in ks]
    words = [f"k = {k}" for k in ks]
    if expected:
        handles.append(Line2D([], [], color=FAINT_INK, linewidth=1.5))
        words.append("expected")
    add_legend(axes, handles, words, fontsize=8)


def _cell_colours(cells: Sequence[GridCell]) -> dict[RepeatsAndRatio, str]:
    pairs = list(map(pair_of, cells))
    groups = share_groups([p**k for k, p in pairs])
    return {pair: corruption_colour(group, max(groups) + 1) for pair, group in zip(pairs, groups, strict=True)}


def _curve_styles(cells: Sequence[GridCell]) -> dict[str, LineStyle]:
    """Return colour by p^k and line style by k, by the label of a cell."""
    ks, colours = _axes_of(cells)[0], _cell_colours(cells)
    return {
        cell.first.label: (colours[pair], LINE_STYLES[ks.index(pair[0]) % len(LINE_STYLES)])
        for cell in cells
        for pair in [pair_of(cell)]
    }


def _marker(ks: Sequence[int], k: int) -> str:
    return MARKERS[ks.index(k) % len(MARKERS)]


def _spaced(shares: Sequence[float]) -> list[float]:
    """Return the shares without those too close to the one before for both to be read."""
    kept: list[float] = []
    for share in shares:
        if not kept or share > kept[-1] + _MIN_TICK_DISTANCE:
            kept.append(share)
    return kept
