"""Cells of a fine-tuning run, one flat list, finished here or by workers; each split keeps its best point."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import loky

from exlm_cli.config.finetune import FinetuneRecipe, GridPoint
from exlm_cli.finetune.cells.cell import Cell, describe_result, run_cell
from exlm_cli.finetune.cells.shared_rows import can_be_shared, remove_shared_rows, write_shared_rows
from exlm_cli.finetune.cells.trainer import TaskData
from exlm_cli.finetune.features import FeatureStore
from exlm_cli.finetune.results import RESULT_FILE
from exlm_cli.finetune.scores import MODEL, Origin, make_scores, point_scores, score_rows_of
from exlm_cli.format import format_fixed
from exlm_cli.progress import Progress
from exlm_cli.run_dir import resume_command
from exlm_cli.tasks.base import DownstreamTask
from exlm_cli.train.jobs import JobKind, run_jobs
from exlm_cli.train.pool import Job, worker_environments
from exlm_cli.train.pretrained import Pretrained, pick_device, recorded_name
from exlm_cli.train.task import Callback, Selection


@dataclass(frozen=True)
class SplitPlan:
    """One split of the rows.

    Attributes:
        seed: Its `task.split_seed`.
        data: Its encoded rows.
        cells: By grid point, then by seed.
    """

    seed: int
    task: DownstreamTask
    data: TaskData
    points: Sequence[GridPoint]
    cells: Mapping[str, Sequence[Cell]]

    @property
    def all_cells(self) -> list[Cell]:
        """Cells of every grid point."""
        return [cell for of_point in self.cells.values() for cell in of_point]


@dataclass(frozen=True)
class RunPlan:
    """What a run trains.

    Attributes:
        checkpoint: Source of the initial weights; None: they are drawn.
        length: Tokens of a sequence before repetition.
        has_baseline: Whether baselines are scored too.
        splits: The run's own first.
        features: Features of the molecules, which forests and descriptors share.
    """

    folder: Path
    recipe: FinetuneRecipe
    weights: Pretrained
    checkpoint: Path | None
    length: int
    use_grid: bool
    has_baseline: bool
    splits: Sequence[SplitPlan]
    features: FeatureStore

    @property
    def cells(self) -> list[Cell]:
        """Cells of every split."""
        return [cell for split in self.splits for cell in split.all_cells]


def finish_cells(
    plan: RunPlan, *, workers: int | None, callbacks: Sequence[Callback], progress: Progress
) -> dict[int, GridPoint]:
    """Finish every cell, and return the best grid point of each split; only its weights are kept.

    With changed seeds, a point whose weights were deleted may become the best one. Its cells are then trained again, on
    a CPU to the same bits.

    Args:
        workers: Processes that train; None: one for each CUDA device or CPU core.
        callbacks: Follow the training of every cell, in this process.

    Raises:
        ExlmError: As for `run_cell`; other cells at work have saved a checkpoint.
    """
    for cell in plan.cells:
        if cell.is_done:
            cell.drop_checkpoints()
    environments = _environments(plan, workers)
    if len(environments) > 1 and (callbacks or not all(can_be_shared(split.data) for split in plan.splits)):
        reason = "callbacks cannot leave" if callbacks else "the rows of a task of another package cannot leave"
        progress.message(f"one training after the other: {reason} this process")
        environments = environments[:1]
    while True:
        waiting = [cell for cell in plan.cells if not cell.is_done]
        if len(environments) == 1:
            _train_here(plan, waiting, callbacks, progress)
        elif waiting:
            _train_with_workers(plan, waiting, environments, progress)
        best = {split.seed: keep_best_point(split, plan.recipe) for split in plan.splits}
        chosen = [cell for split in plan.splits for cell in split.cells[best[split.seed].label]]
        deleted = [cell for cell in chosen if plan.use_grid and not cell.has_weights]
        if not deleted:
            remove_shared_rows(plan.folder)
            return best
        for cell in deleted:
            progress.message(f"{cell.label}: trained again: the best with these seeds, but its weights were deleted")
            (cell.folder / RESULT_FILE).unlink()


def keep_best_point(split: SplitPlan, recipe: FinetuneRecipe) -> GridPoint:
    """Return the grid point with the best validation so far, and delete the weights of those that it beats.

    A point counts once all its seeds are done. Of equals, and where no validation is defined, it is the first.
    """
    data = split.data
    selection = Selection(data.selection_metric, data.is_greater_better)
    done = [point for point in split.points if all(cell.is_done for cell in split.cells[point.label])]
    rows = [
        row
        for point in done
        for cell in split.cells[point.label]
        for row in score_rows_of(Origin(MODEL, point.label, split.seed, cell.seed), cell.read().metrics, {})
    ]
    values = point_scores(make_scores(rows), data.selection_metric, recipe.aggregate)
    best, best_value = (done or split.points)[0], None
    for point in done:
        if selection.is_better(values[point.label], best_value):
            best, best_value = point, values[point.label]
    for point in done:
        for cell in split.cells[point.label] if point is not best else ():
            cell.drop_weights()
    return best


def _environments(plan: RunPlan, workers: int | None) -> list[dict[str, str]]:
    """Return the environment of each worker. A single one is this process.

    Without `train.num_threads`, workers on a CPU share its cores evenly. Their number follows from all cells of the
    run, done or not, so that a resumed run computes with as many threads as before.
    """
    device, threads = pick_device(plan.recipe).type, plan.recipe.train.num_threads
    environments = worker_environments(device, num_threads=threads, workers=workers)[: len(plan.cells)]
    if device != "cpu" or threads is not None:
        return environments
    at_once = len(environments)
    return worker_environments(device, num_threads=max(1, loky.cpu_count() // at_once), workers=at_once)


def _train_here(plan: RunPlan, waiting: Sequence[Cell], callbacks: Sequence[Callback], progress: Progress) -> None:
    splits = {split.seed: split for split in plan.splits}
    num_cells = len(plan.cells)
    num_done, device = num_cells - len(waiting), pick_device(plan.recipe)
    with progress.bar("trainings", num_cells, done=num_done) as bar:
        for count, cell in enumerate(waiting, start=num_done + 1):
            split = splits[cell.split_seed]
            run_cell(cell, split.data, plan.weights, device, callbacks=callbacks, progress=progress)
            bar.update(count)
            progress.message(f"{cell.label}: {describe_result(cell.read(), split.data.selection_metric)}")
            keep_best_point(split, plan.recipe)


def _train_with_workers(
    plan: RunPlan, waiting: Sequence[Cell], environments: Sequence[Mapping[str, str]], progress: Progress
) -> None:
    places = {cell.label: (cell, split) for split in plan.splits for cell in split.all_cells}

    def show(name: str) -> str:
        cell, split = places[name]
        return format_fixed(cell.read().metrics["valid"][split.data.selection_metric], 3)

    def finish(job: Job, _: Any) -> tuple[str, str]:
        cell, split = places[job.name]
        keep_best_point(split, plan.recipe)
        return show(job.name), describe_result(cell.read(), split.data.selection_metric)

    write_shared_rows(plan.folder, {split.seed: split.data for split in plan.splits})
    names = {cell.label for cell in waiting}
    run_jobs(
        [_job(plan, cell) for cell in plan.cells],
        JobKind(
            worker="exlm_cli.finetune.cells.worker",
            function="cell",
            noun="training",
            title=f"Validation {plan.splits[0].data.selection_metric}, or share of the training done",
            describe=finish,
        ),
        finished={name: show(name) for name in places if name not in names},
        environments=environments,
        logs=plan.folder / "workers",
        resume=resume_command("finetune", plan.folder),
        progress=progress,
    )


def _job(plan: RunPlan, cell: Cell) -> Job:
    """Return a cell for a worker: `finetune.cells.worker.do_cell` reads these values."""
    values = {
        "run": str(cell.run),
        "recipe": cell.recipe.model_dump(mode="json"),
        "point": {"label": cell.point.label, "values": cell.point.values},
        "seed": cell.seed,
        "label": cell.label,
        "length": plan.length,
        "checkpoint": None if plan.checkpoint is None else recorded_name(plan.weights),
    }
    row = cell.label.rpartition("seed")[0].strip() or plan.splits[0].data.name
    work = cell.recipe.train.max_steps or cell.recipe.train.max_epochs
    return Job(cell.label, cell.folder, values, row, f"seed {cell.seed}", work)
