"""The rows that a run was scored on, one by one: what the model read, truth, prediction, error, and the worst ones.

Axes: N scored rows, C outputs.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from exlm_cli.data import BoolArray
from exlm_cli.finetune.evaluation.calibration import PredictedRows
from exlm_cli.format import format_number, shorten
from exlm_cli.report.finetuning.molecules import draw_molecule
from exlm_cli.report.style import Card
from exlm_cli.tasks.base import FloatArray

NUM_CARDS = 8
_TEXT_CHARACTERS = 300
_WRONG = 0.5
"""Error of a label from which on the truth is not what was predicted."""


@dataclass(frozen=True)
class ShownRows:
    """Rows of the split whose scores are reported; `is_molecule` says whether what the model read are SMILES."""

    predicted: PredictedRows
    is_molecule: bool

    @cached_property
    def errors(self) -> FloatArray:
        """(N, C) distances of values, or 1 minus the probability of the truth, (N, 1) for classes; NaN: unknown."""
        rows = self.predicted
        if rows.loss == "regression":
            return np.abs(rows.mean - rows.targets)
        if rows.loss == "binary":
            return np.abs(rows.targets - rows.mean)
        true_N = np.nan_to_num(rows.targets[:, 0]).astype(np.int64)
        errors_N = 1 - rows.mean[np.arange(len(rows.mean)), true_N]
        return np.where(np.isnan(rows.targets[:, 0]), np.nan, errors_N)[:, None]

    @property
    def _is_wrong(self) -> BoolArray:
        """(N, C): whether an answer is not the truth, as every known value is; False where that is unknown."""
        if self.predicted.loss == "regression":
            return ~np.isnan(self.errors)
        if self.predicted.loss == "binary":
            return np.nan_to_num(self.errors) >= _WRONG
        truth_N = self.predicted.targets[:, 0]
        is_wrong: BoolArray = (self.predicted.mean.argmax(axis=1) != truth_N) & ~np.isnan(truth_N)
        return is_wrong[:, None]

    @property
    def _sizes(self) -> FloatArray:
        """(N, C): errors of wrong answers, those of values in standard deviations of the truth; -1 for right ones."""
        errors_NC = self.errors
        if self.predicted.loss == "regression":
            deviation_C = np.nanstd(self.predicted.targets, axis=0)
            errors_NC = errors_NC / np.where(deviation_C > 0, deviation_C, 1.0)
        return np.where(self._is_wrong, errors_NC, -1.0)

    def worst(self, is_chosen_N: BoolArray | None = None) -> list[tuple[int, int]]:
        """Return row and output of the largest errors, each row once, the largest first.

        Of labels and classes, they are those of wrong answers alone.

        Args:
            is_chosen_N: Whether a row may be taken; None: all.
        """
        errors_NC = self._sizes
        largest_N = errors_NC.max(axis=1)
        if is_chosen_N is not None:
            largest_N = np.where(is_chosen_N, largest_N, -1.0)
        order = np.argsort(-largest_N, kind="stable")[:NUM_CARDS]
        return [(int(row), int(errors_NC[row].argmax())) for row in order if largest_N[row] >= 0]

    def surprising(self) -> tuple[float, list[tuple[int, int]]]:
        """Return the least similarity of the third of the molecules that is most like the training molecules, and the
        largest errors of that third that are not among the `worst` of all; of values, errors in the largest quarter.
        """
        similarity_N = self.predicted.similarity
        assert similarity_N is not None, "the caller has asked"
        least = float(np.quantile(similarity_N, 2 / 3))
        is_near_N = similarity_N >= least
        is_near_N[[row for row, _ in self.worst()]] = False
        if self.predicted.loss == "regression":
            largest_N = self._sizes.max(axis=1)
            is_near_N &= largest_N >= np.quantile(np.maximum(largest_N, 0.0), 0.75)
        return least, self.worst(is_near_N)

    def cards(self, chosen: Iterable[tuple[int, int]]) -> list[Card]:
        """Return a card of each row: the molecule or text, truth, prediction and similarity."""
        return [self._card(row, output) for row, output in chosen]

    def _card(self, row: int, output: int) -> Card:
        rows, text = self.predicted, self.predicted.inputs[row]
        places = [f"{rows.places[row]} of the file"] if rows.places else []
        lines = [*self._describe(row, output), *places]
        if rows.similarity is not None:
            lines.insert(1, f"nearest training molecule: {rows.similarity[row]:.2f}")
        if not self.is_molecule:
            return Card(None, shorten(text, _TEXT_CHARACTERS), lines)
        return Card(draw_molecule(text), text, [*lines, shorten(text, _TEXT_CHARACTERS)])

    def _describe(self, row: int, output: int) -> list[str]:
        rows = self.predicted
        if rows.loss == "classes":
            truth, guess = int(rows.targets[row, 0]), int(rows.mean[row].argmax())
            return [
                f"true {rows.names[truth]} ({rows.mean[row, truth]:.3f}), predicted {rows.names[guess]} "
                f"({rows.mean[row, guess]:.3f})"
            ]
        name = f"{rows.names[output]}: " if len(rows.names) > 1 else ""
        true, predicted = float(rows.targets[row, output]), float(rows.mean[row, output])
        if rows.loss == "binary":
            return [f"{name}true {true:g}, probability {predicted:.3f}"]
        half = float(rows.half_widths[row, output])
        interval = ""
        if not math.isnan(half):
            ends = " to ".join(format_number(end, beside=predicted) for end in (predicted - half, predicted + half))
            interval = f", {100 * rows.level:g} % interval {ends}"
        return [f"{name}true {format_number(true)}, predicted {format_number(predicted)}{interval}"]
