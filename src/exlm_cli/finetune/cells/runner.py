"""The network of a task on rows: padded batches, their losses, predictions, and the states of a frozen encoder.

Axes: N examples of a split, B of a batch, L tokens, R positions after repetition, C outputs, D width, F descriptors,
n losses of `binary`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from exlm_cli.config.finetune import FinetuneTrainConfig
from exlm_cli.config.sections import TrainConfig
from exlm_cli.data import IntArray
from exlm_cli.data.batch import DeviceBatch
from exlm_cli.data.sampler import cut_microbatches, prefetch_to
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.model.heads import TaskModel
from exlm_cli.ops.precision import autocast, precision_on
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import EncodedRows, FloatArray, Loss

_MAX_TOKENS_ON_CPU = 4096
"""Most positions of a batch that a CPU predicts: with 16,384 a row takes 1.3 times as long."""


@dataclass(frozen=True)
class TaskBatch(DeviceBatch):
    """Input and targets of one forward pass.

    Attributes:
        token_ids: Repeated tokens, [PAD] beyond `lengths`.
        lengths: Positions of each example after repetition, [CLS] and [SEP] included; of pairs whose texts are read
            alone, those of the first texts and then of the second ones, as `token_ids`.
        targets: As in `EncodedRows`, float64, NaN where missing.
        answerable: For spans, over tokens before repetition; False beyond the last one.
        sample_index: Index of each example in its split.
        label_index: As `index_labels` returns it.
        is_padded: Whether any example has [PAD], known to the host.
        num_tokens: Positions without padding, known to the host.
        descriptors, bounds, weights: As in `EncodedRows`.
        states: States of the examples, where the encoder is frozen and they are known.
    """

    token_ids: Int64[Tensor, "B R"]
    lengths: Int64[Tensor, " B"]
    targets: Float[Tensor, "B C"]
    answerable: Bool[Tensor, "B L"] | None
    sample_index: Int64[Tensor, " B"]
    label_index: Int64[Tensor, " n"]
    is_padded: bool
    num_tokens: int
    descriptors: Float[Tensor, "B F"] | None = None
    states: Float[Tensor, "B D"] | None = None
    bounds: Float[Tensor, "B C 2"] | None = None
    weights: Float[Tensor, " B"] | None = None


def repeated_lengths(split: EncodedRows, indices: IntArray, num_repeats: int) -> IntArray:
    """Return the (n,) positions of examples when every token between [CLS] and the last [SEP] is repeated."""
    lengths = np.array([len(split.token_ids[int(i)]) for i in indices], dtype=np.int64)
    return (lengths - 2) * num_repeats + 2


def collate(
    split: EncodedRows, indices: IntArray, *, num_repeats: int, pad_id: int, pairs_of: Tokenizer | None = None
) -> TaskBatch:
    """Repeat and pad the examples of given indices on the CPU; repetition is that of pre-training (section 3.1).

    Args:
        pairs_of: Tokenizer of pairs whose texts are read alone: the first texts, then the second ones; None: rows are
            read whole.
    """
    chosen = [split.token_ids[int(i)] for i in indices]
    if pairs_of is not None:
        firsts, seconds = zip(*(split_pair(ids, pairs_of) for ids in chosen), strict=True)
        chosen = [*firsts, *seconds]
    rows = [_repeat(ids, num_repeats) for ids in chosen]
    answerable = None
    if split.answerable is not None:
        answerable = _padded([split.answerable[int(i)] for i in indices], False)
    targets = split.targets[indices]
    lengths = [len(row) for row in rows]
    return TaskBatch(
        _padded(rows, pad_id),
        torch.tensor(lengths),
        torch.from_numpy(targets),
        answerable,
        torch.from_numpy(indices),
        index_labels(targets),
        is_padded=min(lengths) < max(lengths),
        num_tokens=sum(lengths),
        **{
            name: None if rows is None else torch.from_numpy(rows[indices])
            for name, rows in (
                ("descriptors", split.descriptors),
                ("bounds", split.bounds),
                ("weights", split.weights),
            )
        },
    )


def split_pair(token_ids: IntArray, tokenizer: Tokenizer) -> tuple[IntArray, IntArray]:
    """Return both texts of a pair as [CLS] text [SEP]."""
    end = int(np.flatnonzero(token_ids == tokenizer.sep_id)[0])
    return token_ids[: end + 1], np.concatenate([token_ids[:1], token_ids[end + len(tokenizer.pair_ids) :]])


def index_labels(targets: FloatArray) -> Int64[Tensor, " n"]:
    """Return the indices of the labels present in the flat (B * C), then B * C once for each example without any."""
    is_present = ~np.isnan(targets)
    num_unlabelled = int((~is_present.any(1)).sum())
    return torch.from_numpy(np.append(np.flatnonzero(is_present), [targets.size] * num_unlabelled).astype(np.int64))


def _repeat(token_ids: IntArray, num_repeats: int) -> IntArray:
    pieces = [token_ids[:1], np.repeat(token_ids[1:-1], num_repeats), token_ids[-1:]]
    return np.concatenate(pieces)


def _padded(rows: Sequence[NDArray[Any]], value: int) -> Tensor:
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_value=value)


def batch_losses(loss: Loss, outputs: Tensor, batch: TaskBatch, weights: Tensor | None) -> Float[Tensor, " n"]:
    """Return the losses whose mean is the loss of a batch, float32, in nats; `regression`: squared standard deviations.

    `binary` has one loss for each label present, so that every label weighs the same (as in Uni-Mol). Other losses have
    one for each example; for `regression` it is the mean over the values present, of which a censored one counts how
    far the output is beyond its bound, so nothing on the right side. Each example without labels adds `inf`, which the
    training loop counts and leaves out. The losses of an example are multiplied by its weight.

    Args:
        outputs: (B, C), or (B, L, 2) for `span`.
        batch: Batch with the targets and bounds; standardised ones for `regression`.
        weights: (C,) weight of each class, or of each label's positives; None: all 1.
    """
    match loss:
        case "binary":
            targets_BC = batch.targets.nan_to_num().to(outputs.dtype)
            losses_BC = F.binary_cross_entropy_with_logits(outputs, targets_BC, pos_weight=weights, reduction="none")
            losses_BC = _weighted(losses_BC, batch)
            with_unlabelled = torch.cat([losses_BC.flatten(), losses_BC.new_full((1,), math.inf)])
            return with_unlabelled.index_select(0, batch.label_index)
        case "regression":
            if batch.bounds is None:
                targets_BC = batch.targets.nan_to_num().to(outputs.dtype)
                return _mean_of_present(_weighted((outputs - targets_BC).square(), batch), ~batch.targets.isnan())
            low_BC, high_BC = batch.bounds.to(outputs.dtype).unbind(2)
            losses_BC = (low_BC - outputs).relu().square() + (outputs - high_BC).relu().square()
            return _mean_of_present(_weighted(losses_BC, batch), batch.bounds.isfinite().any(2))
        case "classes":
            targets_B = batch.targets[:, 0].nan_to_num().long()
            losses_B = F.cross_entropy(outputs, targets_B, weight=weights, reduction="none")
            return _mean_of_present(_weighted(losses_B[:, None], batch), ~batch.targets.isnan())
        case "span":
            assert batch.answerable is not None, "a span task says which tokens an answer may begin or end at"
            log_probs_BL2 = outputs.masked_fill(~batch.answerable[..., None], -torch.inf).log_softmax(1)
            return -log_probs_BL2.gather(1, batch.targets.long()[:, None])[:, 0].mean(-1)


def _weighted(losses_BC: Tensor, batch: TaskBatch) -> Tensor:
    return losses_BC if batch.weights is None else losses_BC * batch.weights.to(losses_BC.dtype)[:, None]


def _mean_of_present(losses_BC: Tensor, is_present_BC: Tensor) -> Tensor:
    total_B = torch.where(is_present_BC, losses_BC, 0.0).sum(1)
    num_B = is_present_BC.sum(1)
    return (total_B / num_B.clamp(min=1)).masked_fill(num_B == 0, math.inf)


def task_outputs(model: TaskModel, batch: TaskBatch) -> Tensor:
    """Run a model and return its outputs."""
    return cast(Tensor, model(batch.token_ids, batch.lengths, batch.is_padded, batch.descriptors, batch.states))


def row_states(model: TaskModel, batch: TaskBatch) -> Tensor:
    """Run the encoder and return the state of each row."""
    return model.encode_row(batch.token_ids, batch.lengths, batch.is_padded)


def task_losses(model: TaskModel, batch: TaskBatch, loss: Loss, weights: Tensor | None) -> Float[Tensor, " n"]:
    """Run a model and return its losses, those of `batch_losses`; a regression's targets are standardised."""
    return losses_of_outputs(model, task_outputs(model, batch), batch, loss, weights)


