"""Result files of a sweep as typed values, and sweeps read back from their run directories, finished or not. No torch.

A run directory of a sweep holds `recipe.yaml`, `run.json`, `results.json`, `report/` and a folder for each cell,
`cells/<label>/seed-<n>/`, with `pretrain/`, `measured.json`, `finetune/<task>/` and at last `result.json`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_serializer, model_validator

from exlm_cli.config.load import load_recipe
from exlm_cli.config.sweep import SweepCell, SweepRecipe, VariantDescription
from exlm_cli.errors import CheckpointError
from exlm_cli.files import JsonModel, JsonModelT, read_json
from exlm_cli.finetune.results import RunResults
from exlm_cli.run_dir import RUN_FILE, read_run_json, resume_command

RESULT_FILE = "result.json"
"""In the folder of a cell that is done."""
MEASURED_FILE = "measured.json"
"""In the folder of a cell whose pre-training is done and measured: its result without fine-tuning."""


class Corruption(JsonModel):
    """Tokens that lost every copy, counted under a recipe's own masks, beside the law of App. C.

    Attributes:
        num_tokens: N of App. C, tokens that can be masked, before repetition.
        num_corrupted: Those of them with every copy masked.
        expected: p^k.
        expected_with_floor: p^k, and for k = 1 also the effect of "at least one mask a sequence": with probability
            (1 - p)^n a sequence of n tokens draws no mask and gets one. For k > 1 one masked copy corrupts nothing.
        measured: Share of corrupted tokens.
        standard_error: Square root of App. C's variance of the share, p^k (1 - p^k) / N.
    """

    num_tokens: int
    num_corrupted: int
    expected: float
    expected_with_floor: float
    measured: float
    standard_error: float


class EntropyAt(JsonModel):
    """Entropy of one checkpoint's predictions under one masking of the validation data.

    Attributes:
        objective: `mlm` or `exlm`.
        mask_ratio: p of the masking.
        num_repeats: k of Repeated MLM; 1 otherwise.
        num_states_per_mask: k of ExLM; 1 otherwise.
        entropy_bits: Mean entropy of the emitted distributions. For (Repeated) MLM that is App. E: only tokens whose
            copies are all masked, mean over copies, then over tokens; None where there is none. For ExLM it is the mean
            over expanded states.
        entropy_posterior_bits: For ExLM with a DAG, every state weighted by the posterior that it emits a target, mean
            over targets; None otherwise.
    """

    objective: str
    mask_ratio: float
    num_repeats: int
    num_states_per_mask: int
    entropy_bits: float | None
    entropy_posterior_bits: float | None


class PredictionEntropy(EntropyAt):
    """`EntropyAt` with all figures of the validation (`train.evaluation.summarise`); None: not defined."""

    metrics: dict[str, float | None]


class TaskScores(JsonModel):
    """Results of a cell on one task.

    Attributes:
        identity: Of the fine-tuning recipe.
    """

    identity: str
    results: RunResults

    @property
    def metric(self) -> str:
        """The metric that chose the best epoch."""
        return self.results.selection_metric

    @property
    def score(self) -> float | None:
        """Mean or median of the seeds (`finetune.aggregate`; App. B.2, section 5.2); None where no seed has a value."""
        return self.score_by(self.metric)

    def score_by(self, metric: str) -> float | None:
        """Return the mean or median of the seeds by any metric; None also where the task has no such metric."""
        return score_of(self.results, metric)


def score_of(results: RunResults, metric: str) -> float | None:
    """Return the mean or median of a run's seeds by a metric; None where no seed has a value."""
    summary = results.metrics[results.scored_split].get(metric)
    return None if summary is None else summary.center(results.aggregate)


class DivergedTask(JsonModel):
    """A task on which fine-tuning diverged."""

    identity: str
    diverged: str


