"""`scores.csv` of a run or a cell of a sweep: every score in one tidy table, and what is read from it. No torch.

A row is the value of one metric: of a model, at a grid point, on one split of the rows (`split_seed`), trained with one
seed, over the rows of `split`, for one label or for all together. The seed `average` is the mean prediction of all
seeds, which is what `exlm predict` gives. Only the grid point that is reported has one. In a cell of a sweep the rows
are those of the pre-trained model: a grid point is the masking of the validation rows, like `p=0.387`.
"""

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from exlm_cli.errors import CheckpointError
from exlm_cli.files import csv_bytes, finite_or_none, read_whole, write_atomically
from exlm_cli.run_dir import resume_command

if TYPE_CHECKING:
    from pandas import DataFrame, Series

SCORES_FILE = "scores.csv"
"""In the folder of a finished run; that of a run over several splits has the rows of all."""
MODEL = "exlm"
AVERAGE = "average"
BASELINE_NAMES = {
    "forest-ecfp4": "ECFP4 + random forest",
    "forest-rdkit2d": "RDKit 2D + random forest",
    "boosting": "RDKit 2D and ECFP4 counts + gradient boosting",
    "tfidf": "TF-IDF + linear model",
}
"""How reports name the baselines."""
BOTH = "both"
"""The mean of the model's and a baseline's predictions."""
OTHER_NAMES = {**BASELINE_NAMES, BOTH: "both, model and baseline"}
"""How reports name what predicts besides the model alone."""

Predictor = Literal["model", "baseline", "both"]
"""What may predict new rows: the model, the baseline that is the best in validation, or the mean of these two."""
PREDICTORS: tuple[Predictor, ...] = get_args(Predictor)

Aggregate = Literal["mean", "median"]
Scores = dict[str, dict[str, float | None]]
"""Metrics by split, then by name; None where a metric is not defined."""
LabelScores = dict[str, Scores]
"""Metrics by split, then by label or value, then by name."""


class Origin(NamedTuple):
    """What was scored: the first columns of a row."""

    model: str
    grid_point: str
    split_seed: int
    seed: int | str


class ScoreRow(NamedTuple):
    """A row of `scores.csv`; `label` is empty for all together, `value` None or NaN where a metric is not defined."""

    model: str
    grid_point: str
    split_seed: int
    seed: int | str
    split: str
    label: str
    metric: str
    value: float | None


COLUMNS = ScoreRow._fields
_TYPES = {**dict.fromkeys(COLUMNS, "str"), "split_seed": "int64"}
"""As the file is read; values are strings there, which become numbers later."""


def score_rows_of(origin: Origin, metrics: Scores, labels: LabelScores) -> Iterator[ScoreRow]:
    """Yield the rows of what one model scored."""
    for split, of_split in metrics.items():
        by_label = {"": of_split, **labels.get(split, {})}
        for label, of_label in by_label.items():
            for metric, value in of_label.items():
                yield ScoreRow(*origin, split, label, metric, value)


class Spread(NamedTuple):
    """Values of one metric over seeds, splits or both; NaN where there are none, or for `std` fewer than two.

    Attributes:
        std: Sample standard deviation (n - 1 in the denominator).
        num: Number of values that are defined.
    """

    mean: float
    std: float
    median: float
    low: float
    high: float
    num: int

    def center(self, aggregate: Aggregate) -> float:
        """Return the mean or the median."""
        return self.median if aggregate == "median" else self.mean


def spread_of(values: "Sequence[float] | Series[float]") -> Spread:
    """Return the spread of values; those that are NaN are left out."""
    given = np.asarray(values, dtype=np.float64)
    known = given[~np.isnan(given)]
    if not len(known):
        return Spread(math.nan, math.nan, math.nan, math.nan, math.nan, 0)
    std = float(known.std(ddof=1)) if len(known) > 1 else math.nan
    return Spread(float(known.mean()), std, float(np.median(known)), known.min().item(), known.max().item(), len(known))


