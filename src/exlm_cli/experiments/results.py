"""A sweep read back from its run directory, finished or not. No torch.

A run directory of a sweep holds `recipe.yaml`, `run.json`, `scores.csv`, `report/` and a folder for each cell,
`cells/<label>/seed-<n>/`, with the runs `pretrain/` and `finetune/<task>/`, and `scores.csv` of the pre-trained model.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.config.sections import OneOrRange
from exlm_cli.config.sweep import SweepCell, SweepRecipe
from exlm_cli.errors import CheckpointError
from exlm_cli.files import JsonModel, read_json
from exlm_cli.finetune.results import RESULTS_FILE, FinetunedRun, read_results
from exlm_cli.finetune.scores import COLUMNS, SCORES_FILE, read_score_table
from exlm_cli.run_dir import DIVERGED_FILE, RUN_FILE, RunInfo, read_run_json, resume_command

if TYPE_CHECKING:
    from pandas import DataFrame


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


@dataclass(frozen=True)
class CellRuns:
    """A cell of a sweep and its folder; what it has is read from the folder when it is asked for, and then kept."""

    plan: SweepCell
    folder: Path

    @property
    def pretrain(self) -> Path:
        """Run directory of its pre-training."""
        return self.folder / "pretrain"

    def task_folder(self, task: str) -> Path:
        """Return the run directory of its fine-tuning on a task."""
        return self.folder / "finetune" / task.replace("/", "-")

    @cached_property
    def diverged(self) -> str | None:
        """Where its pre-training diverged; None if it did not."""
        return find_divergence(self.pretrain)

    @cached_property
    def diverged_tasks(self) -> dict[str, str]:
        """Where fine-tuning diverged, by task."""
        tasks = {recipe.task.name: self.task_folder(recipe.task.name) for recipe in self.plan.finetune}
        found = {task: find_divergence(run) for task, run in tasks.items() if not (run / RESULTS_FILE).is_file()}
        return {task: where for task, where in found.items() if where is not None}

    @property
    def is_measured(self) -> bool:
        """Whether it is pre-trained and scored at each of its mask ratios, or diverged."""
        if not ((self.folder / SCORES_FILE).is_file() and (self.pretrain / "recipe.yaml").is_file()):
            return False
        wanted = set(map(masking_of, self.plan.mask_ratios))
        return self.diverged is not None or wanted <= set(self.pretrain_scores.grid_point)

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is left to do."""
        return self.is_measured and (self.diverged is not None or not self.waiting_tasks)

    @property
    def waiting_tasks(self) -> list[FinetuneRecipe]:
        """Tasks on which it is still to be fine-tuned."""
        done = {*self.tuned, *self.diverged_tasks}
        return [recipe for recipe in self.plan.finetune if recipe.task.name not in done]

    @cached_property
    def run(self) -> RunInfo:
        """What `run.json` of its pre-training says: steps, parameters, time."""
        return read_run_json(self.pretrain)

    @cached_property
    def tuned(self) -> dict[str, FinetunedRun]:
        """Finished fine-tuning runs by task."""
        runs = {recipe.task.name: self.task_folder(recipe.task.name) for recipe in self.plan.finetune}
        return {
            task: FinetunedRun(task, run, read_results(run))
            for task, run in runs.items()
            if (run / RESULTS_FILE).is_file()
        }

    @cached_property
    def pretrain_scores(self) -> "DataFrame":
        """Rows of its `scores.csv`: scores of the pre-trained model on `valid`, counts of corrupted tokens on `train`.

        Raises:
            CheckpointError: The file is missing or damaged.
        """
        hint = "delete the file and continue the sweep; the cell is measured again, its training is kept"
        return read_score_table(self.folder / SCORES_FILE, hint)

    @property
    def scores(self) -> "DataFrame":
        """Every score: rows of the pre-trained model and of each task, with variant, seed and task before them."""
        import pandas as pd

        tables = {"": self.pretrain_scores, **{task: run.scores.table for task, run in self.tuned.items()}}
        table = pd.concat([of_task.assign(task=task) for task, of_task in tables.items()], ignore_index=True)
        table = table.assign(variant=self.plan.label, pretrain_seed=self.plan.seed)
        return table[["variant", "pretrain_seed", "task", *COLUMNS]]

    @cached_property
    def values(self) -> "DataFrame":
        """A value for each metric (`loss`, `glue/rte accuracy`) and masking: columns `metric`, `masking`, `value`.

        The score of a task is the mean or median of the seeds of fine-tuning, as its recipe says (App. B.2, section
        5.2), under the cell's own masking.
        """
        import pandas as pd

        own = self.pretrain_scores[["metric", "grid_point", "value"]].set_axis(["metric", "masking", "value"], axis=1)
        masking = masking_of(self.plan.mask_ratios[0])
        rows = [
            (f"{task} {name}", masking, run.seeds(name).center(run.results.aggregate))
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
        is_own = self.values.masking == masking_of(self.plan.mask_ratios[0])
        rows = self.values[is_own & (self.values.metric == metric)]
        return float(rows.value.iloc[0]) if len(rows) else math.nan


class Divergence(JsonModel):
    """`diverged.json` of a training: the step, counted from 0, that it could not take."""

    step: int
    epoch: int
    value: str
    sample_index: tuple[int, ...]


def find_divergence(run: Path) -> str | None:
    """Return where a run diverged, like `step 3`; None if it did not.

    Raises:
        CheckpointError: The file that says so is damaged.
    """
    path = next(run.rglob(DIVERGED_FILE), None)
    return None if path is None else f"step {read_json(path, Divergence).step + 1}"


@dataclass(frozen=True)
class SweepRun:
    """A sweep as far as it is done.

    Attributes:
        cells: Those that are pre-trained and measured, in the order of the recipe, also if a task is still to be done.
    """

    folder: Path
    recipe: SweepRecipe
    cells: list[CellRuns]
    num_cells: int

    @property
    def num_done(self) -> int:
        """Cells that diverged, or were fine-tuned on each task of the recipe."""
        return sum(cell.is_done for cell in self.cells)

    @property
    def num_diverged(self) -> int:
        """Cells whose training, or fine-tuning on a task, diverged."""
        return sum(cell.diverged is not None or bool(cell.diverged_tasks) for cell in self.cells)


def cells_of(run: Path, recipe: SweepRecipe) -> list[CellRuns]:
    """Return the cells of a sweep in its run directory."""
    return [CellRuns(plan, run / "cells" / plan.name) for plan in recipe.plan()]


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
        CheckpointError: No cell is done yet, or a file is damaged.
        ConfigError: Its recipe has keys that this version does not know.
    """
    recipe = load_recipe(path / "recipe.yaml", kind=SweepRecipe)
    cells = cells_of(path, recipe)
    measured = [cell for cell in cells if cell.is_measured]
    if not measured:
        command = resume_command(recipe.run_by, path)
        raise CheckpointError(f"{path}: none of its {len(cells)} cells is done", f"continue with `{command}`")
    return SweepRun(path, recipe, measured, len(cells))
