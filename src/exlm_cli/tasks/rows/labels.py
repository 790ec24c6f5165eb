"""Labels of a user's table: 0/1 labels, classes or values, found from the cells of its label columns.

| cells that are not missing | are |
|---|---|
| 1, true, yes and 0, false, no, in any case; t and f, or y and n | a 0/1 label (`binary`); several: `multi_label` |
| two numbers, in one column | two classes |
| other numbers | values (`regression`) |
| numbers, and bounds such as `<10` and `≥ 5` | values, some of them censored |
| numbers, and fewer others, such as `3 nM` | refused |
| other texts, in one column | classes; refused if most classes have one row, or there are over 100 |

- A cell is missing if it is empty or one of `task.missing_values`, in any case. A note counts such words among words.
- `task.label_kind` says the kind instead. With `multi_label`, -1 is negative in a column without 0.
- `1.00` is 1, and `0.00` is 0. A column of t, f, y and n has classes: such letters are labels beside their own pair.
- Classes are sorted, numbers by value. Text that differs is another class, as `1.1` and `1.10`, or `7` and `007`; only
  `1.0` is the class `1`. Warnings name classes that look alike or are equal as numbers.
- Of two classes the second is the positive one: that of `task.positive_class`, else the one that its name tells
  (`find_positive`), else the later one.
- With `task.decimal_comma`, `1,5` is a number, and `1.5` is none.
- With `task.log10`, values are logarithms, and numbers up to 0 are none.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from exlm_cli.config.tasks import MISSING_VALUES, CsvTaskConfig
from exlm_cli.errors import DataError
from exlm_cli.format import format_number_of, format_percent, name_some
from exlm_cli.tasks.base import FloatArray, Loss
from exlm_cli.tasks.rows.classes import describe_alike, find_list, find_positive
from exlm_cli.tasks.rows.table import Parser, Table, read_bound, read_bounds, read_number
from exlm_cli.tasks.rows.task import LOG10

LabelKind = Literal["auto", "classes", "multi_label", "regression"]
_BINARY = {
    **dict.fromkeys(("1", "1.0", "true", "yes", "t", "y"), 1.0),
    **dict.fromkeys(("0", "0.0", "false", "no", "f", "n"), 0.0),
}
_ZEROS = re.compile("(?<=^[01])[.,]0*$")
_PAIRS = ({"t", "f", "true", "false"}, {"y", "n", "yes", "no"})
_WHOLE = re.compile("([-+]?[0-9]+)[.,]0")
_MAX_CLASSES = 100
_MAX_NAMED = 3
_TWO_DECADES = 100
_FEW_VALUES = 10
"""A column of at most so many whole numbers may be one of classes."""
_LARGEST_VALUE = 1e100  # so that sums of squared errors are finite
_TAKE_AS_CLASSES = "`--set task.label_kind=classes` takes them as classes"
_CORRECT = "correct the cell, or leave it empty"
_OTHERS = "add rows with other values, or choose other columns with `--label-columns A,B`"
CHOOSE_COLUMNS = "choose label columns with `--label-columns A,B`"
_MEND = "correct such cells, leave them empty, or list words of missing labels in `task.missing_values`"


@dataclass(frozen=True)
class Labels:
    """The labels of R rows.

    Attributes:
        names: C labels, classes or columns; of two classes, the second is the positive one.
        targets: (R, C), NaN where missing; (R, 1) class index for `classes`.
        bounds: As in `EncodedRows`, of R rows.
    """

    loss: Loss
    names: tuple[str, ...]
    targets: FloatArray
    notes: tuple[str, ...]
    bounds: FloatArray | None = None

    @property
    def missing(self) -> list[int]:
        """Rows without any label."""
        is_missing_R = np.isnan(self.targets).all(axis=1)
        if self.bounds is not None:
            is_missing_R &= np.isinf(self.bounds).all(axis=(1, 2))
        return np.flatnonzero(is_missing_R).tolist()

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
    decimal_comma: bool = False,
    log10: bool = False,
) -> Labels:
    """Read label columns by the rules above.

    Args:
        columns: At least one.
        kind: Kind of the labels; `auto` finds it from the cells.
        missing: Words of missing labels, in any case; an empty cell is missing too.
        positive: The positive one of two classes; None: found from their names.
        decimal_comma: Whether numbers are written with a comma.
        log10: Whether values are to be logarithms.

    Raises:
        DataError: No such column; a cell that does not fit the kind, named with its row; a column without labels, or
            with one class only; `positive` is given and is not one of two classes.
    """
    number = partial(read_number, decimal_comma=decimal_comma)
    words = {name: _count_missing(table.column(name, CHOOSE_COLUMNS), missing) for name in columns}
    table = blank_missing(table, columns, missing)
    for name in columns:
        if not any(table.columns[name]):
            hint = "; ".join([CHOOSE_COLUMNS, *_describe_missing({name: words[name]}, missing)])
            raise DataError(f"{table.path}: label column `{name}` is empty in every row", hint)
    texts = {name: words[name] for name in columns if any(c and number(c) is None for c in table.columns[name])}
    hint = "; ".join([_OTHERS, *_describe_missing(words, missing)])
    match _find_kind(table, columns, number, positive) if kind == "auto" else kind:
        case "multi_label":
            labels = _binary_labels(table, columns, hint)
        case "regression":
            labels = _values(table, columns, number, hint, is_found=kind == "auto", log10=log10)
        case _:
            labels = _classes(table, columns, number, positive, hint, is_found=kind == "auto")
    if positive is not None and labels.loss != "classes":
        what = "values to predict" if labels.loss == "regression" else "0/1 labels"
        raise DataError(f"{table.path}: `task.positive_class` is for two classes; found {what}", "leave it out")
    if log10 and labels.loss != "regression":
        what = "classes" if labels.loss == "classes" else "0/1 labels"
        raise DataError(f"{table.path}: `task.log10` is for values to predict; found {what}", "leave it out")
    return replace(labels, notes=(*labels.notes, *_describe_missing(texts, missing)))


def read_known_targets(
    table: Table,
    columns: Sequence[str],
    loss: Loss,
    names: Sequence[str],
    kind: LabelKind = "auto",
    missing: Collection[str] = MISSING_VALUES,
    *,
    decimal_comma: bool = False,
    log10: bool = False,
) -> tuple[FloatArray, FloatArray | None, tuple[str, ...]]:
    """Return the labels of new rows of a known task, (R, C), NaN where missing, their bounds, and notes; (R, 1) class
    index for `classes`.

    A cell that is not a label of the task counts as missing, since its row can be predicted all the same; a warning
    says how many such cells there are, and which is the first.

    Args:
        table: May lack some of the columns, or all.
        columns: One for each label or value; the only one for `classes`.
        kind, missing, decimal_comma, log10: As the task was read.
    """
    number = partial(read_number, decimal_comma=decimal_comma)
    parse, accepted = _BINARY_CELLS if loss == "binary" else _value_cells(number, log10=log10)
    if loss == "classes":
        parse, accepted = _class_parser(names, number), name_some((f"`{name}`" for name in names), limit=10)
    table = blank_missing(table, columns, missing)
    if loss == "binary" and kind == "multi_label":
        table = _with_zeros(table, columns, is_strict=False)
    is_censored = loss == "regression"
    targets, odd = _read_cells(_without_bounds(table, columns, parse) if is_censored else table, columns, parse)
    bounds = read_bounds(table, columns, parse, targets) if is_censored else None
    if not odd:
        return targets, bounds, ()
    what = "a cell is no label of the run and is not scored"
    if len(odd) > 1:
        what = f"{len(odd):,} cells are no labels of the run and are not scored; the first"
    return targets, bounds, (f"warning: {what}: {_name_cells(table, odd[:1])}; accepted: {accepted}, or empty",)


def read_targets(
    table: Table, columns: Sequence[str], parse: Parser, accepted: str, hint: str = _CORRECT
) -> FloatArray:
    """Return C label columns as (R, C) numbers, NaN where a cell or the whole column is missing.

    Args:
        table: May lack some of the columns.
        parse: Reads a cell that is not empty.
        accepted: Cells that are labels, in words.

    Raises:
        DataError: A cell is not a label; it names the first ones.
    """
    targets, wrong = _read_cells(table, columns, parse)
    if wrong:
        raise DataError(f"{_name_cells(table, wrong)}; accepted: {accepted}, or empty", hint)
    return targets


def _read_cells(table: Table, columns: Sequence[str], parse: Parser) -> tuple[FloatArray, list[tuple[str, int]]]:
    """Return what `read_targets` does, and column and row of the cells that are no labels, NaN too."""
    targets, wrong = np.full((len(table), len(columns)), math.nan), []
    for index, name in enumerate(columns):
        for row, cell in enumerate(table.columns.get(name, ())):
            value = parse(cell) if cell else math.nan
            targets[row, index] = math.nan if value is None else value
            if value is None:
                wrong.append((name, row))
    return targets, wrong


def read_numbers(table: Table, config: CsvTaskConfig) -> FloatArray:
    """Return the numbers of `task.descriptor_columns`, (R, n), NaN where one is missing.

    Raises:
        DataError: A column is missing, or a cell is not a number.
    """
    columns = config.descriptor_columns
    for name in columns:
        table.column(name, "the model reads it: `task.descriptor_columns` names it")
    parse, accepted = _value_cells(partial(read_number, decimal_comma=config.decimal_comma))
    return read_targets(blank_missing(table, columns, config.missing_values), columns, parse, accepted)


def _class_parser(names: Sequence[str], number: Parser) -> Parser:
    """Return a function from a cell to the index of its class; where classes are numbers, `1.0` is `1`."""
    by_text = {name: float(index) for index, name in enumerate(names)}
    if any(number(name) is None for name in names):
        return by_text.get
    by_code = {_code(name): index for name, index in by_text.items()}
    return lambda cell: by_text.get(cell, by_code.get(_code(cell)))


def _code(cell: str) -> str:
    """Return a number as a class: `1.0`, as other programs write the integer 1, is `1`; any other text stays."""
    return _WHOLE.sub(r"\1", cell) if _WHOLE.fullmatch(cell) else cell


def _binary(cell: str) -> float | None:
    return _BINARY.get(_ZEROS.sub("", cell.lower()))


def _is_binary(cells: Collection[str]) -> bool:
    """Return whether the cells of a column are 0/1 labels; t, f, y and n are, beside words of their own pair alone."""
    words = {cell.lower() for cell in cells}
    has_letters = not words.isdisjoint("tfyn")
    return all(_binary(word) is not None for word in words) and (not has_letters or any(words <= p for p in _PAIRS))


def _count_missing(cells: Sequence[str], missing: Collection[str]) -> Counter[str]:
    folded = {word.lower() for word in missing}
    return Counter(cell for cell in cells if cell and cell.lower() in folded)


def blank_missing(table: Table, columns: Sequence[str], missing: Collection[str] = MISSING_VALUES) -> Table:
    """Return a table whose missing labels are empty cells; columns that it lacks are left out."""
    folded = {word.lower() for word in missing}
    return table.with_cells(columns, lambda cell: "" if cell.lower() in folded else cell)


def _describe_missing(words: Mapping[str, Counter[str]], missing: Collection[str]) -> list[str]:
    """Return a note for each column on the words in it that count as missing labels."""
    notes = []
    for name, counts in words.items():
        if counts:
            listed = name_some(f"`{word}` ({count:,})" for word, count in counts.most_common())
            kept = ",".join(word for word in missing if word.lower() not in {found.lower() for found in counts})
            is_one = len(counts) == 1
            count, become = ("counts", "it is a class") if is_one else ("count", "they are classes")
            notes.append(f"{listed} of `{name}` {count} as missing; with `--set task.missing_values=[{kept}]` {become}")
    return notes


def _find_kind(table: Table, columns: Sequence[str], number: Parser, positive: str | None) -> LabelKind:
    cells = [(name, row, cell) for name in columns for row, cell in enumerate(table.columns[name]) if cell]
    odd = [name for name in columns if not _is_binary({cell for cell in table.columns[name] if cell})]
    if not odd:
        return "multi_label" if positive is None or len(columns) > 1 else "classes"
    values = [number(cell) for *_, cell in cells]
    has_numbers = any(value is not None for value in values)
    others = [
        (name, row)
        for (name, row, cell), value in zip(cells, values, strict=True)
        if value is None and not (has_numbers and read_bound(cell, number))
    ]
    if not others:
        has_bounds = None in values
        return "classes" if len(columns) == 1 and len(set(values)) == 2 and not has_bounds else "regression"
    if len(columns) == 1 and (2 * len(others) >= len(cells) if has_numbers else True):
        return "classes"
    if has_numbers:
        hint = f"{_MEND}; `--set task.decimal_comma=true` reads decimal commas; {_TAKE_AS_CLASSES}"
        raise DataError(f"{_name_cells(table, others)}; others are numbers", hint)
    others = [(name, row) for name, row, cell in cells if _binary(cell) is None] or [
        (name, row) for name, row, _ in cells if name in odd
    ]
    raise DataError(
        f"{_name_cells(table, others)}; several columns hold 0/1, true/false or yes/no",
        "correct or empty such cells, or give one column of classes",
    )


def _name_cells(table: Table, cells: Sequence[tuple[str, int]]) -> str:
    """Return the place of the first of some cells, what is there, and how many more there are, with their lines."""
    (name, row), *more = cells
    said = f"{table.where(row)}: `{name}` is `{table.columns[name][row]}`"
    if more:
        listed = name_some((f"`{table.columns[n][r]}` ({table.short_place(r)})" for n, r in more), limit=_MAX_NAMED)
        said += f", one of {format_number_of(len(cells), 'such cell')}; the next: {listed}"
    return said


def _binary_labels(table: Table, columns: Sequence[str], hint: str) -> Labels:
    """Return 0/1 labels; `hint` is that of a column with one value, here and in `_values` and `_classes`."""
    mend = "write 1 for positive and 0 for negative rows, or give one column of classes"
    targets = read_targets(_with_zeros(table, columns), columns, *_BINARY_CELLS, mend)
    if len(columns) == 1:
        _check_varies(table, columns, targets, hint)
    what = f"a 0/1 label, `{columns[0]}`" if len(columns) == 1 else f"{len(columns)} 0/1 labels"
    positive = ", ".join(format_percent(float(np.nanmean(column))) for column in targets.T[:5])
    more = "" if len(columns) <= 5 else ", ..."
    return Labels("binary", tuple(columns), targets, (f"found {what}, positive in {positive}{more} of the rows",))


def _with_zeros(table: Table, columns: Sequence[str], *, is_strict: bool = True) -> Table:
    """Return a table in which -1 and 1 are 0 and 1 in the columns that have -1; columns that it lacks are left out.

    Raises:
        DataError: One of them has 0 too, and `is_strict`; else it stays as it is.
    """
    for name in [name for name in columns if name in table.columns]:
        numbers = [read_number(cell) for cell in table.columns[name]]
        if -1 in numbers and 0 in numbers and is_strict:
            row = numbers.index(-1)
            raise DataError(
                f"{table.where(row)}: `{name}` is `{table.columns[name][row]}`, and on line "
                f"{table.lines[numbers.index(0)]} it is 0: which of the two is negative?",
                "write 0 in negative rows, and leave the cell empty where the label is not known",
            )
        if -1 in numbers and 0 not in numbers:
            signs: dict[float | None, str] = {-1.0: "0", 1.0: "1"}
            table = table.with_cells([name], lambda cell: signs.get(read_number(cell), cell))  # noqa: B023
    return table


def _values(table: Table, columns: Sequence[str], number: Parser, hint: str, *, is_found: bool, log10: bool) -> Labels:
    parse, accepted = _value_cells(number, log10=log10)
    targets = read_targets(_without_bounds(table, columns, parse), columns, parse, accepted, _MEND)
    _check_varies(table, columns, targets, hint)
    named = name_some(f"`{name}`" for name in columns)
    present = np.unique(targets[~np.isnan(targets)])
    notes = [f"found values to predict in {named}; if they are classes, say so with `--set task.label_kind=classes`"]
    if is_found and len(columns) == 1 and len(present) <= _FEW_VALUES and not (present % 1).any():
        listed = ", ".join(f"{value:g}" for value in present)
        notes = [
            f"warning: {named} has {len(present)} whole numbers ({listed}), taken as values to predict: "
            "`--set task.label_kind=classes` takes them as classes, `--set task.label_kind=regression` says that they "
            "are values"
        ]
    if set(present) == {-1.0, 1.0}:
        notes.append(
            "every value is -1 or 1: `--set task.label_kind=multi_label` takes them as negative and positive labels"
        )
    names = tuple(f"{LOG10}{name}" if log10 else name for name in columns)
    bounds = read_bounds(table, columns, parse, targets)
    if bounds is not None:
        num_each = (np.isfinite(bounds).sum(axis=2) == 1).sum(axis=0).tolist()
        listed = name_some(f"{num:,} of `{name}`" for name, num in zip(columns, num_each, strict=True) if num)
        notes.append(f"censored values (`>`, `<`), of which loss, rmse and mae count the wrong side alone: {listed}")
    return Labels(
        "regression", names, targets, (*notes, *([] if log10 else _describe_decades(columns, targets))), bounds
    )


def _describe_decades(columns: Sequence[str], targets: FloatArray) -> list[str]:
    """Return a note on positive values that span more than two decades."""
    wide = []
    for name, values in zip(columns, targets.T, strict=True):
        low, high = min(known := values[~np.isnan(values)], default=0), max(known, default=0)
        if 0 < _TWO_DECADES * low < high:
            wide.append(f"`{name}` spans {math.log10(high / low):.1f} decades ({low:g} to {high:g})")
    return [f"warning: {name_some(wide)}: `--log10` trains and scores logarithms"] if wide else []


def _without_bounds(table: Table, columns: Sequence[str], number: Parser) -> Table:
    return table.with_cells(columns, lambda cell: "" if read_bound(cell, number) else cell)


def _check_varies(table: Table, columns: Sequence[str], targets: FloatArray, hint: str) -> None:
    for name, values in zip(columns, targets.T, strict=True):
        present = np.unique(values[~np.isnan(values)])
        if len(present) == 1:
            raise _one_value(table, name, f"{present[0]:g}", hint)


def _one_value(table: Table, name: str, value: str, hint: str) -> DataError:
    return DataError(f"{table.path}: `{name}` is {value} in every row that has it: nothing to learn", hint)


def _classes(
    table: Table, columns: Sequence[str], number: Parser, positive: str | None, hint: str, *, is_found: bool
) -> Labels:
    if len(columns) > 1:
        raise DataError(
            f"{table.path}: {len(columns)} label columns cannot be `classes`: each row has one class",
            "give one label column, or set `--set task.label_kind=multi_label` for columns of 0 and 1",
        )
    (name,) = columns
    cells = table.columns[name]
    names = _class_names({cell for cell in cells if cell}, number)
    if len(names) < 2:
        raise _one_value(table, name, f"`{names[0]}`", hint)
    if len(names) > _MAX_CLASSES:
        raise DataError(
            f"{table.path}: `{name}` has {len(names):,} different texts, at most {_MAX_CLASSES} classes are taken",
            "choose the column that holds the labels; values need a number in every cell, and "
            "`--set task.decimal_comma=true` reads decimal commas",
        )
    names, how = _order(table, name, names, number, positive)
    parse = _class_parser(names, number)
    targets = read_targets(table, columns, parse, "the names of the classes")
    counts = [int(np.count_nonzero(targets == index)) for index in range(len(names))]
    if is_found and 2 * counts.count(1) > len(names):
        alone = [(name, row) for row, cell in enumerate(cells) if cell and counts[int(parse(cell) or 0)] == 1]
        raise DataError(
            f"{_name_cells(table, alone)}; {counts.count(1)} of {len(names)} classes have one row",
            "choose the column that holds the labels, or correct misspelt classes; values need a number in every cell, "
            f"and `--set task.decimal_comma=true` reads decimal commas; {_TAKE_AS_CLASSES}",
        )
    listed = name_some((f"`{text}` ({count:,})" for text, count in zip(names, counts, strict=True)), limit=10)
    notes = [f"found {len(names)} classes of `{name}`: {listed}{how}", *describe_alike(names, number)]
    if example := find_list(names):
        notes.append(
            f"warning: classes of `{name}` seem to be lists, such as `{example}`, and each combination is a class; for "
            "several labels a row, give a column of 0 and 1 for each label"
        )
    return Labels("classes", names, targets, tuple(notes))


def _class_names(cells: Collection[str], number: Parser) -> tuple[str, ...]:
    """Return the classes in order: as strings, or where all are numbers, by value; of `1` and `1.0` the shorter one."""
    values = {cell: number(cell) for cell in cells}
    if None in values.values():
        return tuple(sorted(cells))
    shortest = {_code(cell): cell for cell in sorted(cells, key=len, reverse=True)}
    return tuple(sorted(shortest.values(), key=lambda cell: (values[cell], len(cell), cell)))


def _order(
    table: Table, column: str, names: tuple[str, ...], number: Parser, positive: str | None
) -> tuple[tuple[str, ...], str]:
    """Return classes, of two the positive one last, and the end of a sentence that says which it is and why."""
    if len(names) > 2:
        if positive is not None:
            raise DataError(
                f"{table.path}: `task.positive_class` is for two classes; `{column}` has {len(names)}", "leave it out"
            )
        return names, ""
    if positive is not None:
        found = _class_parser(names, number)(positive)
        if found is None:
            listed = " and ".join(f"`{name}`" for name in names)
            raise DataError(
                f"{table.path}: `task.positive_class` is `{positive}`; the classes of `{column}` are {listed}",
                "give one of them as the file writes it",
            )
        chosen, how = names[int(found)], "as `task.positive_class` says"
    else:
        told = find_positive((names[0], names[1]))
        chosen, how = told or names[1], "the later one" if told is None else "by its name"
    other = names[0] if chosen == names[1] else names[1]
    if positive is None:
        how += f"; `--set task.positive_class={other}` chooses the other"
    return (other, chosen), f"; `{chosen}` is the positive one, {how}"


def _value_cells(number: Parser, *, log10: bool = False) -> tuple[Parser, str]:
    """Return a parser of numbers that can be predicted, or of their logarithms, and which are accepted."""

    def value(cell: str) -> float | None:
        found = number(cell)
        if found is None or abs(found) > _LARGEST_VALUE or (log10 and found <= 0):
            return None
        return math.log10(found) if log10 else found

    return value, f"a number {'above 0, of which there is a logarithm' if log10 else 'from -1e100 to 1e100'}"


# which cells are accepted, and what they mean
_BINARY_CELLS: tuple[Parser, str] = (_binary, "0/1, true/false, yes/no, t/f, y/n")
