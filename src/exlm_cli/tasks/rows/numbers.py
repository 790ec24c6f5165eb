"""Numbers in the cells of a table, with a decimal point or a decimal comma, and bounds such as `>10000`.

Axes: R rows, C columns.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence

import numpy as np

from exlm_cli.format import name_some
from exlm_cli.tasks.base import FloatArray
from exlm_cli.tasks.rows.table import Table

_COMMA = re.compile("[-+\N{MINUS SIGN}]?\\d*,(\\d+)(?:[eE][-+\N{MINUS SIGN}]?\\d+)?")

_BOUND = re.compile(r"([<>≤≥])=?\s*(.+)")

Parser = Callable[[str], float | None]
"""Number of a cell that is not missing; None if the cell is not a label."""


def read_bound(cell: str, number: Parser) -> tuple[float, float] | None:
    """Return what a censored value lies between: `>5` between 5 and infinity; None for other cells."""
    match = _BOUND.fullmatch(cell)
    value = None if match is None else number(match[2])
    if match is None or value is None:
        return None
    return (value, math.inf) if match[1] in ">≥" else (-math.inf, value)


def read_bounds(table: Table, columns: Sequence[str], number: Parser, targets_RC: FloatArray) -> FloatArray | None:
    """Return (R, C, 2) what each value lies between, as in `EncodedRows`; None where no cell is a bound.

    Args:
        columns: Those that the table lacks are left out.
        targets_RC: The values, NaN where one is missing or censored.
    """
    is_missing_RC = np.isnan(targets_RC)
    low_RC, high_RC = (np.where(is_missing_RC, end, targets_RC) for end in (-np.inf, np.inf))
    has_any = False
    for index, name in enumerate(columns):
        for row, cell in enumerate(table.columns.get(name, ())):
            if bound := read_bound(cell, number):
                low_RC[row, index], high_RC[row, index], has_any = *bound, True
    return np.stack([low_RC, high_RC], axis=2) if has_any else None


def read_number(cell: str, *, decimal_comma: bool = False) -> float | None:
    """Return a finite number, with U+2212 as a minus too, or None; `1_000`, which Python reads as one, is none."""
    if decimal_comma:
        cell = "" if "." in cell else cell.replace(",", ".") if _COMMA.fullmatch(cell) else cell
    try:
        value = math.nan if "_" in cell else float(cell.replace("\N{MINUS SIGN}", "-"))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def with_points(table: Table, columns: Sequence[str], missing: Collection[str]) -> tuple[Table, tuple[str, ...]]:
    """Return a table whose decimal commas in some columns are points, and a note on them.

    Commas are decimal in a table whose delimiter is another, in columns that hold nothing but numbers with them, unless
    three digits follow each: `1,355` may be thousands.

    Args:
        columns: Those that it lacks are left out.
        missing: Words of missing numbers, in any case.
    """
    if table.delimiter == ",":
        return table, ()
    found, missing = [], {word.lower() for word in missing}
    for name in columns:
        cells = {cell for cell in table.columns.get(name, ()) if cell and cell.lower() not in missing}
        cells = {_BOUND.sub(r"\2", cell) for cell in cells}
        digits = {len(match[1]) for cell in cells if (match := _COMMA.fullmatch(cell))}
        if digits - {3} and all(read_number(cell, decimal_comma=True) is not None for cell in cells):
            found.append(name)
    if not found:
        return table, ()
    note = f"read the commas in {name_some(f'`{name}`' for name in found)} as decimal: 1,5 is 1.5"
    return table.with_cells(found, lambda cell: cell.replace(",", ".")), (note,)
