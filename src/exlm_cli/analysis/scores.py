"""What evaluation knows of runs: their kind, results and predictions. Imports no torch.

Axes: K seeds, N rows, C outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from exlm_cli.errors import CheckpointError
from exlm_cli.run_dir import RUN_FILE, read_run_json
from exlm_cli.tasks.downstream import FloatArray, Split
from exlm_cli.tasks.results import best_cell_folder, read_predictions, read_results

RunKind = Literal["pretrain", "finetune"]


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


def run_directory(path: Path) -> Path:
    """Return the run directory of a run or of one of its `checkpoints/step-N`."""
    is_step = path.parent.name == "checkpoints" and path.name.startswith("step-")
    return path.parent.parent if is_step else path


def run_kind(path: Path) -> RunKind:
    """Return which command made a run.

    Raises:
        CheckpointError: It is no run directory, or one of another command.
    """
    run = run_directory(path)
    if not (run / RUN_FILE).is_file():
        what = "no such run directory" if not run.exists() else f"not a run directory: it has no {RUN_FILE}"
        raise CheckpointError(f"{path}: {what}", "give what `exlm pretrain` or `exlm finetune` named")
    match read_run_json(run).get("command"):
        case "pretrain":
            return "pretrain"
        case "finetune":
            return "finetune"
        case other:
            raise CheckpointError(
                f"{path}: a run of `exlm {other}`; runs of `exlm pretrain` and `exlm finetune` are scored",
                "the cells of `exlm repeat-mlm` are such runs, one by one",
            )


def load_finetuned_runs(paths: list[Path]) -> list[FinetunedRun]:
    """Read the results of fine-tuning runs, named by their directories and apart from each other.

    Raises:
        CheckpointError: One is not finished.
    """
    names = tell_apart([path.resolve() for path in paths])
    return [FinetunedRun(name, path, read_results(path)) for name, path in zip(names, paths, strict=True)]


def tell_apart(paths: list[Path]) -> list[str]:
    """Return the last part of each path, more parts where two are alike."""
    names = []
    for path in paths:
        alike = [other for other in paths if other != path]
        num_parts = 1
        while num_parts < len(path.parts) and any(path.parts[-num_parts:] == o.parts[-num_parts:] for o in alike):
            num_parts += 1
        names.append("/".join(path.parts[-num_parts:]))
    return names


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
    rows, _, targets = read_predictions(truth)
    by_seed = []
    for seed in run.results["seeds"]:
        path = best_cell_folder(run.folder, run.results, seed) / f"predictions-{split}.csv"
        found_rows, _, values = read_predictions(path)
        if found_rows != rows:
            raise CheckpointError(f"{path}: its rows are not those of {truth}", "fine-tune again")
        by_seed.append(values)
    return SeedPredictions(split, tuple(rows), np.stack(by_seed), targets)
