"""A cell of fine-tuning: its folder; the rows of its split, encoded; its training, by the training loop; its score.

Axes: N examples of a split, C outputs, L tokens of an example.
"""

import hashlib
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from exlm_cli.config.finetune import FinetuneRecipe, GridPoint
from exlm_cli.config.tasks import TaskSection
from exlm_cli.cost.meter import num_parameters, tokens_per_second
from exlm_cli.data import IntArray
from exlm_cli.data.rows.records import SKIPPED_FILE
from exlm_cli.data.sampler import EpochPlan, plan_epoch
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import CheckpointError
from exlm_cli.files import read_json, write_json
from exlm_cli.finetune.cells.model import cell_identity, pooled_by
from exlm_cli.finetune.cells.runner import (
    TaskBatch,
    TaskRunner,
    losses_of_outputs,
    repeated_lengths,
    task_losses,
)
from exlm_cli.finetune.features import (
    FeatureStore,
    describe_descriptors,
    descriptor_names,
    fit_quantiles,
    with_descriptors,
)
from exlm_cli.finetune.predictions import LOGITS_FILE, write_logits, write_predictions
from exlm_cli.finetune.results import RESULT_FILE, CellResult, cell_folder
from exlm_cli.finetune.scores import LabelScores, Scores
from exlm_cli.format import format_number_of, format_percent, printable
from exlm_cli.model.heads import DescriptorHead, TaskModel
from exlm_cli.ops.precision import Precision
from exlm_cli.progress import Progress
from exlm_cli.run_dir import METRICS_FILE, MetricsLog, resume_command
from exlm_cli.tasks.base import DownstreamTask, EncodedSplit, FloatArray, Loss, SeedOutputs, Split
from exlm_cli.tasks.metrics import join_seeds, target_scale, to_predictions
from exlm_cli.tasks.rows.splits import split_fingerprint
from exlm_cli.train.checkpoint import (
    best_paths,
    checkpoint_paths,
    load_model_weights,
    newest_good_checkpoint,
    verify_checkpoint,
)
from exlm_cli.train.loop import TrainingLoop
from exlm_cli.train.pretrained import Pretrained
from exlm_cli.train.records.trackers import build_trackers
from exlm_cli.train.task import Callback, LoopResult, Selection

MAX_UNKNOWN = 0.01
"""Share of [UNK] among the training tokens above which a note says that the tokenizer does not fit."""


@dataclass(frozen=True)
class Cell:
    """One seed at one grid point on one split of the rows.

    Attributes:
        run: Run directory.
        point: Its recipe has this split.
        label: Name of the cell in messages and on a bar.
    """

    run: Path
    point: GridPoint
    seed: int
    label: str

    @property
    def recipe(self) -> FinetuneRecipe:
        """What it is trained with."""
        return self.point.recipe

    @property
    def split_seed(self) -> int:
        """Names the split in `scores.csv`."""
        return self.recipe.task.split_seed

    @property
    def folder(self) -> Path:
        """Where it is trained."""
        return cell_folder(self.run, self.point.label, self.split_seed, self.seed)

    @property
    def is_done(self) -> bool:
        """Whether the cell has its result."""
        return (self.folder / RESULT_FILE).is_file()

    @property
    def has_weights(self) -> bool:
        """Whether the weights of its best epoch exist; `drop_weights` deletes them."""
        return bool(best_paths(self.folder))

    def read(self) -> CellResult:
        """Return its `result.json`; a file that cannot be read is a `CheckpointError`."""
        hint = "delete the file; a resumed run trains this cell again"
        return read_json(self.folder / RESULT_FILE, CellResult, hint=hint)

    def drop_weights(self) -> None:
        """Delete its weights and logits; its result and curves stay."""
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        (self.folder / LOGITS_FILE).unlink(missing_ok=True)

    def drop_checkpoints(self) -> None:
        """Delete what a finished cell needs no more; a process killed at this point may have left some.

        The parent of a worker may be deleting all weights of a cell that is beaten.
        """
        for path in checkpoint_paths(self.folder):
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class TaskData:
    """A task on one split of its rows, as the encoder sees it; what training a cell needs to know of the task.

    Attributes:
        name, loss, output_names, selection_metric, is_greater_better, class_weights: As in `DownstreamTask`.
        parts: All parts of the rows, the training rows first.
        rows: Row of the input of each example in each part, counted from 0.
        num_repeats: Copies of each token, as in pre-training.
        fingerprint: Hash of row numbers, tokens, targets, class weights and whatever else the task's scores depend on.
        descriptor_quantiles: (F, Q) quantiles of the descriptors of the training rows; None where there are none.
        about_descriptors: What the head reads beside the encoder's state, in a sentence; empty: nothing.
        frozen_states: (N, D) states of the rows of each part in a precision, where the encoder is frozen: the same in
            every epoch, and for every seed and grid point.
    """

    name: str
    loss: Loss
    output_names: tuple[str, ...]
    selection_metric: str
    is_greater_better: bool
    class_weights: FloatArray | None
    parts: dict[Split, EncodedSplit]
    rows: Mapping[Split, IntArray]
    tokenizer: Tokenizer
    num_repeats: int
    fingerprint: str
    descriptor_quantiles: FloatArray | None = None
    about_descriptors: str = ""
    frozen_states: dict[tuple[Split, Precision], Tensor] = field(default_factory=dict)

    @property
    def num_descriptors(self) -> int:
        """F."""
        return 0 if self.descriptor_quantiles is None else len(self.descriptor_quantiles)

    @property
    def num_outputs(self) -> int | None:
        """C; None for spans."""
        return None if self.loss == "span" else len(self.output_names)

    @property
    def train(self) -> EncodedSplit:
        """Training rows, which are never scored."""
        return self.parts["train"]

    @property
    def scored(self) -> dict[Split, EncodedSplit]:
        """The other parts of the rows."""
        return {part: rows for part, rows in self.parts.items() if part != "train"}

    @property
    def unknown_share(self) -> float:
        """Share of the training tokens between [CLS] and the last [SEP] that are [UNK]."""
        token_ids = np.concatenate([ids[1:-1] for ids in self.train.token_ids])
        return float((token_ids == self.tokenizer.unk_id).mean()) if len(token_ids) else 0.0


