"""Fine-tuning: every seed at every grid point on every split of one task, and their results.

A run directory holds `recipe.yaml`, `encoder.yaml` (the recipe of pre-training), `tokenizer.json`, `split.json`,
`splits/split-<seed>.json` of further splits, `run.json`, `training_rows.npz`, `targets-<part>.csv` (not of spans),
`rejected.csv` (where rows were skipped), `cells/<grid point>/split-<seed>/seed-<n>/`,
`baselines/<model>/split-<seed>/seed-<n>/` and at its end `scores.csv`, `calibration.json` and `results.json`. A cell is
a run of the training loop that ends with `result.json`; a cell that has this file is done. Metrics are those of
the first split; calibration and predictions for new rows are over all.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from exlm_cli.config.base import Mark, identity_values
from exlm_cli.config.finetune import NO_GRID, FinetuneRecipe, GridPoint, grid_points
from exlm_cli.config.input_paths import write_run_recipe
from exlm_cli.config.load import dump_recipe, load_recipe, resumed_recipe
from exlm_cli.config.overrides import describe_changes
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.rows.records import SKIPPED_COLUMNS, SKIPPED_FILE
from exlm_cli.data.tokenizer import TOKENIZER_FILE
from exlm_cli.errors import CheckpointError, ConfigError, DataError
from exlm_cli.files import make_folder, write_atomically, write_csv, write_json
from exlm_cli.finetune.baselines.baseline import baselines_of, is_affordable
from exlm_cli.finetune.cells.cell import Cell
from exlm_cli.finetune.cells.model import (
    ENCODER_FILE,
    choose_tokenizer,
    describe_weights,
    require_fitting_model,
    resolve_sequence_length,
    untrained_model,
)
from exlm_cli.finetune.cells.trainer import describe_rows, encode_task
from exlm_cli.finetune.evaluation.scoring import conclude
from exlm_cli.finetune.features import FeatureStore
from exlm_cli.finetune.plan import RunPlan, SplitPlan, finish_cells
from exlm_cli.finetune.prediction.training_rows import write_training_rows
from exlm_cli.finetune.results import TARGETS_COLUMN, RunResults
from exlm_cli.finetune.scores import RunScores, read_scores
from exlm_cli.format import format_counts
from exlm_cli.launch import require_one_process
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import (
    SPLIT_FILE,
    SPLITS_FOLDER,
    create_run_dir,
    discarded_on_failure,
    read_run_json,
    require_unused,
    sole_process,
    update_run_json,
)
from exlm_cli.tasks.base import DownstreamTask, write_outputs
from exlm_cli.tasks.registry import load_task
from exlm_cli.tasks.rows.splits import split_fingerprint
from exlm_cli.train.checkpoint import require_origin
from exlm_cli.train.pretrained import (
    Pretrained,
    describe_device,
    load_pretrained_weights,
    load_tokenizer,
    model_identity,
    pick_device,
    recorded_name,
)
from exlm_cli.train.task import Callback, require_arguments
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
    workers: int | None = 1,
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
        baseline: Also score baselines on the same splits: of molecules random forests, one on ECFP4 fingerprints and
            one on RDKit's 2D descriptors, of texts TF-IDF with a linear model; None: where there are any that take
            minutes at most. A resumed run does what it began with.
        task: The task, on the first of the splits; None: the one that `recipe.task` names.
        workers: Trainings at once; 1: one after the other in this process. None: one for each CUDA device or CPU core.
        callbacks: Follow the training of every cell, after the trackers of `train.report_to`, in this process.
        progress: Reports the work; None: silent.

    Raises:
        ExlmError: A mistake in data, checkpoint, tokenizer or grid; divergence, interruption.
    """
    progress = progress or SilentProgress()
    require_one_process("fine-tuning")
    require_arguments(recipe, FinetuneRecipe, callbacks)
    require_trackers(recipe.train.report_to)
    device = pick_device(recipe)
    if recipe.train.num_threads is not None:
        torch.set_num_threads(recipe.train.num_threads)
    run = None if resume is None else Path(resume)
    if run is not None:
        begun = read_run_json(run)
        use_grid, baseline = bool(begun.use_grid), bool(begun.baseline)
        if checkpoint is None and begun.checkpoint is not None:
            checkpoint = Path(begun.checkpoint)
        if checkpoint is None:
            encoder = load_recipe(run / ENCODER_FILE)
        if missing := [seed for seed in begun.seeds or () if seed not in recipe.seeds]:
            listed = f"seed{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
            progress.message(f"the results leave out {listed} of this run; to keep all, list them with `seeds=LIST`")
    _require_start(recipe, checkpoint, encoder, task)
    if run is None and out is not None:
        require_unused(Path(out))
    points = grid_points(recipe, use_grid=use_grid)
    weights = None if checkpoint is None else load_pretrained_weights(Path(checkpoint), progress)
    architecture = encoder if weights is None else weights.recipe
    assert architecture is not None, "there is a checkpoint or an encoder"
    start = Path(architecture.name) if weights is None else weights.checkpoint
    length = [resolve_sequence_length(architecture, start, point.recipe) for point in points][-1]
    given = recipe.task if task is None else task
    require_fitting_model(given.name, given.input_kind, architecture, start)
    tasks = _load_splits(recipe, task, progress)
    first = tasks[recipe.task.split_seed]
    if baseline and not baselines_of(first):
        raise ConfigError(f"there is no baseline for {first.name}", "use `baseline=false`")
    if weights is None:
        weights = untrained_model(architecture, choose_tokenizer(architecture, first, run, progress))
    has_baseline = is_affordable(first) if baseline is None else baseline
    if baseline is None and baselines_of(first) and not has_baseline:
        long = "hours" if first.input_kind == "smiles" else "minutes"
        progress.message(f"no baseline, which takes {long} with so many rows and labels; `--baseline` trains it")

    # only now: a data set may be looked for beside this folder
    folder = run or create_run_dir(out, recipe.name)
    with sole_process(folder, is_new=run is None):
        with discarded_on_failure(folder, is_new=run is None):
            store = FeatureStore()
            splits = [
                _plan_split(folder, recipe, points, seed, one, weights, length, store, progress)
                for seed, one in tasks.items()
            ]
            if about := splits[0].data.about_descriptors:
                progress.message(about)
            source = None if checkpoint is None else Path(checkpoint)
            plan = RunPlan(folder, recipe, weights, source, length, use_grid, has_baseline, splits, store)
            if run is None:
                _describe(plan)
            else:
                _refuse_changes(plan)
            _write_splits(plan)
            write_training_rows(folder, list(tasks.values()))
            write_run_recipe(folder, recipe)
        update_run_json(folder, {"device": describe_device(device), "seeds": recipe.seeds})
        more = f" of the first of {len(splits)} splits" if len(splits) > 1 else ""
        progress.message(
            f"{first.name}: {format_counts(first.split_sizes.values())} rows in {', '.join(first.splits)}{more}; "
            f"{describe_weights(weights, recipe).objective} from {weights.name}, on {describe_device(device)}; "
            f"results in {folder}"
        )
        best = finish_cells(plan, workers=workers, callbacks=callbacks, progress=progress)
        results = conclude(plan, best, progress)
    return FinetuneResult(folder, results)


