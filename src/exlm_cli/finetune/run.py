"""Fine-tuning: every seed at every grid point of one task, cell by cell, and their results.

A run directory holds `recipe.yaml`, `encoder.yaml` (the recipe of pre-training), `tokenizer.json`, `split.json`,
`run.json`, `training_rows.npz`, `targets-<split>.csv` (not of spans), `rejected.csv` (where rows were skipped),
`cells/<grid point>/seed-<n>/` and at its end `calibration.json` and `results.json`. A cell is a run of the training
loop that ends with `result.json`; a cell that has this file is done. With `num_replicates`, `replicates/split-<seed>/`
are run directories on other splits.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from exlm_cli.config.base import Mark, identity_values
from exlm_cli.config.finetune import NO_GRID, FinetuneRecipe, GridPoint, grid_points
from exlm_cli.config.input_paths import write_run_recipe
from exlm_cli.config.load import dump_recipe, load_recipe, resumed_recipe
from exlm_cli.config.overrides import describe_changes
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.rows.records import SKIPPED_COLUMNS, SKIPPED_FILE
from exlm_cli.data.tokenizer import TOKENIZER_FILE, Tokenizer
from exlm_cli.distributed.ranks import join
from exlm_cli.distributed.shared_run import hold_run, require_same_data, require_same_recipe
from exlm_cli.errors import CheckpointError, ConfigError, DataError
from exlm_cli.files import write_atomically, write_csv, write_json
from exlm_cli.finetune.baseline import score_baseline
from exlm_cli.finetune.calibration import CALIBRATION_FILE, calibrate_answers, calibrate_run
from exlm_cli.finetune.cell import Job, SplitRun, drop_weights, run_cell
from exlm_cli.finetune.model import (
    ENCODER_FILE,
    describe_weights,
    load_pretrained_weights,
    recorded_name,
    require_fitting_model,
    resolve_sequence_length,
    untrained_model,
)
from exlm_cli.finetune.results import (
    RESULT_FILE,
    RESULTS_FILE,
    TARGETS_COLUMN,
    BaselineResult,
    CellResult,
    GridChoice,
    GridScores,
    RunResults,
    count_known_rows,
    read_results,
    selection_value,
    summarise_labels,
    summarise_metrics,
)
from exlm_cli.finetune.trainer import encode_task
from exlm_cli.finetune.training_rows import similarity_to_training, write_training_rows
from exlm_cli.finetune.verdict import describe_verdict, summarise_splits
from exlm_cli.format import format_counts, name_some, printable
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
from exlm_cli.tasks.metrics import FEW_ROWS, describe_rare_classes
from exlm_cli.tasks.registry import load_task
from exlm_cli.tasks.rows.splits import split_fingerprint
from exlm_cli.train.checkpoint import require_origin
from exlm_cli.train.pretrained import describe_device, model_identity, pick_device
from exlm_cli.train.task import Callback, Selection, require_arguments
from exlm_cli.train.trackers import require_trackers


@dataclass(frozen=True)
class FinetuneResult:
    """Directory and results of a fine-tuning run."""

    run_dir: Path
    results: RunResults


def run_finetuning(
    recipe: FinetuneRecipe,
    *,
    checkpoint: str | Path | None,
    encoder: PretrainRecipe | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    use_grid: bool = False,
    baseline: bool = False,
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
        baseline: For molecules, also score ECFP4 fingerprints with a random forest on the same splits; a resumed run
            does what it began with.
        task: The task; None: the one that `recipe.task` names.
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
    if checkpoint is None and recipe.init != "scratch":
        raise ConfigError("an encoder without a checkpoint has no weights to begin with", "use `init=scratch`")
    if task is not None and recipe.num_replicates > 1:
        raise ConfigError("a task given as `task` has one split", "set `num_replicates` to 1")
    points = grid_points(recipe, use_grid=use_grid)

    with join(launch, device) as ranks:
        require_same_recipe(ranks, recipe)
        weights = None
        if checkpoint is not None:
            weights = ranks.in_turn(partial(load_pretrained_weights, Path(checkpoint), progress))
            encoder = weights.recipe
        assert encoder is not None, "there is a checkpoint or an encoder"
        start = weights.checkpoint if weights is not None else Path(encoder.name)
        check = partial(resolve_sequence_length, encoder, start)
        length = ranks.together(lambda: [check(point.recipe) for point in points][-1])
        load = partial(_load_fitting_task, task=task, encoder=encoder, start=start, baseline=baseline)
        loaded = ranks.in_turn(partial(load, recipe, progress=progress))
        if recipe.num_replicates > 1:
            ranks.first(partial(_check_other_splits, recipe, load, progress))
        if weights is None:
            weights = ranks.in_turn(partial(untrained_model, encoder, loaded, resume, progress))
        source = None if checkpoint is None else Path(checkpoint)
        job = Job(recipe, points, weights, source, length, use_grid, baseline, ranks, progress, callbacks, "")
        return _fine_tune(job, loaded, partial(create_run_dir, out, recipe.name), resume)


def _fine_tune(job: Job, task: DownstreamTask, make: Callable[[], Path], resume: Path | None) -> FinetuneResult:
    """Fine-tune on one split, in the directory that `make` returns or in that of a run to resume."""
    ranks, is_new = job.ranks, resume is None
    with hold_run(ranks, make if resume is None else lambda: resume, is_new=is_new) as folder:
        with discarded_on_failure(folder, is_new=is_new and ranks.is_first):
            weights = job.weights
            encode = partial(encode_task, task, weights.tokenizer, job.length, weights.recipe.masking.num_repeats)
            # a run of a series is continued with the others
            whole = folder.parent if (folder.parent / SERIES_FILE).is_file() else folder
            command = job.resume_command or resume_command("finetune", whole)
            own = {"folder": folder, "data": ranks.together(encode), "resume_command": command}
            run = SplitRun(**{**vars(job), **own})
            require_same_data(ranks, run.data.fingerprint)
            ranks.first(partial(_prepare_folder, run, is_new=is_new))
        return FinetuneResult(folder, _run_and_score(run))


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


def _load_fitting_task(
    recipe: FinetuneRecipe,
    *,
    task: DownstreamTask | None,
    encoder: PretrainRecipe,
    start: Path,
    baseline: bool,
    progress: Progress,
) -> DownstreamTask:
    """Return the given or loaded task; refuse one whose rows the model or the baseline cannot read."""
    given = recipe.task if task is None else task
    require_fitting_model(given.name, given.input_kind, encoder, start, baseline=baseline)
    task = task or load_task(recipe.task, progress)
    for split in ("train", "valid"):
        if split not in task.splits:
            raise DataError(f"{task.name}: there are no rows to use as `{split}`", "fine-tuning needs both splits")
    return task


def _check_other_splits(recipe: FinetuneRecipe, load: Callable[..., DownstreamTask], progress: Progress) -> None:
    """Refuse a split that cannot be trained before hours of training on those before it; nothing read here is kept.

    Raises:
        DataError: A split after the first has no rows to train or to validate on.
    """
    with progress.bar("checking splits", recipe.num_replicates - 1) as bar:
        for number in range(1, recipe.num_replicates):
            of_split = _recipe_of_split(recipe, number)
            try:
                load(of_split, progress=SilentProgress())
            except DataError as error:
                raise DataError(
                    f"split {number + 1} of {recipe.num_replicates}, `task.split_seed` {of_split.task.split_seed}: "
                    f"{error.message}",
                    f"`num_replicates={number}` ends before it; a new run can begin with another `task.split_seed` or "
                    "`task.split`",
                ) from error
            bar.update(number)


def _recipe_of_split(recipe: FinetuneRecipe, number: int) -> FinetuneRecipe:
    """Return the recipe of one of the splits of `num_replicates`, counted from 0."""
    return recipe.changed({"task.split_seed": recipe.task.split_seed + number, "num_replicates": 1})


def _run_and_score(run: SplitRun) -> RunResults:
    """Finish every cell, the baseline and the other splits, and write `results.json`."""
    task, folder, ranks, device = run.data.task, run.folder, run.ranks, describe_device(run.ranks.device)
    described = {"device": device, "seeds": run.recipe.seeds, **({"num_ranks": ranks.size} if ranks.size > 1 else {})}
    ranks.first(lambda: update_run_json(folder, described))
    run.progress.message(
        f"{task.name}: {format_counts(task.split_sizes.values())} rows in {', '.join(task.splits)}; "
        f"{describe_weights(run.weights, run.recipe).objective} from {run.weights.name}, on {device}"
        f"{ranks.describe()}; results in {folder}"
    )
    best = _run_cells(run)
    others = _run_replicates(run)

    def collect() -> RunResults:
        own = _collect_results(run, best, _score_baseline(run) if run.has_baseline else None)
        splits = [own, *others]
        seeds = range(run.recipe.task.split_seed, run.recipe.task.split_seed + len(splits))
        replication = summarise_splits(splits, tuple(seeds)) if others else None
        results = own.model_copy(update={"replication": replication, "verdict": describe_verdict(splits)})
        is_span = task.loss == "span"
        valid = run.data.splits["valid"]
        similarity = similarity_to_training(folder, task, run.progress) if task.loss == "regression" else None
        calibration = (
            calibrate_answers(folder, results, valid) if is_span else calibrate_run(folder, results, similarity)
        )
        write_json(folder / CALIBRATION_FILE, calibration)
        write_json(folder / RESULTS_FILE, results)
        update_run_json(folder, {"parameters": results.parameters, "train_time_s": results.elapsed_s})
        return results

    return ranks.first(collect)


def _score_baseline(run: SplitRun) -> BaselineResult:
    """Return the baseline's scores for every seed; a finished run that is resumed has them."""
    with contextlib.suppress(CheckpointError):  # no results yet, or damaged ones that are written again
        before = read_results(run.folder).baseline
        if before is not None and before.seeds == run.recipe.seeds:
            return before
    threads = run.recipe.train.num_threads
    scored = [score_baseline(run.data.task, seed, run.progress, num_threads=threads) for seed in run.recipe.seeds]
    return BaselineResult(
        name="ECFP4 + random forest",
        seeds=run.recipe.seeds,
        metrics=summarise_metrics([scores for scores, _ in scored]),
        labels=summarise_labels([labels for _, labels in scored]),
    )


