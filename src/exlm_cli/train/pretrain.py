"""Runs of pre-training, new and resumed: data, model, task and training loop of a recipe, put together.

`objective` has the loss, `loop` the steps, `records` what is written to `run.json`.
"""

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from exlm_cli.config.base import identity_values
from exlm_cli.config.load import load_recipe, resumed_recipes
from exlm_cli.config.overrides import describe_changes
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.cost.estimate import describe_long_run
from exlm_cli.cost.gpus import Gpu
from exlm_cli.cost.meter import num_parameters
from exlm_cli.data.corpus.prepare import PreparedData, prepare_data
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.distributed.launch import read_launch
from exlm_cli.distributed.ranks import Ranks, join
from exlm_cli.distributed.shared_run import hold_run, require_same
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import (
    METRICS_FILE,
    MetricsLog,
    create_run_dir,
    read_first_validation,
    read_run_json,
    resume_command,
)
from exlm_cli.train.checkpoint import checkpoint_paths, load_state, newest_good_checkpoint
from exlm_cli.train.evaluation import CollapseWatch
from exlm_cli.train.loop import TrainingLoop
from exlm_cli.train.pretrain_task import PretrainTask
from exlm_cli.train.pretrained import (
    RESUMED_MARKS,
    Pretrained,
    adopt_architecture,
    begin_with,
    build_model,
    load_pretrained_weights,
    load_tokenizer,
    pick_device,
    recorded_name,
    require_own_files,
)
from exlm_cli.train.records.run import record_beginning, record_end, tell_beginning
from exlm_cli.train.records.trackers import build_trackers, require_trackers
from exlm_cli.train.records.unigrams import UnigramScores
from exlm_cli.train.task import Callback, require_arguments


@dataclass(frozen=True)
class PretrainResult:
    """Result of a pre-training run.

    Attributes:
        metrics: Those of the last validation.
        before: Those of the validation before the first step, of a run that began with weights; else None.
        unigrams: What the frequencies of tokens reach on the masks of this validation.
        num_tokens: Input tokens of the training; None where it began with weights.
        elapsed_s: Time of its steps.
        data_wait_s: The part of it in which they waited for data.
        peak_memory_bytes: Most memory of this process: what tensors took on CUDA, on a CPU all that was resident.
        utilisation: Share of the peak of `gpu` that this process's steps reached; None on a CPU and where it is not
            known.
    """

    run_dir: Path
    checkpoint: Path
    recipe: PretrainRecipe
    steps: int
    metrics: dict[str, float]
    before: Mapping[str, Any] | None
    unigrams: UnigramScores
    num_tokens: int | None
    num_parameters: int
    elapsed_s: float
    data_wait_s: float
    peak_memory_bytes: int
    gpu: Gpu | None
    utilisation: float | None


def run_pretraining(
    recipe: PretrainRecipe,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    begun: PretrainRecipe | None = None,
    checkpoint: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
) -> PretrainResult:
    """Pre-train a recipe; tokenise its data first where that is not done.

    Args:
        recipe: What to train. Its architecture is replaced by that of a checkpoint.
        out: Run directory; None: `runs/<name>-<time>`.
        resume: A run directory to continue instead; `recipe` may differ from its own as in `resume_pretraining`.
        begun: With `resume`, the recipe that the run has had until now, if that is read already; None: it is read.
        checkpoint: Weights and tokenizer to begin with: a pre-training run, one of its `checkpoints/step-N`, or
            `bundled:NAME`; None: weights drawn from the seed. A resumed run has its own.
        callbacks: Follow the training, after the trackers of `train.report_to`.
        progress: Reports the work; None: silent.

    Raises:
        ExlmError: A mistake in data, tokenizer or checkpoint; divergence, interruption.
    """
    progress = progress or SilentProgress()
    require_arguments(recipe, PretrainRecipe, callbacks)
    require_trackers(recipe.train.report_to)
    launch = read_launch()
    device = pick_device(recipe, launch)
    if recipe.train.num_threads is not None:
        torch.set_num_threads(recipe.train.num_threads)

    def make() -> Path:
        return Path(resume) if resume is not None else create_run_dir(out, recipe.name)

    if checkpoint is None and resume is None and recipe.model.backbone.family != "own":
        raise ConfigError(
            f"`model.backbone.family` is {recipe.model.backbone.family}, whose encoder comes with its weights",
            "give them as `--checkpoint RUN`",
        )
    with join(launch, device) as ranks:
        same = "start every rank with the same command and the same recipe files"
        require_same(ranks, recipe.model_dump(mode="json"), "were given different recipes", same)
        with hold_run(ranks, make, is_new=resume is None) as run:
            return _run_pretraining(
                recipe, run, ranks, callbacks, checkpoint, begun, is_new=resume is None, progress=progress
            )


