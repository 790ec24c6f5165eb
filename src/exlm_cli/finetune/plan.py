"""What a fine-tuning run trains: splits of its rows, their cells, and what these have left in its folder."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exlm_cli.config.finetune import FinetuneRecipe, GridPoint
from exlm_cli.files import read_json
from exlm_cli.finetune.features import FeatureStore
from exlm_cli.finetune.results import LOGITS_FILE, RESULT_FILE, CellResult, cell_folder
from exlm_cli.finetune.scores import MODEL, Origin, make_scores, point_scores, score_rows_of
from exlm_cli.format import format_number
from exlm_cli.tasks.base import DownstreamTask
from exlm_cli.train.checkpoint import best_paths, checkpoint_paths
from exlm_cli.train.pretrained import Pretrained
from exlm_cli.train.task import Selection

if TYPE_CHECKING:
    from exlm_cli.finetune.cells.trainer import TaskData


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
        """Delete what a finished cell needs no more; a process killed at this point may have left some.

        The parent of a worker may be deleting all weights of a cell that is beaten.
        """
        for path in checkpoint_paths(self.folder):
            shutil.rmtree(path, ignore_errors=True)


def describe_result(result: CellResult, metric: str) -> str:
    """Return a line on the best epoch of a cell and the scores there."""
    scores = ", ".join(
        f"{split} {metric} {format_number(of_split[metric])}" for split, of_split in result.metrics.items()
    )
    return f"best epoch {result.best_epoch} of {result.epochs}: {scores}; {result.elapsed_s:.0f} s"


@dataclass(frozen=True)
class SplitPlan:
    """One split of the rows.

    Attributes:
        seed: Its `task.split_seed`.
        data: Its encoded rows.
        cells: By grid point, then by seed.
    """

    seed: int
    task: DownstreamTask
    data: "TaskData"
    points: Sequence[GridPoint]
    cells: Mapping[str, Sequence[Cell]]

    @property
    def all_cells(self) -> list[Cell]:
        """Cells of every grid point."""
        return [cell for of_point in self.cells.values() for cell in of_point]


@dataclass(frozen=True)
class RunPlan:
    """What a run trains.

    Attributes:
        checkpoint: Source of the initial weights; None: they are drawn.
        length: Tokens of a sequence before repetition.
        has_baseline: Whether baselines are scored too.
        splits: The run's own first.
        features: Features of the molecules, which forests and descriptors share.
    """

    folder: Path
    recipe: FinetuneRecipe
    weights: Pretrained
    checkpoint: Path | None
    length: int
    use_grid: bool
    has_baseline: bool
    splits: Sequence[SplitPlan]
    features: FeatureStore

    @property
    def cells(self) -> list[Cell]:
        """Cells of every split."""
        return [cell for split in self.splits for cell in split.all_cells]


def keep_best_point(split: SplitPlan, recipe: FinetuneRecipe) -> GridPoint:
    """Return the grid point with the best validation so far, and delete the weights of those that it beats.

    A point counts once all its seeds are done. Of equals, and where no validation is defined, it is the first.
    """
    data = split.data
    selection = Selection(data.selection_metric, data.is_greater_better)
    done = [point for point in split.points if all(cell.is_done for cell in split.cells[point.label])]
    rows = [
        row
        for point in done
        for cell in split.cells[point.label]
        for row in score_rows_of(Origin(MODEL, point.label, split.seed, cell.seed), cell.read().metrics, {})
    ]
    values = point_scores(make_scores(rows), data.selection_metric, recipe.aggregate)
    best, best_value = (done or split.points)[0], None
    for point in done:
        if selection.is_better(values[point.label], best_value):
            best, best_value = point, values[point.label]
    for point in done:
        for cell in split.cells[point.label] if point is not best else ():
            cell.drop_weights()
    return best