def _run_replicates(run: SplitRun) -> list[RunResults]:
    """Return the results on the other splits, each a run of its own under `replicates/`; finished ones are read."""
    found = []
    for number in range(1, run.recipe.num_replicates):
        recipe = _recipe_of_split(run.recipe, number)
        seed = recipe.task.split_seed
        points = [GridPoint(p.label, p.values, _recipe_of_split(p.recipe, number)) for p in run.points]
        folder = run.folder / "replicates" / f"split-{seed}"
        job = replace(run, recipe=recipe, points=points)
        is_begun = run.ranks.first((folder / "recipe.yaml").is_file)
        task = run.ranks.in_turn(partial(load_task, recipe.task, run.progress))
        run.progress.message(f"split {number + 1} of {run.recipe.num_replicates}: `task.split_seed` {seed}")
        found.append(_fine_tune(job, task, partial(create_run_dir, folder, ""), folder if is_begun else None).results)
    return found


def _describe(run: SplitRun) -> None:
    """Write all files that a resumption and a later evaluation need, except the recipe."""
    folder, task, weights = run.folder, run.data.task, run.weights
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
            "use_grid": run.use_grid,
            "baseline": run.has_baseline,
            "checkpoint": None if run.checkpoint is None else recorded_name(weights),
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
        "checkpoint": described.checkpoint_sha256 != run.weights.sha256,
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
    own = model_identity(encoder, Tokenizer.load(run.folder / TOKENIZER_FILE, encoder.data.kind))
    files = {"recipe": run.folder / ENCODER_FILE, "tokenizer": run.folder / TOKENIZER_FILE}
    given = model_identity(run.weights.recipe, run.weights.tokenizer)
    require_origin(run.weights.checkpoint, given, own, files)