def resume_pretraining(
    run: str | Path,
    overrides: Sequence[str] = (),
    *,
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
) -> PretrainResult:
    """Continue a run from its own recipe.yaml and newest whole checkpoint; exact on CPU.

    Args:
        run: Run directory of `exlm pretrain`.
        overrides: `section.key=value`: device, input paths, how a step is computed, validation, logs and checkpoints.
        callbacks: Follow the training.
        progress: Reports the work; None: silent.

    Raises:
        CheckpointError: `run` is not a run directory of pre-training.
        ExlmError: As for `run_pretraining`.
    """
    begun, recipe = resumed_recipes(Path(run), PretrainRecipe, overrides)
    return run_pretraining(recipe, resume=run, begun=begun, callbacks=callbacks, progress=progress)


def _run_pretraining(
    recipe: PretrainRecipe,
    run: Path,
    ranks: Ranks,
    callbacks: Sequence[Callback],
    checkpoint: str | Path | None,
    begun: PretrainRecipe | None,
    *,
    is_new: bool,
    progress: Progress,
) -> PretrainResult:
    """Prepare the data, build the model, take up what an earlier process left, and train to the end."""
    before = None if is_new else read_run_json(run)  # a damaged one is refused before anything changes
    saved = None if before is None else ranks.on_rank_0(lambda: _newest_own_checkpoint(run, begun, progress))
    begin, source = None, checkpoint if before is None else before.checkpoint
    if source is not None and saved is None:  # a run that has saved nothing begins with the same weights again
        begin = ranks.rank_0_first(functools.partial(load_pretrained_weights, Path(source), progress))
    if begin is not None and is_new:
        recipe = adopt_architecture(recipe, begin, progress)
    if is_new and (cost := describe_long_run(recipe)):
        progress.message(cost)  # before hours of tokenising
    data = _prepare(recipe, _own_tokenizer(recipe, run, begin, saved), ranks, progress)
    fields: dict[str, Any] = {"started_unix_s": round(time.time(), 3)} if is_new else {}
    model = build_model(recipe, data.tokenizer, ranks.device)
    if begin is not None:
        fields |= {"checkpoint": recorded_name(begin), "checkpoint_sha256": begin.sha256}
        if new := begin_with(model, begin):
            progress.message(f"new in this run: {new}")
        del begin  # its weights are the model's now
    task = PretrainTask(recipe, data, model, ranks.device, ranks)
    tell_beginning(task, run, before, progress)
    loop = _build_loop(task, run, callbacks, progress, validates_first=source is not None)
    if not is_new:
        _resume(loop, run, saved, recipe, progress)
    unigrams = record_beginning(run, task, data, fields, step=loop.state.step, progress=progress)
    result = loop.fit()
    record_end(run, task, result)
    state = result.state
    return PretrainResult(
        run_dir=run,
        checkpoint=result.checkpoint,
        recipe=recipe,
        steps=state.step,
        metrics=result.validation,
        before=ranks.on_rank_0(lambda: read_first_validation(run)),
        unigrams=unigrams,
        num_tokens=state.num_tokens if source is None else None,
        num_parameters=num_parameters(model),
        elapsed_s=state.elapsed_s,
        data_wait_s=state.data_wait_s,
        peak_memory_bytes=result.peak_memory_bytes,
        gpu=result.gpu,
        utilisation=result.utilisation,
    )


