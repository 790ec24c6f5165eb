"""What a fine-tuning run trains: splits of its rows and their cells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.config.finetune import FinetuneRecipe, GridPoint
from exlm_cli.finetune.cells.cell import Cell
from exlm_cli.finetune.cells.trainer import TaskData
from exlm_cli.finetune.features import FeatureStore
from exlm_cli.finetune.results import CellResult
from exlm_cli.finetune.scores import MODEL, Origin, make_scores, point_scores, score_rows_of
from exlm_cli.format import format_number
from exlm_cli.tasks.base import DownstreamTask
from exlm_cli.train.pretrained import Pretrained
from exlm_cli.train.task import Selection


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
    data: TaskData
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
        has_baseline: Whether baselines are scored too.
        splits: The run's own first.
        features: Features of the molecules, which forests and descriptors share.
    """

    folder: Path
    recipe: FinetuneRecipe
    weights: Pretrained
    checkpoint: Path | None
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
