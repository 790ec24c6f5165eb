"""What the cells of a grid leave behind, and grids read back from it, finished or not. No torch here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from exlm_cli.config.cells import CellPlan, CellsRecipe
from exlm_cli.config.load import load_recipe, recipe_kind
from exlm_cli.config.repeat_mlm import RepeatMlmRecipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.errors import CheckpointError
from exlm_cli.finetune.result_shapes import WrittenGridCell, WrittenModel, check_written
from exlm_cli.run_dir import RUN_FILE, read_run_json

RESULT_FILE = "result.json"
"""Of a cell that is done."""


@dataclass(frozen=True)
class GridRun:
    """A grid of pre-training runs as it stands.

    Attributes:
        folder: Its run directory.
        recipe: The grid.
        cells: `result.json` of the cells and seeds that are done, in the order of the recipe.
        num_cells: With those that are not.
    """

    folder: Path
    recipe: CellsRecipe
    cells: list[dict[str, Any]]
    num_cells: int


def cell_folder(run: Path, plan: CellPlan) -> Path:
    """Return where a cell of a run directory works."""
    return run / "cells" / plan.folder


def is_grid_run(path: Path) -> bool:
    """Say whether a path is the run directory of a grid."""
    if not (path / RUN_FILE).is_file() or not (path / "recipe.yaml").is_file():
        return False
    return "num_cells" in read_run_json(path)


def load_grid_run(path: Path) -> GridRun:
    """Read what is done of a grid.

    Raises:
        CheckpointError: Nothing is done yet, or a result is damaged.
        ConfigError: Its recipe has keys that this version does not know.
    """
    recipe_file = str(path / "recipe.yaml")
    kind = recipe_kind(recipe_file)
    if not issubclass(kind, CellsRecipe):  # keys of another version hide what it is
        kind = RepeatMlmRecipe if read_run_json(path).get("command") == RepeatMlmRecipe.command else SweepRecipe
    recipe = load_recipe(recipe_file, kind=kind)
    plans = recipe.plan()
    cells = finished_cells(path, plans)
    if not cells:
        raise CheckpointError(
            f"{path}: none of its {len(plans)} cells is done", f"continue with `{recipe.resume_command(path)}`"
        )
    return GridRun(path, recipe, cells, len(plans))


def finished_cells(run: Path, plans: Sequence[CellPlan]) -> list[dict[str, Any]]:
    """Return `result.json` of the cells that are done.

    Raises:
        CheckpointError: A result is damaged.
    """
    found = (read_cell_file(cell_folder(run, plan) / RESULT_FILE, WrittenGridCell) for plan in plans)
    return [content for content in found if content is not None]


def scored_tasks(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the scores of a cell by task, without tasks on which fine-tuning diverged."""
    return {task: scored for task, scored in result.get("finetune", {}).items() if "diverged" not in scored}


def task_score(scored: Mapping[str, Any]) -> float | None:
    """Return the mean or median (`finetune.aggregate`) over the seeds of a task's fine-tuning (App. B.2, section 5.2).

    None where no seed has a value.
    """
    values = [value for value in scored["values"] if value is not None]
    if not values:
        return None
    # results of before the recipe's choice counted here were means
    return median(values) if scored.get("aggregate") == "median" else fmean(values)


def diverged_tasks(result: Mapping[str, Any]) -> list[str]:
    """Return the tasks on which fine-tuning of a cell diverged."""
    return [task for task, scored in result.get("finetune", {}).items() if "diverged" in scored]


def read_cell_file(path: Path, shape: type[WrittenModel]) -> dict[str, Any] | None:
    """Return the content of a file of a cell; None where there is none yet.

    Raises:
        CheckpointError: It is no JSON, or not what it must hold.
    """
    hint = "remove the file; what it held is measured again"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}", hint) from error
    return check_written(path, content, shape, hint)
