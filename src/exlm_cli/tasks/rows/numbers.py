"""Numbers in the cells of a table, with a decimal point or a decimal comma."""

import math
import re
from collections.abc import Collection, Sequence

from exlm_cli.format import name_some
from exlm_cli.tasks.rows.table import Table

_COMMA = re.compile("[-+\N{MINUS SIGN}]?\\d*,(\\d+)(?:[eE][-+\N{MINUS SIGN}]?\\d+)?")


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
        digits = {len(match[1]) for cell in cells if (match := _COMMA.fullmatch(cell))}
        if digits - {3} and all(read_number(cell, decimal_comma=True) is not None for cell in cells):
            found.append(name)
    if not found:
        return table, ()
    note = f"read the commas in {name_some(f'`{name}`' for name in found)} as decimal: 1,5 is 1.5"
    return table.with_cells(found, lambda cell: cell.replace(",", ".")), (note,)
