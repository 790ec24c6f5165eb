"""Result files of a sweep as typed values, and sweeps read back from their run directories, finished or not. No torch.

A run directory of a sweep holds `recipe.yaml`, `run.json`, `results.json`, `scores.csv`, `report/` and a folder for
each cell, `cells/<label>/seed-<n>/`, with `pretrain/`, `result.json`, `scores.csv` and `finetune/<task>/`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from exlm_cli.config.load import load_recipe
from exlm_cli.config.sections import OneOrRange
from exlm_cli.config.sweep import SweepCell, SweepRecipe, VariantDescription
from exlm_cli.errors import CheckpointError
from exlm_cli.files import JsonModel, absent_if_none, read_json
from exlm_cli.finetune.results import read_results
from exlm_cli.finetune.scores import COLUMNS, SCORES_FILE, FinetunedRun, read_score_table, score_table
from exlm_cli.run_dir import RUN_FILE, read_run_json, resume_command

if TYPE_CHECKING:
    from pandas import DataFrame

RESULT_FILE = "result.json"
"""In the folder of a cell whose pre-training is done and measured."""


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


class PredictionEntropy(JsonModel):
    """Entropy of one checkpoint's predictions under one masking of the validation data.

    Attributes:
        objective: `mlm` or `exlm`.
        mask_ratio: p of the masking, or the range it is from.
        num_repeats: k of Repeated MLM; 1 otherwise.
        num_states_per_mask: k of ExLM; 1 otherwise.
        metrics: Of the validation (`train.evaluation.summarise`); None: not defined. `entropy_bits` is the mean entropy
            of the emitted distributions. For (Repeated) MLM that is App. E: only tokens whose copies are all masked,
            mean over copies, then over tokens. For ExLM it is the mean over expanded states. With a DAG
            `entropy_posterior_bits` weights every state by the posterior that it emits a target, mean over targets.
    """

    objective: str
    mask_ratio: OneOrRange
    num_repeats: int
    num_states_per_mask: int
    metrics: dict[str, float | None]


def masking_of(mask_ratio: float | tuple[float, float]) -> str:
    """Return what `scores.csv` of a cell calls the validation at a mask ratio: `p=0.387`, of a range `p=0.0-0.6`."""
    return f"p={'-'.join(map(str, mask_ratio if isinstance(mask_ratio, tuple) else (mask_ratio,)))}"


class TunedTask(JsonModel):
    """A task that a cell was fine-tuned on, in a run of its own.

    Attributes:
        identity: Of the fine-tuning recipe.
        diverged: Why training stopped early; absent where it finished.
    """

    identity: str
    diverged: str | None = absent_if_none()


class SweepCellResult(VariantDescription):
    """`result.json` of a cell, a variant with one seed: what is done. Its scores are in `scores.csv`.

    Attributes:
        label, seed: As in `config.sweep.SweepCell`.
        pretrain_identity: Identity of the recipe it was trained with.
        corruption: None where masks are not drawn token by token.
        diverged: Why training stopped early; absent where it finished.
        measure_sequences, mask_ratios: What was measured after pre-training, its own mask ratio first.
        steps, elapsed_s, parameters: Absent where training diverged.
        finetune: By task.
    """

    label: str
    seed: int
    pretrain_identity: str
    corruption: Corruption | None
    diverged: str | None = absent_if_none()
    measure_sequences: int | None = None
    mask_ratios: tuple[OneOrRange, ...] = ()
    steps: int | None = absent_if_none()
    elapsed_s: float | None = absent_if_none()
    parameters: int | None = absent_if_none()
    finetune: dict[str, TunedTask] = Field(default={})

    @property
    def diverged_tasks(self) -> list[str]:
        """Tasks on which fine-tuning diverged."""
        return [task for task, tuned in self.finetune.items() if tuned.diverged is not None]


@dataclass(frozen=True)
class MeasuredCell:
    """A cell whose pre-training is done: its folder and its result."""

    folder: Path
    result: SweepCellResult

    @cached_property
    def tuned(self) -> dict[str, FinetunedRun]:
        """Finished fine-tuning runs by task."""
        folders = {
            task: task_folder(self.folder, task) for task, tuned in self.result.finetune.items() if not tuned.diverged
        }
        return {task: FinetunedRun(task, folder, read_results(folder)) for task, folder in folders.items()}

    @cached_property
    def pretrain_scores(self) -> "DataFrame":
        """Rows of `scores.csv`, of the pre-trained model; none where training diverged.

        Raises:
            CheckpointError: The file is missing or damaged.
        """
        hint = f"delete {RESULT_FILE} beside it; the cell is measured again, its training is kept"
        is_measured = self.result.diverged is None
        return read_score_table(self.folder / SCORES_FILE, hint) if is_measured else score_table([])

    @property
    def scores(self) -> "DataFrame":
        """Every score: rows of the pre-trained model and of each task, under `task` before them."""
        import pandas as pd

        tables = {"": self.pretrain_scores, **{task: run.scores.table for task, run in self.tuned.items()}}
        named = (table.assign(task=task)[["task", *COLUMNS]] for task, table in tables.items())
        return pd.concat(named, ignore_index=True)

    @cached_property
    def values(self) -> "DataFrame":
        """A value for each metric (`loss`, `glue/rte accuracy`) and masking: columns `metric`, `masking`, `value`.

        The score of a task is the mean or median of the seeds of fine-tuning, as its recipe says (App. B.2, section
        5.2), under the cell's own masking.
        """
        import pandas as pd

        own = self.pretrain_scores[["metric", "grid_point", "value"]].set_axis(["metric", "masking", "value"], axis=1)
        rows = [
            (f"{task} {name}", masking_of(self.result.mask_ratio), run.seeds(name).center(run.results.aggregate))
            for task, run in self.tuned.items()
            for name in run.scores.names(run.results.scored_split)
        ]
        return pd.concat([own, pd.DataFrame(rows, columns=[*own.columns])], ignore_index=True) if rows else own

    @property
    def task_metrics(self) -> list[str]:
        """The metric that chose the best epoch of each task, like `glue/rte accuracy`."""
        return [f"{task} {run.results.selection_metric}" for task, run in self.tuned.items()]

    def value(self, metric: str) -> float:
        """Return a metric under the cell's own masking; NaN where it has none."""
        rows = self.values[(self.values.metric == metric) & (self.values.masking == masking_of(self.result.mask_ratio))]
        return float(rows.value.iloc[0]) if len(rows) else math.nan


