"""Sweep runner: trains, measures and fine-tunes the cells of a sweep in child processes, the longest first.

Every process uses `train.num_threads` threads, one by default, so no result depends on the number of processes. A
finished cell is never touched again, so a stopped sweep continues where it was.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import loky
import torch

from exlm_cli.config.input_paths import with_absolute_paths, write_run_recipe
from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import DataConfig, TokenizerConfig
from exlm_cli.config.sweep import SweepCell, SweepRecipe
from exlm_cli.data.corpus.prepare import PreparedData, list_rejected, prepare_data
from exlm_cli.errors import CheckpointError, ConfigError, ExlmError, InterruptedRunError
from exlm_cli.experiments.board import SweepBoard, open_board
from exlm_cli.experiments.cell import read_result, refuse_changed_cell
from exlm_cli.experiments.results import SweepRun, SweepSummary, cell_folder, finished_results
from exlm_cli.experiments.workers import Event, Workers
from exlm_cli.files import write_json
from exlm_cli.progress import Progress
from exlm_cli.run_dir import (
    RUN_FILE,
    create_run_dir,
    discarded_on_failure,
    read_run_json,
    resume_command,
    sole_process,
    update_run_json,
)
from exlm_cli.train.pretrained import pick_device
from exlm_cli.train.process import StopSignal
from exlm_cli.train.trackers import require_trackers

_Inputs = tuple[DataConfig, TokenizerConfig]

_LOOK_EVERY_S = 0.5


def run_sweep(
    recipe: SweepRecipe, *, out: Path | None, resume: Path | None, jobs: int | None, progress: Progress
) -> SweepRun:
    """Train, measure and fine-tune every cell that is not done yet.

    Args:
        recipe: The sweep. To continue a run, it may select some of its variants and tasks or add new ones; the recipe
            in the run directory keeps all.
        out: Run directory; none: `runs/<name>-<time>`.
        resume: A run directory to continue instead.
        jobs: Cells at once; None: one for each CUDA device, or for each `train.num_threads` CPU cores.

    Returns:
        Every cell of the run directory that is done.

    Raises:
        CheckpointError: Another process runs this sweep, or a cell was begun with another recipe or on other content of
            its inputs; nothing is changed. Or inputs changed while cells were trained.
        InterruptedRunError: Stopped by a signal; every cell has saved a checkpoint.
        ExlmError: What stops any cell but its own divergence; the others have saved a checkpoint.
    """
    require_trackers([*recipe.pretrain.train.report_to, *recipe.finetune.train.report_to])
    environments = _environments(recipe, jobs)
    recipe = with_absolute_paths(recipe)
    cells = recipe.plan()
    run = resume if resume is not None else create_run_dir(out, recipe.name)
    with sole_process(run, is_new=resume is None):
        with discarded_on_failure(run, is_new=resume is None):
            path = run / "recipe.yaml"
            whole = recipe.together_with(load_recipe(path, kind=SweepRecipe)) if path.is_file() else recipe
            every_cell = whole.plan()
            for cell in every_cell:
                refuse_changed_cell(cell, cell_folder(run, cell))
                read_result(cell, cell_folder(run, cell))
            # a cell that lacks only a task of an earlier recipe counts as done
            results = {cell.folder: read_result(cell, cell_folder(run, cell)) for cell in cells}
            waiting = [cell for cell in cells if results[cell.folder] is None]
            _check_tasks(waiting, progress)
            prepared = _prepare(cells, progress)
            fingerprints = {inputs: data.fingerprint for inputs, data in prepared.items()}
            _refuse_other_data(run, every_cell, fingerprints)
            if (common := prepared.get(_inputs(recipe.pretrain))) is not None:
                list_rejected(common, run / "rejected.csv", progress)
            # only now: a recipe that is refused must not replace the one that the cells were trained with
            fields = {"command": recipe.run_by, "num_cells": len(every_cell), "jobs": len(environments)}
            update_run_json(run, fields)
            write_run_recipe(run, whole)
        num_others = len(every_cell) - len(cells)
        others = f"; the other {num_others} are not run now" if num_others else ""
        progress.message(
            f"{recipe.name}: {len(cells)} cells, {len(cells) - len(waiting)} of them done, "
            f"{len(environments)} at once{others}; results in {run}"
        )
        if waiting:
            # the longest is taken first: those left at the end are short, and no process waits long for another
            waiting.sort(key=lambda cell: cell.work)
            with open_board(run, cells, results, progress) as board:
                _run_waiting(run, waiting, environments[: len(waiting)], board, resume_command(recipe.run_by, run))
            # a file may have changed before the last cells began
            _refuse_other_data(run, cells, fingerprints)
        finished = finished_results(run, every_cell)
        described = {key: getattr(whole, key) for key in ("paper", "seeds", "tasks")}
        summary = SweepSummary(kind=whole.run_by, recipe=whole.name, **described, cells=tuple(finished))
        write_json(run / "results.json", summary)
    return SweepRun(run, whole, finished, len(every_cell))


def _check_tasks(cells: Sequence[SweepCell], progress: Progress) -> None:
    """Load every task once, so that one that cannot be fine-tuned on is found before the first cell is pre-trained."""
    configs = {recipe.task.name: recipe.task for cell in cells for recipe in cell.finetune}
    if not configs:
        return
    # importing them takes seconds
    from exlm_cli.finetune.model import resolve_sequence_length
    from exlm_cli.tasks.registry import load_task

    for config in configs.values():
        needed = config.input_kind
        other = "choose other tasks with `tasks=LIST`"
        if config.suite == "csv" and needed == "smiles":
            other = f"name its column of text with `task.text_column=NAME`, or {other}"
        for cell in cells:
            if cell.pretrain.data.kind != needed:
                raise ConfigError(
                    f"cell {cell.label} pre-trains on {cell.pretrain.data.kind}; task {config.name} needs a model of "
                    f"{needed}",
                    other,
                )
    for cell in cells:
        for finetune in cell.finetune:
            try:
                resolve_sequence_length(cell.pretrain, Path(f"cell {cell.label}"), finetune)
            except ConfigError as error:
                where = f"cell {cell.label}, fine-tuning on {finetune.task.name}"
                raise ConfigError(f"{where}: {error.message}", error.hint) from error
    for config in configs.values():
        load_task(config, progress)


def _prepare(cells: Iterable[SweepCell], progress: Progress) -> dict[_Inputs, PreparedData]:
    """Tokenise the inputs of all cells: the common ones, and those of variants that change data or tokenizer."""
    own = {_inputs(cell.pretrain): cell.pretrain for cell in cells}
    return {inputs: prepare_data(pretrain, progress=progress) for inputs, pretrain in own.items()}


def _inputs(recipe: PretrainRecipe) -> _Inputs:
    return recipe.data, recipe.tokenizer


def _refuse_other_data(run: Path, cells: Iterable[SweepCell], fingerprints: Mapping[_Inputs, str]) -> None:
    """Refuse cells that were trained on other content of the same inputs, so that no mean is over two corpora."""
    for cell in cells:
        folder = cell_folder(run, cell)
        run_folder = folder / "pretrain"
        now = fingerprints.get(_inputs(cell.pretrain))  # None: inputs of a cell that is not asked for
        then = read_run_json(run_folder).data_fingerprint if (run_folder / RUN_FILE).is_file() else None
        if None not in (then, now) and then != now:
            raise CheckpointError(
                f"{folder}: the content of its inputs has changed since this cell was trained",
                "restore the files, or start a new run with `out=DIR`; a cell whose folder is deleted is trained again",
            )


def _run_waiting(
    run: Path, waiting: list[SweepCell], environments: Sequence[Mapping[str, str]], board: SweepBoard, resume: str
) -> None:
    """Give cells to processes until none is left; `resume` is the command that continues the sweep."""
    running: dict[int, SweepCell] = {}
    failure: ExlmError | None = None
    is_stopping = False

    def give(number: int) -> None:
        running[number] = waiting.pop()
        workers.submit(number, running[number], cell_folder(run, running[number]))

    with Workers(environments, run / "workers") as workers, StopSignal() as stop:
        for number in range(len(environments)):
            give(number)
        while running:
            if stop.number is not None and not is_stopping:
                is_stopping = True
                workers.interrupt()
                board.say("stopping: every cell saves a checkpoint; press Ctrl-C again to stop at once")
            received = workers.next_event(_LOOK_EVERY_S)
            if received is None:
                board.look(running.values())
                continue
            number, event = received
            if number not in running:
                continue
            cell = running.pop(number)
            if event["event"] == "done":
                board.finish(cell, *finished_results(run, [cell]))
                if waiting and not is_stopping:
                    give(number)
            elif not is_stopping:
                failure = _explain(event, cell, workers.log(number), resume)
                is_stopping = True
                workers.interrupt()
    if failure is not None:
        raise failure
    if stop.number is not None:
        raise InterruptedRunError(
            f"stopped with {board.num_done} of {board.num_cells} cells done; those that ran have saved a checkpoint",
            f"continue with `{resume}`",
            stop.number,
        )


def _explain(event: Event, cell: SweepCell, log: Path, resume: str) -> ExlmError:
    """Return the error for a cell that ended early without a request to stop."""
    if event["event"] == "error":
        # the hint of a cell's own run names the command for that run
        hint = re.sub(r"`exlm (pretrain|finetune) --resume [^`]*`", lambda _: f"`{resume}`", event["hint"])
        return ExlmError(f"cell {cell.folder}: {event['message']}", hint)
    if event["event"] == "interrupted":
        return ExlmError(f"cell {cell.folder} was interrupted", f"continue with `{resume}`")
    return ExlmError(
        f"cell {cell.folder}: its process ended with code {event['code']}; its output is in {log}",
        f"-9 often means that memory ran out: run fewer cells at once, as with `jobs=1`; continue with `{resume}`",
    )


def _environments(recipe: SweepRecipe, jobs: int | None) -> list[dict[str, str]]:
    """Return the environment variables of every process: its CUDA device, or its number of CPU threads."""
    if pick_device(recipe.pretrain.model_copy(update={"device": recipe.device})).type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        return [{"CUDA_VISIBLE_DEVICES": names[job % len(names)]} for job in range(jobs or len(names))]
    threads = recipe.pretrain.train.num_threads or 1
    if jobs is None:
        jobs = max(1, loky.cpu_count() // threads)
    return [{"OMP_NUM_THREADS": str(threads)}] * jobs
