"""Labels of a user's table: 0/1 labels, classes or values, found from the cells of its label columns.

| cells that are not missing | are |
|---|---|
| 1, true, yes, t, y and 0, false, no, f, n, in any case | a 0/1 label (`binary`); several columns: `multi_label` |
| two numbers, in one column | two classes |
| other numbers | values (`regression`) |
| mostly numbers or what looks like one: `3 nM`, `12%`, `1,355`, `>10` (`looks.py`) | refused if some are no numbers |
| other texts, in one column | classes; refused if most classes have one row, or there are over 100 |

- A cell is missing if it is empty or one of `task.missing_values`, in any case. A note counts such words among words.
- `task.label_kind` says the kind instead. With `multi_label`, -1 is negative in a column without 0.
- Classes are sorted, numbers by value, and `1.0` is the class `1`. Of two classes the second is the positive one: that
  of `task.positive_class`, else the one that its name tells (`positive.py`), else the later one.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from exlm_cli.config.tasks import MISSING_VALUES, CsvTaskConfig, TaskSection
from exlm_cli.errors import DataError
from exlm_cli.format import format_percent, name_some
from exlm_cli.tasks.base import FloatArray, Loss
from exlm_cli.tasks.rows.looks import (
    LIMIT,
    MAYBE_THOUSANDS,
    Look,
    look_of,
    looks_of,
    with_decimal_point,
)
from exlm_cli.tasks.rows.positive import find_positive
from exlm_cli.tasks.rows.table import Table

LabelKind = Literal["auto", "classes", "multi_label", "regression"]

_BINARY = {
    **dict.fromkeys(("1", "1.0", "true", "yes", "t", "y"), 1.0),
    **dict.fromkeys(("0", "0.0", "false", "no", "f", "n"), 0.0),
}
_MAX_CLASSES = 100
_MAX_BINS = 10
_LARGEST_VALUE = 1e100  # so that sums of squared errors are finite
_CHOOSE_KIND = "`task.label_kind=classes` (or `multi_label`, `regression`) says what they are"
_TAKE_AS_CLASSES = "`task.label_kind=classes` takes them as classes"
_CORRECT = "correct the cell, or leave it empty"
_OTHERS = "add rows with other values, or choose other columns with `task.label_columns=[A,B]`"
_CHOOSE_COLUMNS = "choose label columns with `task.label_columns=[A,B]`"


@dataclass(frozen=True)
class Labels:
    """The labels of R rows.

    Attributes:
        names: C labels, classes or columns; of two classes, the second is the positive one.
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


def read_labels(
    table: Table,
    columns: Sequence[str],
    kind: LabelKind,
    *,
    missing: Collection[str] = MISSING_VALUES,
    positive: str | None = None,
) -> Labels:
    """Read label columns by the rules above.

    Args:
        columns: At least one.
        kind: Kind of the labels; `auto` finds it from the cells.
        missing: Words of missing labels, in any case; an empty cell is missing too.
        positive: The positive one of two classes; None: found from their names.

    Raises:
        DataError: No such column; a cell that does not fit the kind, named with its row; a column without labels, or
            with one class only; `positive` is given and is not one of two classes.
    """
    words = {name: _count_missing(table.column(name, _CHOOSE_COLUMNS), missing) for name in columns}
    table = _blank_missing(table, columns, missing)
    cells = {name: table.columns[name] for name in columns}
    for name, column in cells.items():
        if not any(column):
            hint = "; ".join([_CHOOSE_COLUMNS, *_describe_missing({name: words[name]}, missing)])
            raise DataError(f"{table.path}: label column `{name}` is empty in every row", hint)
    notes = _describe_missing({name: words[name] for name in columns if not _holds_numbers(cells[name])}, missing)
    try:
        match _find_kind(table, cells, positive) if kind == "auto" else kind:
            case "multi_label":
                labels = _binary_labels(table, columns)
            case "regression":
                labels = _values(table, columns)
            case _:
                labels = _classes(table, columns, positive, is_found=kind == "auto")
    except _OneValueError as error:
        raise DataError(error.message, "; ".join([_OTHERS, *_describe_missing(words, missing)])) from None
    if positive is not None and labels.loss != "classes":
        what = "values to predict" if labels.loss == "regression" else "0/1 labels"
        raise DataError(f"{table.path}: `task.positive_class` is for two classes; found {what}", "leave it out")
    return replace(labels, notes=(*labels.notes, *notes))


