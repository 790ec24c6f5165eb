"""What assays bring beside one value a molecule: rows that weigh more, and replicates.

Axes: R rows, C columns, n numbers of `task.descriptor_columns`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from exlm_cli.errors import DataError
from exlm_cli.format import format_number_of, name_some
from exlm_cli.tasks.base import FloatArray, SplitIndices
from exlm_cli.tasks.rows.labels import Labels
from exlm_cli.tasks.rows.splits import RowSplit, group_rows
from exlm_cli.tasks.rows.table import InputRows, read_number


@dataclass(frozen=True)
class Measured:
    """What the R rows of a table say.

    Attributes:
        weights: (R,) 0 or more; None: all the same.
        numbers: (R, n) numbers of `task.descriptor_columns`; None: there are none.
    """

    labels: Labels
    weights: FloatArray | None = None
    numbers: FloatArray | None = None


def read_weights(usable: InputRows, column: str) -> FloatArray:
    """Return (R,) weights of the rows, 0 of those that are not used.

    Raises:
        DataError: There is no such column, or a cell of a used row is not a number of 0 or more; it is named.
    """
    cells = usable.table.column(column, "name the column of weights with `--weight-column NAME`")
    weights_R = np.zeros(len(cells))
    for row in usable.rows.tolist():
        weight = read_number(cells[row])
        if weight is None or weight < 0:
            raise DataError(
                f"{usable.table.where(row)}: `{column}` is `{cells[row]}`; accepted: a number of 0 or more",
                "write 0 for a row that is not to be trained on",
            )
        weights_R[row] = weight
    return weights_R


def average_replicates(usable: InputRows, measured: Measured, split: RowSplit) -> tuple[Measured, RowSplit]:
    """Return the rows with one for each molecule or text of a part: its first, which has the mean of all values.

    Rows with other `numbers`, such as a dose, are no replicates. Means are weighted, and weights added. Where a value
    is known, bounds are left out; else the narrowest ones count.
    """
    targets_RC, bounds_RC2 = measured.labels.targets.copy(), measured.labels.bounds
    bounds_RC2 = None if bounds_RC2 is None else bounds_RC2.copy()
    weights_R = np.ones(len(targets_RC)) if measured.weights is None else measured.weights.copy()
    own = [()] * len(targets_RC) if measured.numbers is None else [tuple(row) for row in measured.numbers.tolist()]
    keys = list(zip(usable.keys, own, strict=True))
    kept: SplitIndices = {}
    groups: list[list[int]] = []
    for part, rows in split.indices.items():
        of_part = group_rows(rows.tolist(), keys)
        kept[part] = np.array([group[0] for group in of_part], dtype=np.int64)
        groups += [group for group in of_part if len(group) > 1]
    for group in groups:
        targets_RC[group[0]] = _mean(measured.labels.targets[group], weights_R[group])
        if bounds_RC2 is not None:
            bounds_RC2[group[0]] = _narrowest(bounds_RC2[group], targets_RC[group[0]])
        weights_R[group[0]] = weights_R[group].sum()
    labels = replace(measured.labels, targets=targets_RC, bounds=bounds_RC2)
    averaged = replace(measured, labels=labels, weights=None if measured.weights is None else weights_R)
    return averaged, replace(split, indices=kept, notes=(*split.notes, *_describe(measured.labels, groups)))


def _mean(values_nC: FloatArray, weights_n: FloatArray) -> FloatArray:
    is_known_nC = ~np.isnan(values_nC)
    weights_nC = np.where(is_known_nC, (weights_n if weights_n.any() else np.ones(len(weights_n)))[:, None], 0.0)
    total_C, sums_C = weights_nC.sum(axis=0), (weights_nC * np.nan_to_num(values_nC)).sum(axis=0)
    return np.where(total_C > 0, sums_C / np.maximum(total_C, np.finfo(float).tiny), np.nan)


def _narrowest(bounds_nC2: FloatArray, mean_C: FloatArray) -> FloatArray:
    narrowest_C2 = np.stack([bounds_nC2[..., 0].max(axis=0), bounds_nC2[..., 1].min(axis=0)], axis=1)
    return np.where(np.isnan(mean_C)[:, None], narrowest_C2, mean_C[:, None])


def _describe(labels: Labels, groups: Sequence[Sequence[int]]) -> list[str]:
    """Return a note on how many rows were averaged, and how far their values are apart."""
    if not groups:
        return []
    spreads = []
    for name, values_R in zip(labels.names, labels.targets.T, strict=True):
        known = [column[~np.isnan(column)] for column in (values_R[list(group)] for group in groups)]
        degrees = sum(len(values) - 1 for values in known if len(values))
        if degrees > 0:
            squares = sum(float(((values - values.mean()) ** 2).sum()) for values in known if len(values))
            spreads.append(f"{(squares / degrees) ** 0.5:.3g} of `{name}`")
    rows = format_number_of(sum(map(len, groups)), "row")
    said = f"averaged {rows} of {format_number_of(len(groups), 'molecule')}"
    return [f"{said}; the standard deviation within one is {name_some(spreads)}" if spreads else said]
