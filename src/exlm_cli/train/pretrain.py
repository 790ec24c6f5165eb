"""Pre-training: the data, model, objective and training loop of a recipe, put together."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from exlm_cli.config.base import identity_values
from exlm_cli.config.input_paths import write_run_recipe
from exlm_cli.config.load import load_recipe, resumed_recipe
from exlm_cli.config.overrides import describe_changes
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.cost.counts import FlopCounter
from exlm_cli.cost.estimate import describe_long_run
from exlm_cli.cost.gpus import Gpu
from exlm_cli.cost.meter import num_parameters
from exlm_cli.data import IntArray
from exlm_cli.data.batch import Batch
from exlm_cli.data.corpus.prepare import PreparedData, list_rejected, prepare_data
from exlm_cli.data.corpus.shards import TokenDataset
from exlm_cli.data.sampler import EpochPlan, Feed, plan_epoch
from exlm_cli.data.tokenizer import TOKENIZER_FILE
from exlm_cli.distributed.parallel import StepModule, wrap_ddp
from exlm_cli.distributed.ranks import ALONE, Ranks, join
from exlm_cli.distributed.shared_run import hold_run, require_same
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.files import finite_or_none
from exlm_cli.format import format_number_of, format_parameters, format_percent
from exlm_cli.launch import read_launch
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.ops.alignment import choose_backend
from exlm_cli.ops.precision import autocast, precision_on
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import (
    METRICS_FILE,
    MetricsLog,
    create_run_dir,
    read_run_json,
    resume_command,
    update_run_json,
)
from exlm_cli.train.checkpoint import checkpoint_paths, load_state, newest_good_checkpoint, remove_unfinished
from exlm_cli.train.evaluation import CollapseWatch, Sums, evaluate_batch, measure_own_mask_shares, summarise
from exlm_cli.train.loop import TrainingLoop
from exlm_cli.train.objective import Objective
from exlm_cli.train.pretrained import (
    RESUMED_MARKS,
    Pretrained,
    adopt_architecture,
    begin_with,
    build_model,
    describe_device,
    load_pretrained_weights,
    load_tokenizer,
    model_identity,
    pick_device,
    recorded_name,
    require_own_files,
)
from exlm_cli.train.task import Callback, require_arguments
from exlm_cli.train.trackers import build_trackers, require_trackers
from exlm_cli.train.unigrams import UnigramScores, score_unigrams, token_log_probs

CENTRED_SHARE = 0.9
"""Own-mask share from which a DAG counts as centred on its targets."""

MeasuredT = TypeVar("MeasuredT")

_OWN_MASK_SEQUENCES = 256

VALIDATION_EPOCH = 2**32 - 1
"""The epoch whose masks validation uses: one that training never reaches, so every validation masks the same tokens."""

SPELLED = ("loss", "loss_given_length", "loss_independent", "mask_accuracy")
"""Metrics of a validation that are also given for other spellings than the canonical one."""

VALIDATE_AT_SEQUENCES = 512
"""Sequences that `train.validate_at` scores at each number of masks."""

_VALIDATED_AT = ("loss", "loss_given_length", "mask_accuracy", "num_sequences")


@dataclass(frozen=True)
class PretrainResult:
    """Result of a pre-training run.

    Attributes:
        metrics: Those of the last validation.
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
    unigrams: UnigramScores
    num_tokens: int | None
    num_parameters: int
    elapsed_s: float
    data_wait_s: float
    peak_memory_bytes: int
    gpu: Gpu | None
    utilisation: float | None


