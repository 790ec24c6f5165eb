"""`exlm curves`: training curves of runs, over each other."""

from pathlib import Path
from typing import Annotated

import typer

from exlm_cli.cli.options import JsonOption
from exlm_cli.errors import ConfigError
from exlm_cli.paths import expand_path


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
    from exlm_cli.bundled_models import report_folder
    from exlm_cli.cli import console
    from exlm_cli.cli.reports import draw_curves
    from exlm_cli.export.given import local_run

    path = None if out is None else _figure_path(out)
    progress = console.open_progress()
    local = [local_run(run, progress) for run in runs]
    files = draw_curves(local, path or report_folder(local[0]) / "curves")
    if as_json:
        return console.emit_json({"files": files})
    console.emit_files(files)


def _figure_path(out: str) -> Path:
    """Return the path of both files without their suffixes; refuse another kind of file."""
    path = expand_path(out)
    if out.endswith("/") or path.is_dir():
        return path / "curves"
    # letters alone: the .15 of `curves-p0.15` is not a suffix
    if path.suffix[1:].isalpha() and path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(
            f"`--out {out}`: curves are drawn as .png and .svg, not as {path.suffix}",
            f"`--out {path.with_suffix('')}` writes both",
        )
    return path