@dataclass(frozen=True)
class RunScores:
    """The scores of one run.

    Attributes:
        table: As in the file; `seed` and `label` are strings, a value that is not defined is NaN.
    """

    table: "DataFrame"

    @cached_property
    def reported(self) -> "DataFrame":
        """Rows of the baselines, and of the model at the grid point that is reported, which each split has chosen."""
        keys = ["model", "grid_point", "split_seed"]
        chosen = self.table.loc[self.table.seed == AVERAGE, keys].drop_duplicates()
        return self.table.merge(chosen, on=keys, how="inner")

    @property
    def baselines(self) -> list[str]:
        """Baselines, in the order of the file."""
        return [str(model) for model in self.table.model.unique() if model in BASELINE_NAMES]

    @property
    def others(self) -> list[str]:
        """What was scored besides the model alone: baselines, and the mean of both."""
        return [str(model) for model in self.table.model.unique() if model in OTHER_NAMES]

    @property
    def splits(self) -> list[str]:
        """Parts of the data that were scored, such as `valid` and `test`."""
        return [str(split) for split in self.table.split.unique()]

    @property
    def split_seeds(self) -> list[int]:
        """Splits of the rows, the run's own first."""
        return [int(seed) for seed in self.table.split_seed.unique()]

    def names(self, split: str) -> list[str]:
        """Return the metrics of a split."""
        rows = self.table[(self.table.split == split) & (self.table.label == "") & (self.table.model == MODEL)]
        return [str(name) for name in rows.metric.unique()]

    def labels(self, split: str, model: str = MODEL) -> list[str]:
        """Return the labels or values that have scores of their own."""
        rows = self.table[(self.table.split == split) & (self.table.label != "") & (self.table.model == model)]
        return [str(label) for label in rows.label.unique()]

    def average(self, split: str, metric: str, *, model: str = MODEL, label: str = "") -> Spread:
        """Return what the mean prediction of the seeds scores, over the splits of the rows."""
        rows = self._rows(split, metric, model, label)
        return spread_of(rows[rows.seed == AVERAGE].value)

    def seeds(self, split: str, metric: str, *, model: str = MODEL) -> Spread:
        """Return what the seeds score alone, over the seeds of all splits of the rows."""
        return spread_of(self.by_seed(split, metric, model=model).value)

    def by_seed(self, split: str, metric: str, *, model: str = MODEL) -> "DataFrame":
        """Return the rows of the seeds alone, in the order of the file."""
        rows = self._rows(split, metric, model, "")
        return rows[rows.seed != AVERAGE]

    def of_seed(self, split: str, seed: int, split_seed: int) -> dict[str, float]:
        """Return the metrics of one seed of the model on one split of the rows, by name, where they are defined."""
        rows = self.reported
        rows = rows[(rows.model == MODEL) & (rows.split == split) & (rows.label == "") & rows.value.notna()]
        rows = rows[(rows.seed == str(seed)) & (rows.split_seed == split_seed)]
        return dict(zip(rows.metric.tolist(), rows.value.tolist(), strict=True))

    def by_split(self, split: str, metric: str, model: str = MODEL) -> dict[int, float]:
        """Return what the mean prediction of the seeds scores, by split of the rows, where it is defined."""
        rows = self._rows(split, metric, model, "")
        rows = rows[(rows.seed == AVERAGE) & rows.value.notna()]
        return dict(zip(rows.split_seed.tolist(), rows.value.tolist(), strict=True))

    def as_json(self) -> dict[str, Any]:
        """Return numbers for programs: `metrics` and `labels` of the model, and the same of each baseline."""
        nested: dict[str, dict[str, dict[str, Any]]] = {}
        for (model, split, label, metric), rows in self._by_score.items():
            is_average = rows.seed == AVERAGE
            alone = rows[~is_average].value
            spread = spread_of(alone)
            metrics = {
                "average": spread_of(rows[is_average].value).mean,
                **{"mean": spread.mean, "std": spread.std, "median": spread.median, "values": alone.tolist()},
            }
            of_model = nested.setdefault(model, {"metrics": {}, "labels": {}})
            into = of_model["labels" if label else "metrics"].setdefault(split, {})
            (into.setdefault(label, {}) if label else into)[metric] = metrics
        content: dict[str, Any] = finite_or_none({**nested.pop(MODEL), "baselines": nested})
        return content

    @cached_property
    def _by_score(self) -> dict[tuple[str, str, str, str], "DataFrame"]:
        """Reported rows by model, split, label and metric."""
        return dict(iter(self.reported.groupby(["model", "split", "label", "metric"], sort=False)))

    def _rows(self, split: str, metric: str, model: str, label: str) -> "DataFrame":
        found = self._by_score.get((model, split, label, metric))
        return self.table.iloc[:0] if found is None else found


