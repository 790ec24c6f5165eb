"""Rows with several columns, one after the other, out of TSV, CSV, JSON Lines, JSON arrays and Parquet.

A row that does not fit is told, not raised: whoever reads decides whether it stops the work.
"""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from exlm_cli.data.rows.decode import csv_records, decoded_lines, decompress, explaining_damage
from exlm_cli.data.rows.json_rows import array_elements, as_json, parse_row, starts_array
from exlm_cli.data.rows.readers import format_of
from exlm_cli.data.rows.table import check_header
from exlm_cli.errors import DataError

RECORD_SUFFIXES = (".tsv", ".csv", ".jsonl", ".json", ".parquet")

Cells = tuple[str, list[str]]


class Record(NamedTuple):
    """One row.

    Attributes:
        where: As errors name it: `train.tsv:7`, or `train.parquet, record 6`.
        values: By column; text in TSV and CSV. Empty where the row cannot be read.
        problem: Why it cannot be read.
    """

    where: str
    values: dict[str, Any]
    problem: str | None = None


def iter_records(path: Path, *, header: Sequence[str] | None = None) -> Iterator[Record]:
    """Yield the rows of a file, also gzip'd or xz'd; empty lines are passed over. Cells of TSV are never quoted.

    Args:
        path: The file.
        header: Columns of a TSV or CSV that may have no header: its first row is data unless it names one of them.

    Raises:
        DataError: The file is missing, of another format, damaged, or empty, or its header names a column twice.
    """
    file_format = format_of(path)
    if file_format not in RECORD_SUFFIXES:
        raise DataError(f"{path}: not a table that can be read; known are {' '.join(RECORD_SUFFIXES)}, also .gz or .xz")
    try:
        raw = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror}") from error
    with raw, explaining_damage(path), decompress(path, raw, is_seekable=file_format == ".parquet") as file:
        match file_format:
            case ".tsv":
                # not by the `csv` module: a carriage return inside a cell would end the row
                rows = (
                    (f"{path}:{number}", line.rstrip("\r\n").split("\t"))
                    for number, line in decoded_lines(path, file)
                    if line.strip("\r\n")
                )
                yield from _with_header(path, rows, header)
            case ".csv":
                records = csv_records(path, file, is_tsv=False)
                yield from _with_header(path, ((f"{path}:{n}", cells) for n, cells in records if cells), header)
            case ".parquet":
                yield from _read_parquet(path, file)
            case _:
                yield from _read_json(path, file)


def _with_header(path: Path, rows: Iterator[Cells], header: Sequence[str] | None) -> Iterator[Record]:
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path}: the file is empty")
    if header is None or not set(header).isdisjoint(first[1]):
        names = [cell.strip() for cell in first[1]]
        check_header(path, names)
    else:
        names = list(header)
        yield _record(first, names)
    for row in rows:
        yield _record(row, names)


def _record(row: Cells, names: Sequence[str]) -> Record:
    where, cells = row
    if len(cells) != len(names):
        return Record(where, {}, f"the row has {len(cells)} cells, expected {len(names)}")
    return Record(where, {name: cell.strip() for name, cell in zip(names, cells, strict=True)})


def _read_json(path: Path, file: io.BufferedReader) -> Iterator[Record]:
    if starts_array(file):
        text = "".join(line for _, line in decoded_lines(path, file))
        for number, (value, problem) in enumerate(_array(path, text), start=1):
            yield _json_record(f"{path}, record {number}", value, problem)
        return
    for number, line in decoded_lines(path, file):
        if line.strip():
            yield _json_record(f"{path}:{number}", *parse_row(line))


def _array(path: Path, text: str) -> Iterable[tuple[Any, str | None]]:
    try:
        return [(value, None) for value in json.loads(text)]
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: not JSON: {error.msg} at line {error.lineno} column {error.colno}") from error
    except (ValueError, RecursionError):
        # one element is beyond a limit: which one, only reading them one by one tells
        return array_elements(path, iter([text]))


def _json_record(where: str, value: Any, problem: str | None) -> Record:
    if problem is None and not isinstance(value, dict):
        problem = f"not a JSON object, but {as_json(value)[:40]}"
    return Record(where, value if problem is None else {}, problem)


def _read_parquet(path: Path, file: io.BufferedReader) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            for values in batch.to_pylist():
                number += 1
                yield Record(f"{path}, record {number}", values)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file that can be read: {error}") from error
