"""Sweep runner: checks all cells of a sweep, then has the unfinished ones trained, measured and fine-tuned by workers.

A finished cell is never touched again, so a stopped sweep continues where it was.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from exlm_cli.config.input_paths import with_absolute_paths, write_run_recipe
from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import DataConfig, TokenizerConfig
from exlm_cli.config.sweep import SweepCell, SweepRecipe
from exlm_cli.data.corpus.prepare import PreparedData, list_rejected, prepare_data
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.experiments.cell import read_finished, run_cell
from exlm_cli.experiments.results import MeasuredCell, SweepRun, SweepSummary, cell_folder, measured_cells, sweep_scores
from exlm_cli.files import json_bytes, write_together
from exlm_cli.finetune.scores import SCORES_FILE, scores_csv
from exlm_cli.format import format_fixed
from exlm_cli.progress import Progress
from exlm_cli.run_dir import (
    RUN_FILE,
    create_run_dir,
    read_run_json,
    resume_command,
    sole_process,
    update_run_json,
)
from exlm_cli.train.pretrained import pick_device
from exlm_cli.train.trackers import require_trackers
from exlm_cli.workers import Job, run_jobs, worker_environments

_Inputs = tuple[DataConfig, TokenizerConfig]


def run_sweep(
    recipe: SweepRecipe, *, out: Path | None, resume: Path | None, workers: int | None, progress: Progress
) -> SweepRun:
    """Train, measure and fine-tune every cell that is not done yet.

    Args:
        recipe: The sweep. To continue a run, it may select some of its variants and tasks or add new ones; the recipe
            in the run directory keeps all.
        out: Run directory; none: `runs/<name>-<time>`.
        resume: A run directory to continue instead.
        workers: Cells at once; None: one for each CUDA device, or for each `train.num_threads` CPU cores.

    Returns:
        Every cell of the run directory that is done.

    Raises:
        CheckpointError: Another process runs this sweep, or a cell was begun with another recipe or on other content of
            its inputs; nothing is changed. Or inputs changed while cells were trained.
        InterruptedRunError: Stopped by a signal; every cell has saved a checkpoint.
        ExlmError: What stops any cell but its own divergence; the others have saved a checkpoint.
    """
    require_trackers([*recipe.pretrain.train.report_to, *recipe.finetune.train.report_to])
    device = pick_device(recipe.pretrain.model_copy(update={"device": recipe.device}))
    environments = worker_environments(device.type, num_threads=recipe.pretrain.train.num_threads, workers=workers)
    recipe = with_absolute_paths(recipe)
    cells = recipe.plan()
    run = resume if resume is not None else create_run_dir(out, recipe.name)
    with sole_process(run, is_new=resume is None):
        path = run / "recipe.yaml"
        whole = recipe.together_with(load_recipe(path, kind=SweepRecipe)) if path.is_file() else recipe
        every_cell = whole.plan()
        for cell in every_cell:
            read_finished(cell, cell_folder(run, cell))
        # a cell that lacks only a task of an earlier recipe counts as done
        done = {cell.folder: read_finished(cell, cell_folder(run, cell)) for cell in cells}
        waiting = [cell for cell in cells if done[cell.folder] is None]
        _check_tasks(waiting, progress)
        prepared = _prepare(cells, progress)
        fingerprints = {inputs: data.fingerprint for inputs, data in prepared.items()}
        _refuse_other_data(run, every_cell, fingerprints)
        if (common := prepared.get(_inputs(recipe.pretrain))) is not None:
            list_rejected(common, run / "rejected.csv", progress)
        # only now: a recipe that is refused must not replace the one that the cells were trained with
        fields = {"command": recipe.run_by, "num_cells": len(every_cell), "workers": len(environments)}
        update_run_json(run, fields)
        write_run_recipe(run, whole)
        num_others = len(every_cell) - len(cells)
        others = f"; the other {num_others} are not run now" if num_others else ""
        progress.message(
            f"{recipe.name}: {len(cells)} cells, {len(cells) - len(waiting)} of them done, "
            f"{len(environments)} at once{others}; results in {run}"
        )
        if waiting:
            run_jobs(
                run_cell,
                [Job(cell.folder, (cell, cell_folder(run, cell)), cell.work) for cell in cells],
                noun="cell",
                finished={name for name, cell in done.items() if cell is not None},
                describe=lambda _, cell: describe_cell(cell),
                environments=environments,
                logs=run / "workers",
                resume=resume_command(recipe.run_by, run),
                progress=progress,
            )
            # a file may have changed before the last cells began
            _refuse_other_data(run, cells, fingerprints)
        found = SweepRun(run, whole, measured_cells(run, every_cell), len(every_cell))
        _write_summary(found)
    return found


def _write_summary(run: SweepRun) -> None:
    """Write `scores.csv` and `results.json` of a sweep."""
    whole, results = run.recipe, tuple(cell.result for cell in run.cells)
    described = {key: getattr(whole, key) for key in ("paper", "seeds", "tasks")}
    summary = SweepSummary(kind=whole.run_by, recipe=whole.name, **described, cells=results)
    scores = scores_csv(sweep_scores(run.cells))
    write_together({run.folder / SCORES_FILE: scores, run.folder / "results.json": json_bytes(summary)})


def _check_tasks(cells: Sequence[SweepCell], progress: Progress) -> None:
    """Load every task once, so that one that cannot be fine-tuned on is found before the first cell is pre-trained."""
    configs = {recipe.task.name: recipe.task for cell in cells for recipe in cell.finetune}
    if not configs:
        return
    # importing them takes seconds
    from exlm_cli.finetune.run import resolve_sequence_length
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


def describe_cell(cell: MeasuredCell) -> str:
    """Return the line of a finished cell."""
    if cell.result.diverged is not None:
        return f"diverged: {cell.result.diverged}"
    bits = cell.value("entropy_bits")
    shown = [
        f"loss {format_fixed(cell.value('loss'), 3)}",
        f"entropy {format_fixed(bits, 2)}" + ("" if math.isnan(bits) else " bits"),
        *(f"{name} {format_fixed(cell.value(name), 3)}" for name in cell.task_metrics),
        *(f"{task} diverged" for task in cell.result.diverged_tasks),
    ]
    return ", ".join(shown)
