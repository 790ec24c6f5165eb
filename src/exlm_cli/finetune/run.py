"""Fine-tuning: every seed at every grid point on every split of one task, and their results.

A run directory holds `recipe.yaml`, `encoder.yaml` (the recipe of pre-training), `tokenizer.json`, `split.json`,
`splits/split-<seed>.json` of further splits, `run.json`, `training_rows.npz`, `rejected.csv` (where rows were skipped),
`cells/<grid point>/split-<seed>/seed-<n>/`, `baselines/<model>/split-<seed>/seed-<n>/` and at its end `scores.csv`,
`rows.parquet`, `predictions-<part>.csv` and `calibration.json` (not of spans), and `results.json`. A cell is a run of
the training loop that ends with `result.json`; a cell that has this file is done. Metrics are those of the first split;
calibration and predictions for new rows are over all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from exlm_cli.bundled_models import bundled_name, local_path
from exlm_cli.config.finetune import FinetuneRecipe, grid_points
from exlm_cli.config.load import load_recipe, resumed_recipe, resumed_recipes
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.tasks import InputKind
from exlm_cli.errors import CheckpointError, ConfigError, DataError
from exlm_cli.finetune.results import ENCODER_FILE, RunResults
from exlm_cli.finetune.scores import RunScores, read_scores
from exlm_cli.launch import require_one_process
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import read_run_json, require_pretraining, require_unused, run_directory
from exlm_cli.tasks.base import DownstreamTask
from exlm_cli.tasks.registry import load_task
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
    begun: FinetuneRecipe | None = None,
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
        begun: With `resume`, the recipe that the run has had until now, if that is read already; None: it is read.
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
    run = None if resume is None else Path(resume)
    if run is None and out is not None:
        require_unused(Path(out))
    if run is not None:
        begun, described = begun or resumed_recipe(run, FinetuneRecipe), read_run_json(run)
        use_grid, baseline = bool(described.use_grid), bool(described.baseline)
        if checkpoint is None and described.checkpoint is not None:
            checkpoint = Path(described.checkpoint)
        if checkpoint is None:
            encoder = load_recipe(run / ENCODER_FILE)
        if missing := [seed for seed in described.seeds or () if seed not in recipe.seeds]:
            listed = f"seed{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
            progress.message(f"the results leave out {listed} of this run; to keep all, list them with `--seeds LIST`")
    _require_start(recipe, checkpoint, encoder, task)
    path = None if checkpoint is None else local_path(Path(checkpoint))
    encoder = encoder or _encoder_of(path)
    start, points = path or Path(encoder.name), grid_points(recipe, use_grid=use_grid)
    length = [resolve_sequence_length(encoder, start, point.recipe) for point in points][-1]
    given = recipe.task if task is None else task
    require_fitting_model(given.name, given.input_kind, encoder, start)
    tasks = _load_splits(recipe, task, progress)
    # only now: the import of torch and the reading of weights take longer than all that may have been wrong
    from exlm_cli.finetune.training import Beginning, train

    beginning = Beginning(
        recipe=recipe,
        points=points,
        tasks=tasks,
        checkpoint=path,
        encoder=encoder,
        length=length,
        use_grid=use_grid,
        baseline=baseline,
        run=run,
        begun=begun,
        out=None if out is None else Path(out),
    )
    return FinetuneResult(*train(beginning, workers=workers, callbacks=callbacks, progress=progress))


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
    begun, recipe = resumed_recipes(Path(run), FinetuneRecipe, overrides)
    return run_finetuning(
        recipe, checkpoint=checkpoint, resume=run, begun=begun, workers=workers, callbacks=callbacks, progress=progress
    )


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


def require_fitting_model(name: str, needed: InputKind, encoder: PretrainRecipe, start: Path) -> None:
    """Refuse a task whose rows the model cannot read.

    Args:
        name, needed: Name of the task, and kind of its rows.
        encoder: Recipe of the model.
        start: Where its weights or its recipe come from.

    Raises:
        CheckpointError: The model reads other rows.
    """
    names = {"text": "text", "smiles": "SMILES"}
    kind = encoder.data.kind
    if kind != needed:
        named = "; `--text-column NAME` names a column of text" if (name, needed) == ("csv", "smiles") else ""
        raise CheckpointError(
            f"{bundled_name(start) or start} is a model of {names[kind]}; {name} needs one of {names[needed]}",
            f"make one with `exlm pretrain --recipe quickstart-{needed}`, or give another `--checkpoint RUN`{named}",
        )


def resolve_sequence_length(pretrain: PretrainRecipe, origin: Path, recipe: FinetuneRecipe) -> int:
    """Return the tokens of a sequence before repetition; `origin` is what an error names the model by.

    Raises:
        ConfigError: A sequence needs more positions than the model takes, or does not fit into a microbatch.
    """
    length = recipe.task.sequence_length or pretrain.data.sequence_length
    num_repeats = pretrain.masking.num_repeats
    positions = (length - 2) * num_repeats + 2
    repeated = f" with every token {num_repeats} times" if num_repeats > 1 else ""
    if positions > pretrain.model.max_length:
        raise ConfigError(
            f"`task.sequence_length` {length}{repeated} needs {positions} positions; the model of "
            f"{origin} takes {pretrain.model.max_length}",
            f"it was pre-trained on {pretrain.data.sequence_length} tokens; `--set task.sequence_length=null` uses as "
            "many",
        )
    if positions > recipe.train.microbatch_tokens:
        raise ConfigError(
            f"`train.microbatch_tokens` {recipe.train.microbatch_tokens} does not hold one sequence of {positions}",
            "raise it or lower `task.sequence_length`",
        )
    return length