def encode_task(task: DownstreamTask, tokenizer: Tokenizer, sequence_length: int, num_repeats: int) -> TaskData:
    """Tokenise every part of a task's rows."""
    encoded = {split: task.encode(split, tokenizer, sequence_length) for split in task.splits}
    return TaskData(
        name=task.name,
        loss=task.loss,
        output_names=task.output_names,
        selection_metric=task.selection_metric,
        is_greater_better=task.is_greater_better,
        class_weights=task.class_weights,
        parts=encoded,
        rows=task.split_indices,
        tokenizer=tokenizer,
        num_repeats=num_repeats,
        fingerprint=_fingerprint(task, encoded),
    )


def describe_data(task: DownstreamTask, data: TaskData) -> list[str]:
    """Return caveats of the data, and whether the tokenizer fits them."""
    notes = [*task.notes, *([data.about_descriptors] if data.about_descriptors else [])]
    notes += (f"{name}: {note}" for name, rows in data.parts.items() for note in rows.notes)
    if task.skipped:
        left_out = format_number_of(len(task.skipped), "row")
        notes.append(f"{SKIPPED_FILE} lists what was left out, {left_out}, with reasons")
    if data.unknown_share > MAX_UNKNOWN:
        share = format_percent(data.unknown_share)
        notes.append(f"{share} of the training tokens are [UNK]: the tokenizer was not made for this data")
    return notes


def describe_rows(data: TaskData, config: TaskSection, store: FeatureStore, progress: Progress) -> TaskData:
    """Return a task with the descriptors of each row that the head reads.

    Args:
        config: Names them.
        store: Features of molecules that are known, which grows.
    """
    if not descriptor_names(config):
        return data
    store.of_rows(list(data.parts.values()), config, progress)  # at once, so that the work is spread evenly
    parts = {part: with_descriptors(rows, config, store, progress) for part, rows in data.parts.items()}
    digest = hashlib.sha256(data.fingerprint.encode())
    for rows in parts.values():
        digest.update(np.ascontiguousarray(rows.descriptors).tobytes())
    training_NF = parts["train"].descriptors
    assert training_NF is not None, "the config names some"
    quantiles_FQ = fit_quantiles(training_NF)
    about = describe_descriptors(training_NF, quantiles_FQ, config)
    return replace(
        data,
        parts=parts,
        fingerprint=digest.hexdigest(),
        descriptor_quantiles=quantiles_FQ,
        about_descriptors=about,
    )


def _fingerprint(task: DownstreamTask, splits: dict[Split, EncodedSplit]) -> str:
    digest = hashlib.sha256(repr((task.name, task.loss, task.output_names)).encode())
    digest.update(b"" if task.class_weights is None else task.class_weights.tobytes())
    digest.update(task.score_fingerprint.encode())
    digest.update(split_fingerprint(task.split_indices).encode())
    for split, encoded in splits.items():
        digest.update(f"{split} {len(encoded)}".encode())
        digest.update(np.array([len(ids) for ids in encoded.token_ids], dtype=np.int64).tobytes())
        for ids in encoded.token_ids:
            digest.update(np.ascontiguousarray(ids, dtype=np.int64).tobytes())
        digest.update(np.ascontiguousarray(encoded.targets, dtype=np.float64).tobytes())
        for more in (encoded.bounds, encoded.weights):
            digest.update(b"" if more is None else more.tobytes())
        for mask in encoded.answerable or ():
            digest.update(mask.tobytes())
    return digest.hexdigest()


