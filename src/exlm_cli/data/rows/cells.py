"""Cells of CSV and TSV: their delimiter, their rows, and the names of their columns."""

import csv
import io
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from exlm_cli.data.rows import decode
from exlm_cli.errors import DataError

NumberedCells = tuple[int, list[str]]
"""The line on which a row begins, counted from 1, and its cells."""

LARGEST_CSV_FIELD = 2**31 - 1
"""For `csv.field_size_limit`, whose default is 128 kB."""
_QUOTING_HINTS = {
    ",": "a cell that holds a comma, a quote or a line end is quoted, and a quote in it is doubled",
    "\t": "put a cell that holds a quote in quotes and double the quotes in it, or write the file as CSV; files of "
    "GLUE are not quoted, `exlm finetune glue` reads them",
}
LINE_END_HINT = "save the file with Unix or Windows line endings"
_DECLARATION = re.compile(r"""(?i:"?sep=(?P<delimiter>[^\w\s"'.+-]|\t)"?)[ ,;\t]*(?:\r?\n|\Z)""")
"""First line of a table, in any case, that names its delimiter for Excel."""
_DELIMITERS = (",", ";", "\t", "|")


def read_rows(
    path: Path, file: io.BufferedReader, usual: str, *, is_literal: bool = False
) -> tuple[str, Iterator[NumberedCells]]:
    """Return the delimiter of a table, and its rows, the header first; empty lines are passed over.

    Args:
        usual: Delimiter that files of this name have. A line like Excel's `sep=;` names another; else another one
            parts the header and the first row where this one does not.
        is_literal: Cells are parted by the usual delimiter and are never quoted.

    Raises:
        DataError: A cell is malformed, or a line is not UTF-8; also while rows are read.
    """
    lines = decode.text_lines(path, file)
    if is_literal:
        return usual, _literal_rows(lines)
    csv.field_size_limit(LARGEST_CSV_FIELD)
    begin = [next(lines, (1, ""))]
    if declared := _DECLARATION.match(begin[0][1]):
        return declared["delimiter"], _csv_rows(path, itertools.chain([(1, "\n")], lines), declared["delimiter"])
    for line in lines:
        begin.append(line)
        if sum(bool(text.strip()) for _, text in begin) > 1:
            break
    delimiter = _find_delimiter([text for _, text in begin if text.strip()], usual)
    return delimiter, _csv_rows(path, itertools.chain(begin, lines), delimiter)


def _find_delimiter(lines: Sequence[str], usual: str) -> str:
    """Return the delimiter that gives header and first row most cells, as many each; of equals the usual one.

    The row may have one more, as R writes the names of rows.
    """

    def num_parted(delimiter: str) -> int:
        header, row = (_num_cells(line, delimiter) for line in (*lines, "", "")[:2])
        return header if row - header in (0, 1, -header) else 1

    return max((usual, *_DELIMITERS), key=num_parted)


def _num_cells(line: str, delimiter: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=delimiter), ()))
    except csv.Error:  # a carriage return; the row that it is in is refused
        return 0


def _csv_rows(path: Path, lines: Iterator[tuple[int, str]], delimiter: str) -> Iterator[NumberedCells]:
    """Yield the line on which each row begins and its cells, which may be quoted; empty lines are passed over.

    If the delimiter is a tab, a quoted cell must not hold both a tab and a line break: more likely a quote is not
    closed.
    """
    csv.field_size_limit(LARGEST_CSV_FIELD)
    reader, number = csv.reader((line for _, line in lines), delimiter=delimiter, strict=True), 1
    try:
        for cells in reader:
            spans_lines = reader.line_num > number
            if spans_lines and delimiter == "\t" and any("\t" in cell and "\n" in cell for cell in cells):
                raise csv.Error("a quote seems not to be closed: its cell holds a tab and a line break")
            if cells:
                yield number, cells
            number = reader.line_num + 1
    except csv.Error as error:
        reason = str(error).replace("'\t'", "a tab").replace(" expected after", " is expected after")
        hint = _QUOTING_HINTS.get(delimiter, _QUOTING_HINTS[","].replace("comma", "delimiter"))
        reason = reason.replace("unexpected end of data", "a quote is not closed")
        if "new-line character" in reason:
            reason, hint = "a carriage return outside of quotes", LINE_END_HINT
        elif reader.line_num > number:
            reason += f", in the row that begins on line {number}"
        raise DataError(f"{path}:{reader.line_num}: malformed: {reason}", hint) from error


def _literal_rows(lines: Iterator[tuple[int, str]]) -> Iterator[NumberedCells]:
    """Yield rows as `_csv_rows`; cells are never quoted and may hold carriage returns.

    A lone quotation mark of a GLUE sentence would make the `csv` module join the lines after it.
    """
    for number, line in lines:
        if line.strip("\r\n"):
            yield number, line.rstrip("\r\n").split("\t")


def column_names(header: Sequence[str]) -> list[str]:
    """Return the names of a header's columns; one may have none, as pandas writes an index, others are `column 4`."""
    names = [cell.strip() for cell in header]
    for index in [index for index, name in enumerate(names) if not name][1:]:
        names[index] = f"column {index + 1}"
    return names
