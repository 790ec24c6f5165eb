"""`exlm curves`: training curves of runs, over each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from exlm_cli.cli.options import JsonOption
from exlm_cli.errors import CheckpointError, ConfigError
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
    from exlm_cli.cli.runs import local_run

    path = None if out is None else _figure_path(out)
    progress = console.open_progress()
    local = [local_run(run, progress) for run in runs]
    files = draw_curves(local, path or report_folder(local[0]) / "curves")
    if as_json:
        return console.emit_json({"files": files})
    console.emit_files(files)


def draw_curves(runs: Sequence[Path], path: Path) -> list[Path]:
    """Draw the curves of runs to `path`, a name without suffix, and return the files.

    Raises:
        ConfigError: A run is given twice.
        CheckpointError: A run has no metrics.jsonl, or a file cannot be written.
        DataError: There is nothing to draw.
    """
    from exlm_cli.cli.runs import name_runs
    from exlm_cli.files import folder_for_results
    from exlm_cli.report.curves import plot_curves
    from exlm_cli.run_dir import METRICS_FILE, read_metrics

    names = name_runs(runs)
    for run in runs:
        _require_metrics(run)
    rows_by_run = {name: read_metrics(run / METRICS_FILE) for name, run in zip(names, runs, strict=True)}
    with folder_for_results(path.parent):
        return plot_curves(rows_by_run, path)


def _require_metrics(run: Path) -> None:
    """Refuse a folder without curves; for a run of several models, name one that has them."""
    from exlm_cli.run_dir import METRICS_FILE, RUN_FILE

    if (run / METRICS_FILE).is_file():
        return
    if not (run / RUN_FILE).is_file():
        reason = "not a run directory" if run.exists() else "no such run directory"
        raise CheckpointError(f"{run}: {reason}", "give a run directory of `exlm pretrain`")
    inner = sorted(run.glob(f"cells/**/{METRICS_FILE}"))
    hint = f"give one of its models, such as {inner[0].parent}" if inner else "give a run that has begun to train"
    raise CheckpointError(f"{run}: this run has no curves of its own", hint)


def _figure_path(out: str) -> Path:
    """Return the path of both files without their suffixes; refuse an empty one and another kind of file."""
    if not out:
        raise ConfigError("`--out` is empty", "give a file name, or leave it out: the files go to report/ of the run")
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
