"""`exlm curves`: the training curves of runs, laid over each other."""

from pathlib import Path
from typing import Annotated

import typer

from exlm_cli.cli.options import JsonOption


def curves(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories of `exlm pretrain`.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where to, as PNG and SVG; else `report/curves` of the first."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw the training curves of one or several runs.

    PNG and SVG: loss, perplexity, mask accuracy, entropy and the health of the DAG, from each run's metrics.jsonl.
    """
    from exlm_cli.cli import console

    files = draw_curves(runs, out or runs[0] / "report" / "curves")
    if as_json:
        return console.emit_json({"files": [str(path) for path in files]})
    console.emit_pairs({"curves": files[0], "": files[1]})


def draw_curves(runs: list[Path], path: Path) -> list[Path]:
    """Draw runs over each other, named by as much of their paths as tells them apart; returns the files.

    Raises:
        ConfigError: A run is given twice.
    """
    from exlm_cli.analysis.scores import name_runs
    from exlm_cli.report.curves import plot_curves
    from exlm_cli.run_dir import make_folder, read_metrics

    names = name_runs(runs)
    rows_by_run = {name: read_metrics(run / "metrics.jsonl") for name, run in zip(names, runs, strict=True)}
    make_folder(path.parent)
    return plot_curves(rows_by_run, path)
