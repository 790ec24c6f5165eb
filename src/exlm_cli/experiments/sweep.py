"""Runs the cells of a grid in child processes, the longest first, and puts their results together.

A run directory of a grid holds `recipe.yaml`, `run.json`, `cells/<label>/seed-<n>/` as `run_cell` fills them, and
`results.json`. Every process works with one thread, so no number depends on how many there are; a cell that is done is
never touched again, so a grid that was stopped anywhere goes on where it was.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from exlm_cli.config.cells import CellPlan, CellsRecipe
from exlm_cli.config.input_paths import with_absolute_paths
from exlm_cli.config.load import dump_recipe, load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import DataConfig, TokenizerConfig
from exlm_cli.data.corpus.pipeline import list_rejected, prepare_data
from exlm_cli.errors import CheckpointError, ConfigError, ExlmError, InterruptedRunError
from exlm_cli.experiments.board import GridBoard, open_board
from exlm_cli.experiments.cell import read_result, refuse_changed_cell
from exlm_cli.experiments.cell_files import cell_folder, diverged_tasks, finished_cells
from exlm_cli.experiments.workers import Event, Workers
from exlm_cli.files import removed_on_failure, write_atomically
from exlm_cli.progress import Progress
from exlm_cli.run_dir import create_run_dir, read_run_json, sole_process, update_run_json
from exlm_cli.train.checkpoint import write_json
from exlm_cli.train.interrupt import StopSignal
from exlm_cli.train.pretrained import pick_device

GridRecipeT = TypeVar("GridRecipeT", bound=CellsRecipe)
_Inputs = tuple[DataConfig, TokenizerConfig]

_LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class GridResult:
    """What a grid made: its directory and the `result.json` of every cell that is done, in the order of the recipe."""

    run_dir: Path
    cells: list[dict[str, Any]]

    @property
    def num_diverged(self) -> int:
        """Cells and seeds whose training, or fine-tuning on a task, came to no end."""
        return sum("diverged" in cell or bool(diverged_tasks(cell)) for cell in self.cells)


def run_grid(
    recipe: CellsRecipe, *, out: Path | None, resume: Path | None, jobs: int | None, progress: Progress
) -> GridResult:
    """Train, measure and fine-tune every cell that is not done yet.

    Args:
        recipe: The grid; of one that is gone on with, some of its cells and tasks or others too. The recipe that is
            kept has all.
        out: Run directory; none: `runs/<name>-<time>`.
        resume: A run directory to go on with instead.
        jobs: Cells at once; none: one a CUDA device, or one a CPU core.
        progress: Who is told.

    Raises:
        CheckpointError: Another process runs this grid, or a cell was begun with another recipe or on other content of
            its inputs; nothing is changed. Or inputs changed while cells were trained.
        InterruptedRunError: Stopped by a signal; every cell has saved a checkpoint.
        ExlmError: What stops any cell but its own divergence; the others have saved a checkpoint.
    """
    environments = _environments(recipe, jobs)
    if resume is None:
        recipe = with_absolute_paths(recipe)
    plans = recipe.plan()
    run = resume if resume is not None else create_run_dir(out, recipe.name)
    with sole_process(run):
        with removed_on_failure(run, is_new=resume is None):
            whole = recipe.together_with(_begun(run, recipe))
            every_plan = whole.plan()
            for plan in every_plan:
                refuse_changed_cell(plan, cell_folder(run, plan))
                read_result(plan, cell_folder(run, plan))
            # a cell that lacks an earlier task alone is done: what is asked for is what is worked on
            results = {plan.folder: read_result(plan, cell_folder(run, plan)) for plan in plans}
            waiting = [plan for plan in plans if results[plan.folder] is None]
            _check_tasks(waiting, progress)
            common = prepare_data(recipe.pretrain, rejected_csv=None, progress=progress)
            fingerprints = {_inputs(recipe.pretrain): common.fingerprint} | _prepare_others(recipe, plans, progress)
            _refuse_other_data(run, every_plan, fingerprints)
            list_rejected(common, run / "rejected.csv", progress)
            num_cells = len(every_plan)
            # only now: a recipe that is refused must not replace the one that the cells were trained with
            update_run_json(run, {"command": recipe.command, "num_cells": num_cells, "jobs": len(environments)})
            # last: a run directory is one that has its recipe
            write_atomically(run / "recipe.yaml", dump_recipe(whole).encode())
        others = f"; the other {num_cells - len(plans)} are left as they are" if num_cells > len(plans) else ""
        progress.message(
            f"{recipe.name}: {len(plans)} cells, {len(plans) - len(waiting)} of them done, "
            f"{len(environments)} at once{others}; results in {run}"
        )
        if waiting:
            # the longest first: what is left at the end is short, and no process waits long for another
            waiting.sort(key=lambda plan: plan.work)
            with open_board(plans, results, progress) as board:
                environments = environments[: len(waiting)]
                _work_off(run, waiting, environments, board, recipe.resume_command(run))
            # a file may have changed before the last cells began
            _refuse_other_data(run, plans, fingerprints)
        cells = finished_cells(run, every_plan)
        write_json(run / "results.json", _summary(whole, cells))
    return GridResult(run, cells)


def _begun(run: Path, recipe: GridRecipeT) -> GridRecipeT:
    """Return the recipe that a run directory has; a new one has none yet, and `recipe` stands in for it."""
    path = run / "recipe.yaml"
    return load_recipe(str(path), kind=type(recipe)) if path.is_file() else recipe


def _check_tasks(plans: Sequence[CellPlan], progress: Progress) -> None:
    """Load every task once: one that cannot be had is told now, not when the first cell is pre-trained."""
    configs = {recipe.task.name: recipe.task for plan in plans for recipe in plan.finetune}
    if not configs:
        return
    # what it imports takes seconds
    from exlm_cli.tasks.registry import check_splits, load_task

    for config in configs.values():
        needed = config.input_kind
        other = "choose other tasks with `--task`, or none with `--task none`"
        if config.suite == "csv" and needed == "smiles":
            other = f"name its column of text with `--set finetune.task.text_column=NAME`, or {other}"
        for plan in plans:
            if plan.pretrain.data.kind != needed:
                raise ConfigError(
                    f"cell {plan.label} pre-trains a model of {plan.pretrain.data.kind}; task {config.name} needs one "
                    f"of {needed}",
                    other,
                )
    for config in configs.values():
        check_splits(load_task(config, progress))


def _prepare_others(recipe: CellsRecipe, plans: Iterable[CellPlan], progress: Progress) -> dict[_Inputs, str]:
    """Tokenise the inputs of cells that have their own, and return their fingerprints."""
    own = {_inputs(plan.pretrain): plan.pretrain for plan in plans}
    own.pop(_inputs(recipe.pretrain), None)
    return {
        inputs: prepare_data(pretrain, rejected_csv=None, progress=progress).fingerprint
        for inputs, pretrain in own.items()
    }


def _inputs(recipe: PretrainRecipe) -> _Inputs:
    return recipe.data, recipe.tokenizer


def _refuse_other_data(run: Path, plans: Iterable[CellPlan], fingerprints: Mapping[_Inputs, str]) -> None:
    """Refuse cells that were trained on other content of the same inputs; no mean is over two corpora."""
    for plan in plans:
        folder = cell_folder(run, plan)
        # None: an earlier version did not write it down, or nobody has looked at these inputs
        known = {read_run_json(folder / "pretrain").get("data_fingerprint"), fingerprints.get(_inputs(plan.pretrain))}
        if len(known - {None}) > 1:
            raise CheckpointError(
                f"{folder}: this cell was trained on other content of its inputs than they have now",
                "restore the files, or choose another `--out`; a cell whose folder is deleted is trained again",
            )


def _work_off(
    run: Path, waiting: list[CellPlan], environments: Sequence[Mapping[str, str]], board: GridBoard, resume_command: str
) -> None:
    """Give cells to processes until none is left."""
    running: dict[int, CellPlan] = {}
    failure: ExlmError | None = None
    is_stopping = False
    with Workers(environments, run / "workers") as workers, StopSignal() as stop:
        for number in range(len(environments)):
            _give(run, workers, running, number, waiting.pop())
        while running:
            if stop.number is not None and not is_stopping:
                is_stopping = True
                board.say("stopping: every cell saves a checkpoint; once more Ctrl-C stops at once")
                workers.interrupt()
            received = workers.next_event(_LOOK_EVERY_S)
            if received is None:
                continue
            number, event = received
            plan = running.get(number)
            if plan is None or not _is_end(event):
                if plan is not None:
                    board.follow(plan, event)
                continue
            del running[number]
            if event["event"] == "done":
                board.finish(plan, event["result"])
                if waiting and not is_stopping:
                    _give(run, workers, running, number, waiting.pop())
            elif not is_stopping:
                failure = _explain(event, plan, workers.log(number), resume_command)
                is_stopping = True
                workers.interrupt()
    if failure is not None:
        raise failure
    if stop.number is not None:
        raise InterruptedRunError(
            f"stopped with {board.num_done} of {board.num_cells} cells done; the others have saved a checkpoint",
            f"continue with `{resume_command}`",
            stop.number,
        )


def _give(run: Path, workers: Workers, running: dict[int, CellPlan], number: int, plan: CellPlan) -> None:
    running[number] = plan
    workers.submit(number, plan, cell_folder(run, plan))


def _is_end(event: Event) -> bool:
    return event["event"] in ("done", "error", "interrupted", "exit")


def _explain(event: Event, plan: CellPlan, log: Path, resume_command: str) -> ExlmError:
    """Return why a cell ended early, of its own accord."""
    if event["event"] == "error":
        return ExlmError(f"cell {plan.folder}: {event['message']}", event["hint"])
    if event["event"] == "interrupted":
        return ExlmError(f"cell {plan.folder} was interrupted", f"continue with `{resume_command}`")
    return ExlmError(
        f"cell {plan.folder}: its process ended with code {event['code']}; what it said is in {log}",
        f"-9 often means that memory ran out: fewer `--jobs` need less; continue with `{resume_command}`",
    )


def _environments(recipe: CellsRecipe, jobs: int | None) -> list[dict[str, str]]:
    """Return the variables of every process: its device, or one thread on a CPU."""
    if pick_device(recipe.pretrain.model_copy(update={"device": recipe.device})).type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        return [{"CUDA_VISIBLE_DEVICES": names[job % len(names)]} for job in range(jobs or len(names))]
    threads = recipe.pretrain.train.num_threads or 1
    if jobs is None:
        jobs = max(1, _num_cores() // threads)
    return [{"OMP_NUM_THREADS": str(threads)}] * jobs


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _summary(recipe: CellsRecipe, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kind": recipe.command,
        "recipe": recipe.name,
        "paper": recipe.paper,
        "seeds": list(recipe.seeds),
        "tasks": list(recipe.tasks),
        "cells": list(cells),
    }
