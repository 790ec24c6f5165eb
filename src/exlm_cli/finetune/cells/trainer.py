"""Fine-tuning as a task of the training loop: encoded splits, batched prediction, and the training of one seed.

Axes: N examples of a split, C outputs, L tokens of an example.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from exlm_cli.config.finetune import FinetuneRecipe, FinetuneTrainConfig
from exlm_cli.config.sections import TrainConfig
from exlm_cli.config.tasks import TaskSection
from exlm_cli.data import IntArray
from exlm_cli.data.rows.records import SKIPPED_FILE
from exlm_cli.data.sampler import EpochPlan, cut_microbatches, plan_epoch, prefetch_to
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.distributed.parallel import StepModule
from exlm_cli.finetune.cells.batch import TaskBatch, batch_losses, collate, repeated_lengths
from exlm_cli.finetune.cells.frozen import FrozenStates
from exlm_cli.finetune.features import (
    FeatureStore,
    describe_descriptors,
    descriptor_names,
    fit_quantiles,
    with_descriptors,
)
from exlm_cli.format import format_number_of, format_percent
from exlm_cli.model.heads import DescriptorHead, TaskModel
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import DownstreamTask, EncodedRows, EncodedSplit, FloatArray, Loss, Split
from exlm_cli.tasks.metrics import target_scale
from exlm_cli.tasks.rows.splits import split_fingerprint
from exlm_cli.train.pretrain import autocast_dtype

MAX_UNKNOWN = 0.01
"""Share of [UNK] among the training tokens above which a note says that the tokenizer does not fit."""

_MAX_TOKENS_ON_CPU = 4096
"""Most positions of a batch that a CPU predicts: with 16,384 a row takes 1.3 times as long."""


@dataclass(frozen=True)
class TaskData:
    """A task on one split of its rows, as the encoder sees it; what training a cell needs to know of the task.

    Attributes:
        name, loss, output_names, selection_metric, is_greater_better, class_weights: As in `DownstreamTask`.
        train: Training rows, which are never scored.
        scored: The other parts of the rows.
        num_repeats: Copies of each token, as in pre-training.
        fingerprint: Hash of row numbers, tokens, targets, class weights and whatever else the task's scores depend on.
        descriptor_quantiles: (F, Q) quantiles of the descriptors of the training rows; None where there are none.
        about_descriptors: What the head reads beside the encoder's state, in a sentence; empty: nothing.
        frozen_states: States of the rows, where the encoder is frozen.
    """

    name: str
    loss: Loss
    output_names: tuple[str, ...]
    selection_metric: str
    is_greater_better: bool
    class_weights: FloatArray | None
    train: EncodedRows
    scored: dict[Split, EncodedSplit]
    tokenizer: Tokenizer
    num_repeats: int
    fingerprint: str
    descriptor_quantiles: FloatArray | None = None
    about_descriptors: str = ""
    frozen_states: FrozenStates = field(default_factory=FrozenStates)

    @property
    def num_descriptors(self) -> int:
        """F."""
        return 0 if self.descriptor_quantiles is None else len(self.descriptor_quantiles)

    @property
    def num_outputs(self) -> int | None:
        """C; None for spans."""
        return None if self.loss == "span" else len(self.output_names)

    @property
    def parts(self) -> dict[Split, EncodedRows]:
        """All parts of the rows, the training rows first."""
        return {"train": self.train, **self.scored}

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
        train=encoded["train"],
        scored={split: rows for split, rows in encoded.items() if split != "train"},
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
    assert isinstance(data.train, EncodedSplit), "rows that were encoded here know their molecules"
    parts: dict[Split, EncodedSplit] = {"train": data.train, **data.scored}
    store.of_rows(list(parts.values()), config, progress)  # at once, so that the work is spread evenly
    parts = {part: with_descriptors(rows, config, store, progress) for part, rows in parts.items()}
    digest = hashlib.sha256(data.fingerprint.encode())
    for rows in parts.values():
        digest.update(np.ascontiguousarray(rows.descriptors).tobytes())
    training_NF = parts["train"].descriptors
    assert training_NF is not None, "the config names some"
    quantiles_FQ = fit_quantiles(training_NF)
    about = describe_descriptors(training_NF, quantiles_FQ, config)
    return replace(
        data,
        train=parts["train"],
        scored={part: rows for part, rows in parts.items() if part != "train"},
        fingerprint=digest.hexdigest(),
        descriptor_quantiles=quantiles_FQ,
        about_descriptors=about,
    )


def task_outputs(model: TaskModel, batch: TaskBatch) -> Tensor:
    """Run a model and return its outputs."""
    return cast(Tensor, model(batch.token_ids, batch.lengths, batch.is_padded, batch.descriptors, batch.states))


def cls_states(model: TaskModel, batch: TaskBatch) -> Tensor:
    """Run the encoder and return the states at [CLS]."""
    return model.encode_cls(batch.token_ids, batch.lengths, batch.is_padded)


def task_losses(model: TaskModel, batch: TaskBatch, loss: Loss, weights: Tensor | None) -> Float[Tensor, " n"]:
    """Run a model and return its losses, those of `batch_losses`; a regression's targets are standardised."""
    return losses_of_outputs(model, task_outputs(model, batch), batch, loss, weights)


