"""The cells of a Repeated-MLM grid, seeds together: rows, CSV, Markdown, and what they say of p^k (section 3.2)."""

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exlm_cli.experiments.statistics import RankAgreement, rank_agreement
from exlm_cli.report.cell_rows import (
    CellRow,
    Result,
    column_name,
    csv_number,
    divergences,
    finished,
    in_words,
    other_figures,
    pool_seeds,
    seed_note,
)

Cell = tuple[int, float]

FIGURES = ("entropy_bits", "loss", "perplexity", "mask_accuracy")
"""Validation figures of a cell that every table shows, under their names in metrics.jsonl."""


@dataclass(frozen=True)
class GridRow(CellRow):
    """One cell, all its seeds.

    Attributes:
        num_repeats: k.
        mask_ratio: p.
        steps: Of pre-training; None where no seed came to an end.
        corrupted: `num_tokens`, `expected` (p^k), `expected_with_floor`, `measured` and `standard_error`, seeds pooled.
    """

    num_repeats: int
    mask_ratio: float
    steps: int | None
    corrupted: Mapping[str, float]

    @property
    def cell(self) -> Cell:
        """(k, p)."""
        return self.num_repeats, self.mask_ratio


def grid_rows(results: Sequence[Result]) -> list[GridRow]:
    """Put the `result.json` of cells together by (k, p), in order of k and p."""
    by_cell: dict[Cell, list[Result]] = {}
    for result in results:
        by_cell.setdefault((int(result["num_repeats"]), float(result["mask_ratio"])), []).append(result)
    return [_row(cell, by_cell[cell]) for cell in sorted(by_cell)]


def task_figures(rows: Sequence[GridRow]) -> list[str]:
    """Return the names of the fine-tuned figures, in the order in which they came."""
    return other_figures(rows, FIGURES)


def csv_text(rows: Sequence[GridRow]) -> str:
    """Return the grid as CSV, one row a cell; figures are means over seeds, `<name>_std` their sample deviation."""
    names = [*FIGURES, *task_figures(rows)]
    header = [
        "num_repeats", "mask_ratio", "corrupted_expected", "corrupted_measured", "corrupted_standard_error",
        "corrupted_expected_with_floor", *(f"{column_name(name)}{end}" for name in names for end in ("", "_std")),
        "steps", "seeds", "diverged_seeds",
    ]  # fmt: skip
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        shares = [row.corrupted[key] for key in ("expected", "measured", "standard_error", "expected_with_floor")]
        figures = [value for name in names for value in (row.mean(name), row.deviation(name))]
        numbers = [csv_number(value) for value in (*shares, *figures)]
        seeds = [" ".join(map(str, some)) for some in (row.seeds, row.diverged_seeds)]
        writer.writerow([row.num_repeats, f"{row.mask_ratio:g}", *numbers, row.steps, *seeds])
    return text.getvalue()


def markdown_text(rows: Sequence[GridRow], *, title: str) -> str:
    """Return the grid as Markdown: a k x p table of each figure as in the paper, then what they say of p^k."""
    parts = [f"# {title}\n", "Corrupted share, measured (p^k expected):\n", _square(rows, _shares_text)]
    for name in _present(rows):
        parts += [f"{in_words(name)}{seed_note(rows)}:\n", _square(rows, lambda row, n=name: row.show(n))]
    parts += ["Does it follow p^k or p?\n", agreement_table(rows)]
    all_steps = Counter(row.steps for row in rows if row.steps is not None)
    if len(all_steps) > 1:
        parts += ["Steps, more where few tokens are masked in all copies:\n"]
        parts += [_square(rows, lambda row: f"{row.steps or '–'}")]
        steps, count = all_steps.most_common(1)[0]
        if count > 1:
            same = [row for row in rows if row.steps == steps]
            parts += [f"Does it follow p^k or p, of the {count} cells of {steps:,} steps?\n", agreement_table(same)]
    diverged = divergences(rows, [f"k = {row.num_repeats}, p = {row.mask_ratio:g}" for row in rows])
    if diverged:
        parts.append(f"Diverged: {'; '.join(diverged)}.\n")
    return "\n".join(parts)


def agreements(rows: Sequence[GridRow]) -> dict[str, RankAgreement]:
    """Return how each figure goes with p^k; cells without the figure are left out."""
    found = {}
    for name in _present(rows):
        held = [row for row in rows if not math.isnan(row.mean(name))]
        found[name] = rank_agreement([row.cell for row in held], [row.mean(name) for row in held])
    return found


def agreement_table(rows: Sequence[GridRow]) -> str:
    """Return `agreements` as a Markdown table."""
    lines = [
        "| figure | Spearman with p^k | equal p^k as ties | spread at equal p^k | spread at equal p | follows |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in agreements(rows).items():
        is_other = found.spread_equal_share > found.spread_equal_ratio
        follows = "p^k" if found.follows_share else "p" if is_other else "–"
        numbers = [found.spearman, found.spearman_of_groups, found.spread_equal_share, found.spread_equal_ratio]
        lines.append(f"| {in_words(name)} | {' | '.join(map(_short, numbers))} | {follows} |")
    return "\n".join(lines) + "\n"


def _row(cell: Cell, results: Sequence[Result]) -> GridRow:
    corrupted = _pooled([result["corruption"] for result in results])
    done = finished(results)
    steps = int(done[0]["steps"]) if done else None
    return GridRow(*cell, steps, corrupted, **pool_seeds(results, FIGURES))


def _pooled(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    num_tokens = sum(count["num_tokens"] for count in counts)
    expected = counts[0]["expected"]
    weighted = {
        key: math.fsum(count[key] * count["num_tokens"] for count in counts) / max(1, num_tokens)
        for key in ("measured", "expected_with_floor")
    }
    standard_error = math.sqrt(expected * (1 - expected) / max(1, num_tokens))
    return {"num_tokens": num_tokens, "expected": expected, "standard_error": standard_error, **weighted}


def _present(rows: Sequence[GridRow]) -> list[str]:
    return [name for name in (*FIGURES, *task_figures(rows)) if any(name in row.figures for row in rows)]


def _square(rows: Sequence[GridRow], text_of: Any) -> str:
    """Return a table with k downwards and p across."""
    ratios = sorted({row.mask_ratio for row in rows})
    texts = {row.cell: text_of(row) for row in rows}
    lines = [f"| k \\ p | {' | '.join(f'{100 * p:g}%' for p in ratios)} |", "|---" * (len(ratios) + 1) + "|"]
    for k in sorted({row.num_repeats for row in rows}):
        lines.append(f"| {k} | {' | '.join(texts.get((k, p), '') for p in ratios)} |")
    return "\n".join(lines) + "\n"


def _shares_text(row: GridRow) -> str:
    return f"{100 * row.corrupted['measured']:.2f}% ({100 * row.corrupted['expected']:.2f}%)"


def _short(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g}"
