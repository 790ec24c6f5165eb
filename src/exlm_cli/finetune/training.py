"""What a fine-tuning run trains, with the record that a resumption must meet, and its training, here or by workers."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import loky
import torch

from exlm_cli.config.base import Mark, identity_values
from exlm_cli.config.finetune import NO_GRID, FinetuneRecipe, GridPoint, grid_points
from exlm_cli.config.input_paths import write_run_recipe
from exlm_cli.config.load import dump_recipe, load_recipe
from exlm_cli.config.overrides import describe_changes
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.rows.records import SKIPPED_COLUMNS, SKIPPED_FILE
from exlm_cli.data.tokenizer import TOKENIZER_FILE
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.files import make_folder, write_atomically, write_csv, write_json
from exlm_cli.finetune.baselines.baseline import baselines_of, is_affordable
from exlm_cli.finetune.cells.model import choose_tokenizer, describe_weights, untrained_model
from exlm_cli.finetune.cells.trainer import Cell, TaskData, describe_rows, encode_task, run_cell
from exlm_cli.finetune.features import FeatureStore
from exlm_cli.finetune.prediction.training_rows import write_training_rows
from exlm_cli.finetune.results import ENCODER_FILE, RESULT_FILE, CellResult
from exlm_cli.finetune.scores import MODEL, Origin, first_best, make_scores, point_scores, score_rows_of
from exlm_cli.format import format_counts, format_number
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import (
    SPLIT_FILE,
    SPLITS_FOLDER,
    create_run_dir,
    read_run_json,
    resume_command,
    sole_process,
    update_run_json,
)
from exlm_cli.tasks.base import DownstreamTask
from exlm_cli.tasks.rows.splits import split_fingerprint
from exlm_cli.train.checkpoint import require_origin
from exlm_cli.train.pretrained import (
    Pretrained,
    describe_device,
    load_pretrained,
    load_pretrained_weights,
    load_tokenizer,
    model_identity,
    pick_device,
    recorded_name,
)
from exlm_cli.train.task import Callback
from exlm_cli.train.workers import Job, await_earlier_workers, run_jobs, worker_environments


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
        has_baseline: Whether baselines are scored too.
        splits: The run's own first.
        features: Features of the molecules, which baselines and descriptors share.
    """

    folder: Path
    recipe: FinetuneRecipe
    weights: Pretrained
    checkpoint: Path | None
    use_grid: bool
    has_baseline: bool
    splits: Sequence[SplitPlan]
    features: FeatureStore

    @property
    def cells(self) -> list[Cell]:
        """Cells of every split."""
        return [cell for split in self.splits for cell in split.all_cells]


@contextmanager
def planned_run(
    recipe: FinetuneRecipe,
    tasks: Mapping[int, DownstreamTask],
    *,
    checkpoint: Path | None,
    encoder: PretrainRecipe,
    use_grid: bool,
    baseline: bool | None,
    run: Path | None,
    begun: FinetuneRecipe | None,
    out: Path | None,
    progress: Progress,
) -> Iterator[RunPlan]:
    """Plan a run whose rows are read, in its directory, which no other process uses until the context ends.

    Args:
        tasks: The task on each split, by `task.split_seed`, the run's own first.
        checkpoint: Source of the initial weights; None: they are drawn.
        encoder: Recipe of the model.
        baseline: Whether baselines are scored too; None: where they take minutes at most.
        run: The run that is continued; None: a new one, in `out`.
        begun: The recipe that it has had until now.
        out: None: `runs/<name>-<time>`.

    Raises:
        ExlmError: A mistake in checkpoint, tokenizer or device, or the run did not begin with this.
    """
    first = next(iter(tasks.values()))
    device = pick_device(recipe)
    if recipe.train.num_threads is not None:
        torch.set_num_threads(recipe.train.num_threads)
    if baseline and not baselines_of(first):
        raise ConfigError(f"there is no baseline for {first.name}", "use `--no-baseline`")
    if checkpoint is not None:
        weights = load_pretrained(checkpoint, device="cpu", progress=progress)
    else:
        weights = untrained_model(encoder, choose_tokenizer(encoder, first, run, progress))
    has_baseline = is_affordable(first) if baseline is None else baseline
    if baseline is None and baselines_of(first) and not has_baseline:
        cost = "hours or gigabytes" if first.input_kind == "smiles" else "minutes"
        progress.message(f"skipped the baseline ({cost} at this size); `--baseline` forces it")

    # only now: a data set may be looked for beside this folder
    folder = run or create_run_dir(out, recipe.name)
    with sole_process(folder, is_new=run is None):
        store = FeatureStore()
        points, length = grid_points(recipe, use_grid=use_grid), recipe.sequence_length(encoder)
        splits = []
        for seed, task in tasks.items():
            encoded = encode_task(task, weights.tokenizer, length, weights.recipe.masking.num_repeats)
            data = describe_rows(encoded, recipe.task, store, progress)
            splits.append(_plan_split(folder, recipe, points, seed, task, data))
        if about := splits[0].data.about_descriptors:
            progress.message(about)
        plan = RunPlan(folder, recipe, weights, checkpoint, use_grid, has_baseline, splits, store)
        _record_beginning(plan, begun)
        update_run_json(folder, {"device": describe_device(device), "seeds": recipe.seeds})
        more = f" of the first of {len(splits)} splits" if len(splits) > 1 else ""
        progress.message(
            f"{first.name}: {format_counts(first.split_sizes.values())} rows in {', '.join(first.splits)}{more}; "
            f"{describe_weights(weights, recipe).objective} from {weights.name}, on {describe_device(device)}; "
            f"results in {folder}"
        )
        yield plan


