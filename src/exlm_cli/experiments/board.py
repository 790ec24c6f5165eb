"""The standing of a grid while it runs: a table of cells, a bar with the time left, a line for each finished cell."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from exlm_cli.config.cells import CellPlan
from exlm_cli.experiments.cell_files import diverged_tasks, scored_tasks, task_score
from exlm_cli.experiments.workers import Event
from exlm_cli.format import NOT_DEFINED
from exlm_cli.progress import Bar, Board, Progress

_PARTS = 1000
"""The bar counts thousandths of the work."""
_TRAINING_BARS = ("train", "seed ")
"""How the bars of pre-training and of one seed of fine-tuning begin."""


@contextmanager
def open_board(
    plans: Sequence[CellPlan], results: Mapping[str, Mapping[str, Any] | None], progress: Progress
) -> Iterator["GridBoard"]:
    """Show the table of a grid until the context ends.

    Args:
        plans: All cells.
        results: Results by folder of those that are done, None for the others.
        progress: Where.
    """
    rows, columns = (list(dict.fromkeys(getattr(plan, axis) for plan in plans)) for axis in ("row", "column"))
    total = sum(plan.work for plan in plans)
    done = sum(plan.work for plan in plans if results[plan.folder] is not None)
    title = "Entropy in bits, or how far"
    with (
        progress.board(title, rows, columns) as board,
        progress.bar("grid", _PARTS, done=int(_PARTS * done / total)) as bar,
    ):
        yield GridBoard(plans, results, board, bar, progress)


class GridBoard:
    """Follows the events of cells and shows where they stand."""

    def __init__(
        self,
        plans: Sequence[CellPlan],
        results: Mapping[str, Mapping[str, Any] | None],
        board: Board,
        bar: Bar,
        progress: Progress,
    ) -> None:
        self._plans, self._board, self._bar, self._progress = plans, board, bar, progress
        self._results = {folder: result for folder, result in results.items() if result is not None}
        self._share: dict[str, float] = {}
        self._stages: dict[str, int] = {}
        for plan in plans:
            self._show(plan)

    @property
    def num_cells(self) -> int:
        """Cells with every seed."""
        return len(self._plans)

    @property
    def num_done(self) -> int:
        """Of them, those that are done."""
        return len(self._results)

    def say(self, text: str) -> None:
        """Say one line that stays."""
        self._progress.message(text)

    def follow(self, plan: CellPlan, event: Event) -> None:
        """Take in how far a cell is; only bars of training count."""
        if event["event"] != "bar" or not event["label"].startswith(_TRAINING_BARS) or not event["total"]:
            return
        # pre-training is one bar, each seed of each fine-tuning another; each counts the same
        if event["done"] == 0 or plan.folder not in self._stages:
            self._stages[plan.folder] = self._stages.get(plan.folder, 0) + 1
        num_stages = 1 + sum(len(recipe.seeds) for recipe in plan.finetune)
        before = min(self._stages[plan.folder], num_stages) - 1
        self._share[plan.folder] = (before + event["done"] / event["total"]) / num_stages
        self._show(plan)
        self._advance()

    def finish(self, plan: CellPlan, result: Mapping[str, Any]) -> None:
        """Take in the result of a cell and say it."""
        self._results[plan.folder] = result
        self._show(plan)
        self._advance()
        self.say(f"{plan.folder}: {_describe(result)} ({self.num_done} of {self.num_cells} cells)")

    def _advance(self) -> None:
        total = sum(plan.work for plan in self._plans)
        done = sum(
            plan.work * (1.0 if plan.folder in self._results else self._share.get(plan.folder, 0.0))
            for plan in self._plans
        )
        self._bar.update(int(_PARTS * done / total), rate=f"{self.num_done} of {self.num_cells} cells")

    def _show(self, plan: CellPlan) -> None:
        """Show the place of a cell, all its seeds side by side."""
        here = [other for other in self._plans if (other.row, other.column) == (plan.row, plan.column)]
        texts = [self._text(other) for other in here]
        is_done = all(other.folder in self._results for other in here)
        self._board.show(plan.row, plan.column, " ".join(texts), is_done=is_done)

    def _text(self, plan: CellPlan) -> str:
        result = self._results.get(plan.folder)
        if result is not None:
            return "diverged" if "diverged" in result else _two_decimals(result["metrics"]["entropy_bits"])
        share = self._share.get(plan.folder)
        return "·" if share is None else f"{100 * share:.0f}%"


def _describe(result: Mapping[str, Any]) -> str:
    if "diverged" in result:
        return f"diverged: {result['diverged']}"
    metrics = result["metrics"]
    entropy = metrics["entropy_bits"]
    figures = [
        f"loss {metrics['loss']:.3f}",
        f"entropy {_two_decimals(entropy)}" + ("" if entropy is None else " bits"),
    ]
    for task, scored in scored_tasks(result).items():
        score = task_score(scored)
        figures.append(f"{task} {scored['metric']} {NOT_DEFINED if score is None else f'{score:.3f}'}")
    return ", ".join([*figures, *(f"{task} diverged" for task in diverged_tasks(result))])


def _two_decimals(value: float | None) -> str:
    return NOT_DEFINED if value is None else f"{value:.2f}"
