"""Sweep runner: a list of ordinary runs in one folder, variants by seeds, and then their fine-tunings.

All are checked before the first begins. What is finished is never touched again, so a stopped sweep continues where it
was.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from exlm_cli.config.base import identity_values
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.input_paths import with_absolute_paths, write_run_recipe
from exlm_cli.config.load import load_recipe
from exlm_cli.config.overrides import describe_changes
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import DataConfig, TokenizerConfig
from exlm_cli.config.sweep import SweepCell, SweepRecipe
from exlm_cli.data.corpus.prepare import PreparedData, list_rejected, prepare_data
from exlm_cli.errors import CheckpointError
from exlm_cli.experiments.cell import pretrain_and_measure
from exlm_cli.experiments.results import CellRuns, SweepRun, cells_of, load_sweep_run
from exlm_cli.experiments.series import run_task, run_tasks
from exlm_cli.files import write_atomically
from exlm_cli.finetune.run import require_fitting_model
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
from exlm_cli.train.records.trackers import require_trackers
from exlm_cli.train.workers import Job, run_jobs, worker_environments

_Inputs = tuple[DataConfig, TokenizerConfig]


def run_sweep(
    recipe: SweepRecipe, *, out: Path | None, resume: Path | None, workers: int | None, progress: Progress
) -> SweepRun:
    """Pre-train and measure every cell that is not done yet, then fine-tune each on the tasks.

    Args:
        recipe: The sweep. To continue a run, it may have other variants, seeds and tasks than the run's own, which it
            replaces; runs that it leaves out stay in their folders.
        out: Run directory; none: `runs/<name>-<time>`.
        resume: A run directory to continue instead.
        workers: Runs at once; None: one for each CUDA device, or for each `train.num_threads` CPU cores.

    Returns:
        Every cell of the recipe.

    Raises:
        CheckpointError: Another process runs this sweep, or a cell was begun with another recipe or on other content of
            its inputs; nothing is changed. Or inputs changed while cells were trained.
        InterruptedRunError: Stopped by a signal; every run has saved a checkpoint.
        ExlmError: What stops any run but its own divergence; the others have saved a checkpoint.
    """
    require_trackers([*recipe.pretrain.train.report_to, *recipe.finetune.train.report_to])
    device = pick_device(recipe.pretrain.model_copy(update={"device": recipe.device}))
    environments = worker_environments(device.type, num_threads=recipe.pretrain.train.num_threads, workers=workers)
    recipe = with_absolute_paths(recipe)
    run = resume if resume is not None else create_run_dir(out, recipe.name)
    with sole_process(run, is_new=resume is None):
        cells = cells_of(run, recipe)
        for cell in cells:
            _refuse_changed(cell)
        waiting = [cell for cell in cells if not cell.is_done]
        _check_tasks([cell.plan for cell in waiting], progress)
        prepared = _prepare(cells, progress)
        fingerprints = {inputs: data.fingerprint for inputs, data in prepared.items()}
        _refuse_other_data(cells, fingerprints)
        if (common := prepared.get(_inputs(recipe.pretrain))) is not None:
            list_rejected(common, run / "rejected.csv", progress)
        if _compare_with_earlier(run, recipe, progress):
            cells = cells_of(run, recipe)  # what they have read is gone
            waiting = [cell for cell in cells if not cell.is_done]
        # only now: a recipe that is refused must not replace the one that the cells were trained with
        fields = {"command": recipe.run_by, "num_cells": len(cells), "workers": len(environments)}
        update_run_json(run, fields)
        write_run_recipe(run, recipe)
        progress.message(
            f"{recipe.name}: {len(cells)} cells, {len(cells) - len(waiting)} of them done, "
            f"{len(environments)} at once; results in {run}"
        )
        options = {"environments": environments, "logs": run / "workers", "progress": progress}
        options["resume"] = resume_command(recipe.run_by, run)
        _pretrain(cells, options)
        _finetune(cells_of(run, recipe), options)
        if waiting:
            # a file may have changed before the last cells began
            _refuse_other_data(cells, fingerprints)
        found = load_sweep_run(run)
        scores = pd.concat([cell.scores for cell in found.cells], ignore_index=True)
        write_atomically(run / SCORES_FILE, scores_csv(scores))
    return found


def _pretrain(cells: Sequence[CellRuns], options: Mapping[str, Any]) -> None:
    """Pre-train and measure the cells, the longest first."""
    run_jobs(
        pretrain_and_measure,
        [Job(cell.plan.name, (cell.plan, cell.folder), cell.plan.work) for cell in cells],
        noun="cell",
        finished=[cell.plan.name for cell in cells if cell.is_measured],
        describe=lambda job, _: describe_cell(CellRuns(*job.arguments)),
        **options,
    )


def _finetune(cells: Sequence[CellRuns], options: Mapping[str, Any]) -> None:
    """Fine-tune every pre-trained model on every task."""
    jobs, finished = [], []
    for cell in cells:
        waiting = cell.waiting_tasks
        for recipe in cell.plan.finetune if cell.diverged is None else ():
            task = recipe.task.name
            jobs.append(Job(f"{cell.plan.name} {task}", (recipe, cell.task_folder(task), str(cell.pretrain))))
            if recipe not in waiting:
                finished.append(jobs[-1].name)
    run_tasks(jobs, run_task, finished=finished, **options)


def _compare_with_earlier(run: Path, recipe: SweepRecipe, progress: Progress) -> bool:
    """Say what a resumption leaves out; delete all scores, and return True, if it scores other sequences."""
    if not (run / "recipe.yaml").is_file():
        return False
    before = load_recipe(run / "recipe.yaml", kind=SweepRecipe)
    left_out = {plan.name for plan in before.plan()} - {plan.name for plan in recipe.plan()}
    left_out |= {*before.tasks} - {*recipe.tasks}
    if left_out:
        progress.message(
            f"the results leave out {', '.join(sorted(left_out))} of this run, whose files stay; to keep all, list all "
            "variants, seeds and tasks"
        )
    is_other = before.measure_sequences != recipe.measure_sequences
    for path in run.glob(f"cells/*/*/{SCORES_FILE}") if is_other else ():
        path.unlink()
    return is_other


def _check_tasks(cells: Sequence[SweepCell], progress: Progress) -> None:
    """Load every task once, so that one that cannot be fine-tuned on is found before the first cell is pre-trained."""
    for cell in cells:
        for finetune in cell.finetune:
            require_fitting_model(finetune, cell.pretrain, Path(f"cell {cell.label}"))
    configs = {recipe.task.name: recipe.task for cell in cells for recipe in cell.finetune}
    if configs:
        # importing them takes seconds
        from exlm_cli.tasks.registry import load_task

        for config in configs.values():
            load_task(config, progress)


def _prepare(cells: Iterable[CellRuns], progress: Progress) -> dict[_Inputs, PreparedData]:
    """Tokenise the inputs of all cells: the common ones, and those of variants that change data or tokenizer."""
    own = {_inputs(cell.plan.pretrain): cell.plan.pretrain for cell in cells}
    return {inputs: prepare_data(pretrain, progress=progress) for inputs, pretrain in own.items()}


def _inputs(recipe: PretrainRecipe) -> _Inputs:
    return recipe.data, recipe.tokenizer


def _refuse_changed(cell: CellRuns) -> None:
    """Refuse to continue a cell of which a run was begun with another recipe."""
    runs: dict[Path, PretrainRecipe | FinetuneRecipe] = {cell.pretrain: cell.plan.pretrain}
    runs |= {cell.task_folder(recipe.task.name): recipe for recipe in cell.plan.finetune}
    for run, recipe in runs.items():
        if (run / "recipe.yaml").is_file():
            both = load_recipe(run / "recipe.yaml", kind=type(recipe)), recipe
            if changes := describe_changes(*(identity_values(with_absolute_paths(one)) for one in both)):
                raise CheckpointError(
                    f"{run}: this run was begun with another recipe{changes}",
                    "start the changed recipe as a new run, without `--resume RUN`; a run whose folder is deleted is "
                    "done again",
                )


def _refuse_other_data(cells: Iterable[CellRuns], fingerprints: Mapping[_Inputs, str]) -> None:
    """Refuse cells that were trained on other content of the same inputs, so that no mean is over two corpora."""
    for cell in cells:
        if not (cell.pretrain / RUN_FILE).is_file():
            continue
        then = read_run_json(cell.pretrain).data_fingerprint
        if then is not None and then != fingerprints[_inputs(cell.plan.pretrain)]:
            raise CheckpointError(
                f"{cell.folder}: the content of its inputs has changed since this cell was trained",
                "restore the files, or start a new run with `--out DIR`; a cell whose folder is deleted is trained "
                "again",
            )


def describe_cell(cell: CellRuns) -> str:
    """Return the line of a measured cell."""
    if cell.diverged is not None:
        return f"diverged at {cell.diverged}"
    bits = cell.value("entropy_bits")
    unit = "" if math.isnan(bits) else " bits"
    return f"loss {format_fixed(cell.value('loss'), 3)}, entropy {format_fixed(bits, 2)}{unit}"