def with_decimal_points(table: Table, columns: Sequence[str]) -> Table:
    """Return a table in which `1,5` is `1.5` in some columns; columns that it lacks are left out.

    Raises:
        DataError: One of their cells is a number with a point, which may separate thousands.
    """
    read = dict(table.columns)
    for name in [name for name in columns if name in read]:
        for row, cell in enumerate(read[name]):
            if "." in cell and read_number(cell.replace(",", "")) is not None:
                raise DataError(
                    f"{table.where(row)}: `{name}` is `{cell}`, but `task.decimal_comma` is true",
                    "write it with a decimal comma and without separators of thousands",
                )
        read[name] = tuple(map(with_decimal_point, read[name]))
    return replace(table, columns=read)


def read_known_targets(
    table: Table,
    columns: Sequence[str],
    loss: Loss,
    names: Sequence[str],
    kind: LabelKind = "auto",
    missing: Collection[str] = MISSING_VALUES,
    *,
    decimal_comma: bool = False,
) -> tuple[FloatArray, tuple[str, ...]]:
    """Return the labels of new rows of a known task, (R, C), NaN where missing, and notes; (R, 1) class index for
    `classes`.

    A cell that is not a label of the task counts as missing, since its row can be predicted all the same; a warning
    says how many such cells there are, and which is the first.

    Args:
        table: May lack some of the columns, or all.
        columns: One for each label or value; the only one for `classes`.
        kind, missing, decimal_comma: As the task was read.
    """
    parse, accepted = _BINARY_CELLS if loss == "binary" else _VALUE_CELLS
    if loss == "classes":
        parse, accepted = _class_parser(names), name_some((f"`{name}`" for name in names), limit=10)
    if decimal_comma:
        parse = _with_comma(parse)
    if loss == "binary" and kind == "multi_label":
        table = _with_zeros(_blank_missing(table, columns, missing), columns, is_strict=False)
    odd: list[str] = []
    targets = read_targets(table, columns, parse, accepted, missing=missing, odd=odd)
    if not odd:
        return targets, ()
    what = (
        "a cell is no label of the run and is not scored"
        if len(odd) == 1
        else (f"{len(odd):,} cells are no labels of the run and are not scored; the first")
    )
    return targets, (f"warning: {what}: {odd[0]}",)


def _with_comma(parse: Callable[[str], float | None]) -> Callable[[str], float | None]:
    """Return a parser of cells with decimal commas, in which a point of a number is no part of it."""

    def parse_comma(cell: str) -> float | None:
        has_point = "." in cell and read_number(cell.replace(",", "")) is not None
        return None if has_point else parse(with_decimal_point(cell))

    return parse_comma


def read_targets(
    table: Table,
    columns: Sequence[str],
    parse: Callable[[str], float | None],
    accepted: str,
    hint: str = _CORRECT,
    *,
    missing: Collection[str] = MISSING_VALUES,
    odd: list[str] | None = None,
) -> FloatArray:
    """Return C label columns as (R, C) numbers, NaN where a cell or the whole column is missing.

    Args:
        table: May lack some of the columns.
        parse: Number of a cell that is not missing; None if the cell is not a label.
        accepted: Cells that are labels, in words.
        missing: Words of missing labels, in any case.
        odd: Gets a sentence on each cell that is not a label, which then counts as missing; None: it is an error.

    Raises:
        DataError: A cell is not a label.
    """
    table = _blank_missing(table, columns, missing)
    targets = np.full((len(table), len(columns)), math.nan)
    for index, name in enumerate(columns):
        for row, cell in enumerate(table.columns.get(name, ())):
            if not cell:
                continue
            value = parse(cell)
            said = f"{table.where(row)}: `{name}` is `{cell}`; accepted: {accepted}, or empty"
            if value is None and odd is not None:
                odd.append(said)
            elif value is None:
                look = look_of(cell) if read_number(cell) is None else None
                told = hint if look is None else f"it looks like {look.what}: {look.advice}"
                raise DataError(said, told)
            else:
                targets[row, index] = value
    return targets


