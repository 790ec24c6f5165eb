"""What applying a fine-tuned run to a file gives, and the outputs of its seeds.

Axes: K seeds, N examples, C outputs, L tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import ConfigError
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import EncodedSplit, FloatArray, Loss
from exlm_cli.tasks.table_task import to_probabilities


class Predictor(Protocol):
    """The model of one seed."""

    def predict(self, encoded: EncodedSplit, progress: Progress, label: str) -> list[FloatArray]:
        """Return the outputs of every example, in order."""


class FinetunedResults(Protocol):
    """What prediction reads of the results of a fine-tuned run (`finetune.results.RunResults`)."""

    @property
    def task(self) -> str:
        """Name of the task."""

    @property
    def input_kind(self) -> Literal["text", "smiles"]:
        """Whether rows are text or SMILES."""

    @property
    def loss(self) -> Loss:
        """How outputs become a loss."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs."""

    def validation_median(self, metric: str) -> float | None:
        """Return the median of a validation metric over the seeds; None where it is not defined."""


class FinetunedModels(Protocol):
    """What prediction reads of a fine-tuned run (`finetune.model.Finetuned`)."""

    @property
    def recipe(self) -> FinetuneRecipe:
        """Recipe of fine-tuning."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the checkpoint."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence before repetition."""

    @property
    def results(self) -> FinetunedResults:
        """Content of `results.json`."""

    @property
    def runners(self) -> Mapping[int, Predictor]:
        """Models by seed."""


@dataclass(frozen=True)
class Applied:
    """What became of the rows or questions of a file.

    Attributes:
        files: Written.
        num_rows: In the file.
        num_unreadable: Of these, such as the model cannot read.
        metrics: Scores of the seeds' mean where the file has labels; empty where it has none.
        notes: What a report has to say.
    """

    files: tuple[Path, ...]
    num_rows: int
    num_unreadable: int
    metrics: dict[str, float]
    notes: tuple[str, ...]


def refuse_overwriting(data: Path, *written: Path) -> None:
    """Refuse to overwrite the input file.

    Raises:
        ConfigError: One of `written` is `data`.
    """
    for path in written:
        if data.exists() and path.exists() and path.samefile(data):
            raise ConfigError(f"`out={written[0]}` would overwrite the input file {data}", "name another file")


def no_answer_file(answers: Path) -> Path:
    """Return the file beside that of answers with the probabilities that there is none."""
    return answers.with_name(f"{answers.stem}-no-answer.json")


def probabilities_by_seed(finetuned: FinetunedModels, encoded: EncodedSplit, progress: Progress) -> FloatArray:
    """Return (K, N, C) probabilities of labels or classes, or values."""
    loss, num_outputs = finetuned.results.loss, len(finetuned.results.output_names)
    by_seed = np.zeros((len(finetuned.runners), len(encoded), num_outputs))
    with progress.bar("seeds", len(finetuned.runners)) as bar:
        for index, (seed, runner) in enumerate(finetuned.runners.items()):
            if len(encoded):
                outputs = runner.predict(encoded, progress, f"seed {seed}")
                by_seed[index] = to_probabilities(loss, np.stack(outputs))
            bar.update(index + 1)
    return by_seed


def mean_span_logits(finetuned: FinetunedModels, encoded: EncodedSplit, progress: Progress) -> list[FloatArray]:
    """Return the seeds' mean logits of first and last answer token, (L, 2) for each window."""
    sums: list[FloatArray] = [np.zeros((len(ids), 2)) for ids in encoded.token_ids]
    with progress.bar("seeds", len(finetuned.runners)) as bar:
        for index, (seed, runner) in enumerate(finetuned.runners.items()):
            predicted = runner.predict(encoded, progress, f"seed {seed}")
            sums = [total + logits for total, logits in zip(sums, predicted, strict=True)]
            bar.update(index + 1)
    return [total / len(finetuned.runners) for total in sums]


def describe_cut(num_cut: int, sequence_length: int) -> tuple[str, ...]:
    """Return the note on rows that were too long; none where there are none."""
    return (f"cut {num_cut:,} rows to {sequence_length} tokens",) if num_cut else ()