def _plan_split(
    folder: Path,
    recipe: FinetuneRecipe,
    points: Sequence[GridPoint],
    split_seed: int,
    task: DownstreamTask,
    data: TaskData,
) -> SplitPlan:
    """List the cells of a split by grid point and seed."""
    own = [
        GridPoint(point.label, point.values, point.recipe.changed({"task.split_seed": split_seed, "num_replicates": 1}))
        for point in points
    ]
    of_split = [f"split {split_seed}"] if recipe.num_replicates > 1 else []
    cells = {}
    for point in own:
        place = [*([] if point.label == NO_GRID else [point.label]), *of_split]
        cells[point.label] = [Cell(folder, point, seed, " ".join([*place, f"seed {seed}"])) for seed in recipe.seeds]
    return SplitPlan(split_seed, task, data, own, cells)


def _record_beginning(plan: RunPlan, begun: FinetuneRecipe | None) -> None:
    """Write what a run begins with; of a run that is continued, its splits and recipe, which may be new.

    Args:
        begun: The recipe that the run has had until now; None: a new run.

    Raises:
        CheckpointError: Data, weights or recipe are not those that the run began with, or a file cannot be written.
    """
    if begun is None:
        _describe(plan)
    else:
        _refuse_changes(plan, begun)
    _write_splits(plan)
    write_training_rows(plan.folder, [split.task for split in plan.splits])
    write_run_recipe(plan.folder, plan.recipe)


def _describe(plan: RunPlan) -> None:
    """Write what a resumption and a later evaluation need of a new run, except its splits and recipe."""
    folder, weights, first = plan.folder, plan.weights, plan.splits[0]
    weights.tokenizer.save(folder / TOKENIZER_FILE)
    write_atomically(folder / ENCODER_FILE, dump_recipe(weights.recipe).encode())
    update_run_json(
        folder,
        {
            "command": "finetune",
            "task": first.task.name,
            "seeds": plan.recipe.seeds,
            "use_grid": plan.use_grid,
            "baseline": plan.has_baseline,
            "checkpoint": None if plan.checkpoint is None else recorded_name(weights),
            "checkpoint_sha256": weights.sha256,
            "data_fingerprint": first.data.fingerprint,
            "started_unix_s": round(time.time(), 3),
        },
    )
    if first.task.skipped:
        write_csv(folder / SKIPPED_FILE, SKIPPED_COLUMNS, (row.cells for row in first.task.skipped))


def _write_splits(plan: RunPlan) -> None:
    """Write the row numbers of every split; each file can be a `task.split_file`."""
    for number, split in enumerate(plan.splits):
        task = split.task
        content = {
            "task": task.name,
            "split": task.split_name,
            "sizes": task.split_sizes,
            "sha256": split_fingerprint(task.split_indices),
            "indices": {name: rows.tolist() for name, rows in task.split_indices.items()},
        }
        further = plan.folder / SPLITS_FOLDER
        if number:
            make_folder(further)
        write_json(further / f"split-{split.seed}.json" if number else plan.folder / SPLIT_FILE, content)


def _refuse_changes(plan: RunPlan, begun: FinetuneRecipe) -> None:
    """Refuse to continue with other data, weights or recipe; seeds and the number of splits may change."""
    folder, weights, first = plan.folder, plan.weights, plan.splits[0]
    described = read_run_json(folder)
    free = {name: getattr(plan.recipe, name) for name in ("seeds", "num_replicates")}
    then, now = (
        identity_values(recipe, without={Mark.INPUT}) for recipe in (begun.model_copy(update=free), plan.recipe)
    )
    changes = {
        f"data of {first.task.name}": described.data_fingerprint != first.data.fingerprint,
        "checkpoint": described.checkpoint_sha256 != weights.sha256,
        "recipe": then != now,
    }
    for name, is_changed in changes.items():
        if is_changed:
            detail = describe_changes(then, now) if name == "recipe" else ""
            raise CheckpointError(
                f"{folder}: the {name} is not the one this run began with{detail}",
                "an exact resume needs the same inputs and recipe; start a new run for changed ones",
            )
    encoder = load_recipe(folder / ENCODER_FILE)
    own = model_identity(encoder, load_tokenizer(folder, encoder))
    files = {"recipe": folder / ENCODER_FILE, "tokenizer": folder / TOKENIZER_FILE}
    require_origin(weights.checkpoint, model_identity(weights.recipe, weights.tokenizer), own, files)


