"""Rows as Python code gives them: one string, lists, arrays, Series and DataFrames of pandas.

Axes: R rows, n columns of numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from exlm_cli.config.tasks import InputKind
from exlm_cli.data.rows.records import ColumnChoice
from exlm_cli.errors import DataError
from exlm_cli.format import is_unicode, name_some
from exlm_cli.tasks.base import FloatArray

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class GivenRows:
    """R rows to predict.

    Attributes:
        texts: SMILES, texts or pairs of them.
        numbers: (R, n) columns of numbers that the model reads; None: it reads none.
        frame: The rows as they were given, with their index; None: they had none.
    """

    texts: list[tuple[str, ...]]
    numbers: FloatArray | None
    frame: "DataFrame | None"

    def beside(self, table: "DataFrame") -> "DataFrame":
        """Return a table of the rows with their index, and their own columns first; others replace those of a name."""
        if self.frame is None:
            return table
        import pandas as pd

        own = self.frame[[name for name in self.frame.columns if name not in table.columns]]
        return pd.concat([own, table.set_axis(own.index)], axis=1)


def read_given(
    rows: Any,
    columns: Mapping[str, Sequence[float]] | None,
    *,
    kind: InputKind,
    usual: tuple[str, ...],
    number_columns: tuple[str, ...],
    num_texts: int,
) -> GivenRows:
    """Return rows of any form.

    Args:
        rows: One row, or several; the columns of a DataFrame are chosen as those of a file.
        columns: Numbers of every row by column; None: those of a DataFrame.
        kind: What the model reads.
        usual: Columns that it was trained on; empty: they had no name.
        number_columns: Columns of numbers that it reads.
        num_texts: Texts of a row.

    Raises:
        DataError: A column is missing, or the rows or numbers are none.
    """
    frame = as_frame(rows)
    if frame is not None:
        names = usual
        if frame is not rows:  # a Series
            names = tuple(frame.columns)
        elif not set(usual) <= set(frame.columns) or not usual:
            if num_texts > 1:
                raise DataError(f"`rows` has no columns {name_some(usual)}", "give the columns of the training")
            names = (ColumnChoice(kind, is_of_task=True).choose("rows", [str(name) for name in frame.columns]),)
        rows = [tuple(cells) for cells in zip(*(strings(frame[name]) for name in names), strict=True)]
        columns = {name: frame[name] for name in number_columns if name in frame} if columns is None else columns
    texts = check_rows(rows, num_texts)
    numbers = None
    if columns or number_columns:
        numbers = _check_columns(columns or {}, number_columns, len(texts))
    return GivenRows(texts, numbers, frame)


def as_frame(rows: Any) -> "DataFrame | None":
    """Return a DataFrame as it is, and a Series as one of a single column; None for anything else."""
    if not hasattr(rows, "iloc"):
        return None
    frame: DataFrame = rows if hasattr(rows, "columns") else rows.to_frame(rows.name or "input")
    return frame


def strings(column: Iterable[Any]) -> list[Any]:
    """Return cells without missing ones, which become empty."""
    return ["" if cell is None or cell != cell else cell for cell in column]


def check_rows(rows: object, num_texts: int = 1) -> list[tuple[str, ...]]:
    """Return rows as tuples of `num_texts` strings; one string, or one tuple of several, is one row.

    An array may have an axis of texts.

    Raises:
        DataError: They are something else, or contain a lone surrogate; the error names the row, counted from 1.
    """
    wanted = "a string" if num_texts == 1 else f"a tuple of {num_texts} strings"
    is_one = (
        isinstance(rows, str)
        if num_texts == 1
        else isinstance(rows, tuple) and all(isinstance(text, str) for text in rows)
    )
    if is_one and rows:
        rows = [rows]
    axes = getattr(rows, "ndim", 1)
    is_frame = hasattr(rows, "columns")  # whose rows are its columns' names
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable) or axes not in (1, 2) or is_frame:
        raise DataError(f"`rows` is {type(rows).__name__}, not a list", f"give a list, each row {wanted}")
    found = []
    for number, row in enumerate(rows, start=1):
        is_several = isinstance(row, tuple | list) or axes == 2
        texts = (str(row),) if isinstance(row, str) else tuple(row) if is_several else ()
        if len(texts) != num_texts or not all(isinstance(text, str) for text in texts):
            raise DataError(f"row {number} is {row!r}, not {wanted}", f"give a list, each row {wanted}")
        if not all(map(is_unicode, texts)):
            raise DataError(f"row {number} contains a lone surrogate", "correct the row or leave it out")
        found.append(texts)
    return found


def _check_columns(columns: Mapping[str, Sequence[float]], names: tuple[str, ...], num_rows: int) -> FloatArray:
    """Return the (R, n) numbers of the columns that a model reads.

    Raises:
        DataError: They are not those columns, or not R finite numbers each; NaN is a missing one.
    """
    wanted = f"the run reads {', '.join(f'`{name}`' for name in names) or 'none'}"
    if odd := sorted(set(columns) ^ set(names)):
        what = "has no" if odd[0] in names else "has"
        raise DataError(f"`columns` {what} `{odd[0]}`; {wanted}", "give a list of numbers for each of these")
    numbers = np.zeros((num_rows, len(names)))
    for index, name in enumerate(names):
        try:
            column = np.array(columns[name], dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(f"`columns`: `{name}` is not a list of numbers: {error}", "give a number a row") from None
        if column.shape != (num_rows,) or np.isinf(column).any():
            what = "infinite numbers" if column.shape == (num_rows,) else f"the shape {column.shape}"
            raise DataError(f"`columns`: `{name}` has {what}; there are {num_rows} rows", "give a number a row")
        numbers[:, index] = column
    return numbers
