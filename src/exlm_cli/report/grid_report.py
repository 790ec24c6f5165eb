"""The report of a Repeated-MLM grid, from its run directory: CSV, Markdown and pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exlm_cli.report.curves import Row
from exlm_cli.report.grid_figures import write_grid_figures
from exlm_cli.report.grid_table import GridRow, csv_text, grid_rows, markdown_text
from exlm_cli.run_dir import read_metrics, write_atomically


def write_grid_report(run: Path, cells: Sequence[Mapping[str, Any]], *, title: str) -> tuple[list[GridRow], list[Path]]:
    """Write `report/grid.csv`, `grid.md` and the figures of a grid.

    Args:
        run: Run directory; curves are read from its cells, those of the first seed.
        cells: `result.json` of every cell and seed.
        title: Of the Markdown.

    Returns:
        The cells, seeds together, and the files.

    Raises:
        CheckpointError: The file system refuses, or a metrics.jsonl is damaged.
    """
    rows = grid_rows(cells)
    folder = run / "report"
    folder.mkdir(exist_ok=True)
    texts = {"grid.csv": csv_text(rows), "grid.md": markdown_text(rows, title=title)}
    for name, text in texts.items():
        write_atomically(folder / name, text.encode())
    figures = write_grid_figures(rows, _curves(run, cells), folder)
    return rows, [*(folder / name for name in texts), *figures]


def _curves(run: Path, cells: Sequence[Mapping[str, Any]]) -> dict[tuple[int, float], list[Row]]:
    curves: dict[tuple[int, float], list[Row]] = {}
    for cell in cells:
        key = (int(cell["num_repeats"]), float(cell["mask_ratio"]))
        path = run / "cells" / cell["label"] / f"seed-{cell['seed']}" / "pretrain" / "metrics.jsonl"
        if key not in curves and path.is_file():
            curves[key] = list(read_metrics(path))
    return curves
