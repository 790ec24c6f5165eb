"""Live view of a running sweep: a table of its cells, a bar with the time left, a line for each finished cell."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from exlm_cli.config.sweep import SweepCell
from exlm_cli.experiments.results import SweepCellResult, cell_folder
from exlm_cli.format import format_fixed, format_percent
from exlm_cli.progress import Bar, Board, Progress

_TAIL_BYTES = 8192
"""Bytes at the end of a metrics.jsonl that hold at least one whole row."""


@contextmanager
def open_board(
    run: Path, cells: Sequence[SweepCell], results: Mapping[str, SweepCellResult | None], progress: Progress
) -> Iterator["SweepBoard"]:
    """Show the table of a sweep until the context ends.

    Args:
        results: Result of each cell by its folder; None for cells that are not done.
    """
    rows, columns = (list(dict.fromkeys(getattr(cell, axis) for cell in cells)) for axis in ("row", "column"))
    done = sum(cell.work for cell in cells if results[cell.folder] is not None) / sum(cell.work for cell in cells)
    with (
        progress.board("Entropy in bits, or share of the training done", rows, columns) as board,
        progress.bar("sweep in %", 100, done=int(100 * done)) as bar,
    ):
        yield SweepBoard(run, cells, results, board, bar, progress)


class SweepBoard:
    """Shows results as cells finish, and reads from the files of running cells how far they are."""

    def __init__(
        self,
        run: Path,
        cells: Sequence[SweepCell],
        results: Mapping[str, SweepCellResult | None],
        board: Board,
        bar: Bar,
        progress: Progress,
    ) -> None:
        self._run, self._cells, self._board, self._bar, self._progress = run, cells, board, bar, progress
        self._results = {folder: result for folder, result in results.items() if result is not None}
        self._shares: dict[str, float] = {}
        for cell in cells:
            self._show(cell)

    @property
    def num_cells(self) -> int:
        """Number of all cells."""
        return len(self._cells)

    @property
    def num_done(self) -> int:
        """Number of finished cells."""
        return len(self._results)

    def say(self, text: str) -> None:
        """Write one line that stays."""
        self._progress.message(text)

    def look(self, running: Iterable[SweepCell]) -> None:
        """Show how far the running cells are."""
        for cell in running:
            self._shares[cell.folder] = trained_share(cell, cell_folder(self._run, cell))
            self._show(cell)
        self._advance()

    def finish(self, cell: SweepCell, result: SweepCellResult) -> None:
        """Show the result of a cell."""
        self._results[cell.folder] = result
        self._show(cell)
        self._advance()
        self.say(f"{cell.folder}: {_describe(result)} ({self.num_done} of {self.num_cells} cells)")

    def _advance(self) -> None:
        shares = self._shares | dict.fromkeys(self._results, 1.0)
        done = sum(cell.work * shares.get(cell.folder, 0.0) for cell in self._cells)
        total = sum(cell.work for cell in self._cells)
        self._bar.update(int(100 * done / total), rate=f"{self.num_done} of {self.num_cells} cells")

    def _show(self, cell: SweepCell) -> None:
        """Show what is known at the place of a cell, all its seeds side by side."""
        here = [other for other in self._cells if (other.row, other.column) == (cell.row, cell.column)]
        is_done = all(other.folder in self._results for other in here)
        self._board.show(cell.row, cell.column, " ".join(map(self._text, here)), is_done=is_done)

    def _text(self, cell: SweepCell) -> str:
        result = self._results.get(cell.folder)
        if result is not None:
            return "diverged" if result.diverged is not None else format_fixed(result.metrics["entropy_bits"], 2)
        share = self._shares.get(cell.folder)
        return "·" if share is None else format_percent(share, 0)


def trained_share(cell: SweepCell, folder: Path) -> float:
    """Return how much of a cell's training is done: pre-training and each seed of fine-tuning count the same."""
    metrics, train = folder / "pretrain" / "metrics.jsonl", cell.pretrain.train
    pretrained = 0.0
    if train.max_steps is not None:
        pretrained = _last_value(metrics, "step") / train.max_steps
    elif train.max_epochs is not None:
        pretrained = _last_value(metrics, "epoch") / train.max_epochs
    finetuned = sum(1 for _ in folder.glob("finetune/*/cells/*/seed-*/result.json"))
    num_trainings = 1 + sum(len(recipe.seeds) for recipe in cell.finetune)
    return min(1.0, (min(1.0, pretrained) + finetuned) / num_trainings)


def _last_value(metrics: Path, column: str) -> float:
    """Return the value in the last whole row of a metrics.jsonl that has the column; 0 where there is none."""
    if not metrics.is_file():
        return 0.0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the first line may be cut; a damaged one is explained by the process of the cell
        if isinstance(row, dict) and isinstance(row.get(column), int | float):
            return float(row[column])
    return 0.0


def _describe(result: SweepCellResult) -> str:
    if result.diverged is not None:
        return f"diverged: {result.diverged}"
    entropy = result.metrics["entropy_bits"]
    figures = [
        f"loss {format_fixed(result.metrics['loss'], 3)}",
        f"entropy {format_fixed(entropy, 2)}" + ("" if entropy is None else " bits"),
        *(f"{task} {scores.metric} {format_fixed(scores.score, 3)}" for task, scores in result.scored_tasks.items()),
    ]
    return ", ".join([*figures, *(f"{task} diverged" for task in result.diverged_tasks)])
