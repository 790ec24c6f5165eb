"""Labels of a user's table: 0/1 labels, classes or values, found from the cells of its label columns.

- A cell that is empty or says na, n/a, nan, null, none or `-`, in any case, is missing.
- 1, true, yes, t, y are positive, 0, false, no, f, n negative, in any case. A column of such cells is a 0/1 label
  (`binary`), and so are several such columns (`multi_label`).
- A column with two other texts or numbers, or with more texts, holds classes. Classes are sorted, numbers by value, and
  `1.0` is the class `1`. With two classes, the second is the positive class of ROC-AUC, average precision and F1.
- More than two numbers are values to predict (`regression`); several columns of numbers too.
- `1,5` is a text. A warning names `task.decimal_comma`, with which it is the number 1.5.
- A column of numbers with some text in it is refused, if most cells are numbers or a text is a limit such as `<10`.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from exlm_cli.data.rows.table import Table
from exlm_cli.errors import DataError
from exlm_cli.format import format_percent, name_some
from exlm_cli.tasks.base import FloatArray, Loss

LabelKind = Literal["auto", "classes", "multi_label", "regression"]

_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "-"})
_BINARY = {
    **dict.fromkeys(("1", "1.0", "true", "yes", "t", "y"), 1.0),
    **dict.fromkeys(("0", "0.0", "false", "no", "f", "n"), 0.0),
}
_MAX_CLASSES = 100
_LARGEST_VALUE = 1e100  # so that sums of squared errors are finite
_CHOOSE_KIND = "choose what they are with `task.label_kind=classes|multi_label|regression`"
_CORRECT = "correct the cell, or leave it empty"
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")
_LIMIT = re.compile(r"[<>≤≥~]")
_READ_COMMAS = "`task.decimal_comma=true` reads numbers with a decimal comma"
_OTHERS = "add rows with other values, or choose other columns with `task.label_columns=[A,B]`"
_CHOOSE_COLUMNS = "choose label columns with `task.label_columns=[A,B]`"


@dataclass(frozen=True)
class Labels:
    """The labels of R rows.

    Attributes:
        names: C labels, classes or columns.
        targets: (R, C), NaN where missing; (R, 1) class index for `classes`.
    """

    loss: Loss
    names: tuple[str, ...]
    targets: FloatArray
    notes: tuple[str, ...]

    @property
    def missing(self) -> list[int]:
        """Rows without any label."""
        return np.flatnonzero(np.isnan(self.targets).all(axis=1)).tolist()

    @property
    def classes(self) -> list[float] | None:
        """The class of each row, -1 where it is missing; None where rows have more than one label, or values."""
        if self.loss == "regression" or self.targets.shape[1] > 1:
            return None
        classes: list[float] = np.nan_to_num(self.targets[:, 0], nan=-1).tolist()
        return classes


def read_labels(table: Table, columns: Sequence[str], kind: LabelKind) -> Labels:
    """Read label columns by the rules above.

    Args:
        columns: At least one.
        kind: Kind of the labels; `auto` finds it from the cells.

    Raises:
        DataError: No such column; a cell that does not fit the kind, named with its row; a column without labels, or
            with one class only.
    """
    cells = {name: table.column(name, _CHOOSE_COLUMNS) for name in columns}
    for name, column in cells.items():
        if all(map(_is_missing, column)):
            raise DataError(f"{table.path}: label column `{name}` is empty in every row", _CHOOSE_COLUMNS)
    match _find_kind(table, cells) if kind == "auto" else kind:
        case "multi_label":
            labels = _binary_labels(table, columns)
        case "regression":
            labels = _values(table, columns)
        case _:
            labels = _classes(table, columns)
    classes = labels.names if kind == "auto" and labels.loss == "classes" else ()
    has_commas = any(map(_DECIMAL_COMMA.fullmatch, classes))
    if has_commas and all(_number(_with_point(name)) is not None for name in classes):
        note = f"warning: `{columns[0]}` looks like numbers with a decimal comma, read as classes; {_READ_COMMAS}"
        labels = replace(labels, notes=(*labels.notes, note))
    return labels


def with_decimal_points(table: Table, columns: Sequence[str]) -> Table:
    """Return a table in which `1,5` is `1.5` in some columns; columns that it lacks are left out.

    Raises:
        DataError: One of their cells is a number with a point, which may separate thousands.
    """
    read = dict(table.columns)
    for name in [name for name in columns if name in read]:
        for row, cell in enumerate(read[name]):
            if "." in cell and _number(cell.replace(",", "")) is not None:
                raise DataError(
                    f"{table.where(row)}: `{name}` is `{cell}`, but `task.decimal_comma` is true",
                    "write it with a decimal comma and without separators of thousands",
                )
        read[name] = tuple(map(_with_point, read[name]))
    return replace(table, columns=read)


def _with_point(cell: str) -> str:
    return cell.replace(",", ".") if _DECIMAL_COMMA.fullmatch(cell) else cell


def read_known_targets(table: Table, columns: Sequence[str], loss: Loss, names: Sequence[str]) -> FloatArray:
    """Return the labels of new rows of a known task: (R, C), NaN where missing; (R, 1) class index for `classes`.

    Args:
        table: May lack some of the columns, or all.
        columns: One for each label or value; the only one for `classes`.

    Raises:
        DataError: A cell is not a label of the task.
    """
    if loss == "classes":
        listed = name_some((f"`{name}`" for name in names), limit=10)
        return read_targets(table, columns, _class_parser(names), listed)
    return read_targets(table, columns, *(_BINARY_CELLS if loss == "binary" else _VALUE_CELLS))


def read_targets(
    table: Table, columns: Sequence[str], parse: Callable[[str], float | None], accepted: str, hint: str = _CORRECT
) -> FloatArray:
    """Return C label columns as (R, C) numbers, NaN where a cell or the whole column is missing.

    Args:
        table: May lack some of the columns.
        parse: Number of a cell that is not missing; None if the cell is not a label.
        accepted: Cells that are labels, in words.

    Raises:
        DataError: A cell is not a label.
    """
    targets = np.full((len(table), len(columns)), math.nan)
    for index, name in enumerate(columns):
        for row, cell in enumerate(table.columns.get(name, ())):
            if _is_missing(cell):
                continue
            value = parse(cell)
            if value is None:
                raise DataError(f"{table.where(row)}: `{name}` is `{cell}`; accepted: {accepted}, or empty", hint)
            targets[row, index] = value
    return targets


def _class_parser(names: Sequence[str]) -> Callable[[str], float | None]:
    """Return a function from a cell to the index of its class; where classes are numbers, `1.0` is `1`."""
    by_text = {name: float(index) for index, name in enumerate(names)}
    by_number = {_number(name): index for name, index in by_text.items() if _number(name) is not None}
    return lambda cell: by_text.get(cell, by_number.get(_number(cell)))


def _find_kind(table: Table, cells: dict[str, tuple[str, ...]]) -> LabelKind:
    present = [cell for column in cells.values() for cell in column if not _is_missing(cell)]
    if all(cell.lower() in _BINARY for cell in present):
        return "multi_label"
    numbers = [number for cell in present if (number := _number(cell)) is not None]
    if len(numbers) == len(present):
        return "classes" if len(cells) == 1 and len(set(numbers)) == 2 else "regression"
    # with limits such as `<10` in most cells, the numbers are still values
    is_numeric = 2 * len(numbers) > len(present) or (len(numbers) > 0 and any(map(_LIMIT.match, present)))
    if len(cells) == 1 and not is_numeric:
        return "classes"
    wanted = "others are numbers" if is_numeric else "several columns hold 0/1, true/false or yes/no"
    wrong = [
        (name, row)
        for name, column in cells.items()
        for row, cell in enumerate(column)
        if not _is_missing(cell) and (_number(cell) is None if is_numeric else cell.lower() not in _BINARY)
    ]
    name, row = wrong[0]
    one_of = f", one of {len(wrong):,} such cells" if len(wrong) > 1 else ""
    commas = f"; {_READ_COMMAS}" if _DECIMAL_COMMA.fullmatch(cells[name][row]) else ""
    raise DataError(
        f"{table.where(row)}: `{name}` is `{cells[name][row]}`{one_of}; {wanted}",
        f"correct or empty such cells, or {_CHOOSE_KIND}{commas}",
    )


def _binary_labels(table: Table, columns: Sequence[str]) -> Labels:
    hint = "write 1 for positive and 0 for negative rows, or give one column of classes"
    targets = read_targets(table, columns, *_BINARY_CELLS, hint)
    if len(columns) == 1:
        _check_varies(table, columns, targets)
    what = f"a 0/1 label, `{columns[0]}`" if len(columns) == 1 else f"{len(columns)} 0/1 labels"
    positive = ", ".join(format_percent(float(np.nanmean(column))) for column in targets.T[:5])
    more = "" if len(columns) <= 5 else ", ..."
    return Labels("binary", tuple(columns), targets, (f"found {what}, positive in {positive}{more} of the rows",))


def _values(table: Table, columns: Sequence[str]) -> Labels:
    targets = read_targets(table, columns, *_VALUE_CELLS)
    _check_varies(table, columns, targets)
    named = name_some(f"`{name}`" for name in columns)
    return Labels("regression", tuple(columns), targets, (f"found values to predict in {named}; {_CHOOSE_KIND}",))


def _check_varies(table: Table, columns: Sequence[str], targets: FloatArray) -> None:
    for name, values in zip(columns, targets.T, strict=True):
        present = np.unique(values[~np.isnan(values)])
        if len(present) == 1:
            raise DataError(
                f"{table.path}: `{name}` is {present[0]:g} in every row that has it: nothing to learn", _OTHERS
            )


def _classes(table: Table, columns: Sequence[str]) -> Labels:
    if len(columns) > 1:
        raise DataError(
            f"{table.path}: {len(columns)} label columns cannot be `classes`: each row has one class",
            "give one label column, or set `task.label_kind=multi_label` for columns of 0 and 1",
        )
    (name,) = columns
    names = _class_names({cell for cell in table.column(name, _CHOOSE_COLUMNS) if not _is_missing(cell)})
    if len(names) < 2:
        raise DataError(f"{table.path}: `{name}` is `{names[0]}` in every row that has it: nothing to learn", _OTHERS)
    if len(names) > _MAX_CLASSES:
        raise DataError(
            f"{table.path}: `{name}` has {len(names):,} different texts, at most {_MAX_CLASSES} classes are taken",
            f"choose the column that holds the labels; {_READ_COMMAS}",
        )
    targets = read_targets(table, columns, _class_parser(names), "the names of the classes")
    counts = [np.count_nonzero(targets == index) for index in range(len(names))]
    listed = name_some((f"`{text}` ({count:,})" for text, count in zip(names, counts, strict=True)), limit=10)
    positive = f"; `{names[1]}` is the positive one" if len(names) == 2 else ""
    notes = [f"found {len(names)} classes of `{name}`: {listed}{positive}"]
    by_folded = {text.casefold(): text for text in reversed(names)}
    alike = [f"`{by_folded[text.casefold()]}` and `{text}`" for text in names if by_folded[text.casefold()] != text]
    if alike:
        notes.append(f"warning: classes that differ in capital letters alone: {name_some(alike, limit=3)}")
    return Labels("classes", names, targets, tuple(notes))


def _class_names(cells: Collection[str]) -> tuple[str, ...]:
    """Return the classes in order: the texts, or where all are numbers, the shortest text of each value."""
    if any(_number(cell) is None for cell in cells):
        return tuple(sorted(cells))
    longest_first = sorted(cells, key=lambda cell: (len(cell), cell), reverse=True)
    shortest = {float(cell): cell for cell in longest_first}
    return tuple(shortest[value] for value in sorted(shortest))


def _is_missing(cell: str) -> bool:
    return cell.lower() in _MISSING


def _number(cell: str) -> float | None:
    """Return a finite number, or None; `1_000`, which Python reads as one, is none."""
    try:
        value = math.nan if "_" in cell else float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _value(cell: str) -> float | None:
    """Return a number that can be predicted, or None."""
    number = _number(cell)
    return None if number is None or abs(number) > _LARGEST_VALUE else number


# what a cell means, and which cells are accepted
_BINARY_CELLS = (lambda cell: _BINARY.get(cell.lower()), "0/1, true/false, yes/no, t/f, y/n")
_VALUE_CELLS = (_value, "a number from -1e100 to 1e100")