def _own_tokenizer(
    recipe: PretrainRecipe, run: Path, begin: Pretrained | None, saved: "_Saved | None"
) -> Tokenizer | None:
    """Return the tokenizer of the weights to begin with, or of the run to continue; None: the recipe's."""
    if saved is not None and recipe.tokenizer.path == saved.recipe.tokenizer.path:
        return load_tokenizer(run, recipe)
    return None if begin is None else begin.tokenizer


def _prepare(recipe: PretrainRecipe, tokenizer: Tokenizer | None, ranks: Ranks, progress: Progress) -> PreparedData:
    """Tokenise the data on rank 0, where that is not done; the others find them in the cache."""
    prepare = functools.partial(prepare_data, recipe, progress=progress, builds=ranks.is_first, tokenizer=tokenizer)
    data = ranks.rank_0_first(prepare)
    seen = "put the data where all nodes see the same files"
    require_same(ranks, {"data": data.fingerprint}, "read different data under the same names", seen)
    return data


def _build_loop(
    task: PretrainTask, run: Path, callbacks: Sequence[Callback], progress: Progress, *, validates_first: bool
) -> TrainingLoop:
    recipe = task.recipe
    trackers = build_trackers(recipe.train.report_to, recipe, run, run.resolve().name, recipe.name, progress)
    watch = [] if task.model.transition is None else [CollapseWatch(recipe, progress)]
    return TrainingLoop(
        task,
        recipe.train,
        recipe.optim,
        seed=recipe.seed,
        run=run,
        metrics=MetricsLog(run / METRICS_FILE),
        progress=progress,
        resume_command=resume_command("pretrain", run),
        callbacks=[*trackers, *watch, *callbacks],
        validate_at=task.validate_at,
        count_microbatches=task.count_microbatches,
        validates_first=validates_first,
        ranks=task.ranks,
    )


# What happens at `--resume`


class _Saved(NamedTuple):
    """Checkpoint that a run continues from, and the recipe that the run has had until now."""

    name: str
    recipe: PretrainRecipe


def _newest_own_checkpoint(run: Path, begun: PretrainRecipe | None, progress: Progress) -> _Saved | None:
    """Return the newest whole checkpoint, which recipe and tokenizer of the run fit; None without any.

    Args:
        begun: The recipe of the run until now; None: it is read.
    """
    found = newest_good_checkpoint(run, progress.message)
    refused = checkpoint_paths(run)
    if found is None and refused:
        raise CheckpointError(
            f"{run}: none of its checkpoints can be trusted: {', '.join(path.name for path in refused)}",
            f"restore their files, or delete {run / 'checkpoints'} to train again from step 0",
        )
    if found is None:
        return None
    begun = begun or load_recipe(run / "recipe.yaml")
    require_own_files(run, found, load_state(found), begun)
    return _Saved(found.name, begun)


def _resume(loop: TrainingLoop, run: Path, saved: _Saved | None, recipe: PretrainRecipe, progress: Progress) -> None:
    """Load a checkpoint, or start again where none was saved."""
    checkpoint, changes = None, ""
    if saved is not None:
        checkpoint = run / "checkpoints" / saved.name
        changes = describe_changes(*(identity_values(one, without=RESUMED_MARKS) for one in (saved.recipe, recipe)))
    loop.ranks.on_all_ranks(lambda: loop.resume(checkpoint, changes=changes))
    if checkpoint is None:
        progress.message(f"{run} has no checkpoint yet; starting from step 0")
    else:
        progress.message(f"resuming at step {loop.state.step} of {loop.total_steps} from {checkpoint}")
