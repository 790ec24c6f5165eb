"""`exlm curves`: the training curves of runs, laid over each other."""

from pathlib import Path
from typing import Annotated

import typer

from exlm_cli.cli.options import JsonOption
from exlm_cli.errors import ConfigError


def curves(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories of `exlm pretrain`.")],
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", metavar="PATH", help="Name of the PNG and SVG, or directory; else report/ of the first."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw the training curves of one or several runs.

    PNG and SVG: loss, perplexity, mask accuracy, entropy and the health of the DAG, from each run's metrics.jsonl.
    """
    from exlm_cli.cli import console

    files = draw_curves(runs, runs[0] / "report" / "curves" if out is None else _named(out))
    if as_json:
        return console.emit_json({"files": [str(path) for path in files]})
    console.emit_pairs({"curves": files[0], "": files[1]})


def _named(out: str) -> Path:
    """Return the path of both pictures but for their suffix."""
    if not out:
        raise ConfigError(
            "`--out` is empty", "give the pictures a name, or leave it out: they go to report/ of the run"
        )
    path = Path(out)
    if out.endswith("/") or path.is_dir():
        return path / "curves"
    # letters alone: the .15 of `curves-p0.15` is no kind of file
    if path.suffix[1:].isalpha() and path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(
            f"`--out {out}`: curves are drawn as .png and .svg, not as {path.suffix}",
            f"`--out {path.with_suffix('')}` writes both",
        )
    return path


def draw_curves(runs: list[Path], path: Path) -> list[Path]:
    """Draw runs over each other, named by as much of their paths as tells them apart; returns the files.

    Raises:
        ConfigError: A run is given twice.
    """
    from exlm_cli.cli.runs import name_runs
    from exlm_cli.files import make_folder
    from exlm_cli.report.curves import plot_curves
    from exlm_cli.run_dir import read_metrics

    names = name_runs(runs)
    rows_by_run = {name: read_metrics(run / "metrics.jsonl") for name, run in zip(names, runs, strict=True)}
    make_folder(path.parent)
    return plot_curves(rows_by_run, path)