class PretrainTask:
    """Masked batches of a token data set and their loss, for the training loop.

    Args:
        recipe: What to train.
        data: Its sequences.
        model: On `device`.
        device: Where batches go.
        ranks: Those that train together.
    """

    def __init__(
        self,
        recipe: PretrainRecipe,
        data: PreparedData,
        model: ExlmModel,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self.recipe, self.model, self.device, self.ranks = recipe, model, device, ranks
        self.train_set, self.valid_set, self.spellings = data.train, data.valid, data.spellings
        self.tokenizer = data.tokenizer
        self.objective = Objective(data.tokenizer.unk_id, recipe.masking.num_repeats, recipe.train.alignment_backend)
        self.precision = precision_on(device, recipe.train.precision)
        model.encoder.gradient_checkpointing = recipe.train.gradient_checkpointing
        if recipe.train.compile:
            model.encoder.compile_blocks()
        self.module = wrap_ddp(StepModule(model, self.objective.sequence_nll), ranks)
        # the closed form is that of our encoder
        own = recipe.model.backbone.family == "own"
        self._flops = FlopCounter(recipe, data.tokenizer.vocab_size) if own else None
        self.identity = {"data fingerprint": data.fingerprint, **model_identity(recipe, data.tokenizer)}

    def plan(self, epoch: int) -> EpochPlan:
        """Return the steps of an epoch."""
        train = self.recipe.train
        return plan_epoch(
            self.train_set.lengths * self.recipe.masking.num_repeats + 2,
            seed=self.recipe.seed,
            epoch=epoch,
            batch_sequences=train.batch_sequences,
            batch_tokens=train.batch_tokens,
            bucket_steps=train.bucket_steps,
        )

    def begin_step(self, share_done: float) -> None:
        """Fade the penalty on uneven visits of states."""
        if self.model.transition is not None:
            self.model.transition.fade_balance(share_done)

    def microbatches(self, indices: IntArray, epoch: int) -> Iterator[Batch]:
        """Return one step's masked, expanded and padded microbatches; start preparing the first one now."""
        return self._batches(self.train_set, indices, epoch, flops=self._flops)

    def count_microbatches(self, indices: IntArray, epoch: int) -> int:
        """Return how many of them there are."""
        return Feed(self.train_set, self.recipe, self.tokenizer, epoch).count_microbatches(indices)

    def losses(self, batch: Batch) -> Tensor:
        """Return nats per target of each sequence."""
        with self._autocast():
            losses: Tensor = self.module(batch)
        return losses

    def _autocast(self) -> torch.autocast:
        return autocast(self.device, self.precision)

    def count_tokens(self, batch: Batch) -> int:
        """Return the input tokens before expansion."""
        return batch.num_tokens

    def count_flops(self, batch: Batch) -> float:
        """Return the FLOPs of training on a batch without its padding; 0 for an encoder that is not our own."""
        return batch.flops

    def validate(self, progress: Progress | None = None) -> dict[str, float]:
        """Return metrics on the validation set, with the same masks every time; `progress` shows a bar of sequences.

        Where molecules have several spellings, these metrics are of canonical SMILES, and `SPELLED` ones of the others
        have `_spellings` at the end of their names.
        """
        progress = progress or SilentProgress()
        metrics = self._validate(self.valid_set, progress)
        if self.spellings:
            others = self._validate(self.spellings, progress)
            metrics |= {f"{name}_spellings": others[name] for name in SPELLED if name in others}
        return metrics

    def validate_at(
        self, max_sequences: int | None = VALIDATE_AT_SEQUENCES, progress: Progress | None = None
    ) -> list[dict[str, float]]:
        """Return loss and accuracy at each of `train.validate_at`, the same masks every time, as rows with `at`."""
        indices = validation_indices(self.valid_set, max_sequences)
        rows = []
        for at in self.recipe.train.validate_at:
            found = summarise(self._measure(self.valid_set, indices, self._evaluate, progress or SilentProgress(), at))
            rows.append({"at": at, **{name: found[name] for name in _VALIDATED_AT}})
        return rows

    def _validate(self, dataset: TokenDataset, progress: Progress) -> dict[str, float]:
        indices = validation_indices(dataset, self.recipe.train.validation_sequences)
        return summarise(self._measure(dataset, indices, self._evaluate, progress))

    def unigrams(self) -> UnigramScores:
        """Return what the frequencies of training tokens reach on the targets of `validate`."""
        indices = validation_indices(self.valid_set, self.recipe.train.validation_sequences)
        feed = Feed(self.valid_set, self.recipe, self.tokenizer, VALIDATION_EPOCH)
        batches = feed.microbatches(indices, torch.device("cpu")) if len(indices) else ()
        return score_unigrams(token_log_probs(self.train_set, self.tokenizer.vocab_size), batches)

    def own_mask_share(self) -> float:
        """Return the own-mask share of the model as it is now: the mean over at most 256 validation sequences."""
        indices = validation_indices(self.valid_set, _OWN_MASK_SEQUENCES)
        measure = functools.partial(measure_own_mask_shares, backend=self.objective.backend)
        measured = self._measure(self.valid_set, indices, measure, SilentProgress())
        shares = [share for row in measured for share in row]
        # the same sum for any number of ranks; sequences without masks have no share
        return math.fsum(shares) / max(1, len(shares))

    def _evaluate(self, model: Any, batch: Batch) -> Sums:
        return evaluate_batch(model, self.objective, batch)

    def _measure(
        self,
        dataset: TokenDataset,
        indices: IntArray,
        measure: Callable[[Any, Batch], MeasuredT],
        progress: Progress,
        at: float | None = None,
    ) -> list[MeasuredT]:
        """Return the results of `measure(model, batch)` on each batch of validation sequences, from all ranks."""
        share = self.ranks.shares_of(indices)[self.ranks.rank]
        batches = self._batches(dataset, share, VALIDATION_EPOCH, at=at) if len(share) else ()
        own: list[MeasuredT] = []
        num_done = 0
        self.model.eval()
        with progress.bar("validating", len(share)) as bar, torch.no_grad(), self._autocast():
            for batch in batches:
                own.append(measure(self.model, batch))
                num_done += len(batch.token_ids)
                bar.update(num_done)
        self.model.train()
        return [row for rows in self.ranks.all_gather_object(own) for row in rows]

    def _batches(
        self,
        dataset: TokenDataset,
        indices: IntArray,
        epoch: int,
        *,
        flops: FlopCounter | None = None,
        at: float | None = None,
    ) -> Iterator[Batch]:
        return Feed(dataset, self.recipe, self.tokenizer, epoch, flops, at).microbatches(indices, self.device)


def run_pretraining(
    recipe: PretrainRecipe,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    checkpoint: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Progress | None = None,
) -> PretrainResult:
    """Pre-train a recipe; tokenise its data first where that is not done.

    Args:
        recipe: What to train. Its architecture is replaced by that of a checkpoint.
        out: Run directory; None: `runs/<name>-<time>`.
        resume: A run directory to continue instead; `recipe` may differ from its own as in `resume_pretraining`.
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
            "give them as `checkpoint=RUN`",
        )
    with join(launch, device) as ranks:
        same = "start every rank with the same command and the same recipe files"
        require_same(ranks, recipe.model_dump(mode="json"), "were given different recipes", same)
        begin = None
        if checkpoint is not None:
            source = Path(checkpoint)
            begin = ranks.rank_0_first(lambda: load_pretrained_weights(source, progress))
            recipe = adopt_architecture(recipe, begin, progress)
        with hold_run(ranks, make, is_new=resume is None) as run:
            return _run_pretraining(recipe, run, ranks, callbacks, begin, is_new=resume is None, progress=progress)


def _run_pretraining(
    recipe: PretrainRecipe,
    run: Path,
    ranks: Ranks,
    callbacks: Sequence[Callback],
    begin: Pretrained | None,
    *,
    is_new: bool,
    progress: Progress,
) -> PretrainResult:
    device = ranks.device
    before = None if is_new else read_run_json(run)  # a damaged one is refused before anything changes
    saved = None if before is None else ranks.on_rank_0(lambda: _newest_own_checkpoint(run, progress))
    if before is not None and before.checkpoint is not None and saved is None:
        # nothing was saved yet: begin with the same weights again
        begun_with = Path(before.checkpoint)
        begin = ranks.rank_0_first(lambda: load_pretrained_weights(begun_with, progress))
    tokenizer = None if begin is None else begin.tokenizer
    if saved is not None and recipe.tokenizer.path == saved.recipe.tokenizer.path:
        tokenizer = load_tokenizer(run, recipe)
    if is_new and ranks.is_first and (cost := describe_long_run(recipe)):
        progress.message(cost)  # before hours of tokenising
    prepare = functools.partial(prepare_data, recipe, progress=progress, builds=ranks.is_first, tokenizer=tokenizer)
    data = ranks.rank_0_first(prepare)
    seen = "put the data where all nodes see the same files"
    require_same(ranks, {"data": data.fingerprint}, "read different data under the same names", seen)
    started_s = time.time()
    model = build_model(recipe, data.tokenizer, device)
    if begin is not None and (new := begin_with(model, begin)):
        progress.message(f"new in this run: {new}")
    parameters = num_parameters(model)
    task = PretrainTask(recipe, data, model, device, ranks)
    shown_ranks = "" if ranks.size == 1 else f", {ranks.size} ranks"
    progress.message(
        f"{recipe.name}: {format_parameters(parameters)} parameters, "
        f"{format_number_of(len(data.train), 'sequence')}, {data.train.num_tokens:,} tokens, "
        f"on {describe_device(device)}{shown_ranks}; results in {run}"
    )
    if before is not None and before.precision not in (None, task.precision):
        change = f"trained in {before.precision} until now, and in {task.precision} from here"
        progress.message(f"note: the run was {change}")
    described: dict[str, Any] = {
        "device": describe_device(device),
        "precision": task.precision,
        **({"started_unix_s": round(started_s, 3)} if is_new else {}),
        "num_ranks": ranks.size if ranks.size > 1 else None,
        **({} if begin is None else {"checkpoint": recorded_name(begin), "checkpoint_sha256": begin.sha256}),
    }
    del begin  # its weights are the model's now
    if model.transition is not None:
        # the native backend may have to be built: before the first step
        backend = ranks.rank_0_first(lambda: choose_backend(recipe.train.alignment_backend, torch.float32, device))
        described["alignment_backend"] = backend
    trackers = build_trackers(recipe.train.report_to, recipe, run, run.resolve().name, recipe.name, progress)
    watch = [] if model.transition is None else [CollapseWatch(recipe, progress)]
    loop = TrainingLoop(
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
        ranks=ranks,
    )
    if not is_new:
        _resume(loop, run, saved, recipe, progress)
    if model.transition is not None and loop.state.step == 0:
        described["own_mask_share"] = task.own_mask_share()
        if described["own_mask_share"] < CENTRED_SHARE:
            progress.message(_describe_start(described["own_mask_share"]))
    unigrams = ranks.on_rank_0(task.unigrams)
    described |= {
        "unigram_loss": finite_or_none(unigrams.loss),
        "unigram_accuracy": finite_or_none(unigrams.accuracy),
    }
    # after `_resume`: a run whose checkpoint refuses the recipe or the data stays unchanged
    ranks.on_rank_0(functools.partial(_describe_run, run, recipe, data, described, progress))
    result = loop.fit()
    if ranks.is_first:
        time_s = round(result.state.elapsed_s, 1)
        update_run_json(run, {"parameters": parameters, "steps": result.state.step, "train_time_s": time_s})
    state, begun_with_weights = result.state, ranks.on_rank_0(lambda: read_run_json(run).checkpoint is not None)
    return PretrainResult(
        run,
        result.checkpoint,
        recipe,
        state.step,
        result.validation,
        unigrams,
        None if begun_with_weights else state.num_tokens,
        parameters,
        state.elapsed_s,
        state.data_wait_s,
        result.peak_memory_bytes,
        result.gpu,
        result.utilisation,
    )


def _describe_run(
    run: Path, recipe: PretrainRecipe, data: PreparedData, fields: dict[str, Any], progress: Progress
) -> None:
    list_rejected(data, run / "rejected.csv", progress)
    data.tokenizer.save(run / TOKENIZER_FILE)
    update_run_json(
        run,
        {
            "command": "pretrain",
            "seed": recipe.seed,
            "data_fingerprint": data.fingerprint,
            "num_rejected_rows": data.num_rejected,
            "train_sequences": len(data.train),
            "train_tokens": data.train.num_tokens,
            "valid_sequences": len(data.valid),
            **fields,
        },
    )
    write_run_recipe(run, recipe)


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
    recipe = resumed_recipe(Path(run), PretrainRecipe, overrides)
    return run_pretraining(recipe, resume=run, callbacks=callbacks, progress=progress)


def _describe_start(share: float) -> str:
    """Return the message of a run whose DAG does not begin centred."""
    return (
        f"note: at the start of training, {format_percent(share)} of what a mask learns is its own token, and the rest "
        "those of other masks; `model.transition.start=next_mask` and `model.transition.start_strength=4` change that"
    )


def validation_indices(dataset: TokenDataset, limit: int | None) -> IntArray:
    """Return evenly spread indices of at most `limit` sequences; None: of all."""
    size = len(dataset)
    count = size if limit is None else min(limit, size)
    spread: IntArray = torch.linspace(0, size - 1, count, dtype=torch.float64).round().long().numpy()
    return spread


class _Saved(NamedTuple):
    """Checkpoint that a run continues from, and the recipe that the run has had until now."""

    name: str
    recipe: PretrainRecipe


def _newest_own_checkpoint(run: Path, progress: Progress) -> _Saved | None:
    """Return the newest whole checkpoint, which recipe and tokenizer of the run fit; None without any."""
    found = newest_good_checkpoint(run, progress.message)
    refused = checkpoint_paths(run)
    if found is None and refused:
        raise CheckpointError(
            f"{run}: none of its checkpoints can be trusted: {', '.join(path.name for path in refused)}",
            f"restore their files, or delete {run / 'checkpoints'} to train again from step 0",
        )
    if found is None:
        return None
    begun = load_recipe(run / "recipe.yaml")
    require_own_files(run, found, load_state(found), begun)
    return _Saved(found.name, begun)


def _resume(loop: TrainingLoop, run: Path, saved: _Saved | None, recipe: PretrainRecipe, progress: Progress) -> None:
    """Load a checkpoint, or start again where none was saved."""
    ranks = loop.ranks
    if saved is not None:
        checkpoint = run / "checkpoints" / saved.name
        values = (identity_values(one, without=RESUMED_MARKS) for one in (saved.recipe, recipe))
        ranks.on_all_ranks(lambda: loop.resume(checkpoint, changes=describe_changes(*values)))
        progress.message(f"resuming at step {loop.state.step} of {loop.total_steps} from {checkpoint}")
    else:
        progress.message(f"{run} has no checkpoint yet; starting from step 0")
    if ranks.is_first:
        if saved is None:
            loop.metrics.truncate_after(0)
        remove_unfinished(run)