class SweepSummary(JsonModel):
    """`results.json` of a sweep, for scripts: nothing here reads it."""

    kind: str
    recipe: str
    paper: str
    seeds: tuple[int, ...]
    tasks: tuple[str, ...]
    cells: tuple[SweepCellResult, ...]


def sweep_scores(cells: Sequence[MeasuredCell]) -> "DataFrame":
    """Return every score of a sweep, for `scores.csv`: variant, seed of pre-training and task before each row."""
    import pandas as pd

    tables = [cell.scores.assign(variant=cell.result.label, pretrain_seed=cell.result.seed) for cell in cells]
    return pd.concat(tables, ignore_index=True)[["variant", "pretrain_seed", "task", *COLUMNS]]


@dataclass(frozen=True)
class SweepRun:
    """A sweep as far as it is done.

    Attributes:
        cells: Those that are pre-trained, in the order of the recipe, also if a task is still to be done.
    """

    folder: Path
    recipe: SweepRecipe
    cells: list[MeasuredCell]
    num_cells: int

    @property
    def num_done(self) -> int:
        """Cells that diverged, or were fine-tuned on each task of the recipe."""
        tasks, results = set(self.recipe.tasks), [cell.result for cell in self.cells]
        return sum(result.diverged is not None or tasks <= result.finetune.keys() for result in results)

    @property
    def num_diverged(self) -> int:
        """Cells whose training, or fine-tuning on a task, diverged."""
        return sum(cell.result.diverged is not None or bool(cell.result.diverged_tasks) for cell in self.cells)


def cell_folder(run: Path, cell: SweepCell) -> Path:
    """Return where a cell of a run directory works."""
    return run / "cells" / cell.folder


def task_folder(cell: Path, task: str) -> Path:
    """Return the fine-tuning run of a cell on a task."""
    return cell / "finetune" / task.replace("/", "-")


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
    planned = recipe.plan()
    cells = measured_cells(path, planned)
    if not cells:
        raise CheckpointError(
            f"{path}: none of its {len(planned)} cells is done",
            f"continue with `{resume_command(recipe.run_by, path)}`",
        )
    return SweepRun(path, recipe, cells, len(planned))


def measured_cells(run: Path, cells: Sequence[SweepCell]) -> list[MeasuredCell]:
    """Return the cells that have a result, also those that lack a task.

    Raises:
        CheckpointError: A result is damaged.
    """
    folders = [cell_folder(run, cell) for cell in cells]
    found = ((folder, read_cell_result(folder)) for folder in folders)
    return [MeasuredCell(folder, result) for folder, result in found if result is not None]


def read_cell_result(folder: Path) -> SweepCellResult | None:
    """Return the result of a cell; None where there is none yet.

    Raises:
        CheckpointError: It is damaged.
    """
    path, hint = folder / RESULT_FILE, "delete the file; the cell is measured again, its training is kept"
    return read_json(path, SweepCellResult, hint=hint) if path.is_file() else None
