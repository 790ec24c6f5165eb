"""What a fine-tuning run directory says of itself, and what `results.json` holds."""

import csv
import io
import time
from pathlib import Path
from typing import Any

from exlm_cli.config.finetune import NO_GRID, FinetuneRecipe, GridPoint
from exlm_cli.config.input_paths import with_absolute_paths
from exlm_cli.config.load import dump_recipe, resumed_recipe
from exlm_cli.config.overrides import describe_changes
from exlm_cli.config.yaml import dump_yaml
from exlm_cli.data.rows.records import SKIPPED_COLUMNS, SKIPPED_FILE
from exlm_cli.errors import CheckpointError
from exlm_cli.files import write_atomically
from exlm_cli.finetune.cell import Cell
from exlm_cli.finetune.initial import Initial
from exlm_cli.finetune.results import TARGETS_COLUMN, cell_folder, summarise_metrics, write_predictions
from exlm_cli.finetune.trainer import TaskData, decisive_values, finetune_identity
from exlm_cli.run_dir import read_run_json, update_run_json
from exlm_cli.tasks.scaffold import split_fingerprint
from exlm_cli.train.checkpoint import write_json

ENCODER_FILE = "encoder.yaml"
"""The recipe of pre-training."""


def describe_run(
    run: Path, recipe: FinetuneRecipe, initial: Initial, data: TaskData, *, use_grid: bool, with_yardstick: bool
) -> None:
    """Write everything that a resumption and a later evaluation need."""
    initial.tokenizer.save(run / "tokenizer.json")
    write_atomically(run / ENCODER_FILE, dump_recipe(initial.recipe).encode())
    task = data.task
    write_json(
        run / "split.json",
        {
            "task": task.name,
            "split": task.split_name,
            "sizes": task.split_sizes,
            "sha256": split_fingerprint(task.split_indices),
            "indices": {split: rows.tolist() for split, rows in task.split_indices.items()},
        },
    )
    update_run_json(
        run,
        {
            "command": "finetune",
            "task": task.name,
            "seeds": list(recipe.seeds),
            "use_grid": use_grid,
            "yardstick": with_yardstick,
            # where it is, whatever folder a resumption is started from
            "checkpoint": str(initial.checkpoint.resolve()),
            "checkpoint_sha256": initial.sha256,
            "data_fingerprint": data.fingerprint,
            "started_unix_s": round(time.time(), 3),
        },
    )
    _write_targets(run, data)
    _list_left_out(run, data)
    # last: a run directory is one that has its recipe
    write_atomically(run / "recipe.yaml", dump_recipe(with_absolute_paths(recipe)).encode())


def _write_targets(run: Path, data: TaskData) -> None:
    """Write the targets beside which each seed's predictions are drawn, but for spans, whose answers are no columns."""
    task = data.task
    for split in task.splits:
        if split != "train" and task.loss != "span":
            names = [TARGETS_COLUMN] if task.loss == "classes" else task.output_names
            rows, targets = task.split_indices[split].tolist(), data.splits[split].targets
            write_predictions(run / f"targets-{split}.csv", rows, names, list(targets))


def _list_left_out(run: Path, data: TaskData) -> None:
    """List the rows that are not used, with the columns of pre-training's list; without any there is none."""
    if not data.task.left_out:
        return
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(SKIPPED_COLUMNS)
    writer.writerows(row.cells for row in data.task.left_out)
    write_atomically(run / SKIPPED_FILE, text.getvalue().encode(errors="backslashreplace"))


def check_resumed(run: Path, recipe: FinetuneRecipe, initial: Initial, data: TaskData) -> None:
    """Check that a run goes on with the data, weights and recipe it began with; seeds may be added or left out.

    Raises:
        CheckpointError: It does not.
    """
    described, before = read_run_json(run), resumed_recipe(run, FinetuneRecipe)
    pairs = {
        f"data of {data.task.name}": (described["data_fingerprint"], data.fingerprint),
        "checkpoint": (described["checkpoint_sha256"], initial.sha256),
        "recipe": (_decisive(before), _decisive(recipe)),
    }
    whole = (decisive_values(r) | r.model_dump(mode="json", include={"aggregate", "grid"}) for r in (before, recipe))
    changes = describe_changes(*whole)
    for name, (then, now) in pairs.items():
        if then != now:
            raise CheckpointError(
                f"{run}: the {name} is not the one this run began with{changes if name == 'recipe' else ''}",
                "an exact resume needs the same inputs and recipe; start a new run for changed ones",
            )


def _decisive(recipe: FinetuneRecipe) -> tuple[object, ...]:
    """Return what of a recipe decides the results besides its data and seeds."""
    return (finetune_identity(recipe, 0), recipe.aggregate, dump_yaml(recipe.model_dump(mode="json")["grid"]))


def collect_results(
    run: Path,
    recipe: FinetuneRecipe,
    points: list[GridPoint],
    best: GridPoint,
    initial: Initial,
    data: TaskData,
    notes: list[str],
) -> dict[str, Any]:
    """Return the content of `results.json`."""
    task = data.task
    by_point = {
        point.label: [Cell(point, seed, cell_folder(run, point.label, seed)).read() for seed in recipe.seeds]
        for point in points
    }
    cells = by_point[best.label]
    every = [cell for of_point in by_point.values() for cell in of_point]
    has_grid = best.label != NO_GRID
    return {
        "task": task.name,
        "kind": "finetune",
        "recipe": recipe.name,
        "init": initial.describe(recipe),
        "parameters": cells[0]["parameters"],
        "input_kind": task.input_kind,
        "loss": task.loss,
        "output_names": list(task.output_names),
        "num_labels": len(task.output_names),
        "split": task.split_name,
        "split_sizes": task.split_sizes,
        "max_rows": recipe.task.max_rows,
        "split_sha256": split_fingerprint(task.split_indices),
        "selection_metric": task.selection_metric,
        "is_greater_better": task.is_greater_better,
        "aggregate": recipe.aggregate,
        "seeds": list(recipe.seeds),
        "best_epochs": [cell["best_epoch"] for cell in cells],
        "elapsed_s": round(sum(cell["elapsed_s"] for cell in every), 3),
        "tokens_per_s": round(sum(cell["tokens_per_s"] for cell in every) / len(every), 1),
        "outside_model_share": round(sum(cell["outside_model_share"] for cell in every) / len(every), 4),
        "notes": notes,
        "metrics": summarise_metrics([cell["metrics"] for cell in cells]),
        "grid_best": {"label": best.label, "values": best.values} if has_grid else None,
        "grid": [
            {
                "label": point.label,
                "values": point.values,
                "valid": summarise_metrics([cell["metrics"] for cell in by_point[point.label]])["valid"],
            }
            for point in points
            if has_grid
        ],
    }
