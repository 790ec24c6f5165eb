"""A downstream task for the training loop: its data encoded once, and the task of one seed and grid point.

Axes: N examples of a split, C outputs, L tokens.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.data.masking import IntArray
from exlm_cli.data.sampler import EpochPlan, plan_epoch
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.finetune.batch import TaskBatch, repeated_lengths
from exlm_cli.finetune.loss import example_losses
from exlm_cli.finetune.runner import TaskRunner
from exlm_cli.model.heads import TaskModel
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import DownstreamTask, EncodedSplit, FloatArray, Split
from exlm_cli.train.pretrain import autocast_dtype


@dataclass(frozen=True)
class TaskData:
    """A task's splits as the encoder sees them; shared by all seeds and grid points.

    Attributes:
        task: Whose data.
        splits: Encoded.
        tokenizer: Of the checkpoint.
        num_repeats: Copies of each token, as in pre-training.
        fingerprint: Of tokens, targets, class weights and what else the task's scores depend on.
    """

    task: DownstreamTask
    splits: dict[Split, EncodedSplit]
    tokenizer: Tokenizer
    num_repeats: int
    fingerprint: str

    @property
    def num_outputs(self) -> int | None:
        """C; None for spans."""
        return None if self.task.loss == "span" else len(self.task.output_names)

    @property
    def unknown_share(self) -> float:
        """Share of the training tokens between [CLS] and the last [SEP] that are [UNK]."""
        token_ids = np.concatenate([ids[1:-1] for ids in self.splits["train"].token_ids])
        return float((token_ids == self.tokenizer.unk_id).mean()) if len(token_ids) else 0.0


def encode_task(task: DownstreamTask, tokenizer: Tokenizer, sequence_length: int, num_repeats: int) -> TaskData:
    """Tokenise every split of a task."""
    splits = {split: task.encode(split, tokenizer, sequence_length) for split in task.splits}
    return TaskData(task, splits, tokenizer, num_repeats, _fingerprint(task, splits))


class FinetuneTask:
    """One seed of one grid point, for the training loop.

    Args:
        recipe: Of the grid point.
        seed: Of data order and, through the loop, of dropout.
        data: The task's.
        model: On `device`; for regression its outputs are set to the scale of the training targets.
        device: Where it runs.
        initial: What identifies the weights it begins with.
        progress: Shown how far a validation is.
    """

    def __init__(
        self,
        recipe: FinetuneRecipe,
        seed: int,
        data: TaskData,
        model: TaskModel,
        device: torch.device,
        initial: str,
        progress: Progress,
    ) -> None:
        self.recipe, self.seed, self.data, self.model, self.device = recipe, seed, data, model, device
        self._progress = progress
        self._runner = TaskRunner(
            model,
            num_repeats=data.num_repeats,
            pad_id=data.tokenizer.pad_id,
            microbatch_tokens=recipe.train.microbatch_tokens,
            device=device,
            autocast_dtype=autocast_dtype(recipe.train, device),
        )
        self.identity = {
            "data fingerprint": data.fingerprint,
            "checkpoint": initial,
            "recipe": finetune_identity(recipe, seed),
        }
        weights = data.task.class_weights
        self._weights = None if weights is None else torch.from_numpy(weights).float().to(device)
        self._train_lengths = repeated_lengths(
            data.splits["train"], np.arange(len(data.splits["train"])), data.num_repeats
        )
        if data.task.loss == "regression":
            mean_C, std_C = target_scale(data.splits["train"].targets)
            model.output_mean.copy_(torch.from_numpy(mean_C))
            model.output_std.copy_(torch.from_numpy(std_C))

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

    def microbatches(self, indices: IntArray, epoch: int) -> Iterator[TaskBatch]:
        """Pad one step's examples, a microbatch ahead of the model, the first from now on."""
        del epoch  # no masks: an example is the same in every epoch
        return self._runner.batches(self.data.splits["train"], indices)

    def losses(self, batch: TaskBatch) -> Tensor:
        """Loss of each example; `inf` for one without labels."""
        return self._example_losses(self._runner.run(batch), batch)

    def count_tokens(self, batch: TaskBatch) -> int:
        """Input tokens, repetitions counted."""
        return int(batch.lengths.sum())

    def validate(self) -> dict[str, float]:
        """Return loss and metrics on the validation split."""
        loss, outputs = self.predict("valid")
        return {"loss": loss, **self.data.task.score("valid", outputs)}

    def predict(self, split: Split) -> tuple[float, list[FloatArray]]:
        """Return the mean loss over a split's labelled examples, and the outputs of all, in order.

        Outputs are (C,) logits, values in the task's units for `regression`, (L, 2) logits for `span`.
        """
        encoded = self.data.splits[split]
        losses = np.zeros(len(encoded))
        outputs: list[FloatArray] = [np.zeros(0)] * len(encoded)
        for batch, raw in self._runner.outputs(encoded, self._progress, f"scoring {split}"):
            losses[batch.sample_index.cpu().numpy()] = self._example_losses(raw, batch).double().cpu().numpy()
            for index, row in self._runner.rows(encoded, batch, raw):
                outputs[index] = row
        is_counted = np.isfinite(losses)
        return float(losses[is_counted].mean()) if is_counted.any() else math.nan, outputs

    def _example_losses(self, outputs: Tensor, batch: TaskBatch) -> Tensor:
        if self.data.task.loss == "regression":
            standardised = (batch.targets - self.model.output_mean) / self.model.output_std
            batch = TaskBatch(batch.token_ids, batch.lengths, standardised, batch.answerable, batch.sample_index)
        return example_losses(self.data.task.loss, outputs, batch, self._weights)


