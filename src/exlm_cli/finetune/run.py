"""Fine-tuning: every seed at every grid point on every split of one task, and their results.

A run directory holds `recipe.yaml`, `encoder.yaml` (the recipe of pre-training), `tokenizer.json`, `split.json`,
`splits/split-<seed>.json` of further splits, `run.json`, `training_rows.npz`, `rejected.csv` (where rows were skipped),
`cells/<grid point>/split-<seed>/seed-<n>/`, `baselines/<model>/split-<seed>/seed-<n>/` and at its end `scores.csv`,
`rows.parquet`, `predictions-<part>.csv` and `calibration.json` (not of spans), and `results.json`. A cell is a run of
the training loop that ends with `result.json`; a cell that has this file is done. Metrics are those of the first split;
calibration and predictions for new rows are over all.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from exlm_cli.bundled_models import bundled_name, local_path
from exlm_cli.config.finetune import FinetuneRecipe, grid_points
from exlm_cli.config.load import load_recipe, resumed_recipe, resumed_recipes
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.errors import CheckpointError, ConfigError, DataError
from exlm_cli.finetune.results import ENCODER_FILE, FinetunedRun
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import read_run_json, require_pretraining, require_unused, run_directory
from exlm_cli.tasks.base import DownstreamTask
from exlm_cli.tasks.registry import load_task
from exlm_cli.train.records.trackers import require_trackers
from exlm_cli.train.task import Callback, require_arguments


def run_finetuning(
    recipe: FinetuneRecipe,
    *,
    checkpoint: str | Path | None,
    encoder: PretrainRecipe | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    begun: FinetuneRecipe | None = None,
    use_grid: bool = False,
    baseline: bool | None = False,
    task: DownstreamTask | None = None,
    workers: int | None = 1,
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
) -> FinetunedRun:
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
        begun: With `resume`, the recipe that the run has had until now, if that is read already; None: it is read.
        use_grid: Search `recipe.grid`; a resumed run does what it began with.
        baseline: Also score baselines on the same splits: of molecules random forests on ECFP4 fingerprints and on
            RDKit's 2D descriptors, and gradient boosting on the latter and counts of ECFP4; of texts TF-IDF with a
            linear model; None: where there are any that take minutes at most. A resumed run does what it began with.
        task: The task, on the first of the splits; None: the one that `recipe.task` names.
        workers: Trainings at once; 1: one after the other in this process. None: one for each CUDA device or CPU core.
        callbacks: Follow the training of every cell, after the trackers of `train.report_to`, in this process.
        progress: Reports the work; None: silent.

    Raises:
        ExlmError: A mistake in data, checkpoint, tokenizer or grid; divergence, interruption.
    """
    progress = progress or SilentProgress()
    require_arguments(recipe, FinetuneRecipe, callbacks)
    require_trackers(recipe.train.report_to)
    run = None if resume is None else Path(resume)
    if run is not None:
        begun = begun or resumed_recipe(run, FinetuneRecipe)
        checkpoint, own, use_grid, baseline = _settings_of(run, recipe, checkpoint, progress)
        encoder = own or encoder
    elif out is not None:
        require_unused(Path(out))
    _require_start(recipe, checkpoint, encoder, task)
    path = None if checkpoint is None else local_path(Path(checkpoint))
    encoder = encoder or _encoder_of(path)
    require_fitting_model(recipe, encoder, path or Path(encoder.name), task=task, use_grid=use_grid)
    tasks = _load_splits(recipe, task, progress)
    # only now: the import of torch and the reading of weights take longer than all that may have been wrong
    from exlm_cli.finetune.evaluation.scoring import score_run
    from exlm_cli.finetune.training import planned_run, train

    planned = planned_run(
        recipe,
        tasks,
        checkpoint=path,
        encoder=encoder,
        use_grid=use_grid,
        baseline=baseline,
        run=run,
        begun=begun,
        out=None if out is None else Path(out),
        progress=progress,
    )
    with planned as plan:
        best = train(plan, workers=workers, callbacks=callbacks, progress=progress)
        results = score_run(plan, best, progress)
    return FinetunedRun(plan.folder.name, plan.folder, results)


def resume_finetuning(
    run: str | Path,
    overrides: Sequence[str] = (),
    *,
    checkpoint: str | Path | None = None,
    workers: int | None = 1,
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
) -> FinetunedRun:
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
    begun, recipe = resumed_recipes(Path(run), FinetuneRecipe, overrides)
    return run_finetuning(
        recipe, checkpoint=checkpoint, resume=run, begun=begun, workers=workers, callbacks=callbacks, progress=progress
    )