def resume_finetuning(
    run: str | Path,
    overrides: Sequence[str] = (),
    *,
    checkpoint: str | Path | None = None,
    workers: int | None = 1,
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
) -> FinetuneResult:
    """Continue a run with its own recipe.yaml, cell by cell; exact on CPU.

    Args:
        run: Run directory of `exlm finetune`.
        overrides: `section.key=value`; seeds, number of splits, device, input paths, logging and saving may change.
        checkpoint: The pre-training run, if it has moved; None: where it was.
        workers: As in `run_finetuning`.
        callbacks: Follow the training of every cell.
        progress: Reports the work; None: silent.

    Raises:
        ExlmError: `run` is not a run directory of fine-tuning; otherwise as for `run_finetuning`.
    """
    recipe = resumed_recipe(Path(run), FinetuneRecipe, overrides)
    return run_finetuning(
        recipe, checkpoint=checkpoint, resume=run, workers=workers, callbacks=callbacks, progress=progress
    )


def _require_start(
    recipe: FinetuneRecipe, checkpoint: str | Path | None, encoder: PretrainRecipe | None, task: DownstreamTask | None
) -> None:
    """Refuse arguments of `run_finetuning` that do not go together.

    Raises:
        ConfigError: They do not.
    """
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


def _recipe_of_split(recipe: FinetuneRecipe, split_seed: int) -> FinetuneRecipe:
    """Return the recipe of a run as it is for one of its splits."""
    return recipe.changed({"task.split_seed": split_seed, "num_replicates": 1})