class FinetuneTask:
    """One seed of one grid point, for the training loop.

    Args:
        recipe: Recipe of the grid point.
        seed: Decides the order of the data and, through the loop, dropout.
        data: Encoded splits.
        model: On its device; a regression sets its `output_mean` and `output_std` from the training targets.
        origin: Hashes of the weights that training begins with, the recipes and the tokenizer, by name.
        progress: Shows how far a validation is.

    Attributes:
        last_validation: What `predict` returned in the last validation of this process; None before the first.
    """

    last_validation: tuple[float, SeedOutputs] | None = None

    def __init__(
        self,
        recipe: FinetuneRecipe,
        seed: int,
        data: TaskData,
        model: TaskModel,
        origin: Mapping[str, str],
        progress: Progress,
    ) -> None:
        self.recipe, self.seed, self.data, self.model = recipe, seed, data, model
        self._progress = progress
        model.encoder.gradient_checkpointing = recipe.train.gradient_checkpointing
        weights = data.class_weights
        self._weights = None if weights is None else torch.from_numpy(weights).float().to(model.output_mean.device)
        self._runner = TaskRunner(model, data.tokenizer, data.num_repeats, recipe.train)
        self.module = model  # one process trains: nothing is around it
        if recipe.train.compile:
            model.encoder.compile_blocks()
        self.identity = {"data fingerprint": data.fingerprint, **origin}
        self._train_lengths = repeated_lengths(data.train, np.arange(len(data.train)), data.num_repeats)
        if data.loss == "regression":
            mean_C, std_C = target_scale(data.train.targets)
            model.output_mean.copy_(torch.from_numpy(mean_C))
            model.output_std.copy_(torch.from_numpy(std_C))
        if isinstance(model.head, DescriptorHead):
            assert data.descriptor_quantiles is not None, "the model was built for them"
            model.head.ranks.quantiles.copy_(torch.from_numpy(data.descriptor_quantiles))

    def plan(self, epoch: int) -> EpochPlan:
        """Return the steps of an epoch."""
        train = self.recipe.train
        return plan_epoch(
            self._train_lengths,
            seed=self.seed,
            epoch=epoch,
            batch_sequences=train.batch_sequences,
            batch_tokens=None,
            bucket_steps=train.bucket_steps,
        )

    def begin_step(self, share_done: float) -> None:
        """Do nothing: the loss is the same from the first step to the last."""

    def microbatches(self, indices: IntArray, epoch: int) -> Iterator[TaskBatch]:
        """Return one step's padded batches; start preparing the first one now."""
        del epoch  # no masks: an example is the same in every epoch
        return self._runner.batches(self.data.train, indices, self._states("train"))

    def losses(self, batch: TaskBatch) -> Tensor:
        """Return the loss of each label or example, as `batch_losses` gives them."""
        with self._runner.autocast():
            return task_losses(self.model, batch, self.data.loss, self._weights)

    def count_tokens(self, batch: TaskBatch) -> int:
        """Return the number of input tokens, repetitions counted."""
        return batch.num_tokens

    def count_flops(self, batch: TaskBatch) -> float:
        """Return 0: utilisation is a matter of pre-training."""
        del batch
        return 0.0

    def validate(self) -> dict[str, float]:
        """Return loss and metrics on the validation split."""
        loss, outputs = self.last_validation = self.predict("valid")
        return {"loss": loss, **self.data.scored["valid"].score(outputs)}

    def predict(self, split: Split) -> tuple[float, SeedOutputs]:
        """Return the mean loss over a split's labels or examples, and what this seed predicts."""
        losses: list[float] = []
        outputs = self._runner.predict(
            self.data.scored[split],
            self._progress,
            f"scoring {split}",
            lambda batch, raw: losses.extend(
                losses_of_outputs(self.model, raw, batch, self.data.loss, self._weights).tolist()
            ),
            self._states(split),
        )
        counted = [value for value in losses if math.isfinite(value)]
        predicted = to_predictions(self.data.loss, outputs, len(self.data.output_names))
        return math.fsum(counted) / len(counted) if counted else math.nan, join_seeds([predicted])

    def _states(self, split: Split) -> Tensor | None:
        """Return the states of a split that a frozen encoder gives, worked out when first asked for; else None.

        They are those of the whole split in one fixed order, so that a resumed run has the same bits.
        """
        if not self.model.is_encoder_frozen or self.data.loss == "span":
            return None
        known, key = self.data.frozen_states, (split, self._runner.precision)
        if key not in known:
            known[key] = self._runner.encode(self.data.parts[split], self._progress, f"encoding {split}")
        return known[key]