def make_scores(rows: Iterable[ScoreRow]) -> RunScores:
    """Return the scores of rows."""
    return RunScores(score_table(rows))


def score_table(rows: Iterable[ScoreRow]) -> "DataFrame":
    """Return rows as `scores.csv` has them."""
    import pandas as pd

    table = pd.DataFrame(list(rows), columns=list(COLUMNS))
    return table.astype(_TYPES | {"value": "float64"})


def join_scores(parts: Sequence[RunScores]) -> RunScores:
    """Return the rows of several splits in one table."""
    import pandas as pd

    return RunScores(pd.concat([part.table for part in parts], ignore_index=True))


def point_scores(scores: RunScores, metric: str, aggregate: Aggregate) -> dict[str, float]:
    """Return a validation metric of each grid point over its seeds, by label; NaN where it is never defined."""
    rows = _in_validation(scores, metric)
    values = rows.groupby("grid_point", sort=False).value.agg(aggregate)
    return {str(point): float(value) for point, value in values.items()}


def best_seed(scores: RunScores, grid_point: str, metric: str, *, is_greater_better: bool) -> int:
    """Return the seed with the best validation score at a grid point: the first of equals, and where none has one."""
    rows = _in_validation(scores, metric)
    rows = rows[rows.grid_point == grid_point]
    return int(rows.seed.iloc[first_best(rows.value.tolist(), is_greater_better=is_greater_better)])


def first_best(values: Sequence[float], *, is_greater_better: bool) -> int:
    """Return the place of the best value; the first of equals, and where none is defined."""
    ranked = np.array(values) if is_greater_better else -np.array(values)
    return int(np.argmax(np.where(np.isnan(ranked), -np.inf, ranked)))


def _in_validation(scores: RunScores, metric: str) -> "DataFrame":
    table = scores.table
    is_chosen = (table.model == MODEL) & (table.seed != AVERAGE) & (table.label == "")
    return table[is_chosen & (table.split == "valid") & (table.metric == metric)]


def scores_csv(table: "DataFrame") -> bytes:
    """Return the content of `scores.csv`, values with all digits."""
    values = ("" if math.isnan(value) else repr(value) for value in table.value.tolist())
    named = table[[name for name in table.columns if name != "value"]]
    rows = ([*row, value] for row, value in zip(named.itertuples(index=False, name=None), values, strict=True))
    return csv_bytes([*named.columns, "value"], rows)


def write_scores(run: Path, scores: RunScores) -> None:
    """Write `scores.csv`.

    Raises:
        CheckpointError: The file cannot be written.
    """
    write_atomically(run / SCORES_FILE, scores_csv(scores.table))


def read_scores(run: Path) -> RunScores:
    """Return the scores of a finished run.

    Raises:
        CheckpointError: The file is missing or altered.
    """
    hint = f"`{resume_command('finetune', run)}` writes it again"
    table = read_score_table(run / SCORES_FILE, hint)
    if not (table.seed[table.model == MODEL] == AVERAGE).any():
        raise CheckpointError(f"{run / SCORES_FILE}: not readable as scores: no row of the seeds' average", hint)
    return RunScores(table)


def read_score_table(path: Path, hint: str) -> "DataFrame":
    """Return the rows of a `scores.csv`; `hint` says how to get it back.

    Raises:
        CheckpointError: The file is missing or altered.
    """
    import pandas as pd

    content = read_whole(path, hint=hint)
    try:
        table = pd.read_csv(io.BytesIO(content), dtype=_TYPES, keep_default_na=False)
        if tuple(table.columns) != COLUMNS:
            raise ValueError("other columns")
        # by Python, which reads back what `repr` wrote; pandas before 3.1 may differ in the last digit
        table["value"] = np.array([float(text or math.nan) for text in table.value])
    except (ValueError, OverflowError) as error:
        raise CheckpointError(f"{path}: not readable as scores: {error}", hint) from error
    return table