def _settings_of(
    run: Path, recipe: FinetuneRecipe, checkpoint: str | Path | None, progress: Progress
) -> tuple[str | Path | None, PretrainRecipe | None, bool, bool]:
    """Return checkpoint or recipe of the encoder, grid and baseline that a run began with.

    Args:
        checkpoint: Where it is now; None: where it was.
    """
    described = read_run_json(run)
    if missing := [seed for seed in described.seeds or () if seed not in recipe.seeds]:
        listed = f"seed{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
        progress.message(f"the results leave out {listed} of this run; to keep all, list them with `--seeds LIST`")
    checkpoint = checkpoint or described.checkpoint
    encoder = load_recipe(run / ENCODER_FILE) if checkpoint is None else None
    return checkpoint, encoder, bool(described.use_grid), bool(described.baseline)


def _require_start(
    recipe: FinetuneRecipe, checkpoint: str | Path | None, encoder: PretrainRecipe | None, task: DownstreamTask | None
) -> None:
    """Refuse arguments of `run_finetuning` that do not go together.

    Raises:
        ConfigError: They do not.
    """
    if checkpoint is None and encoder is None:
        raise ConfigError("no checkpoint to fine-tune", "give a pre-training run as `--checkpoint RUN`")
    if checkpoint is not None and encoder is not None:
        raise ConfigError(
            f"`--encoder {encoder.name}` cannot be combined with `--checkpoint {checkpoint}`",
            "a checkpoint has its own encoder",
        )
    if checkpoint is None and recipe.init != "scratch":
        raise ConfigError("an encoder without a checkpoint has no weights to begin with", "use `--from-scratch`")
    if task is not None and recipe.num_replicates > 1 and task.resplit is None:
        raise ConfigError("a task given as `task` has one split", "set `num_replicates` to 1")


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
            assert first.resplit is not None, "a task without it was refused"
            tasks[seed] = first.resplit(seed)
        except DataError as error:
            raise DataError(
                f"split {number + 1} of {recipe.num_replicates}, `task.split_seed` {seed}: {error.message}",
                f"`--num-replicates {number}` ends before it; a new run can begin with another `task.split_seed` or "
                "`task.split`",
            ) from error
    return tasks


def _encoder_of(checkpoint: Path | None) -> PretrainRecipe:
    """Return the recipe of a pre-training run or checkpoint, whose weights are read later."""
    assert checkpoint is not None, "there is a checkpoint or an encoder"
    require_pretraining(checkpoint)
    return load_recipe(run_directory(checkpoint) / "recipe.yaml")


def require_fitting_model(
    recipe: FinetuneRecipe,
    encoder: PretrainRecipe,
    start: Path,
    *,
    task: DownstreamTask | None = None,
    use_grid: bool = False,
) -> None:
    """Refuse a task whose rows the model cannot read.

    Args:
        recipe: What to do, at every point of its grid with `use_grid`.
        encoder: Recipe of the model.
        start: Where its weights or its recipe come from, as errors name it.
        task: None: the one that `recipe.task` names.

    Raises:
        CheckpointError: The model reads other rows.
        ConfigError: A sequence needs more positions than the model takes, or does not fit into a microbatch.
    """
    names = {"text": "text", "smiles": "SMILES"}
    given = task or recipe.task
    kind, needed = encoder.data.kind, given.input_kind
    if kind != needed:
        named = "; `--text-column NAME` names a column of text" if (given.name, needed) == ("csv", "smiles") else ""
        raise CheckpointError(
            f"{bundled_name(start) or start} is a model of {names[kind]}; {given.name} needs one of {names[needed]}",
            f"make one with `exlm pretrain --recipe quickstart-{needed}`, or give another `--checkpoint RUN`{named}",
        )
    for point in grid_points(recipe, use_grid=use_grid):
        _require_room(point.recipe, encoder, start)


def _require_room(recipe: FinetuneRecipe, encoder: PretrainRecipe, start: Path) -> None:
    length = recipe.sequence_length(encoder)
    num_repeats = encoder.masking.num_repeats
    positions = (length - 2) * num_repeats + 2
    repeated = f" with every token {num_repeats} times" if num_repeats > 1 else ""
    if positions > encoder.model.max_length:
        raise ConfigError(
            f"`task.sequence_length` {length}{repeated} needs {positions} positions; the model of "
            f"{start} takes {encoder.model.max_length}",
            f"it was pre-trained on {encoder.data.sequence_length} tokens; `--set task.sequence_length=null` uses as "
            "many",
        )
    if positions > recipe.train.microbatch_tokens:
        raise ConfigError(
            f"`train.microbatch_tokens` {recipe.train.microbatch_tokens} does not hold one sequence of {positions}",
            "raise it or lower `task.sequence_length`",
        )