def _load_splits(
    recipe: FinetuneRecipe, task: DownstreamTask | None, progress: Progress
) -> Mapping[int, DownstreamTask]:
    """Return the task on each of its splits, by `task.split_seed`: a table is read once, its molecules parsed once.

    Args:
        task: The task on the first split; None: it is read.

    Raises:
        DataError: A split has no rows to train or to validate on; it is refused before any is trained.
    """
    first = task or load_task(recipe.task, progress)
    for split in ("train", "valid"):
        if split not in first.splits:
            raise DataError(f"{first.name}: there are no rows to use as `{split}`", "fine-tuning needs both splits")
    tasks = {recipe.task.split_seed: first}
    for number in range(1, recipe.num_replicates):
        seed = recipe.task.split_seed + number
        try:
            if first.resplit is not None:
                tasks[seed] = first.resplit(seed)
            else:
                tasks[seed] = load_task(_recipe_of_split(recipe, seed).task, SilentProgress())
        except DataError as error:
            raise DataError(
                f"split {number + 1} of {recipe.num_replicates}, `task.split_seed` {seed}: {error.message}",
                f"`num_replicates={number}` ends before it; a new run can begin with another `task.split_seed` or "
                "`task.split`",
            ) from error
    return tasks


def _plan_split(
    folder: Path,
    recipe: FinetuneRecipe,
    points: Sequence[GridPoint],
    split_seed: int,
    task: DownstreamTask,
    weights: Pretrained,
    length: int,
    store: FeatureStore,
    progress: Progress,
) -> SplitPlan:
    """Encode the rows of a split, and list its cells by grid point and seed."""
    encoded = encode_task(task, weights.tokenizer, length, weights.recipe.masking.num_repeats)
    data = describe_rows(encoded, recipe.task, store, progress)
    own = [GridPoint(point.label, point.values, _recipe_of_split(point.recipe, split_seed)) for point in points]
    of_split = [f"split {split_seed}"] if recipe.num_replicates > 1 else []
    cells = {}
    for point in own:
        words = [*([] if point.label == NO_GRID else [point.label]), *of_split]
        cells[point.label] = [Cell(folder, point, seed, " ".join([*words, f"seed {seed}"])) for seed in recipe.seeds]
    return SplitPlan(split_seed, task, data, own, cells)


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
    # targets for scores and pictures; spans have no table
    for part, encoded in {"train": first.data.train, **first.data.scored}.items() if first.task.loss != "span" else ():
        columns = [TARGETS_COLUMN] if first.task.loss == "classes" else first.task.output_names
        write_outputs(folder / f"targets-{part}.csv", first.task.split_indices[part], columns, encoded.targets)
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


def _refuse_changes(plan: RunPlan) -> None:
    """Refuse to continue with other data, weights or recipe; seeds and the number of splits may change."""
    folder, weights, first = plan.folder, plan.weights, plan.splits[0]
    described, begun = read_run_json(folder), resumed_recipe(folder, FinetuneRecipe)
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
