"""Cells of fine-tuning to one table of results: over seeds, over grid points. No torch.

A cell is what `result.json` of one (grid point, seed) holds; its `metrics` are by split, then by name.
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from exlm_cli.config.finetune import NO_GRID
from exlm_cli.errors import CheckpointError
from exlm_cli.files import reason_of, write_atomically
from exlm_cli.finetune.result_shapes import WrittenResults, check_written
from exlm_cli.tasks.base import FloatArray

RESULT_FILE = "result.json"
"""Of a cell."""
RESULTS_FILE = "results.json"
"""Of a run."""
TARGETS_COLUMN = "class"
"""Of `targets-<split>.csv` where rows have one class: its index."""

Aggregate = Literal["mean", "median"]
Summary = dict[str, Any]
"""`mean`, `std` (n - 1 in the denominator, None for one value), `median`, `values`."""


def summarise_values(values: Iterable[float | None]) -> Summary:
    """Return mean, standard deviation and median over seeds; values that are not defined are None and left out."""
    listed = [None if v is None or math.isnan(v) else float(v) for v in values]
    known = np.array([v for v in listed if v is not None])
    return {
        "mean": float(known.mean()) if len(known) else None,
        "std": float(known.std(ddof=1)) if len(known) > 1 else None,
        "median": float(np.median(known)) if len(known) else None,
        "values": listed,
    }


def summarise_metrics(runs: Sequence[Mapping[str, Mapping[str, float | None]]]) -> dict[str, dict[str, Summary]]:
    """Return a summary of each metric of each split over several runs.

    Args:
        runs: Metrics by split and name; all of the same splits and names.
    """
    return {
        split: {name: summarise_values(run[split][name] for run in runs) for name in runs[0][split]}
        for split in runs[0]
    }


def selection_value(cells: Sequence[Mapping[str, Any]], metric: str, aggregate: Aggregate) -> float:
    """Return the aggregated validation metric of a grid point's cells; NaN where it is never defined."""
    value = summarise_values(cell["metrics"]["valid"][metric] for cell in cells)[aggregate]
    return math.nan if value is None else float(value)


def is_better_point(value: float, best: float | None, *, is_greater_better: bool) -> bool:
    """Return whether a grid point beats the best one before it; an equal one does not, an undefined one beats none."""
    if best is None:
        return True
    if math.isnan(value) or math.isnan(best):
        return math.isnan(best) and not math.isnan(value)
    return value > best if is_greater_better else value < best


def read_results(run: Path) -> dict[str, Any]:
    """Return `results.json` of a finished run.

    Raises:
        CheckpointError: There is none, it cannot be read, or it lacks something.
    """
    path = run / RESULTS_FILE
    hint = f"`exlm finetune --resume {run}` writes it again"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{run}: the run is not finished: it has no {RESULTS_FILE}",
            f"finish it with `exlm finetune --resume {run}`",
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}", hint) from error
    return check_written(path, content, WrittenResults, hint)


def cell_folder(run: Path, label: str, seed: int) -> Path:
    """Return where a cell of a run lives."""
    return run / "cells" / label / f"seed-{seed}"


def best_cell_folder(run: Path, results: Mapping[str, Any], seed: int) -> Path:
    """Return where the cell of a seed at the best grid point lives; `results` is the content of `results.json`."""
    return cell_folder(run, results["grid_best"]["label"] if results["grid_best"] else NO_GRID, seed)


def how_to_redo(cell: Path) -> str:
    """Return a hint on what makes a run do a finished cell again."""
    return f"delete {cell / RESULT_FILE} and go on with `exlm finetune --resume {cell.parents[2]}`, which does it again"


def write_predictions(path: Path, rows: Sequence[int], names: Sequence[str], outputs: Sequence[FloatArray]) -> None:
    """Write `row` and one column for each output: probabilities of labels or classes, values for regression.

    Args:
        path: Of the CSV; written whole or not at all.
        rows: Row of the input each example came from.
        names: C columns.
        outputs: (C,) of each example.

    Raises:
        CheckpointError: The file system refuses.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", *names])
    for row, output in zip(rows, outputs, strict=True):
        writer.writerow([row, *(repr(float(value)) for value in output)])
    write_atomically(path, text.getvalue().encode())


def read_predictions(path: Path, hint: str) -> tuple[list[int], list[str], FloatArray]:
    """Read back what `write_predictions` wrote: rows of the input, names of columns, (N, C) values.

    Args:
        path: Of the CSV.
        hint: What brings it back.

    Raises:
        CheckpointError: The file is missing or altered.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *lines = csv.reader(file)
        values = np.array([[float(cell) for cell in line[1:]] for line in lines])
        return [int(line[0]) for line in lines], header[1:], values.reshape(len(lines), len(header) - 1)
    except (OSError, ValueError, IndexError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: not readable as predictions: {reason}", hint) from error
