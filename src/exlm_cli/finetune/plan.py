"""What a fine-tuning run trains: splits of its rows and their cells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.config.finetune import FinetuneRecipe, GridPoint
from exlm_cli.finetune.cells.cell import Cell
from exlm_cli.finetune.cells.trainer import TaskData
from exlm_cli.finetune.features import FeatureStore
from exlm_cli.finetune.results import CellResult
from exlm_cli.finetune.scores import MODEL, Origin, first_best, make_scores, point_scores, score_rows_of
from exlm_cli.format import format_number
from exlm_cli.tasks.base import DownstreamTask
from exlm_cli.train.pretrained import Pretrained


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
        features: Features of the molecules, which baselines and descriptors share.
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
    data, done = split.data, [p for p in split.points if all(cell.is_done for cell in split.cells[p.label])]
    if not done:
        return split.points[0]
    rows = [
        row
        for point in done
        for cell in split.cells[point.label]
        for row in score_rows_of(Origin(MODEL, point.label, split.seed, cell.seed), cell.read().metrics, {})
    ]
    by_label = point_scores(make_scores(rows), data.selection_metric, recipe.aggregate)
    values = [by_label[point.label] for point in done]
    best = done[first_best(values, is_greater_better=data.is_greater_better)]
    for point in done:
        for cell in split.cells[point.label] if point is not best else ():
            cell.drop_weights()
    return best
