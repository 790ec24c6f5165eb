"""Cells of a fine-tuning run, each one seed at one grid point: trained, and its best epoch scored once."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.config.finetune import NO_GRID, FinetuneRecipe, GridPoint
from exlm_cli.distributed.ranks import Ranks
from exlm_cli.errors import CheckpointError
from exlm_cli.files import read_json, write_json
from exlm_cli.finetune.features import FeatureStore
from exlm_cli.finetune.model import build_task_model, cell_identity
from exlm_cli.finetune.results import LOGITS_FILE, RESULT_FILE, CellResult, cell_folder, write_logits
from exlm_cli.finetune.scores import LabelScores, Scores
from exlm_cli.finetune.trainer import FinetuneTask, TaskData
from exlm_cli.format import format_number, printable
from exlm_cli.progress import Progress
from exlm_cli.run_dir import METRICS_FILE, MetricsLog
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
    """One seed at one grid point, and its folder."""

    point: GridPoint
    seed: int
    folder: Path

    @property
    def is_done(self) -> bool:
        """Whether the cell has its result."""
        return (self.folder / RESULT_FILE).is_file()

    @property
    def has_weights(self) -> bool:
        """Whether the weights of its best epoch exist; `drop_weights` deletes them."""
        return bool(best_paths(self.folder))

    @property
    def label(self) -> str:
        """Name of the cell in messages and on a bar."""
        return f"seed {self.seed}" if self.point.label == NO_GRID else f"{self.point.label} seed {self.seed}"

    def describe(self, result: CellResult, metric: str) -> str:
        """Return a line on its best epoch and the scores there."""
        scores = ", ".join(
            f"{split} {metric} {format_number(of_split[metric])}" for split, of_split in result.metrics.items()
        )
        return f"{self.label}: best epoch {result.best_epoch} of {result.epochs}: {scores}; {result.elapsed_s:.0f} s"

    def read(self) -> CellResult:
        """Return its `result.json`; a file that cannot be read is a `CheckpointError`."""
        hint = "delete the file; a resumed run trains this cell again"
        return read_json(self.folder / RESULT_FILE, CellResult, hint=hint)


@dataclass(frozen=True)
class Job:
    """What all splits of a run share.

    Attributes:
        checkpoint: Source of the initial weights; None: they are drawn.
        length: Tokens of a sequence before repetition.
        features: Features of the molecules, which baselines and descriptors share.
    """

    weights: Pretrained
    checkpoint: Path | None
    length: int
    use_grid: bool
    has_baseline: bool
    ranks: Ranks
    progress: Progress
    callbacks: Sequence[Callback]
    features: FeatureStore


@dataclass(frozen=True)
class SplitRun:
    """One split of a job: its recipe, directory and data.

    Attributes:
        resume_command: Continues the run, whichever split is at work.
    """

    job: Job
    recipe: FinetuneRecipe
    points: list[GridPoint]
    folder: Path
    data: TaskData
    resume_command: str

    @property
    def split_seed(self) -> int:
        """Names the split in `scores.csv`."""
        return self.recipe.task.split_seed

    def cells(self, point: GridPoint) -> list[Cell]:
        """Return the cells of a grid point, one for each seed."""
        return [Cell(point, seed, cell_folder(self.folder, point.label, seed)) for seed in self.recipe.seeds]


def drop_weights(run: SplitRun, point: GridPoint) -> None:
    """Delete the weights and logits of a grid point's cells; their results and curves stay."""
    for cell in run.cells(point):
        shutil.rmtree(cell.folder / "checkpoints", ignore_errors=True)
        (cell.folder / LOGITS_FILE).unlink(missing_ok=True)


def run_cell(run: SplitRun, cell: Cell) -> CellResult:
    """Train a cell or continue it, score its best epoch and return its result; a cell that is done is only read.

    All ranks call this; rank 0 writes.

    Raises:
        ExlmError: Divergence, interruption, a checkpoint that cannot be written or trusted.
    """
    job, data = run.job, run.data
    ranks, weights = job.ranks, job.weights
    if not ranks.first(lambda: cell.is_done):
        if ranks.is_first:
            cell.folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(cell.folder)
        recipe = cell.point.recipe
        model = build_task_model(weights, recipe, data, cell.seed, ranks.device)
        begun = "scratch" if recipe.init == "scratch" else weights.sha256
        origin = {"checkpoint": begun, **cell_identity(recipe, cell.seed, weights.recipe, weights.tokenizer)}
        task = FinetuneTask(recipe, cell.seed, data, model, origin, job.progress, ranks)
        group = run.folder.resolve().name
        title = f"{group}: {cell.label}"
        trackers = build_trackers(run.recipe.train.report_to, recipe, run.folder, title, group, job.progress)
        loop = TrainingLoop(
            task,
            recipe.train,
            recipe.optim,
            seed=cell.seed,
            run=cell.folder,
            metrics=MetricsLog(cell.folder / METRICS_FILE),
            progress=job.progress,
            resume_command=run.resume_command,
            callbacks=[*trackers, *job.callbacks],
            selection=Selection(data.task.selection_metric, data.task.is_greater_better, recipe.train.patience),
            label=cell.label,
            ranks=ranks,
        )
        _resume(loop, cell.folder, job.progress)
        result = _score(cell, task, loop.fit(), ranks)
        ranks.first(lambda: write_json(cell.folder / RESULT_FILE, result))
    if ranks.is_first:
        # a finished cell needs no checkpoint to resume from; a process killed at this point may have left some
        for path in checkpoint_paths(cell.folder):
            shutil.rmtree(path)
    return ranks.first(cell.read)


def _resume(loop: TrainingLoop, folder: Path, progress: Progress) -> None:
    def find() -> str | None:
        found = newest_good_checkpoint(folder, progress.message)
        return None if found is None else found.name

    name = loop.ranks.first(find)
    if name is not None:
        loop.ranks.together(lambda: loop.resume(folder / "checkpoints" / name))
    elif loop.ranks.is_first:
        loop.metrics.truncate_after(0)


def _score(cell: Cell, task: FinetuneTask, result: LoopResult, ranks: Ranks) -> CellResult:
    """Load the best weights, score every split but the training one, and write the predictions."""
    assert result.best is not None, "a run with a selection has a best checkpoint"
    best = result.best
    reason = ranks.first(lambda: verify_checkpoint(best))
    if reason is not None:
        raise CheckpointError(
            f"{result.best} is refused: {reason}", f"delete {cell.folder} and resume the run to train this cell again"
        )
    state, downstream = result.state, task.data.task
    # the last validation has just predicted with these weights, unless this process only continued a finished loop
    validated = task.last_validation if state.best_step == state.step else None
    if validated is None:
        load_model_weights(best, task.model)
    assert state.best_epoch is not None, "known where there is a best checkpoint"
    assert state.best_step is not None, "likewise"
    metrics: Scores = {}
    labels: LabelScores = {}
    notes: list[str] = []
    for split in downstream.splits:
        if split != "train":
            loss, outputs = validated if split == "valid" and validated is not None else task.predict(split)
            encoded = task.data.splits[split]
            metrics[split] = {"loss": loss, **encoded.score([outputs])}
            if of_labels := encoded.score_labels([outputs]):
                labels[split] = {name: dict(scores) for name, scores in of_labels.items()}
            notes += (printable(f"{split}: {note}") for note in encoded.describe_outputs([outputs]))
            if ranks.is_first:
                encoded.write_predictions(cell.folder, split, [outputs])
                if downstream.loss == "span" and split == "valid":
                    write_logits(cell.folder, outputs)
    return CellResult(
        task=downstream.name,
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