def read_number(cell: str) -> float | None:
    """Return a finite number, with U+2212 as a minus too, or None; `1_000`, which Python reads as one, is none."""
    try:
        value = math.nan if "_" in cell else float(cell.replace("\N{MINUS SIGN}", "-"))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def read_numbers(table: Table, config: TaskSection) -> FloatArray:
    """Return the numbers of `task.descriptor_columns`, (R, n), NaN where one is missing.

    Raises:
        DataError: A column is missing, or a cell is not a number.
    """
    columns = config.number_columns
    for name in columns:
        table.column(name, "the model reads it: `task.descriptor_columns` names it")
    if not isinstance(config, CsvTaskConfig):
        return np.zeros((len(table), 0))
    table = with_decimal_points(table, columns) if config.decimal_comma else table
    return read_targets(table, columns, *_VALUE_CELLS, missing=config.missing_values)


def _class_parser(names: Sequence[str]) -> Callable[[str], float | None]:
    """Return a function from a cell to the index of its class; where classes are numbers, `1.0` is `1`."""
    by_text = {name: float(index) for index, name in enumerate(names)}
    by_number = {read_number(name): index for name, index in by_text.items() if read_number(name) is not None}
    return lambda cell: by_text.get(cell, by_number.get(read_number(cell)))


def _count_missing(cells: Sequence[str], missing: Collection[str]) -> Counter[str]:
    folded = {word.lower() for word in missing}
    return Counter(cell for cell in cells if cell and cell.lower() in folded)


def _blank_missing(table: Table, columns: Sequence[str], missing: Collection[str]) -> Table:
    """Return a table whose missing labels are empty cells; columns that it lacks are left out."""
    folded = {word.lower() for word in missing}
    blanked = {
        name: tuple("" if cell.lower() in folded else cell for cell in table.columns[name])
        for name in columns
        if name in table.columns
    }
    return replace(table, columns=table.columns | blanked)


def _describe_missing(words: Mapping[str, Counter[str]], missing: Collection[str]) -> list[str]:
    """Return a note for each column on the words in it that count as missing labels."""
    notes = []
    for name, counts in words.items():
        if counts:
            listed = name_some(f"`{word}` ({count:,})" for word, count in counts.most_common())
            kept = ",".join(word for word in missing if word.lower() not in {found.lower() for found in counts})
            is_one = len(counts) == 1
            count, become = ("counts", "it is a class") if is_one else ("count", "they are classes")
            notes.append(f"{listed} of `{name}` {count} as missing; with `task.missing_values=[{kept}]` {become}")
    return notes


def _holds_numbers(cells: Sequence[str]) -> bool:
    return all(read_number(cell) is not None for cell in cells if cell)


def _find_kind(table: Table, cells: Mapping[str, tuple[str, ...]], positive: str | None) -> LabelKind:
    present = [cell for column in cells.values() for cell in column if cell]
    if all(cell.lower() in _BINARY for cell in present):
        return "multi_label" if positive is None or len(cells) > 1 else "classes"
    numbers = [number for cell in present if (number := read_number(cell)) is not None]
    if len(numbers) == len(present):
        return "classes" if len(cells) == 1 and len(set(numbers)) == 2 else "regression"
    looks = {name: looks_of(c for c in column if read_number(c) is None) for name, column in cells.items()}
    alike = {cell: look for of_column in looks.values() for cell, look in of_column.items()}
    may_be_bins = len(set(present)) <= _MAX_BINS
    certain = [cell for cell in present if cell in alike and not (may_be_bins and alike[cell].may_be_bins)]
    num_numeric = len(numbers) + len(certain)
    # with limits such as `<10` in most cells, the numbers are still values
    is_numeric = 2 * num_numeric > len(present) or (num_numeric > 0 and LIMIT in alike.values())
    if len(cells) == 1 and not is_numeric:
        return "classes"
    raise _unfit_cell(table, cells, looks if is_numeric else None, has_numbers=bool(numbers))


def _unfit_cell(
    table: Table,
    cells: Mapping[str, tuple[str, ...]],
    looks: Mapping[str, Mapping[str, Look]] | None,
    *,
    has_numbers: bool,
) -> DataError:
    """Return the error for the first cell that does not fit the others of its columns.

    Args:
        looks: What cells of columns of numbers look like; None: several columns hold 0/1 labels.
    """
    wrong = [
        (name, row)
        for name, column in cells.items()
        for row, cell in enumerate(column)
        if cell and (cell.lower() not in _BINARY if looks is None else read_number(cell) is None)
    ]
    if looks is not None and not has_numbers:
        wrong = [(name, row) for name, row in wrong if cells[name][row] in looks[name]]
    name, row = wrong[0]
    cell = cells[name][row]
    look = None if looks is None else looks[name].get(cell)
    found = ["several columns hold 0/1, true/false or yes/no"] if looks is None else []
    found += ["others are numbers"] if looks is not None and has_numbers else []
    found += [f"{'and ' if found else ''}it looks like {look.what}"] if look is not None else []
    mend = look.advice if look is not None else "correct or empty such cells"
    if looks is not None and look is None:
        mend += ", list words of missing labels in `task.missing_values`"
    force = _TAKE_AS_CLASSES if look is not None and len(cells) == 1 else f"or {_CHOOSE_KIND}"
    one_of = f", one of {len(wrong):,} such cells" if len(wrong) > 1 else ""
    return DataError(f"{table.where(row)}: `{name}` is `{cell}`{one_of}; {' '.join(found)}", f"{mend}; {force}")


