"""Fine-tuning: seeds by grid points of one task, cell by cell, and their results.

A run directory holds `recipe.yaml`, `encoder.yaml` (the recipe of pre-training), `tokenizer.json`, `split.json`,
`run.json`, `cells/<grid point>/seed-<n>/` and at its end `results.json`. A cell is a run of the training loop that ends
with `result.json`; one that has it is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from exlm_cli.config.finetune import FinetuneRecipe, GridPoint, grid_points
from exlm_cli.config.input_paths import with_absolute_paths
from exlm_cli.config.load import dump_recipe, resumed_recipe
from exlm_cli.data.rows.records import SKIPPED_FILE
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.files import removed_on_failure, write_atomically
from exlm_cli.finetune.cell import Cell, drop_weights, run_cell
from exlm_cli.finetune.initial import Initial, load_initial, resolve_sequence_length
from exlm_cli.finetune.result_shapes import WrittenRun, check_written
from exlm_cli.finetune.results import (
    RESULT_FILE,
    RESULTS_FILE,
    cell_folder,
    is_better_point,
    selection_value,
    summarise_metrics,
)
from exlm_cli.finetune.run_files import check_resumed, collect_results, describe_run
from exlm_cli.finetune.trainer import TaskData, encode_task
from exlm_cli.format import format_counts, format_number, format_percent
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import RUN_FILE, create_run_dir, read_run_json, sole_process, update_run_json
from exlm_cli.tasks.base import DownstreamTask
from exlm_cli.tasks.registry import check_splits, load_task
from exlm_cli.train.checkpoint import write_json
from exlm_cli.train.pretrained import describe_device, pick_device

MOST_UNKNOWN = 0.01
"""Share of [UNK] among the training tokens above which a run says that the tokenizer does not fit."""


@dataclass(frozen=True)
class FinetuneResult:
    """What a fine-tuning run made: its directory and the content of `results.json`."""

    run_dir: Path
    results: dict[str, Any]


def run_finetuning(
    recipe: FinetuneRecipe,
    *,
    checkpoint: Path | None,
    out: Path | None = None,
    resume: Path | None = None,
    use_grid: bool = False,
    with_yardstick: bool = False,
    task: DownstreamTask | None = None,
    progress: Progress | None = None,
) -> FinetuneResult:
    """Fine-tune a checkpoint with every seed of a recipe, and at every point of its grid where asked to, and score it.

    The epoch that is best in validation is scored once on the test split. Of a grid, the point with the best aggregate
    of validation scores is reported.

    Args:
        recipe: What to do.
        checkpoint: A pre-training run or one of its `checkpoints/step-N`; with `init: scratch` its architecture and
            tokenizer alone are used. None only with `resume`, which remembers it.
        out: Run directory; none: `runs/<name>-<time>`.
        resume: A run directory to continue instead; `recipe` must be the one it began with.
        use_grid: Search `recipe.grid`.
        with_yardstick: For molecules, score ECFP4 with a random forest on the same splits too.
        task: A task of your own instead of the one that `recipe.task` names.
        progress: Who is told; none: nobody.

    Raises:
        ExlmError: Anything the user can mend: data, checkpoint, tokenizer, grid, divergence, interruption.
    """
    progress = progress or SilentProgress()
    device = pick_device(recipe)
    if recipe.train.num_threads is not None:
        torch.set_num_threads(recipe.train.num_threads)
    if resume is not None:
        described = check_written(
            resume / RUN_FILE,
            read_run_json(resume),
            WrittenRun,
            "exlm wrote this file whole, so something else altered it; restore it or start a new run",
        )
        use_grid, with_yardstick = bool(described.get("use_grid")), bool(described.get("yardstick"))
        if checkpoint is None and "checkpoint" in described:
            checkpoint = Path(described["checkpoint"])
    if checkpoint is None:
        raise ConfigError("no checkpoint to fine-tune", "give a pre-training run with `--checkpoint`")
    points = grid_points(recipe, use_grid=use_grid)
    initial = load_initial(checkpoint, progress)
    for point in points:
        length = resolve_sequence_length(initial, point.recipe)
    if task is None:
        # a model of the other kind is told before data are fetched and read
        _check_kind(recipe.task.name, recipe.task.input_kind, initial)
        task = load_task(recipe.task, progress)
    _check_kind(task.name, task.input_kind, initial)
    check_splits(task)
    if with_yardstick and task.input_kind != "smiles":
        raise ConfigError(f"`--yardstick` is for molecules; {task.name} has text", "leave it out")
    run = create_run_dir(out, recipe.name) if resume is None else resume
    with sole_process(run):
        with removed_on_failure(run, is_new=resume is None):
            data = encode_task(task, initial.tokenizer, length, initial.recipe.masking.num_repeats)
            notes = _notes(data, initial)
            if resume is None:
                describe_run(run, recipe, initial, data, use_grid=use_grid, with_yardstick=with_yardstick)
            else:
                check_resumed(run, recipe, initial, data)
                write_atomically(run / "recipe.yaml", dump_recipe(with_absolute_paths(recipe)).encode())
        update_run_json(run, {"device": describe_device(device), "seeds": list(recipe.seeds)})
        sizes = format_counts(task.split_sizes.values())
        progress.message(
            f"{task.name}: {sizes} rows in {', '.join(task.splits)}; {initial.describe(recipe)['objective']} from "
            f"{initial.checkpoint}, on {describe_device(device)}; results in {run}"
        )
        best = _run_cells(run, recipe, points, initial, data, device, progress)
        results = collect_results(run, recipe, points, best, initial, data, notes)
        if with_yardstick:
            results["yardstick"] = _run_yardstick(task, recipe.seeds, progress)
        write_json(run / RESULTS_FILE, results)
        update_run_json(run, {"parameters": results["parameters"], "train_time_s": results["elapsed_s"]})
        return FinetuneResult(run, results)


def resume_finetuning(
    run: Path, overrides: Sequence[str] = (), *, checkpoint: Path | None = None, progress: Progress | None = None
) -> FinetuneResult:
    """Continue a run from its own recipe.yaml, cell by cell; exact on CPU.

    Args:
        run: Run directory of `exlm finetune`.
        overrides: `section.key=value` of what may change: `seeds`, `device`, how often to log and save.
        checkpoint: Where the pre-training run is now; none: where it was.
        progress: Who is told; none: nobody.

    Raises:
        CheckpointError: `run` is no run directory of fine-tuning.
    """
    return run_finetuning(
        resumed_recipe(run, FinetuneRecipe, overrides), checkpoint=checkpoint, resume=run, progress=progress
    )


def _check_kind(name: str, needed: Literal["text", "smiles"], initial: Initial) -> None:
    names = {"text": "text", "smiles": "SMILES"}
    kind = initial.recipe.data.kind
    if kind != needed:
        raise CheckpointError(
            f"{initial.checkpoint} is a model of {names[kind]}; {name} needs one of {names[needed]}",
            f"make one with `exlm pretrain --recipe quickstart-{needed}`, or give another `--checkpoint`",
        )


def _notes(data: TaskData, initial: Initial) -> list[str]:
    notes = list(data.task.notes)
    if data.task.left_out:
        notes.append(
            f"{SKIPPED_FILE} lists all {len(data.task.left_out):,} rows that were left out, with their reasons"
        )
    share = data.unknown_share
    if share > MOST_UNKNOWN:
        notes.append(
            f"{format_percent(share)} of the training tokens are [UNK]: the tokenizer of {initial.checkpoint} "
            "was not made for this data"
        )
    return notes


def _run_cells(
    run: Path,
    recipe: FinetuneRecipe,
    points: list[GridPoint],
    initial: Initial,
    data: TaskData,
    device: torch.device,
    progress: Progress,
) -> GridPoint:
    """Run what is still to be run of every cell and return the best grid point; only its weights are kept.

    With seeds added or left out, a point whose weights were dropped may become the best one. Its cells are then trained
    again, on a CPU to the same bits.
    """
    best, best_value = points[0], None
    cells = [[Cell(p, seed, cell_folder(run, p.label, seed)) for seed in recipe.seeds] for p in points]
    num_done = sum(cell.is_done for of_point in cells for cell in of_point)
    with progress.bar("cells", len(points) * len(recipe.seeds), done=num_done) as bar:
        for point, of_point in zip(points, cells, strict=True):
            results = []
            for cell in of_point:
                is_new = not cell.is_done
                results.append(run_cell(cell, initial, data, device, progress, resume_command=_resume_command(run)))
                if is_new:
                    num_done += 1
                    bar.update(num_done)
                    progress.message(_describe_cell(cell, results[-1], data.task.selection_metric))
            value = selection_value(results, data.task.selection_metric, recipe.aggregate)
            loser = point
            if is_better_point(value, best_value, is_greater_better=data.task.is_greater_better):
                best, best_value, loser = point, value, best
            if loser is not best:
                drop_weights(run, loser.label, recipe.seeds)
    of_best = next(of_point for of_point in cells if of_point[0].point is best)
    for cell in of_best:
        if len(points) > 1 and not cell.has_weights:
            progress.message(f"{cell.label}: trained again: the best with these seeds, its weights were deleted before")
            (cell.folder / RESULT_FILE).unlink()
            run_cell(cell, initial, data, device, progress, resume_command=_resume_command(run))
    return best


def _describe_cell(cell: Cell, result: dict[str, Any], metric: str) -> str:
    scores = ", ".join(
        f"{split} {metric} {format_number(of_split[metric])}" for split, of_split in result["metrics"].items()
    )
    return (
        f"{cell.label}: best epoch {result['best_epoch']} of {result['epochs']}: {scores}; {result['elapsed_s']:.0f} s"
    )


def _resume_command(run: Path) -> str:
    return f"exlm finetune --resume {run}"


def _run_yardstick(task: DownstreamTask, seeds: tuple[int, ...], progress: Progress) -> dict[str, Any]:
    from exlm_cli.finetune.baseline import run_yardstick

    return {
        "name": "ECFP4 + random forest",
        "seeds": list(seeds),
        "metrics": summarise_metrics([run_yardstick(task, seed, progress) for seed in seeds]),
    }