def target_scale(targets_NC: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return mean and standard deviation of each column of training targets, (C,) each; 0 and 1 where none is present,
    and a deviation of 1 where all are equal. Squares neither overflow nor vanish.
    """
    is_present = ~np.isnan(targets_NC)
    num_C = np.maximum(is_present.sum(0), 1)
    # by comparison: the mean of three times 0.1 is not 0.1, and a deviation of 1e-17 would be divided by
    differs_C = np.where(is_present, targets_NC, -np.inf).max(0) > np.where(is_present, targets_NC, np.inf).min(0)
    mean_C = np.where(is_present, targets_NC, 0.0).sum(0) / num_C
    off_NC = np.where(is_present, targets_NC - mean_C, 0.0)
    most_C = np.where(differs_C, np.abs(off_NC).max(0), 1.0)
    std_C = most_C * np.sqrt(((off_NC / most_C) ** 2).sum(0) / num_C)
    return mean_C, np.where(differs_C & (std_C > 0), std_C, 1.0)


def decisive_values(recipe: FinetuneRecipe) -> dict[str, Any]:
    """Return what of a recipe decides the weights besides its data and seed, as JSON; how often to save does not."""
    content = recipe.model_dump(mode="json", include={"init", "model", "train", "optim"})
    for key in ("checkpoint_every_steps", "keep_last", "log_every_steps"):
        del content["train"][key]
    return content


def finetune_identity(recipe: FinetuneRecipe, seed: int) -> str:
    """Return a hash of everything in a recipe that decides the weights besides its data."""
    content = decisive_values(recipe) | {"optim": recipe.optim.as_identity()}
    return hashlib.sha256(json.dumps([content, seed], sort_keys=True).encode()).hexdigest()


def _fingerprint(task: DownstreamTask, splits: dict[Split, EncodedSplit]) -> str:
    digest = hashlib.sha256(repr((task.name, task.loss, task.output_names)).encode())
    digest.update(b"" if task.class_weights is None else task.class_weights.tobytes())
    digest.update(task.score_fingerprint.encode())
    for split, encoded in splits.items():
        digest.update(f"{split} {len(encoded)}".encode())
        digest.update(np.array([len(ids) for ids in encoded.token_ids], dtype=np.int64).tobytes())
        for ids in encoded.token_ids:
            digest.update(np.ascontiguousarray(ids, dtype=np.int64).tobytes())
        digest.update(np.ascontiguousarray(encoded.targets, dtype=np.float64).tobytes())
        for mask in encoded.answerable or ():
            digest.update(mask.tobytes())
    return digest.hexdigest()
