"""Fine-tuning: every seed at every grid point of one task, cell by cell, and their results.

A run directory holds `recipe.yaml`, `encoder.yaml` (the recipe of pre-training), `tokenizer.json`, `split.json`,
`run.json`, `training_rows.npz`, `targets-<split>.csv` (not of spans), `rejected.csv` (where rows were skipped),
`cells/<grid point>/seed-<n>/`, `baselines/<model>/seed-<n>/` and at its end `scores.csv`, `calibration.json` and
`results.json`. A cell is a run of the training loop that ends with `result.json`; a cell that has this file is done.
With `num_replicates`, `replicates/split-<seed>/` are run directories on other splits.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from exlm_cli.config.base import Mark, identity_values
from exlm_cli.config.finetune import FinetuneRecipe, GridPoint, grid_points
from exlm_cli.config.input_paths import write_run_recipe
from exlm_cli.config.load import dump_recipe, load_recipe, resumed_recipe
from exlm_cli.config.overrides import describe_changes
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.rows.records import SKIPPED_COLUMNS, SKIPPED_FILE
from exlm_cli.data.tokenizer import TOKENIZER_FILE
from exlm_cli.distributed.ranks import join
from exlm_cli.distributed.shared_run import hold_run, require_same_data, require_same_recipe
from exlm_cli.errors import CheckpointError, ConfigError, DataError
from exlm_cli.files import write_atomically, write_csv, write_json
from exlm_cli.finetune.baseline import FeatureStore, is_affordable
from exlm_cli.finetune.cell import Job, SplitRun, drop_weights, run_cell
from exlm_cli.finetune.model import (
    ENCODER_FILE,
    describe_weights,
    require_fitting_model,
    resolve_sequence_length,
    untrained_model,
)
from exlm_cli.finetune.results import (
    RESULT_FILE,
    TARGETS_COLUMN,
    RunResults,
)
from exlm_cli.finetune.scores import (
    MODEL,
    Origin,
    RunScores,
    ScoreRow,
    make_scores,
    point_scores,
    read_scores,
    score_rows_of,
)
from exlm_cli.finetune.scoring import SplitScores, conclude, score_split
from exlm_cli.finetune.trainer import encode_task
from exlm_cli.finetune.training_rows import write_training_rows
from exlm_cli.format import format_counts
from exlm_cli.launch import read_launch
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import (
    SERIES_FILE,
    SPLIT_FILE,
    create_run_dir,
    discarded_on_failure,
    read_run_json,
    resume_command,
    update_run_json,
)
from exlm_cli.tasks.base import DownstreamTask, write_outputs
from exlm_cli.tasks.registry import load_task
from exlm_cli.tasks.rows.splits import split_fingerprint
from exlm_cli.train.checkpoint import require_origin
from exlm_cli.train.pretrained import (
    describe_device,
    load_pretrained_weights,
    load_tokenizer,
    model_identity,
    pick_device,
    recorded_name,
)
from exlm_cli.train.task import Callback, Selection, require_arguments
from exlm_cli.train.trackers import require_trackers


@dataclass(frozen=True)
class FinetuneResult:
    """Directory and results of a fine-tuning run."""

    run_dir: Path
    results: RunResults

    @cached_property
    def scores(self) -> RunScores:
        """Scores of the run, read from its directory."""
        return read_scores(self.run_dir)


def run_finetuning(
    recipe: FinetuneRecipe,
    *,
    checkpoint: str | Path | None,
    encoder: PretrainRecipe | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    use_grid: bool = False,
    baseline: bool | None = False,
    task: DownstreamTask | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
) -> FinetuneResult:
    """Fine-tune a checkpoint with every seed of a recipe, optionally at every point of its grid, and score it.

    The epoch that is best in validation is scored once on the test split. With a grid, the point with the best
    aggregate of validation scores is reported.

    Args:
        recipe: What to do.
        checkpoint: A pre-training run, one of its `checkpoints/step-N`, or `bundled:NAME`; `init: scratch` uses its
            architecture and tokenizer alone. None with `resume`: the checkpoint that the run began with; None with
            `encoder`: none.
        encoder: Without a checkpoint: the pre-training recipe whose architecture is trained from scratch. Its tokenizer
            is trained on the training rows, unless the recipe names one.
        out: Run directory; None: `runs/<name>-<time>`.
        resume: A run directory to continue instead; `recipe` may differ from its own as in `resume_finetuning`.
        use_grid: Search `recipe.grid`; a resumed run does what it began with.
        baseline: For molecules, also score random forests on the same splits, one on ECFP4 fingerprints and one on
            RDKit's 2D descriptors; None: where that takes minutes. A resumed run does what it began with.
        task: The task, on the first of the splits; None: the one that `recipe.task` names.
        callbacks: Follow the training of every cell, after the trackers of `train.report_to`.
        progress: Reports the work; None: silent.

    Raises:
        ExlmError: A mistake in data, checkpoint, tokenizer or grid; divergence, interruption.
    """
    progress = progress or SilentProgress()
    require_arguments(recipe, FinetuneRecipe, callbacks)
    require_trackers(recipe.train.report_to)
    launch = read_launch()
    device = pick_device(recipe, launch)
    if recipe.train.num_threads is not None:
        torch.set_num_threads(recipe.train.num_threads)
    if resume is not None:
        resume = Path(resume)
        begun = read_run_json(resume)
        use_grid, baseline = bool(begun.use_grid), bool(begun.baseline)
        if checkpoint is None and begun.checkpoint is not None:
            checkpoint = Path(begun.checkpoint)
        if checkpoint is None:
            encoder = load_recipe(resume / ENCODER_FILE)
        if missing := [seed for seed in begun.seeds or () if seed not in recipe.seeds]:
            listed = f"seed{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
            progress.message(f"the results leave out {listed} of this run; to keep all, list them with `seeds=LIST`")
    if checkpoint is None and encoder is None:
        raise ConfigError("no checkpoint to fine-tune", "give a pre-training run as `checkpoint=RUN`")
    if checkpoint is not None and encoder is not None:
        raise ConfigError(
            f"`encoder={encoder.name}` cannot be combined with `checkpoint={checkpoint}`",
            "a checkpoint has its own encoder",
        )
    if checkpoint is None and recipe.init != "scratch":
        raise ConfigError("an encoder without a checkpoint has no weights to begin with", "use `init=scratch`")
    if task is not None and recipe.num_replicates > 1 and task.resplit is None:
        raise ConfigError("a task given as `task` has one split", "set `num_replicates` to 1")
    points = grid_points(recipe, use_grid=use_grid)

    with join(launch, device) as ranks:
        require_same_recipe(ranks, recipe)
        source = None if checkpoint is None else Path(checkpoint)
        weights = None if source is None else ranks.in_turn(lambda: load_pretrained_weights(source, progress))
        architecture = encoder if weights is None else weights.recipe
        assert architecture is not None, "there is a checkpoint or an encoder"
        start = Path(architecture.name) if weights is None else weights.checkpoint
        length = ranks.together(
            lambda: [resolve_sequence_length(architecture, start, point.recipe) for point in points][-1]
        )

        def load() -> list[DownstreamTask]:
            given = recipe.task if task is None else task
            require_fitting_model(given.name, given.input_kind, architecture, start, baseline=bool(baseline))
            return _load_splits(recipe, task, progress)

        tasks = ranks.in_turn(load)
        if weights is None:
            weights = ranks.in_turn(lambda: untrained_model(architecture, tasks[0], resume, progress))
        has_baseline = is_affordable(tasks[0]) if baseline is None else baseline
        if baseline is None and tasks[0].input_kind == "smiles" and not has_baseline:
            progress.message("no baseline, which takes hours with so many rows and labels; `--baseline` trains it")
        job = Job(weights, source, length, use_grid, has_baseline, ranks, progress, callbacks, FeatureStore())
        return _fine_tune(job, recipe, points, tasks, out, resume)


def _load_splits(recipe: FinetuneRecipe, task: DownstreamTask | None, progress: Progress) -> list[DownstreamTask]:
    """Return the task on each of its splits: the table is read once, and its molecules are parsed once.

    Args:
        task: The task on the first split; None: it is read.

    Raises:
        DataError: A split has no rows to train or to validate on; it is refused before any is trained.
    """
    first = task or load_task(recipe.task, progress)
    for split in ("train", "valid"):
        if split not in first.splits:
            raise DataError(f"{first.name}: there are no rows to use as `{split}`", "fine-tuning needs both splits")
    tasks = [first]
    for number in range(1, recipe.num_replicates):
        seed = recipe.task.split_seed + number
        try:
            if first.resplit is not None:
                tasks.append(first.resplit(seed))
            else:
                tasks.append(load_task(_recipe_of_split(recipe, number).task, SilentProgress()))
        except DataError as error:
            raise DataError(
                f"split {number + 1} of {recipe.num_replicates}, `task.split_seed` {seed}: {error.message}",
                f"`num_replicates={number}` ends before it; a new run can begin with another `task.split_seed` or "
                "`task.split`",
            ) from error
    return tasks


def _recipe_of_split(recipe: FinetuneRecipe, number: int) -> FinetuneRecipe:
    """Return the recipe of one of the splits of `num_replicates`, counted from 0."""
    return recipe.changed({"task.split_seed": recipe.task.split_seed + number, "num_replicates": 1})


def _fine_tune(
    job: Job,
    recipe: FinetuneRecipe,
    points: list[GridPoint],
    tasks: Sequence[DownstreamTask],
    out: str | Path | None,
    resume: Path | None,
) -> FinetuneResult:
    """Fine-tune on every split: the first in the directory of the run, each other one in one under `replicates/`."""
    ranks, is_new = job.ranks, resume is None
    with hold_run(ranks, lambda: resume or create_run_dir(out, recipe.name), is_new=is_new) as folder:
        # a run of a series is continued with the others
        whole = folder.parent if (folder.parent / SERIES_FILE).is_file() else folder
        command = resume_command("finetune", whole)
        run = _open_split(job, recipe, points, tasks[0], folder, command, is_new=is_new)
        parts = [_finish_cells(run)]
        for number, task in enumerate(tasks[1:], start=1):
            own = _recipe_of_split(recipe, number)
            seed = own.task.split_seed
            job.progress.message(f"split {number + 1} of {len(tasks)}: `task.split_seed` {seed}")
            own_points = [GridPoint(p.label, p.values, _recipe_of_split(p.recipe, number)) for p in points]
            place = folder / "replicates" / f"split-{seed}"
            parts.append(_fine_tune_other_split(job, own, own_points, task, place, command))
        results = ranks.first(lambda: conclude(run, parts))
    return FinetuneResult(folder, results)


def _fine_tune_other_split(
    job: Job, recipe: FinetuneRecipe, points: list[GridPoint], task: DownstreamTask, place: Path, command: str
) -> SplitScores:
    """Fine-tune on a split after the first; a finished one is only read."""
    is_new = not job.ranks.first((place / "recipe.yaml").is_file)
    with hold_run(job.ranks, lambda: create_run_dir(place, "") if is_new else place, is_new=is_new) as folder:
        run = _open_split(job, recipe, points, task, folder, command, is_new=is_new)
        part = _finish_cells(run)
        job.ranks.first(lambda: conclude(run, [part]))
    return part


def _open_split(
    job: Job,
    recipe: FinetuneRecipe,
    points: list[GridPoint],
    task: DownstreamTask,
    folder: Path,
    command: str,
    *,
    is_new: bool,
) -> SplitRun:
    """Encode a split and describe it in its directory; a directory that has been begun must have the same."""
    ranks, tokenizer, num_repeats = job.ranks, job.weights.tokenizer, job.weights.recipe.masking.num_repeats
    with discarded_on_failure(folder, is_new=is_new and ranks.is_first):
        data = ranks.together(lambda: encode_task(task, tokenizer, job.length, num_repeats))
        run = SplitRun(job, recipe, points, folder, data, command)
        require_same_data(ranks, data.fingerprint)
        ranks.first(lambda: _prepare_folder(run, is_new=is_new))
    return run


def _prepare_folder(run: SplitRun, *, is_new: bool) -> None:
    if is_new:
        _describe(run)
    else:
        _check_resumed(run)
    write_training_rows(run.folder, run.data.task)
    write_run_recipe(run.folder, run.recipe)


def resume_finetuning(
    run: str | Path,
    overrides: Sequence[str] = (),
    *,
    checkpoint: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
) -> FinetuneResult:
    """Continue a run with its own recipe.yaml, cell by cell; exact on CPU.

    Args:
        run: Run directory of `exlm finetune`.
        overrides: `section.key=value`; seeds, number of splits, device, input paths, logging and saving may change.
        checkpoint: The pre-training run, if it has moved; None: where it was.
        callbacks: Follow the training of every cell.
        progress: Reports the work; None: silent.

    Raises:
        ExlmError: `run` is not a run directory of fine-tuning; otherwise as for `run_finetuning`.
    """
    recipe = resumed_recipe(Path(run), FinetuneRecipe, overrides)
    return run_finetuning(recipe, checkpoint=checkpoint, resume=run, callbacks=callbacks, progress=progress)


def _finish_cells(run: SplitRun) -> SplitScores:
    """Train every cell and the baselines of a split, and score them."""
    task, job, ranks, device = run.data.task, run.job, run.job.ranks, describe_device(run.job.ranks.device)
    described = {"device": device, "seeds": run.recipe.seeds, **({"num_ranks": ranks.size} if ranks.size > 1 else {})}
    ranks.first(lambda: update_run_json(run.folder, described))
    job.progress.message(
        f"{task.name}: {format_counts(task.split_sizes.values())} rows in {', '.join(task.splits)}; "
        f"{describe_weights(job.weights, run.recipe).objective} from {job.weights.name}, on {device}"
        f"{ranks.describe()}; results in {run.folder}"
    )
    best = _run_cells(run)
    return ranks.first(lambda: score_split(run, best))


def _describe(run: SplitRun) -> None:
    """Write all files that a resumption and a later evaluation need, except the recipe."""
    folder, task, weights = run.folder, run.data.task, run.job.weights
    weights.tokenizer.save(folder / TOKENIZER_FILE)
    write_atomically(folder / ENCODER_FILE, dump_recipe(weights.recipe).encode())
    split = {
        "task": task.name,
        "split": task.split_name,
        "sizes": task.split_sizes,
        "sha256": split_fingerprint(task.split_indices),
        "indices": {name: rows.tolist() for name, rows in task.split_indices.items()},
    }
    write_json(folder / SPLIT_FILE, split)
    update_run_json(
        folder,
        {
            "command": "finetune",
            "task": task.name,
            "seeds": run.recipe.seeds,
            "use_grid": run.job.use_grid,
            "baseline": run.job.has_baseline,
            "checkpoint": None if run.job.checkpoint is None else recorded_name(weights),
            "checkpoint_sha256": weights.sha256,
            "data_fingerprint": run.data.fingerprint,
            "started_unix_s": round(time.time(), 3),
        },
    )
    for name in task.splits:
        # targets for the score plots; spans have no table
        if name != "train" and task.loss != "span":
            columns = [TARGETS_COLUMN] if task.loss == "classes" else task.output_names
            targets = run.data.splits[name].targets
            write_outputs(folder / f"targets-{name}.csv", task.split_indices[name], columns, targets)
    if task.skipped:
        write_csv(folder / SKIPPED_FILE, SKIPPED_COLUMNS, (row.cells for row in task.skipped))


def _check_resumed(run: SplitRun) -> None:
    """Refuse to continue with other data, weights or recipe; seeds and the number of splits may change."""
    described, begun = read_run_json(run.folder), resumed_recipe(run.folder, FinetuneRecipe)
    free = {name: getattr(run.recipe, name) for name in ("seeds", "num_replicates")}
    then, now = (
        identity_values(recipe, without={Mark.INPUT}) for recipe in (begun.model_copy(update=free), run.recipe)
    )
    changes = {
        f"data of {run.data.task.name}": described.data_fingerprint != run.data.fingerprint,
        "checkpoint": described.checkpoint_sha256 != run.job.weights.sha256,
        "recipe": then != now,
    }
    for name, is_changed in changes.items():
        if is_changed:
            detail = describe_changes(then, now) if name == "recipe" else ""
            raise CheckpointError(
                f"{run.folder}: the {name} is not the one this run began with{detail}",
                "an exact resume needs the same inputs and recipe; start a new run for changed ones",
            )
    encoder = load_recipe(run.folder / ENCODER_FILE)
    own = model_identity(encoder, load_tokenizer(run.folder, encoder))
    files = {"recipe": run.folder / ENCODER_FILE, "tokenizer": run.folder / TOKENIZER_FILE}
    given = model_identity(run.job.weights.recipe, run.job.weights.tokenizer)
    require_origin(run.job.weights.checkpoint, given, own, files)


def _run_cells(run: SplitRun) -> GridPoint:
    """Finish every cell and return the best grid point; only its weights are kept.

    With changed seeds, a point whose weights were deleted may become the best one. Its cells are then trained again, on
    a CPU to the same bits.
    """
    task, progress, ranks = run.data.task, run.job.progress, run.job.ranks
    metric, aggregate = task.selection_metric, run.recipe.aggregate
    selection = Selection(metric, task.is_greater_better)
    best, best_value = run.points[0], None
    num_done = sum(cell.is_done for point in run.points for cell in run.cells(point))
    with progress.bar("cells", len(run.points) * len(run.recipe.seeds), done=num_done) as bar:
        for point in run.points:
            rows: list[ScoreRow] = []
            for cell in run.cells(point):
                is_new = not cell.is_done
                result = run_cell(run, cell)
                rows += score_rows_of(Origin(MODEL, point.label, run.split_seed, cell.seed), result.metrics, {})
                if is_new:
                    num_done += 1
                    bar.update(num_done)
                    progress.message(cell.describe(result, metric))
            value = point_scores(make_scores(rows), metric, aggregate)[point.label]
            loser = point
            if selection.is_better(value, best_value):
                best, best_value, loser = point, value, best
            if loser is not best and ranks.is_first:
                drop_weights(run, loser)
    missing = ranks.first(lambda: [len(run.points) > 1 and not cell.has_weights for cell in run.cells(best)])
    for cell, is_missing in zip(run.cells(best), missing, strict=True):
        if is_missing:
            progress.message(f"{cell.label}: trained again: the best with these seeds, but its weights were deleted")
            if ranks.is_first:
                (cell.folder / RESULT_FILE).unlink()
            run_cell(run, cell)
    return best
