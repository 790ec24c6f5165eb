"""Encoded examples through a task's model. Axes: N examples, C outputs, L tokens."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from exlm_cli.data.masking import IntArray
from exlm_cli.data.prefetch import prefetch
from exlm_cli.data.sampler import cut_microbatches
from exlm_cli.finetune.batch import TaskBatch, collate, repeated_lengths
from exlm_cli.model.heads import TaskModel
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import EncodedSplit, FloatArray


class TaskRunner:
    """Cuts examples into batches and runs the model on them.

    Args:
        model: On `device`.
        num_repeats: Copies of each token, as in pre-training.
        pad_id: Id of [PAD].
        microbatch_tokens: Positions, padding included, that go through at once.
        device: Where the model is.
        autocast_dtype: bfloat16 or None.
    """

    def __init__(
        self,
        model: TaskModel,
        *,
        num_repeats: int,
        pad_id: int,
        microbatch_tokens: int,
        device: torch.device,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        self.model = model
        self.num_repeats, self.pad_id, self.microbatch_tokens = num_repeats, pad_id, microbatch_tokens
        self.device, self.autocast_dtype = device, autocast_dtype

    def batches(self, encoded: EncodedSplit, indices: IntArray) -> Iterator[TaskBatch]:
        """Return padded batches of examples of like length, one ahead of the model, the first from now on."""

        def make(chosen: IntArray) -> TaskBatch:
            return collate(encoded, chosen, num_repeats=self.num_repeats, pad_id=self.pad_id)

        lengths = repeated_lengths(encoded, indices, self.num_repeats)
        made = prefetch(make, cut_microbatches(indices, lengths, self.microbatch_tokens))
        return (batch.to(self.device) for batch in made)

    def run(self, batch: TaskBatch) -> Tensor:
        """Return the model's outputs, float32; for regression of standardised targets."""
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            outputs: Tensor = self.model(batch.token_ids, batch.lengths)
        return outputs

    def outputs(self, encoded: EncodedSplit, progress: Progress, label: str) -> Iterator[tuple[TaskBatch, Tensor]]:
        """Yield every batch of a split and its outputs, without dropout; the model is left in training mode.

        Args:
            encoded: The split.
            progress: Shown how many examples are done.
            label: Of the bar.
        """
        self.model.eval()
        num_done = 0
        with progress.bar(label, len(encoded)) as bar, torch.no_grad():
            for batch in self.batches(encoded, np.arange(len(encoded))):
                yield batch, self.run(batch)
                num_done += len(batch.sample_index)
                bar.update(num_done)
        self.model.train()

    def rows(self, encoded: EncodedSplit, batch: TaskBatch, outputs: Tensor) -> Iterator[tuple[int, FloatArray]]:
        """Yield index and outputs of each example of a batch: (C,) in the task's units, or (L, 2) for spans."""
        in_units = self.model.in_units(outputs).cpu().numpy()
        for index, row in zip(batch.sample_index.tolist(), in_units, strict=True):
            yield index, row if row.ndim == 1 else row[: len(encoded.token_ids[index])]

    def predict(self, encoded: EncodedSplit, progress: Progress, label: str) -> list[FloatArray]:
        """Return the outputs of every example, in order: (C,) logits or values, or (L, 2) logits for spans."""
        predicted: list[FloatArray] = [np.zeros(0)] * len(encoded)
        for batch, outputs in self.outputs(encoded, progress, label):
            for index, row in self.rows(encoded, batch, outputs):
                predicted[index] = row
        return predicted
