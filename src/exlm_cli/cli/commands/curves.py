"""`exlm curves`: training curves of runs, over each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from exlm_cli.cli.options import JsonOption
from exlm_cli.errors import ConfigError


def curves(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories of `exlm pretrain`.")],
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="PATH", help="File name or directory; default: report/ of the first run."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw the training curves of one or several runs.

    PNG and SVG: loss, perplexity, mask accuracy, entropy and the health of the DAG, from each run's metrics.jsonl.
    """
    from exlm_cli.cli import console
    from exlm_cli.cli.runs import local_run

    path = None if out is None else _figure_path(out)
    progress = console.open_progress()
    local = [local_run(run, progress) for run in runs]
    files = draw_curves(local, path or local[0] / "report" / "curves")
    if as_json:
        return console.emit_json({"files": files})
    console.emit_files(files)


def draw_curves(runs: Sequence[Path], path: Path) -> list[Path]:
    """Draw the curves of runs to `path`, a name without suffix, and return the files.

    Raises:
        ConfigError: A run is given twice.
        CheckpointError: A run has no metrics.jsonl, or the file system refuses.
        DataError: There is nothing to draw.
    """
    from exlm_cli.cli.runs import name_runs
    from exlm_cli.files import folder_for_results
    from exlm_cli.report.curves import plot_curves
    from exlm_cli.run_dir import read_metrics

    rows_by_run = {name: read_metrics(run / "metrics.jsonl") for name, run in zip(name_runs(runs), runs, strict=True)}
    with folder_for_results(path.parent):
        return plot_curves(rows_by_run, path)


def _figure_path(out: str) -> Path:
    """Return the path of both files without their suffixes; refuse an empty one and another kind of file."""
    if not out:
        raise ConfigError("`--out` is empty", "give a file name, or leave it out: the files go to report/ of the run")
    path = Path(out)
    if out.endswith("/") or path.is_dir():
        return path / "curves"
    # letters alone: the .15 of `curves-p0.15` is not a suffix
    if path.suffix[1:].isalpha() and path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(
            f"`--out {out}`: curves are drawn as .png and .svg, not as {path.suffix}",
            f"`--out {path.with_suffix('')}` writes both",
        )
    return path