def losses_of_outputs(
    model: TaskModel, outputs: Tensor, batch: TaskBatch, loss: Loss, weights: Tensor | None
) -> Float[Tensor, " n"]:
    """Return the losses of `batch_losses` for outputs of a model; a regression's targets are standardised."""
    if loss == "regression":
        batch = replace(batch, targets=(batch.targets - model.output_mean) / model.output_std)
    return batch_losses(loss, outputs, batch, weights)


class TaskRunner:
    """Cuts examples into batches and runs the model on them.

    Args:
        model: On the device it runs on.
        tokenizer: Tokenizer of the checkpoint.
        num_repeats: Copies of each token, as in pre-training.
        train: Precision, and the positions, padding included, that go through at once.
        losses: Loss function of `StepModule`, compiled if `train.compile`; None: for prediction alone.

    Attributes:
        module: The model and its loss.
    """

    def __init__(
        self,
        model: TaskModel,
        tokenizer: Tokenizer,
        num_repeats: int,
        train: TrainConfig | FinetuneTrainConfig,
        losses: Callable[[TaskModel, TaskBatch], Tensor] | None = None,
    ) -> None:
        self.model, self.num_repeats, self.pad_id = model, num_repeats, tokenizer.pad_id
        self.microbatch_tokens = train.microbatch_tokens
        self.device = next(model.parameters()).device
        is_cpu = self.device.type == "cpu"
        self.predicted_tokens = min(train.microbatch_tokens, _MAX_TOKENS_ON_CPU) if is_cpu else train.microbatch_tokens
        self.autocast_dtype = autocast_dtype(train, self.device)
        self.module = StepModule(model, losses or task_outputs)
        if losses is not None and train.compile:
            self.module.compile_step()

    def batches(
        self, encoded: EncodedRows, indices: IntArray, states: Tensor | None = None, *, is_predicted: bool = False
    ) -> Iterator[TaskBatch]:
        """Return padded batches of examples of similar length; start preparing the first one now.

        Args:
            states: (N, D) states of all examples at [CLS], on the host, where they are known.
            is_predicted: Nothing is trained on them: batches have the size that is fastest on the device.
        """

        def make(chosen: IntArray) -> TaskBatch:
            batch = collate(encoded, chosen, num_repeats=self.num_repeats, pad_id=self.pad_id)
            return batch if states is None else replace(batch, states=states[torch.from_numpy(chosen)])

        lengths = repeated_lengths(encoded, indices, self.num_repeats)
        parts = cut_microbatches(lengths, self.predicted_tokens if is_predicted else self.microbatch_tokens)
        return prefetch_to(self.device, (make(indices[part]) for part in parts))

    def autocast(self) -> torch.autocast:
        """Return the context in which the model runs."""
        return torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)

    def predict(
        self,
        encoded: EncodedRows,
        progress: Progress,
        label: str,
        see: Callable[[TaskBatch, Tensor], None] | None = None,
        states: Tensor | None = None,
    ) -> list[FloatArray]:
        """Run the model on every example without dropout; leave it in training mode.

        Args:
            encoded: The examples.
            progress: Shows a bar.
            label: Label of the bar.
            see: Called with each batch and the model's outputs.
            states: As for `batches`.

        Returns:
            Outputs of each example, in order: (C,) logits, or values in the task's units; (L, 2) logits for spans.
        """
        predicted: dict[int, FloatArray] = {}
        every = np.arange(len(encoded))
        batches = self.batches(encoded, every, states, is_predicted=True) if len(every) else iter(())
        self.model.eval()
        with progress.bar(label, len(every)) as bar, torch.no_grad():
            for batch in batches:
                with self.autocast():
                    outputs = self.module(batch, task_outputs)
                if see is not None:
                    see(batch, outputs)
                in_units = self.model.in_units(outputs).cpu().numpy()
                for index, row in zip(batch.sample_index.tolist(), in_units, strict=True):
                    predicted[index] = row if row.ndim == 1 else row[: len(encoded.token_ids[index])]
                bar.update(len(predicted))
        self.model.train()
        return [predicted[index] for index in every.tolist()]

    def encode(self, encoded: EncodedRows, progress: Progress, label: str) -> Float[Tensor, "N D"]:
        """Return the states of all examples at [CLS], without dropout, on the host."""
        states = torch.zeros(len(encoded), self.model.encoder.token_embedding.embedding_dim)
        is_training, num_done = self.model.training, 0
        self.model.eval()
        with progress.bar(label, len(encoded)) as bar, torch.no_grad(), self.autocast():
            for batch in self.batches(encoded, np.arange(len(encoded)), is_predicted=True):
                states[batch.sample_index.cpu()] = cls_states(self.model, batch).cpu()
                num_done += len(batch.sample_index)
                bar.update(num_done)
        self.model.train(is_training)
        return states


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

    last_validation: tuple[float, list[FloatArray]] | None = None

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
        model.encoder.recomputes = recipe.train.gradient_checkpointing
        weights = data.class_weights
        self._weights = None if weights is None else torch.from_numpy(weights).float().to(model.output_mean.device)
        losses = partial(task_losses, loss=data.loss, weights=self._weights)
        self._runner = TaskRunner(model, data.tokenizer, data.num_repeats, recipe.train, losses)
        self.module = self._runner.module
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
            return cast(Tensor, self.module(batch))

    def count_tokens(self, batch: TaskBatch) -> int:
        """Return the number of input tokens, repetitions counted."""
        return batch.num_tokens

    def validate(self) -> dict[str, float]:
        """Return loss and metrics on the validation split."""
        loss, outputs = self.last_validation = self.predict("valid")
        return {"loss": loss, **self.data.scored["valid"].score([outputs])}

    def predict(self, split: Split) -> tuple[float, list[FloatArray]]:
        """Return the mean loss over a split's labels or examples, and the outputs as `TaskRunner.predict` does."""
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
        return math.fsum(counted) / len(counted) if counted else math.nan, outputs

    def _states(self, split: Split) -> Tensor | None:
        """Return the states of a split that a frozen encoder gives, worked out when first asked for; else None.

        They are those of the whole split in one fixed order, so that a resumed run has the same bits.
        """
        if not self.model.is_encoder_frozen or self.data.loss == "span":
            return None
        encoded, precision = self.data.parts[split], self._runner.autocast_dtype
        states = self.data.frozen_states.find(encoded, precision)
        if states is None:
            states = self._runner.encode(encoded, self._progress, f"encoding {split}")
            self.data.frozen_states.keep(encoded, precision, states)
        return states


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
        for mask in encoded.answerable or ():
            digest.update(mask.tobytes())
    return digest.hexdigest()
