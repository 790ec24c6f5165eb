"""Fine-tuning on several tasks of a suite: a list of ordinary runs for the workers, each in a folder of its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exlm_cli.bundled_models import bundled_name
from exlm_cli.config.finetune import FinetuneRecipe, grid_points
from exlm_cli.config.input_paths import with_absolute_paths
from exlm_cli.config.load import load_recipe
from exlm_cli.errors import DataError, DivergedError
from exlm_cli.files import JsonModel, read_json, write_json
from exlm_cli.finetune.results import RESULTS_FILE, read_results
from exlm_cli.finetune.run import (
    FinetuneResult,
    require_fitting_model,
    resolve_sequence_length,
    resume_finetuning,
    run_finetuning,
)
from exlm_cli.finetune.scores import read_scores
from exlm_cli.format import format_fixed
from exlm_cli.launch import require_one_process
from exlm_cli.progress import Progress
from exlm_cli.run_dir import (
    SERIES_FILE,
    create_run_dir,
    mark_resumable,
    resume_command,
    run_directory,
    run_kind,
    sole_process,
)
from exlm_cli.tasks.registry import require_local_files
from exlm_cli.train.pretrained import pick_device
from exlm_cli.train.trackers import require_trackers
from exlm_cli.workers.jobs import JobKind, run_jobs
from exlm_cli.workers.pool import Job, worker_environments


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
        ConfigError: There are several ranks, a sequence is too long for the model, or there is no such device or
            tracker; a resumption keeps the recipes, so nothing is made.
        DataError: Files of a task are missing; nothing is made.
    """
    require_one_process("fine-tuning")
    run_kind(checkpoint)  # refuses what is no run
    encoder = load_recipe(run_directory(checkpoint) / "recipe.yaml")
    for recipe in recipes:
        require_fitting_model(recipe.task.name, recipe.task.input_kind, encoder, checkpoint)
        for point in grid_points(recipe, use_grid=use_grid):
            resolve_sequence_length(encoder, checkpoint, point.recipe)
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
) -> tuple[list[FinetuneResult], list[DivergedError]]:
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
    common = {
        "checkpoint": series.checkpoint,
        "moved": None if checkpoint is None else str(checkpoint.resolve()),
        "use_grid": series.use_grid,
        "baseline": series.baseline,
    }
    jobs = [
        Job(name, folder / name, {"recipe": recipe.model_dump(mode="json"), **common}, name, "score")
        for name, recipe in series.recipes.items()
    ]
    done = [name for name in series.recipes if (folder / name / RESULTS_FILE).is_file()]
    diverged: dict[str, DivergedError] = {}

    def describe(job: Job, error: dict[str, str] | None) -> tuple[str, str]:
        if error is None:
            return _shown(job.folder)
        diverged[job.name] = DivergedError(**error)
        return "diverged", error["message"]

    first = next(iter(series.recipes.values()))
    environments = worker_environments(pick_device(first).type, num_threads=first.train.num_threads, workers=workers)
    with sole_process(folder, is_new=False):
        progress.message(
            f"{len(jobs)} tasks, {len(done)} of them done, {len(environments)} at once; results in {folder}"
        )
        run_jobs(
            jobs,
            JobKind(
                worker="exlm_cli.experiments.worker",
                function="task",
                noun="task",
                title="Score, or share of the trainings done",
                describe=describe,
            ),
            finished={name: _shown(folder / name)[0] for name in done},
            environments=environments,
            logs=folder / "workers",
            resume=resume_command("finetune", folder),
            progress=progress,
        )
    finished = [job.folder for job in jobs if job.name not in diverged]
    return [FinetuneResult(run, read_results(run)) for run in finished], list(diverged.values())


def run_task(folder: Path, values: Mapping[str, Any], progress: Progress) -> dict[str, str] | None:
    """Begin or continue one run of a series, in a worker; return message and hint where it diverged.

    Args:
        folder: Its run directory.
        values: `recipe`, `use_grid`, `baseline` and `checkpoint` for a beginning; `moved`, where the pre-training run
            is now, or None.
    """
    moved = None if values["moved"] is None else Path(values["moved"])
    try:
        if (folder / "recipe.yaml").is_file():
            resume_finetuning(folder, checkpoint=moved, progress=progress)
        else:
            run_finetuning(
                FinetuneRecipe.model_validate(values["recipe"]),
                checkpoint=moved or Path(values["checkpoint"]),
                out=folder,
                use_grid=values["use_grid"],
                baseline=values["baseline"],
                progress=progress,
            )
    except DivergedError as error:
        return {"message": error.message, "hint": error.hint}
    return None


def _shown(run: Path) -> tuple[str, str]:
    """Return the text of a finished run in the table, and its line."""
    results = read_results(run)
    metric, split = results.selection_metric, results.scored_split
    score = read_scores(run).average(split, metric).center(results.aggregate)
    text = f"{metric} {format_fixed(score, 3)}"
    return text, f"{text} in {split}"
