"""The report of a Repeated-MLM grid, from its run directory: CSV, Markdown and pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exlm_cli.files import make_folder, write_atomically
from exlm_cli.report.cell_rows import Result, read_curves
from exlm_cli.report.curves import Row
from exlm_cli.report.grid_figures import write_grid_figures
from exlm_cli.report.grid_table import GridRow, agreements, csv_text, grid_rows, markdown_text


def write_grid_report(
    run: Path, cells: Sequence[Result], *, title: str, folder: Path, has_figures: bool = True
) -> tuple[list[GridRow], list[Path]]:
    """Write `grid.csv`, `grid.md` and the figures of a grid.

    Args:
        run: Run directory; curves are read from its cells, those of the first seed.
        cells: `result.json` of every cell and seed.
        title: Of the Markdown.
        folder: Where; made if need be.
        has_figures: Draw.

    Returns:
        The cells, seeds together, and the files.

    Raises:
        CheckpointError: The file system refuses, or a metrics.jsonl is damaged.
    """
    rows = grid_rows(cells)
    make_folder(folder)
    texts = {"grid.csv": csv_text(rows), "grid.md": markdown_text(rows, title=title)}
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())
    figures = write_grid_figures(rows, _curves(run, cells), folder) if has_figures else []
    return rows, [*(folder / name for name in texts), *figures]


def grid_as_json(run: Path, files: Sequence[Path], rows: Sequence[GridRow]) -> dict[str, Any]:
    """Return a grid for programs: figures are means over seeds."""
    return {
        "run_dir": str(run),
        "files": [str(path) for path in files],
        "cells": [
            {
                "num_repeats": row.num_repeats,
                "mask_ratio": row.mask_ratio,
                "seeds": list(row.seeds),
                "diverged_seeds": list(row.diverged_seeds),
                **{f"corrupted_{name}": value for name, value in row.corrupted.items()},
                **{name: row.mean(name) for name in row.figures},
            }
            for row in rows
        ],
        "agreement": {
            name: {
                "spearman": found.spearman,
                "spearman_of_groups": found.spearman_of_groups,
                "spread_equal_share": found.spread_equal_share,
                "spread_equal_ratio": found.spread_equal_ratio,
            }
            for name, found in agreements(rows).items()
        },
    }


def _curves(run: Path, cells: Sequence[Result]) -> dict[tuple[int, float], list[Row]]:
    by_label = read_curves(run, cells)
    keys = {cell["label"]: (int(cell["num_repeats"]), float(cell["mask_ratio"])) for cell in cells}
    return {keys[label]: rows for label, rows in by_label.items()}
