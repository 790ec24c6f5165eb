"""What evaluation knows of runs: their kind, results and predictions. Imports no torch.

Axes: K seeds, N rows, C outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exlm_cli.config.finetune import NO_GRID
from exlm_cli.errors import CheckpointError
from exlm_cli.finetune.results import cell_folder, how_to_redo, read_predictions, read_results
from exlm_cli.tasks.base import FloatArray, Split


@dataclass(frozen=True)
class FinetunedRun:
    """A finished fine-tuning run.

    Attributes:
        name: What it is called in tables.
        folder: Its directory.
        results: Content of `results.json`.
    """

    name: str
    folder: Path
    results: Mapping[str, Any]

    @property
    def scored_split(self) -> Split:
        """The split whose scores are reported: `test`, or `valid` where no test labels are public."""
        return "test" if "test" in self.results["metrics"] else "valid"

    def summary(self, metric: str) -> Mapping[str, Any] | None:
        """Return the summary over seeds of a metric of that split; None where it has none."""
        found: Mapping[str, Any] | None = self.results["metrics"][self.scored_split].get(metric)
        return found


@dataclass(frozen=True)
class PretrainedScore:
    """A pre-trained checkpoint and its figures on validation data (`train.evaluation.summarise`).

    Attributes:
        name: What it is called in tables.
        checkpoint: Where it is.
        objective: `exlm` or `mlm`.
        step: Of its training.
        parameters: All of them.
        tokens: Input tokens it was trained on.
        data: What it was scored on, in words.
        metrics: Figures by name.
    """

    name: str
    checkpoint: str
    objective: str
    step: int
    parameters: int
    tokens: int
    data: str
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class PredictionEntropy:
    """Figures of one checkpoint under one masking of the validation data.

    Attributes:
        objective: `mlm` or `exlm`.
        mask_ratio: p of the masking.
        num_repeats: k of Repeated MLM; 1 otherwise.
        num_states_per_mask: k of ExLM; 1 otherwise.
        entropy_bits: Mean entropy of the emitted distributions. For (Repeated) MLM that is App. E: only tokens whose
            copies are all masked, mean over copies, then over tokens; NaN where there is none. For ExLM it is the mean
            over expanded states.
        entropy_posterior_bits: For ExLM with a DAG, every state weighted by the posterior that it emits a target, mean
            over targets; None otherwise.
        metrics: All figures of the validation, see `train.evaluation.summarise`.
    """

    objective: str
    mask_ratio: float
    num_repeats: int
    num_states_per_mask: int
    entropy_bits: float
    entropy_posterior_bits: float | None
    metrics: dict[str, float]


@dataclass(frozen=True)
class SeedPredictions:
    """What the seeds of a run predicted for the rows of one split, and what is true.

    Attributes:
        split: Which.
        rows: N rows of the input.
        probabilities: (K, N, C) of labels or classes; values for regression.
        targets: (N, C), NaN where missing; (N, 1) class index for `classes`.
    """

    split: Split
    rows: tuple[int, ...]
    probabilities: FloatArray
    targets: FloatArray


def load_finetuned_run(path: Path, name: str) -> FinetunedRun:
    """Read the results of a fine-tuning run.

    Raises:
        CheckpointError: It is not finished.
    """
    return FinetunedRun(name, path, read_results(path).as_json())


def load_seed_predictions(run: FinetunedRun) -> SeedPredictions | None:
    """Read what every seed of the best grid point predicted for the scored split.

    Returns:
        None where the task has no such files: answers of SQuAD, or a run from before targets were kept.

    Raises:
        CheckpointError: A file is missing or altered.
    """
    split = run.scored_split
    truth = run.folder / f"targets-{split}.csv"
    if not truth.is_file():
        return None
    rows, _, targets = read_predictions(truth, "fine-tune again")
    by_seed = []
    for seed in run.results["seeds"]:
        cell = cell_folder(run.folder, (run.results["grid_best"] or {"label": NO_GRID})["label"], seed)
        path = cell / f"predictions-{split}.csv"
        found_rows, _, values = read_predictions(path, how_to_redo(cell))
        if found_rows != rows:
            raise CheckpointError(f"{path}: its rows are not those of {truth}", how_to_redo(cell))
        by_seed.append(values)
    return SeedPredictions(split, tuple(rows), np.stack(by_seed), targets)