def _run_cells(run: SplitRun) -> GridPoint:
    """Finish every cell and return the best grid point; only its weights are kept.

    With changed seeds, a point whose weights were deleted may become the best one. Its cells are then trained again, on
    a CPU to the same bits.
    """
    task, progress = run.data.task, run.progress
    selection = Selection(task.selection_metric, task.is_greater_better)
    best, best_value = run.points[0], None
    num_done = sum(cell.is_done for point in run.points for cell in run.cells(point))
    with progress.bar("cells", len(run.points) * len(run.recipe.seeds), done=num_done) as bar:
        for point in run.points:
            results = []
            for cell in run.cells(point):
                is_new = not cell.is_done
                results.append(run_cell(run, cell))
                if is_new:
                    num_done += 1
                    bar.update(num_done)
                    progress.message(cell.describe(results[-1], task.selection_metric))
            value = selection_value(results, task.selection_metric, run.recipe.aggregate)
            loser = point
            if selection.is_better(value, best_value):
                best, best_value, loser = point, value, best
            if loser is not best and run.ranks.is_first:
                drop_weights(run, loser)
    missing = run.ranks.first(lambda: [len(run.points) > 1 and not cell.has_weights for cell in run.cells(best)])
    for cell, is_missing in zip(run.cells(best), missing, strict=True):
        if is_missing:
            progress.message(f"{cell.label}: trained again: the best with these seeds, but its weights were deleted")
            if run.ranks.is_first:
                (cell.folder / RESULT_FILE).unlink()
            run_cell(run, cell)
    return best


