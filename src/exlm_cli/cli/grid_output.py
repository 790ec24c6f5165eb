"""How a grid of pre-training runs is told: by the commands that run them, and by `exlm eval`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exlm_cli.errors import ConfigError


def tell_sweep(
    run: Path,
    cells: Sequence[Mapping[str, Any]],
    name: str,
    *,
    folder: Path | None = None,
    formats: Sequence[str] = (),
    has_figures: bool = True,
    as_json: bool = False,
) -> None:
    """Write the report of a sweep and print its tables.

    Args:
        run: Run directory.
        cells: `result.json` of variants and seeds.
        name: Of the recipe.
        folder: Of the report; none: `report/` of the run.
        formats: Files of the tables besides, by their names in `report.tables`.
        has_figures: Draw.
        as_json: Print for programs.
    """
    from exlm_cli.cli import console
    from exlm_cli.report.sweep_report import sweep_as_json, write_sweep_report
    from exlm_cli.report.tables import write_tables

    folder = folder or run / "report"
    report = write_sweep_report(run, cells, name=name, folder=folder, has_figures=has_figures)
    files = [*report.files, *write_tables(report.tables, folder, formats)]
    if as_json:
        return console.emit_json(sweep_as_json(run, report.rows, files))
    for table in report.tables:
        console.emit_renderable(table)
        console.emit_text("")
    _emit_files(run, files)


def tell_repeat_mlm(
    run: Path,
    cells: Sequence[Mapping[str, Any]],
    name: str,
    *,
    folder: Path | None = None,
    formats: Sequence[str] = (),
    has_figures: bool = True,
    as_json: bool = False,
) -> None:
    """Write the report of a Repeated-MLM grid and print its tables; arguments are those of `tell_sweep`.

    Raises:
        ConfigError: `formats`: its tables are Markdown and CSV.
    """
    from exlm_cli.cli import console
    from exlm_cli.report.grid_report import grid_as_json, write_grid_report
    from exlm_cli.report.grid_table import markdown_text

    if formats:
        raise ConfigError(
            "`--format` is not for a run of `exlm repeat-mlm`", "its report/ has grid.md and grid.csv as it is"
        )
    title = f"Repeated MLM: {name}"
    folder = folder or run / "report"
    rows, files = write_grid_report(run, cells, title=title, folder=folder, has_figures=has_figures)
    if as_json:
        return console.emit_json(grid_as_json(run, files, rows))
    console.emit_text(markdown_text(rows, title=title))
    _emit_files(run, files)


def _emit_files(run: Path, files: Sequence[Path]) -> None:
    from exlm_cli.cli import console

    console.emit_pairs({"run": run, **{path.name: path for path in files if path.suffix != ".svg"}})
