"""Fine-tuning on every task of a suite: one folder with a run for each task; a stopped series can be resumed."""

import signal
from collections.abc import Sequence
from pathlib import Path

from exlm_cli.bundled_models import bundled_name
from exlm_cli.config.finetune import FinetuneRecipe, grid_points
from exlm_cli.config.input_paths import with_absolute_paths
from exlm_cli.config.load import dump_recipe, load_recipe
from exlm_cli.errors import DataError, DivergedError, InterruptedRunError
from exlm_cli.files import JsonModel, read_json, write_atomically, write_json
from exlm_cli.finetune.model import require_fitting_model, resolve_sequence_length
from exlm_cli.finetune.results import RESULTS_FILE, read_results
from exlm_cli.finetune.run import FinetuneResult, resume_finetuning, run_finetuning
from exlm_cli.progress import Progress
from exlm_cli.run_dir import SERIES_FILE, create_run_dir, mark_resumable, resume_command, run_directory, run_kind
from exlm_cli.tasks.registry import require_local_files
from exlm_cli.train.pretrained import pick_device
from exlm_cli.train.trackers import require_trackers


class Series(JsonModel):
    """`series.json`: what the runs of a folder begin with.

    Attributes:
        names: Runs in order; `<name>.yaml` is the recipe of each, `<name>/` its directory.
        checkpoint: Pre-training run: its absolute path, or `bundled:NAME`.
        use_grid, baseline: As in `run_finetuning`.
    """

    names: tuple[str, ...]
    checkpoint: str
    use_grid: bool
    baseline: bool | None


def begin_series(
    recipes: Sequence[FinetuneRecipe],
    *,
    suite: str,
    checkpoint: Path,
    out: Path | None,
    use_grid: bool,
    baseline: bool | None,
) -> Path:
    """Make the folder of a series and return it.

    Args:
        recipes: Recipe of each task; the part of `task.name` after the slash names its run.
        out: The folder; None: `runs/<suite>-all-<time>`.
        use_grid, baseline: As in `run_finetuning`.

    Raises:
        CheckpointError: The model reads other rows than the tasks have, `out` is not empty, or a file cannot be
            written.
        ConfigError: The baseline reads other rows, a sequence is too long for the model, or there is no such device or
            tracker; a resumption keeps the recipes, so nothing is made.
        DataError: Files of a task are missing; nothing is made.
    """
    run_kind(checkpoint)  # refuses what is no run
    encoder = load_recipe(run_directory(checkpoint) / "recipe.yaml")
    for recipe in recipes:
        require_fitting_model(recipe.task.name, recipe.task.input_kind, encoder, checkpoint, baseline=bool(baseline))
        for point in grid_points(recipe, use_grid=use_grid):
            resolve_sequence_length(encoder, checkpoint, point.recipe)
        pick_device(recipe)
        require_trackers(recipe.train.report_to)
    _require_all_files(recipes, suite)
    by_name = {recipe.task.name.partition("/")[2]: recipe for recipe in recipes}
    folder = create_run_dir(out, f"{suite}-all", further_files=[f"{name}.yaml" for name in by_name])
    for name, recipe in by_name.items():
        write_atomically(folder / f"{name}.yaml", dump_recipe(with_absolute_paths(recipe)).encode())
    source = bundled_name(checkpoint) or str(checkpoint.resolve())
    series = Series(names=tuple(by_name), checkpoint=source, use_grid=use_grid, baseline=baseline)
    write_json(folder / SERIES_FILE, series)
    mark_resumable(folder)
    return folder


def _require_all_files(recipes: Sequence[FinetuneRecipe], suite: str) -> None:
    """Refuse a series in which a task has no files: it would fail there after hours."""
    present: list[str] = []
    missing: dict[str, DataError] = {}
    for recipe in recipes:
        name = recipe.task.name.partition("/")[2]
        try:
            require_local_files(recipe.task)
            present.append(name)
        except DataError as error:
            missing[name] = error
    if missing:
        first, *others = missing
        also = f"; files of {', '.join(others)} cannot be used either" if others else ""
        instead = f"; or run the others: `exlm finetune {suite} {','.join(present)}`" if present else ""
        raise DataError(f"{first}: {missing[first].message}{also}", f"{missing[first].hint}{instead}")


def run_series(
    folder: Path, *, checkpoint: Path | None, progress: Progress
) -> tuple[list[FinetuneResult], list[DivergedError]]:
    """Finish every run of a series, and return their results and the errors of those that diverged.

    Args:
        folder: Made by `begin_series`.
        checkpoint: The pre-training run, if it has moved; None: where it was.

    Raises:
        ExlmError: A mistake in data or checkpoint; interruption.
    """
    series = read_json(folder / SERIES_FILE, Series)
    finished, diverged = [], []
    for number, name in enumerate(series.names, start=1):
        run = folder / name
        if (run / RESULTS_FILE).is_file():
            progress.message(f"{name}: finished before")
            finished.append(FinetuneResult(run, read_results(run)))
            continue
        progress.message(f"{name}: task {number} of {len(series.names)}")
        try:
            if (run / "recipe.yaml").is_file():
                finished.append(resume_finetuning(run, checkpoint=checkpoint, progress=progress))
                continue
            begun = run_finetuning(
                load_recipe(folder / f"{name}.yaml", kind=FinetuneRecipe),
                checkpoint=checkpoint or Path(series.checkpoint),
                out=run,
                use_grid=series.use_grid,
                baseline=series.baseline,
                progress=progress,
            )
            finished.append(begun)
        except DivergedError as error:
            progress.message(f"{name}: {error.message}")
            diverged.append(error)
        except KeyboardInterrupt as stop:  # while no model was trained
            raise InterruptedRunError(
                f"stopped at {name}, task {number} of {len(series.names)}",
                f"continue with `{resume_command('finetune', folder)}`",
                signal.SIGINT,
            ) from stop
    return finished, diverged