def _binary_labels(table: Table, columns: Sequence[str]) -> Labels:
    hint = "write 1 for positive and 0 for negative rows, or give one column of classes"
    targets = read_targets(_with_zeros(table, columns), columns, *_BINARY_CELLS, hint, missing=())
    if len(columns) == 1:
        _check_varies(table, columns, targets)
    what = f"a 0/1 label, `{columns[0]}`" if len(columns) == 1 else f"{len(columns)} 0/1 labels"
    positive = ", ".join(format_percent(float(np.nanmean(column))) for column in targets.T[:5])
    more = "" if len(columns) <= 5 else ", ..."
    return Labels("binary", tuple(columns), targets, (f"found {what}, positive in {positive}{more} of the rows",))


def _with_zeros(table: Table, columns: Sequence[str], *, is_strict: bool = True) -> Table:
    """Return a table in which -1 and 1 are 0 and 1 in the columns that have -1; columns that it lacks are left out.

    Raises:
        DataError: One of them has 0 too, and `is_strict`; else it stays as it is.
    """
    read = dict(table.columns)
    for name in [name for name in columns if name in read]:
        numbers = [read_number(cell) for cell in read[name]]
        if -1 not in numbers or (0 in numbers and not is_strict):
            continue
        if 0 in numbers:
            raise DataError(
                f"{table.where(numbers.index(-1))}: `{name}` is `{read[name][numbers.index(-1)]}`, and on line "
                f"{table.lines[numbers.index(0)]} it is 0: which of the two is negative?",
                "write 0 in negative rows, and leave the cell empty where the label is not known",
            )
        signs: dict[float | None, str] = {-1.0: "0", 1.0: "1"}
        read[name] = tuple(signs.get(number, cell) for number, cell in zip(numbers, read[name], strict=True))
    return replace(table, columns=read)


def _values(table: Table, columns: Sequence[str]) -> Labels:
    targets = read_targets(table, columns, *_VALUE_CELLS, missing=())
    _check_varies(table, columns, targets)
    named = name_some(f"`{name}`" for name in columns)
    notes = [f"found values to predict in {named}; if they are classes, say so with `task.label_kind=classes`"]
    if set(np.unique(targets[~np.isnan(targets)])) == {-1.0, 1.0}:
        notes.append("every value is -1 or 1: `task.label_kind=multi_label` takes them as negative and positive labels")
    return Labels("regression", tuple(columns), targets, (*notes, *_doubt_points(table, columns)))


def _doubt_points(table: Table, columns: Sequence[str]) -> list[str]:
    """Return a warning for each column of whole numbers below 1000 and others like `1.355`, which may be 1355."""
    notes = []
    for name in columns:
        whole: list[str] = []
        others: list[str] = []
        for cell in filter(None, table.columns[name]):
            (whole if cell.lstrip("+-\N{MINUS SIGN}").isdecimal() else others).append(cell)
        is_doubtful = whole and all(len(cell.lstrip("+-\N{MINUS SIGN}")) < 4 for cell in whole)
        if is_doubtful and len(others) > 1 and all(map(MAYBE_THOUSANDS.fullmatch, others)):
            notes.append(
                f"warning: in `{name}`, all numbers that are not whole have three decimals, such as `{others[0]}`, and "
                "no whole one has four digits: the point may separate thousands, but is read as a decimal point"
            )
    return notes


class _OneValueError(DataError):
    """A column has the same label in every row."""


def _check_varies(table: Table, columns: Sequence[str], targets: FloatArray) -> None:
    for name, values in zip(columns, targets.T, strict=True):
        present = np.unique(values[~np.isnan(values)])
        if len(present) == 1:
            raise _one_value(table, name, f"{present[0]:g}")


