"""The report of a Repeated-MLM grid, from its run directory: CSV, Markdown and pictures."""

from collections.abc import Sequence
from pathlib import Path

from exlm_cli.report.cell_rows import Result, read_curves
from exlm_cli.report.curves import Row
from exlm_cli.report.grid_figures import write_grid_figures
from exlm_cli.report.grid_table import GridRow, csv_text, grid_rows, markdown_text
from exlm_cli.run_dir import write_atomically


def write_grid_report(run: Path, cells: Sequence[Result], *, title: str) -> tuple[list[GridRow], list[Path]]:
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


def _curves(run: Path, cells: Sequence[Result]) -> dict[tuple[int, float], list[Row]]:
    by_label = read_curves(run, cells)
    keys = {cell["label"]: (int(cell["num_repeats"]), float(cell["mask_ratio"])) for cell in cells}
    return {keys[label]: rows for label, rows in by_label.items()}