class SweepCellResult(VariantDescription):
    """`result.json` of a cell: a variant with one seed. The file of a diverged cell lacks the values it never reached.

    Attributes:
        label, seed: As in `config.sweep.SweepCell`.
        pretrain_identity: Identity of the recipe it was trained with.
        corruption: None where masks are not drawn token by token.
        diverged: Why training stopped early; None where it finished.
        metrics, entropy: Measured after pre-training; the first entropy is at its own mask ratio.
    """

    label: str
    seed: int
    pretrain_identity: str
    corruption: Corruption | None
    diverged: str | None = None
    measure_sequences: int | None = None
    steps: int | None = None
    elapsed_s: float | None = None
    parameters: int | None = None
    metrics: dict[str, float | None] = Field(default={})
    entropy: tuple[EntropyAt, ...] = ()
    finetune: dict[str, TaskScores | DivergedTask] = Field(default={})

    @property
    def scored_tasks(self) -> dict[str, TaskScores]:
        """Scores by task, without tasks on which fine-tuning diverged."""
        return {task: scores for task, scores in self.finetune.items() if isinstance(scores, TaskScores)}

    @property
    def diverged_tasks(self) -> list[str]:
        """Tasks on which fine-tuning diverged."""
        return [task for task, scores in self.finetune.items() if isinstance(scores, DivergedTask)]

    @model_validator(mode="after")
    def _check_figures(self) -> Self:
        for key in ("steps", "elapsed_s", "parameters", "metrics", "entropy", "finetune"):
            if self.diverged is None and key not in self.model_fields_set:
                raise ValueError(f"`{key}` is missing")
        return self

    @model_serializer(mode="wrap")
    def _written_keys(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


class SweepSummary(JsonModel):
    """`results.json` of a sweep, for scripts: nothing here reads it."""

    kind: str
    recipe: str
    paper: str
    seeds: tuple[int, ...]
    tasks: tuple[str, ...]
    cells: tuple[SweepCellResult, ...]


@dataclass(frozen=True)
class SweepRun:
    """A sweep as far as it is done.

    Attributes:
        results: Results of its cells in the order of the recipe, also of those that lack a task that was added later.
    """

    folder: Path
    recipe: SweepRecipe
    results: list[SweepCellResult]
    num_cells: int

    @property
    def num_done(self) -> int:
        """Cells that diverged, or have a result for each task of the recipe."""
        tasks = set(self.recipe.tasks)
        return sum(result.diverged is not None or tasks <= result.finetune.keys() for result in self.results)

    @property
    def num_diverged(self) -> int:
        """Cells whose training, or fine-tuning on a task, diverged."""
        return sum(result.diverged is not None or bool(result.diverged_tasks) for result in self.results)


def cell_folder(run: Path, cell: SweepCell) -> Path:
    """Return where a cell of a run directory works."""
    return run / "cells" / cell.folder


def is_sweep_run(path: Path) -> bool:
    """Return whether a path is the run directory of a sweep.

    Raises:
        CheckpointError: Its run.json is damaged.
    """
    if not (path / RUN_FILE).is_file() or not (path / "recipe.yaml").is_file():
        return False
    return read_run_json(path).num_cells is not None


def load_sweep_run(path: Path) -> SweepRun:
    """Read what is done of a sweep.

    Raises:
        CheckpointError: No cell is done yet, or a result is damaged.
        ConfigError: Its recipe has keys that this version does not know.
    """
    recipe = load_recipe(path / "recipe.yaml", kind=SweepRecipe)
    cells = recipe.plan()
    results = finished_results(path, cells)
    if not results:
        raise CheckpointError(
            f"{path}: none of its {len(cells)} cells is done", f"continue with `{resume_command(recipe.run_by, path)}`"
        )
    return SweepRun(path, recipe, results, len(cells))


def finished_results(run: Path, cells: Sequence[SweepCell]) -> list[SweepCellResult]:
    """Return the results of the cells that have one, also of those that lack a task that was added later.

    Raises:
        CheckpointError: A result is damaged.
    """
    found = (read_cell_file(cell_folder(run, cell) / RESULT_FILE, SweepCellResult) for cell in cells)
    return [result for result in found if result is not None]


def read_cell_file(path: Path, model: type[JsonModelT]) -> JsonModelT | None:
    """Return the content of a file of a cell; None where there is none yet.

    Raises:
        CheckpointError: It is damaged.
    """
    hint = "delete the file; the cell is measured again, its training is kept"
    return read_json(path, model, hint=hint) if path.is_file() else None
