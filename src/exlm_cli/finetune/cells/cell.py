"""Cells of a fine-tuning run, each one seed at one grid point on one split: trained, and its best epoch scored once."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from exlm_cli.config.finetune import FinetuneRecipe, GridPoint
from exlm_cli.errors import CheckpointError
from exlm_cli.files import read_json, write_json
from exlm_cli.finetune.cells.model import build_task_model, cell_identity
from exlm_cli.finetune.cells.trainer import FinetuneTask, TaskData
from exlm_cli.finetune.results import LOGITS_FILE, RESULT_FILE, CellResult, cell_folder, write_logits
from exlm_cli.finetune.scores import LabelScores, Scores
from exlm_cli.format import format_number, printable
from exlm_cli.progress import Progress
from exlm_cli.run_dir import METRICS_FILE, MetricsLog, resume_command
from exlm_cli.train.checkpoint import (
    best_paths,
    checkpoint_paths,
    load_model_weights,
    newest_good_checkpoint,
    remove_unfinished,
    verify_checkpoint,
)
from exlm_cli.train.loop import TrainingLoop
from exlm_cli.train.pretrained import Pretrained
from exlm_cli.train.task import Callback, LoopResult, Selection
from exlm_cli.train.trackers import build_trackers


@dataclass(frozen=True)
class Cell:
    """One seed at one grid point on one split of the rows.

    Attributes:
        run: Run directory.
        point: Its recipe has this split.
        label: Name of the cell in messages and on a bar.
    """

    run: Path
    point: GridPoint
    seed: int
    label: str

    @property
    def recipe(self) -> FinetuneRecipe:
        """What it is trained with."""
        return self.point.recipe

    @property
    def split_seed(self) -> int:
        """Names the split in `scores.csv`."""
        return self.recipe.task.split_seed

    @property
    def folder(self) -> Path:
        """Where it is trained."""
        return cell_folder(self.run, self.point.label, self.split_seed, self.seed)

    @property
    def is_done(self) -> bool:
        """Whether the cell has its result."""
        return (self.folder / RESULT_FILE).is_file()

    @property
    def has_weights(self) -> bool:
        """Whether the weights of its best epoch exist; `drop_weights` deletes them."""
        return bool(best_paths(self.folder))

    def read(self) -> CellResult:
        """Return its `result.json`; a file that cannot be read is a `CheckpointError`."""
        hint = "delete the file; a resumed run trains this cell again"
        return read_json(self.folder / RESULT_FILE, CellResult, hint=hint)

    def drop_weights(self) -> None:
        """Delete its weights and logits; its result and curves stay."""
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        (self.folder / LOGITS_FILE).unlink(missing_ok=True)

    def drop_checkpoints(self) -> None:
        """Delete what a finished cell needs no more; a process killed at this point may have left some."""
        for path in checkpoint_paths(self.folder):
            shutil.rmtree(path)


def describe_result(result: CellResult, metric: str) -> str:
    """Return a line on the best epoch of a cell and the scores there."""
    scores = ", ".join(
        f"{split} {metric} {format_number(of_split[metric])}" for split, of_split in result.metrics.items()
    )
    return f"best epoch {result.best_epoch} of {result.epochs}: {scores}; {result.elapsed_s:.0f} s"


def run_cell(
    cell: Cell,
    data: TaskData,
    weights: Pretrained,
    device: torch.device,
    *,
    callbacks: Sequence[Callback] = (),
    progress: Progress,
) -> None:
    """Train a cell or continue it, score its best epoch and write its result.

    Args:
        data: The split of the cell.
        weights: What training begins with.

    Raises:
        ExlmError: Divergence, interruption, a checkpoint that cannot be written or trusted.
    """
    recipe = cell.recipe
    cell.folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(cell.folder)
    model = build_task_model(weights, recipe, data, cell.seed, device)
    begun = "scratch" if recipe.init == "scratch" else weights.sha256
    origin = {"checkpoint": begun, **cell_identity(recipe, cell.seed, weights.recipe, weights.tokenizer)}
    task = FinetuneTask(recipe, cell.seed, data, model, origin, progress)
    group = cell.run.resolve().name
    trackers = build_trackers(recipe.train.report_to, recipe, cell.run, f"{group}: {cell.label}", group, progress)
    loop = TrainingLoop(
        task,
        recipe.train,
        recipe.optim,
        seed=cell.seed,
        run=cell.folder,
        metrics=MetricsLog(cell.folder / METRICS_FILE),
        progress=progress,
        resume_command=resume_command("finetune", cell.run),
        callbacks=[*trackers, *callbacks],
        selection=Selection(data.selection_metric, data.is_greater_better, recipe.train.patience),
        label=cell.label,
    )
    checkpoint = newest_good_checkpoint(cell.folder, progress.message)
    if checkpoint is None:
        loop.metrics.truncate_after(0)
    else:
        loop.resume(checkpoint)
    write_json(cell.folder / RESULT_FILE, _score(cell, task, loop.fit()))
    cell.drop_checkpoints()


def _score(cell: Cell, task: FinetuneTask, result: LoopResult) -> CellResult:
    """Load the best weights, score every part but the training rows, and write the predictions."""
    assert result.best is not None, "a run with a selection has a best checkpoint"
    reason = verify_checkpoint(result.best)
    if reason is not None:
        raise CheckpointError(
            f"{result.best} is refused: {reason}", f"delete {cell.folder} and resume the run to train this cell again"
        )
    state, data = result.state, task.data
    # the last validation has just predicted with these weights, unless this process only continued a finished loop
    validated = task.last_validation if state.best_step == state.step else None
    if validated is None:
        load_model_weights(result.best, task.model)
    assert state.best_epoch is not None, "known where there is a best checkpoint"
    assert state.best_step is not None, "likewise"
    metrics: Scores = {}
    labels: LabelScores = {}
    notes: list[str] = []
    for split, encoded in data.scored.items():
        loss, outputs = validated if split == "valid" and validated is not None else task.predict(split)
        metrics[split] = {"loss": loss, **encoded.score([outputs])}
        if of_labels := encoded.score_labels([outputs]):
            labels[split] = {name: dict(scores) for name, scores in of_labels.items()}
        notes += (printable(f"{split}: {note}") for note in encoded.describe_outputs([outputs]))
        encoded.write_predictions(cell.folder, split, [outputs])
        if data.loss == "span" and split == "valid":
            write_logits(cell.folder, outputs)
    return CellResult(
        task=data.name,
        seed=cell.seed,
        grid=cell.point.values,
        parameters=sum(p.numel() for p in task.model.parameters()),
        epochs=state.epoch + 1,
        best_epoch=state.best_epoch + 1,
        steps=state.step,
        best_step=state.best_step,
        elapsed_s=round(state.elapsed_s + state.validate_s, 3),
        metrics=metrics,
        labels=labels,
        notes=tuple(notes),
        tokens_per_s=round(state.num_tokens / max(1e-9, state.elapsed_s), 1),
        outside_model_share=round(1 - state.model_s / max(1e-9, state.elapsed_s), 4),
    )
