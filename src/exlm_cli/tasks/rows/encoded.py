"""Encoded rows of a text, pair of texts or molecule each: scores, columns and files of the outputs of models.

Axes: K seeds, N rows, C outputs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data import IntArray
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import (
    PLACE_COLUMN,
    EncodedRows,
    EncodedSplit,
    FloatArray,
    Loss,
    SeedOutputs,
    Split,
    write_outputs,
)


@dataclass(frozen=True, kw_only=True)
class ScoredRows(EncodedSplit):
    """Rows of a split or of a file to predict.

    Attributes:
        loss, names: `loss` and `output_names` of the task.
        texts: One or two texts, or one SMILES, of each of N rows.
        rows: (N,) row of the input, counted from 0.
        places: Place of each row in its file for people, like `line 7`; none where nobody knows.
        scale: (C,) standard deviations of the training targets, as in `metrics.score_rows`.
    """

    loss: Loss
    names: tuple[str, ...]
    texts: Sequence[tuple[str, ...]]
    rows: IntArray
    places: Sequence[str] = ()
    scale: FloatArray | None = None

    def by_seed(self, outputs: SeedOutputs) -> FloatArray:
        """Return (K, N, C) probabilities or values, float64."""
        return metrics.probabilities_by_seed(self.loss, outputs, len(self.names))

    def score(self, outputs: SeedOutputs, is_scored_N: NDArray[np.bool_] | None = None) -> dict[str, float]:
        """Return the metrics, means over the labels or columns in which each is defined."""
        chosen = slice(None) if is_scored_N is None else is_scored_N
        return self._metrics(self.by_seed(outputs).mean(axis=0)[chosen], self.targets[chosen])

    def _metrics(self, mean_NC: FloatArray, targets_NC: FloatArray) -> dict[str, float]:
        return metrics.score_rows(self.loss, mean_NC, targets_NC, self.scale)

    def score_labels(self, outputs: SeedOutputs) -> dict[str, dict[str, float]]:
        """Return the metrics of each label or value by its name; nothing for classes or a single one."""
        return metrics.score_labels(self.loss, self.by_seed(outputs).mean(axis=0), self.targets, self.names)

    def describe_outputs(self, outputs: SeedOutputs) -> list[str]:
        """Return in words which outputs are the same in every row."""
        return metrics.describe_constant(self.loss, self.by_seed(outputs).mean(axis=0), self.targets, self.names)

    def prediction_columns(self, outputs: SeedOutputs) -> dict[str, list[str]]:
        """Return `<name>_probability` of each label or class, or `<name>_predicted` value; `predicted_class` if there
        are classes; over several seeds `<name>_seed_spread`, their standard deviation (n - 1).
        """
        by_seed_KNC = self.by_seed(outputs)
        mean_NC = by_seed_KNC.mean(axis=0)
        columns = name_columns(self.names, "predicted" if self.loss == "regression" else "probability", mean_NC)
        if self.loss == "classes":
            columns["predicted_class"] = [self.names[index] for index in mean_NC.argmax(axis=1)]
        if len(by_seed_KNC) > 1:
            columns |= name_columns(self.names, "seed_spread", by_seed_KNC.std(axis=0, ddof=1))
        return columns

    def stored(self) -> dict[str, Any] | None:
        """Return all but tokens and targets; None for a class of another package."""
        return {"kind": "rows", **self._stored_fields()} if type(self) is ScoredRows else None

    def _stored_fields(self) -> dict[str, Any]:
        scale = None if self.scale is None else self.scale.tolist()
        fields = {"loss": self.loss, "names": self.names, "texts": self.texts, "scale": scale}
        return {"fields": {**fields, "rows": self.rows.tolist(), "places": self.places}}

    def write_predictions(self, folder: Path, split: Split, outputs: SeedOutputs) -> None:
        """Write `predictions-<split>.csv`: probabilities of labels or classes, or values, by row of the input.

        Then come the truth, `<name>_true` or `true_class`, the place in the file, and the text or SMILES that the model
        read.
        """
        if self.loss == "classes":
            classes = self.targets[:, 0]
            truth = {"true_class": ["" if math.isnan(c) else self.names[int(c)] for c in classes]}
        else:
            truth = name_columns(self.names, "true", self.targets)
        texts = zip(*self.texts, strict=True)
        inputs = ("input",) if len(self.texts[0]) == 1 else ("input_a", "input_b")
        places = {PLACE_COLUMN: self.places} if self.places else {}
        more = {**truth, **places, **dict(zip(inputs, texts, strict=True))}
        mean_NC = self.by_seed(outputs).mean(axis=0)
        write_outputs(folder / f"predictions-{split}.csv", self.rows, self.names, mean_NC, more)


def restored_fields(stored: Mapping[str, Any], rows: EncodedRows) -> dict[str, Any]:
    """Return the fields of the `ScoredRows` of which `stored` was returned, given their tokens and targets."""
    fields = stored["fields"]
    return {
        **vars(rows),
        **fields,
        "names": tuple(fields["names"]),
        "texts": list(map(tuple, fields["texts"])),
        "rows": np.array(fields["rows"], dtype=np.int64),
        "scale": None if fields["scale"] is None else np.array(fields["scale"]),
    }


def name_columns(names: Sequence[str], what: str, values_NC: FloatArray) -> dict[str, list[str]]:
    """Return cells of `<name>_<what>` for C names, with ten digits, empty for NaN."""
    return {
        f"{name}_{what}": ["" if math.isnan(value) else f"{value:.10g}" for value in column]
        for name, column in zip(names, values_NC.T, strict=True)
    }