def _collect_results(run: SplitRun, best: GridPoint, baseline: BaselineResult | None) -> RunResults:
    task, recipe = run.data.task, run.recipe
    by_point = {point.label: [cell.read() for cell in run.cells(point)] for point in run.points}
    cells = by_point[best.label]
    every = [cell for of_point in by_point.values() for cell in of_point]
    has_grid = best.label != NO_GRID
    metrics = {label: summarise_metrics([cell.metrics for cell in of_point]) for label, of_point in by_point.items()}
    grid = (
        GridScores(label=point.label, values=point.values, valid=metrics[point.label]["valid"]) for point in run.points
    )
    return RunResults(
        task=task.name,
        kind="finetune",
        recipe=recipe.name,
        init=describe_weights(run.weights, recipe),
        parameters=cells[0].parameters,
        input_kind=task.input_kind,
        loss=task.loss,
        output_names=task.output_names,
        num_labels=len(task.output_names),
        split=printable(task.split_name),
        split_sizes=task.split_sizes,
        known_rows={
            split: count_known_rows(task.loss, encoded.scored_targets, len(task.output_names))
            for split, encoded in run.data.splits.items()
            if split != "train"
        },
        max_rows=recipe.task.max_rows,
        max_valid_rows=recipe.task.max_valid_rows,
        split_sha256=split_fingerprint(task.split_indices),
        labels_sha256=task.labels_sha256,
        selection_metric=task.selection_metric,
        is_greater_better=task.is_greater_better,
        aggregate=recipe.aggregate,
        seeds=recipe.seeds,
        best_epochs=tuple(cell.best_epoch for cell in cells),
        elapsed_s=round(sum(cell.elapsed_s for cell in every), 3),
        tokens_per_s=round(sum(cell.tokens_per_s for cell in every) / len(every), 1),
        outside_model_share=round(sum(cell.outside_model_share for cell in every) / len(every), 4),
        # a skipped row or a title may have a lone surrogate, which no JSON file may hold
        notes=tuple(map(printable, _notes(run, cells))),
        metrics=metrics[best.label],
        labels=summarise_labels([cell.labels for cell in cells]),
        grid_best=GridChoice(label=best.label, values=best.values) if has_grid else None,
        grid=tuple(grid) if has_grid else (),
        baseline=baseline,
    )


def _notes(run: SplitRun, cells: Sequence[CellResult]) -> tuple[str, ...]:
    notes, task = run.data.notes(), run.data.task
    for split, encoded in run.data.splits.items():
        if "roc_auc" in cells[0].metrics.get(split, ()):
            rare = describe_rare_classes(task.loss, encoded.targets, task.output_names)
            few = f"{split}: with fewer than {FEW_ROWS} rows of a class, ROC-AUC and average precision say little"
            notes += [f"{few}: {name_some(rare)}"] if rare else []
    for note in dict.fromkeys(note for cell in cells for note in cell.notes):
        seeds = [str(cell.seed) for cell in cells if note in cell.notes]
        notes.append(f"{note} (seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)})")
    return tuple(notes)
