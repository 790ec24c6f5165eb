"""Fine-tuning on several tasks of a suite: a list of ordinary runs for the workers, each in a folder of its own."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from exlm_cli.bundled_models import bundled_name
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.input_paths import with_absolute_paths
from exlm_cli.config.load import load_recipe
from exlm_cli.errors import DataError, DivergedError
from exlm_cli.files import JsonModel, read_json, write_json
from exlm_cli.finetune.results import RESULTS_FILE, FinetunedRun, read_results
from exlm_cli.finetune.run import require_fitting_model, run_finetuning
from exlm_cli.finetune.scores import read_scores
from exlm_cli.format import format_fixed
from exlm_cli.progress import Progress
from exlm_cli.run_dir import (
    SERIES_FILE,
    create_run_dir,
    mark_resumable,
    out_or_resume,
    resume_command,
    run_directory,
    run_kind,
    sole_process,
)
from exlm_cli.tasks.registry import require_local_files
from exlm_cli.train.pretrained import pick_device
from exlm_cli.train.records.trackers import require_trackers
from exlm_cli.train.workers import Job, run_jobs, worker_environments


class Series(JsonModel):
    """`series.json`: what the runs of a folder begin with.

    Attributes:
        recipes: Recipe of each run by its name, which is its directory's, in order.
        checkpoint: Pre-training run: its absolute path, or `bundled:NAME`.
        use_grid, baseline: As in `run_finetuning`.
    """

    recipes: dict[str, FinetuneRecipe]
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
        ConfigError: A sequence is too long for the model, or there is no such device or
            tracker; a resumption keeps the recipes, so nothing is made.
        DataError: Files of a task are missing; nothing is made.
    """
    run_kind(checkpoint)  # refuses what is no run
    encoder = load_recipe(run_directory(checkpoint) / "recipe.yaml")
    for recipe in recipes:
        require_fitting_model(recipe, encoder, checkpoint, use_grid=use_grid)
        pick_device(recipe)
        require_trackers(recipe.train.report_to)
    _require_all_files(recipes, suite)
    folder = create_run_dir(out, f"{suite}-all")
    series = Series(
        recipes={recipe.task.name.partition("/")[2]: with_absolute_paths(recipe) for recipe in recipes},
        checkpoint=bundled_name(checkpoint) or str(checkpoint.resolve()),
        use_grid=use_grid,
        baseline=baseline,
    )
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
    folder: Path, *, checkpoint: Path | None, workers: int | None, progress: Progress
) -> tuple[list[FinetunedRun], list[DivergedError]]:
    """Finish every run of a series, and return their results and the errors of those that diverged.

    Args:
        folder: Made by `begin_series`.
        checkpoint: The pre-training run, if it has moved; None: where it was.
        workers: Runs at once; None: one for each CUDA device, or for each `train.num_threads` CPU cores.

    Raises:
        CheckpointError: Another process works on this series.
        InterruptedRunError: Stopped by a signal; runs that were at work have saved a checkpoint.
        ExlmError: What stops any run but its own divergence; the others have saved a checkpoint.
    """
    series = read_json(folder / SERIES_FILE, Series)
    start = series.checkpoint if checkpoint is None else str(checkpoint.resolve())
    task = partial(run_task, use_grid=series.use_grid, baseline=series.baseline)
    jobs = [Job(name, (recipe, folder / name, start)) for name, recipe in series.recipes.items()]
    first = next(iter(series.recipes.values()))
    environments = worker_environments(pick_device(first).type, num_threads=first.train.num_threads, workers=workers)
    with sole_process(folder, is_new=False):
        done = [name for name in series.recipes if (folder / name / RESULTS_FILE).is_file()]
        progress.message(
            f"{len(jobs)} tasks, {len(done)} of them done, {len(environments)} at once; results in {folder}"
        )
        diverged = run_tasks(
            jobs,
            task,
            finished=done,
            environments=environments,
            logs=folder / "workers",
            resume=resume_command("finetune", folder),
            progress=progress,
        )
    finished = [folder / name for name in series.recipes if name not in diverged]
    return [FinetunedRun(run.name, run, read_results(run)) for run in finished], list(diverged.values())


def run_tasks(
    jobs: Sequence[Job], task: Callable[..., DivergedError | None], **options: Any
) -> dict[str, DivergedError]:
    """Finish fine-tuning runs, and return the errors of those that diverged, by name.

    Args:
        jobs: Each has the first arguments of `run_task`.
        task: `run_task`, or a part of it.
        options: As in `workers.run_jobs`.

    Raises:
        InterruptedRunError: Stopped by a signal; runs that were at work have saved a checkpoint.
        ExlmError: What stops any run but its own divergence; the others have saved a checkpoint.
    """
    diverged: dict[str, DivergedError] = {}

    def describe(job: Job, error: DivergedError | None) -> str:
        if error is None:
            return _describe(job.arguments[1])
        diverged[job.name] = error
        return error.message

    run_jobs(task, jobs, noun="task", describe=describe, **options)
    return diverged


def run_task(
    recipe: FinetuneRecipe,
    run: Path,
    checkpoint: str,
    progress: Progress,
    *,
    use_grid: bool = False,
    baseline: bool | None = False,
) -> DivergedError | None:
    """Begin or continue a fine-tuning run, in a worker; return the error where it diverged.

    Args:
        recipe: What it does.
        run: Its run directory.
        checkpoint: The pre-training run that it begins with.
        use_grid, baseline: As in `run_finetuning`.
    """
    try:
        run_finetuning(
            recipe,
            checkpoint=checkpoint,
            use_grid=use_grid,
            baseline=baseline,
            progress=progress,
            **out_or_resume(run),
        )
    except DivergedError as error:
        return error
    return None


def _describe(run: Path) -> str:
    """Return the line of a finished run."""
    results = read_results(run)
    metric, split = results.selection_metric, results.scored_split
    score = read_scores(run).average(split, metric).center(results.aggregate)
    return f"{metric} {format_fixed(score, 3)} in {split}"