def _one_value(table: Table, name: str, value: str) -> DataError:
    return _OneValueError(f"{table.path}: `{name}` is {value} in every row that has it: nothing to learn", _OTHERS)


def _classes(table: Table, columns: Sequence[str], positive: str | None, *, is_found: bool) -> Labels:
    if len(columns) > 1:
        raise DataError(
            f"{table.path}: {len(columns)} label columns cannot be `classes`: each row has one class",
            "give one label column, or set `task.label_kind=multi_label` for columns of 0 and 1",
        )
    (name,) = columns
    cells = table.columns[name]
    names = _class_names({cell for cell in cells if cell})
    if len(names) < 2:
        raise _one_value(table, name, f"`{names[0]}`")
    if len(names) > _MAX_CLASSES:
        raise DataError(
            f"{table.path}: `{name}` has {len(names):,} different texts, at most {_MAX_CLASSES} classes are taken",
            "choose the column that holds the labels",
        )
    names, how = _order(table, name, names, positive)
    parse = _class_parser(names)
    targets = read_targets(table, columns, parse, "the names of the classes", missing=())
    counts = [int(np.count_nonzero(targets == index)) for index in range(len(names))]
    if is_found and 2 * counts.count(1) > len(names):
        first = next(row for row, cell in enumerate(cells) if cell and counts[int(parse(cell) or 0)] == 1)
        raise DataError(
            f"{table.where(first)}: `{name}` is `{cells[first]}` in this row alone; {counts.count(1)} of {len(names)} "
            "classes have one row",
            f"choose the column that holds the labels, or correct misspelt classes; {_TAKE_AS_CLASSES}",
        )
    listed = name_some((f"`{text}` ({count:,})" for text, count in zip(names, counts, strict=True)), limit=10)
    notes = [f"found {len(names)} classes of `{name}`: {listed}{how}"]
    by_folded = {text.casefold(): text for text in reversed(names)}
    alike = [f"`{by_folded[text.casefold()]}` and `{text}`" for text in names if by_folded[text.casefold()] != text]
    if alike:
        notes.append(f"warning: classes that differ in capital letters alone: {name_some(alike, limit=3)}")
    return Labels("classes", names, targets, tuple(notes))


def _class_names(cells: Collection[str]) -> tuple[str, ...]:
    """Return the classes in order: as strings, or where all are numbers, as the shortest string of each value."""
    numbers = {cell: number for cell in cells if (number := read_number(cell)) is not None}
    if len(numbers) < len(cells):
        return tuple(sorted(cells))
    longest_first = sorted(cells, key=lambda cell: (len(cell), cell), reverse=True)
    shortest = {numbers[cell]: cell for cell in longest_first}
    return tuple(shortest[value] for value in sorted(shortest))


def _order(table: Table, column: str, names: tuple[str, ...], positive: str | None) -> tuple[tuple[str, ...], str]:
    """Return classes, of two the positive one last, and the end of a sentence that says which it is and why."""
    if len(names) > 2:
        if positive is not None:
            raise DataError(
                f"{table.path}: `task.positive_class` is for two classes; `{column}` has {len(names)}", "leave it out"
            )
        return names, ""
    if positive is not None:
        found = _class_parser(names)(positive)
        if found is None:
            listed = " and ".join(f"`{name}`" for name in names)
            raise DataError(
                f"{table.path}: `task.positive_class` is `{positive}`; the classes of `{column}` are {listed}",
                "give one of them as the file writes it",
            )
        chosen, how = names[int(found)], "as `task.positive_class` says"
    else:
        told = find_positive((names[0], names[1]))
        chosen = told or names[1]
        how = "the later one" if told is None else "by its name"
    other = names[0] if chosen == names[1] else names[1]
    if positive is None:
        how += f"; `task.positive_class={other}` chooses the other"
    return (other, chosen), f"; `{chosen}` is the positive one, {how}"


def _value(cell: str) -> float | None:
    """Return a number that can be predicted, or None."""
    number = read_number(cell)
    return None if number is None or abs(number) > _LARGEST_VALUE else number


# what a cell means, and which cells are accepted
_BINARY_CELLS = (lambda cell: _BINARY.get(cell.lower()), "0/1, true/false, yes/no, t/f, y/n")
_VALUE_CELLS = (_value, "a number from -1e100 to 1e100")