def train(
    plan: RunPlan, *, workers: int | None, callbacks: Sequence[Callback], progress: Progress
) -> dict[int, GridPoint]:
    """Finish every cell, and return the best grid point of each split; only its weights are kept.

    With changed seeds, a point whose weights were deleted may become the best one. Its cells are then trained again, on
    a CPU to the same bits.

    Args:
        workers: Processes that train; None: one for each CUDA device or CPU core.
        callbacks: Follow the training of every cell, in this process.

    Raises:
        ExlmError: As for `run_cell`; other cells at work have saved a checkpoint. Or a worker of a killed start is
            still at work.
    """
    await_earlier_workers(plan.folder / "workers")
    for cell in plan.cells:
        if cell.is_done:
            cell.drop_checkpoints()
    environments = _environments(plan, workers)
    if len(environments) > 1 and callbacks:
        progress.message("one training after the other: callbacks cannot leave this process")
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
            return best
        for cell in deleted:
            progress.message(f"{cell.label}: trained again: the best with these seeds, but its weights were deleted")
            (cell.folder / RESULT_FILE).unlink()


def describe_result(result: CellResult, metric: str) -> str:
    """Return a line on the best epoch of a cell and the scores there."""
    scores = ", ".join(
        f"{split} {metric} {format_number(of_split[metric])}" for split, of_split in result.metrics.items()
    )
    return f"best epoch {result.best_epoch} of {result.epochs}: {scores}; {result.elapsed_s:.0f} s"


def keep_best_point(split: SplitPlan, recipe: FinetuneRecipe) -> GridPoint:
    """Return the grid point with the best validation so far, and delete the weights of those that it beats.

    A point counts once all its seeds are done. Of equals, and where no validation is defined, it is the first.
    """
    data, done = split.data, [p for p in split.points if all(cell.is_done for cell in split.cells[p.label])]
    if not done:
        return split.points[0]
    rows = [
        row
        for point in done
        for cell in split.cells[point.label]
        for row in score_rows_of(Origin(MODEL, point.label, split.seed, cell.seed), cell.read().metrics, {})
    ]
    by_label = point_scores(make_scores(rows), data.selection_metric, recipe.aggregate)
    values = [by_label[point.label] for point in done]
    best = done[first_best(values, is_greater_better=data.is_greater_better)]
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
    splits = {split.seed: split for split in plan.splits}
    cells = {cell.label: cell for cell in plan.cells}

    def describe(job: Job, _: None) -> str:
        cell = cells[job.name]
        split = splits[cell.split_seed]
        keep_best_point(split, plan.recipe)
        return describe_result(cell.read(), split.data.selection_metric)

    # each worker reads or draws the weights itself, so that they are in no pipe
    if plan.checkpoint is None:
        begin = partial(untrained_model, plan.weights.recipe, plan.weights.tokenizer)
    else:
        begin = partial(load_pretrained_weights, Path(recorded_name(plan.weights)), SilentProgress())
    run_jobs(
        _CellTrainer(begin, {split.seed: split.data for split in plan.splits}),
        [Job(cell.label, (cell,), cell.recipe.train.max_steps or cell.recipe.train.max_epochs) for cell in plan.cells],
        noun="training",
        finished=cells.keys() - {cell.label for cell in waiting},
        describe=describe,
        environments=environments,
        logs=plan.folder / "workers",
        resume=resume_command("finetune", plan.folder),
        progress=progress,
    )


@dataclass(frozen=True)
class _CellTrainer:
    """Finishes cells of a run, in a worker.

    Attributes:
        begin: Returns the initial weights.
        data: Rows of each split, by `task.split_seed`.
    """

    begin: Callable[[], Pretrained]
    data: Mapping[int, TaskData]

    @cached_property
    def _weights(self) -> Pretrained:
        return self.begin()

    def __call__(self, cell: Cell, progress: Progress) -> None:
        if cell.recipe.train.num_threads is not None:
            torch.set_num_threads(cell.recipe.train.num_threads)
        run_cell(cell, self.data[cell.split_seed], self._weights, pick_device(cell.recipe), progress=progress)
