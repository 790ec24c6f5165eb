"""The report of a sweep, from its run directory: CSV, Markdown and pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exlm_cli.files import make_folder, write_atomically
from exlm_cli.report.cell_rows import Result, read_curves
from exlm_cli.report.curves import plot_curves
from exlm_cli.report.sweep_figures import write_entropy_figures
from exlm_cli.report.sweep_rows import ABOUT, SweepRow, csv_text, sweep_rows
from exlm_cli.report.sweep_tables import sweep_tables
from exlm_cli.report.tables import ReportTable, as_markdown


@dataclass(frozen=True)
class SweepReport:
    """What was made of a sweep: its variants, the tables, and the files with them and with figures."""

    rows: list[SweepRow]
    tables: list[ReportTable]
    files: list[Path]


def write_sweep_report(
    run: Path, results: Sequence[Result], *, name: str, folder: Path, has_figures: bool = True
) -> SweepReport:
    """Write `sweep.csv`, `sweep.md`, the curves, and Figure 12 where entropy was measured at several p.

    Args:
        run: Run directory; curves are read from its cells, those of the first seed.
        results: `result.json` of every variant and seed.
        name: Of the recipe.
        folder: Where; made if need be.
        has_figures: Draw.

    Raises:
        CheckpointError: The file system refuses, or a metrics.jsonl is damaged.
    """
    rows = sweep_rows(results)
    tables = sweep_tables(rows, name=name)
    make_folder(folder)
    markdown = "\n".join([f"# Sweep: {name}\n", *map(as_markdown, tables)])
    texts = {"sweep.csv": csv_text(rows), "sweep.md": markdown}
    for file, text in texts.items():
        write_atomically(folder / file, text.encode())
    files = [folder / file for file in texts]
    if has_figures:
        curves = read_curves(run, results)
        files += plot_curves(curves, folder / "curves") if curves else []
        files += write_entropy_figures(rows, folder)
    return SweepReport(rows, tables, files)


def sweep_as_json(run: Path, rows: Sequence[SweepRow], files: Sequence[Path]) -> dict[str, Any]:
    """Return a sweep for programs: figures are means over seeds."""
    return {
        "run_dir": str(run),
        "files": [str(path) for path in files],
        "variants": [
            {
                "variant": row.label,
                **{name: row.about[name] for name in ABOUT},
                "changes": dict(row.changes),
                "parameters": row.parameters,
                "steps": row.steps,
                "elapsed_s": row.elapsed_s,
                "seeds": list(row.seeds),
                "diverged_seeds": list(row.diverged_seeds),
                **{name: row.mean(name) for name in row.figures},
                "entropy_at": {f"{ratio:g}": {n: list(v) for n, v in e.items()} for ratio, e in row.entropy_at.items()},
            }
            for row in rows
        ],
    }