def run_cell(
    cell: Cell,
    data: TaskData,
    weights: Pretrained,
    device: torch.device,
    *,
    callbacks: Sequence[Callback] = (),
    progress: Progress,
) -> None:
    """Train a cell or continue it, score its best epoch and write its result.

    Args:
        data: The split of the cell.
        weights: What training begins with.

    Raises:
        ExlmError: Divergence, interruption, a checkpoint that cannot be written or trusted.
    """
    recipe = cell.recipe
    cell.folder.mkdir(parents=True, exist_ok=True)
    model = _build_model(weights, recipe, data, cell.seed, device)
    begun = "scratch" if recipe.init == "scratch" else weights.sha256
    origin = {"checkpoint": begun, **cell_identity(recipe, cell.seed, weights.recipe, weights.tokenizer)}
    task = FinetuneTask(recipe, cell.seed, data, model, origin, progress)
    group = cell.run.resolve().name
    trackers = build_trackers(recipe.train.report_to, recipe, cell.run, f"{group}: {cell.label}", group, progress)
    loop = TrainingLoop(
        task,
        recipe.train,
        recipe.optim,
        seed=cell.seed,
        run=cell.folder,
        metrics=MetricsLog(cell.folder / METRICS_FILE),
        progress=progress,
        resume_command=resume_command("finetune", cell.run),
        callbacks=[*trackers, *callbacks],
        selection=Selection(data.selection_metric, data.is_greater_better, recipe.train.patience),
        label=cell.label,
    )
    loop.resume(newest_good_checkpoint(cell.folder, progress.message))
    write_json(cell.folder / RESULT_FILE, _score(cell, task, loop.fit()))
    cell.drop_checkpoints()


def _score(cell: Cell, task: FinetuneTask, result: LoopResult) -> CellResult:
    """Load the best weights, score every part but the training rows, and write the predictions."""
    assert result.best is not None, "a run with a selection has a best checkpoint"
    reason = verify_checkpoint(result.best)
    if reason is not None:
        raise CheckpointError(
            f"{result.best} is refused: {reason}", f"delete {cell.folder} and resume the run to train this cell again"
        )
    state, data = result.state, task.data
    # the last validation has just predicted with these weights, unless this process only continued a finished loop
    validated = task.last_validation if state.best_step == state.step else None
    if validated is None:
        load_model_weights(result.best, task.model)
    assert state.best_epoch is not None, "known where there is a best checkpoint"
    assert state.best_step is not None, "likewise"
    metrics: Scores = {}
    labels: LabelScores = {}
    notes: list[str] = []
    predicted: dict[Split, FloatArray] = {}
    for split, encoded in data.scored.items():
        loss, outputs = validated if split == "valid" and validated is not None else task.predict(split)
        metrics[split] = {"loss": loss, **encoded.score(outputs)}
        if of_labels := encoded.score_labels(outputs):
            labels[split] = {name: dict(scores) for name, scores in of_labels.items()}
        notes += (printable(f"{split}: {note}") for note in encoded.describe_outputs(outputs))
        if isinstance(outputs, np.ndarray):
            predicted[split] = outputs[0]
            continue
        encoded.write_answers(cell.folder, split, outputs)
        if split == "valid":
            write_logits(cell.folder, outputs[0])
    if predicted:
        write_predictions(cell.folder, data.output_names, predicted, data.rows)
    return CellResult(
        task=data.name,
        seed=cell.seed,
        grid=cell.point.values,
        parameters=num_parameters(task.model),
        epochs=state.epoch + 1,
        best_epoch=state.best_epoch + 1,
        steps=state.step,
        best_step=state.best_step,
        elapsed_s=round(state.elapsed_s + state.validate_s, 3),
        metrics=metrics,
        labels=labels,
        notes=tuple(notes),
        tokens_per_s=round(tokens_per_second(state.num_tokens, state.elapsed_s), 1),
        outside_model_share=round(1 - state.model_s / max(1e-9, state.elapsed_s), 4),
    )


def _build_model(
    weights: Pretrained, recipe: FinetuneRecipe, data: TaskData, seed: int, device: torch.device
) -> TaskModel:
    """Build the network of one seed: a head drawn from the seed, and the checkpoint's encoder or one drawn as well."""
    torch.manual_seed(seed)
    vocab_size = weights.tokenizer.vocab_size
    sizes = (vocab_size, data.num_outputs, data.num_descriptors)
    model = TaskModel(weights.recipe, recipe.model, *sizes, pooled=pooled_by(recipe))
    if recipe.init == "checkpoint":
        model.load_encoder(weights.model)
    if recipe.train.freeze_encoder:
        model.freeze_encoder()
    return model.to(device)