def losses_of_outputs(
    model: TaskModel, outputs: Tensor, batch: TaskBatch, loss: Loss, weights: Tensor | None
) -> Float[Tensor, " n"]:
    """Return the losses of `batch_losses` for outputs of a model; a regression's targets are standardised."""
    if loss == "regression":
        bounds = batch.bounds
        if bounds is not None:
            bounds = (bounds - model.output_mean[:, None]) / model.output_std[:, None]
        batch = replace(batch, targets=(batch.targets - model.output_mean) / model.output_std, bounds=bounds)
    return batch_losses(loss, outputs, batch, weights)


@contextmanager
def evaluating(model: TaskModel) -> Iterator[None]:
    """Turn dropout and gradients off, and afterwards leave the model in the mode that it was in."""
    is_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(is_training)


class TaskRunner:
    """Cuts examples into batches and runs the model on them.

    Args:
        model: On the device it runs on.
        tokenizer: Tokenizer of the checkpoint.
        num_repeats: Copies of each token, as in pre-training.
        train: Precision, and the positions, padding included, that go through at once.
    """

    def __init__(
        self,
        model: TaskModel,
        tokenizer: Tokenizer,
        num_repeats: int,
        train: TrainConfig | FinetuneTrainConfig,
    ) -> None:
        self.model, self.tokenizer, self.num_repeats = model, tokenizer, num_repeats
        self.microbatch_tokens = train.microbatch_tokens
        self.device = next(model.parameters()).device
        is_cpu = self.device.type == "cpu"
        self.predicted_tokens = min(train.microbatch_tokens, _MAX_TOKENS_ON_CPU) if is_cpu else train.microbatch_tokens
        self.precision = precision_on(self.device, train.precision)

    def batches(
        self, encoded: EncodedRows, indices: IntArray, states: Tensor | None = None, *, is_predicted: bool = False
    ) -> Iterator[TaskBatch]:
        """Return padded batches of examples of similar length; start preparing the first one now.

        Args:
            states: (N, D) states of all examples, on the host, where they are known.
            is_predicted: Nothing is trained on them: batches have the size that is fastest on the device.
        """
        pairs_of = self.tokenizer if self.model.pooled == "means" and encoded.is_pairs else None

        def make(chosen: IntArray) -> TaskBatch:
            batch = collate(
                encoded, chosen, num_repeats=self.num_repeats, pad_id=self.tokenizer.pad_id, pairs_of=pairs_of
            )
            return batch if states is None else replace(batch, states=states[torch.from_numpy(chosen)])

        lengths = repeated_lengths(encoded, indices, self.num_repeats)
        parts = cut_microbatches(lengths, self.predicted_tokens if is_predicted else self.microbatch_tokens)
        return prefetch_to(self.device, (make(indices[part]) for part in parts))

    def autocast(self) -> torch.autocast:
        """Return the context in which the model runs."""
        return autocast(self.device, self.precision)

    def predict(
        self,
        encoded: EncodedRows,
        progress: Progress,
        label: str,
        see: Callable[[TaskBatch, Tensor], None] | None = None,
        states: Tensor | None = None,
    ) -> list[FloatArray]:
        """Run the model on every example without dropout.

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
        with progress.bar(label, len(every)) as bar, evaluating(self.model):
            for batch in batches:
                with self.autocast():
                    outputs = task_outputs(self.model, batch)
                if see is not None:
                    see(batch, outputs)
                in_units = self.model.in_units(outputs).cpu().numpy()
                for index, row in zip(batch.sample_index.tolist(), in_units, strict=True):
                    predicted[index] = row if row.ndim == 1 else row[: len(encoded.token_ids[index])]
                bar.update(len(predicted))
        return [predicted[index] for index in every.tolist()]

    def encode(self, encoded: EncodedRows, progress: Progress, label: str) -> Float[Tensor, "N D"]:
        """Return the states of all examples, as the head reads them, without dropout, on the host."""
        states = torch.zeros(len(encoded), self.model.state_width)
        num_done = 0
        with progress.bar(label, len(encoded)) as bar, evaluating(self.model), self.autocast():
            for batch in self.batches(encoded, np.arange(len(encoded)), is_predicted=True):
                states[batch.sample_index.cpu()] = row_states(self.model, batch).cpu()
                num_done += len(batch.sample_index)
                bar.update(num_done)
        return states
