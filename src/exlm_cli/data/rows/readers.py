"""Rows out of one local file, whatever its format and compression; streamed, each with its line or record number."""

import codecs
import io
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from exlm_cli.config.spelling import how_to_set
from exlm_cli.data.rows.decode import (
    BUFFER_BYTES,
    csv_records,
    decode_line,
    decoded_lines,
    decompress,
    explaining_damage,
)
from exlm_cli.data.rows.json_rows import array_elements, as_json, parse_row, starts_array
from exlm_cli.errors import DataError

RowKind = Literal["text", "smiles"]

FORMATS = (".txt", ".smi", ".csv", ".tsv", ".jsonl", ".json", ".parquet")
LINE_FORMATS = (".txt", ".smi")
COMPRESSIONS = (".gz", ".xz")

_PLAUSIBLE_COLUMNS: dict[RowKind, frozenset[str]] = {
    "text": frozenset({"text", "sentence", "content", "document", "article"}),
    "smiles": frozenset({"smiles", "canonical_smiles", "isomeric_smiles", "mol"}),
}
_CHOOSE = f"choose one with {how_to_set('data.column', 'NAME')}"
_LONGEST_TEXT_BYTES = 1 << 20
_PARQUET_BATCH_ROWS = 4096


class Row(NamedTuple):
    """One text or one SMILES.

    Attributes:
        source: The file or data set it came from.
        number: Its line (text formats) or record (JSON arrays, Parquet, Hub), counted from 1.
        text: What it says; empty where the record has nothing there.
        starts_document: Whether a document begins with it; lines of a text file go on until a blank line.
        problem: Why it cannot be used, where the format itself says so.
    """

    source: str
    number: int
    text: str
    starts_document: bool = True
    problem: str | None = None


def format_of(path: Path) -> str | None:
    """Return a file's format ("`.csv`" of "a.csv.gz"), or None where the extension is not known."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def read_file(path: Path, raw: io.BufferedReader, kind: RowKind, column: str | None) -> Iterator[Row]:
    """Yield the rows of one file.

    Args:
        path: Names the file and, by its extension, the format.
        raw: The open file; its position says how far reading has come.
        kind: For "smiles", a line's first blank-separated column is the SMILES.
        column: Column of CSV, TSV, JSON and Parquet rows; none: the one plausible one.

    Raises:
        DataError: Undecodable, binary, truncated or malformed content, or no such column.
    """
    with explaining_damage(path), decompress(path, raw, is_seekable=format_of(path) == ".parquet") as file:
        match format_of(path):
            case ".txt" | ".smi":
                yield from _read_lines(path, file, kind)
            case ".csv":
                yield from _read_csv(path, file, kind, column, is_tsv=False)
            case ".tsv":
                yield from _read_csv(path, file, kind, column, is_tsv=True)
            case ".jsonl":
                yield from _read_json_lines(path, file, kind, column)
            case ".json":
                yield from _read_json(path, file, kind, column)
            case ".parquet":
                yield from _read_parquet(path, file, kind, column)


def choose_column(origin: str, names: Sequence[str], kind: RowKind, column: str | None) -> str:
    """Return the column to read.

    Raises:
        DataError: `column` is not among the names, or none was given and not exactly one is plausible.
    """
    listed = _listed(names)
    if column is not None:
        if column not in names:
            raise DataError(f"{origin}: no column `{column}`; there are {listed}", _CHOOSE)
        return column
    plausible = [name for name in names if name.lower() in _PLAUSIBLE_COLUMNS[kind]]
    if len(plausible) != 1:
        which = "more than one" if plausible else "none"
        raise DataError(
            f"{origin}: which column holds the {kind}? There are {listed}; {which} of them is named like it",
            _CHOOSE,
        )
    return plausible[0]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _read_lines(path: Path, file: BinaryIO, kind: RowKind) -> Iterator[Row]:
    source = str(path)
    starts_document = True
    for number, line in _bounded_lines(path, file):
        text = line.strip()
        if not text:
            starts_document = True
        elif kind == "smiles":
            yield Row(source, number, text.split(maxsplit=1)[0])
        else:
            yield Row(source, number, line.rstrip(), starts_document)
            starts_document = False


def _bounded_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield numbered lines, those beyond 1 MiB in pieces cut at blanks, so that one endless line needs no memory."""
    number, offset, held = 1, 0, b""
    for piece in iter(partial(file.readline, _LONGEST_TEXT_BYTES), b""):
        line = held + piece
        held = b""
        is_whole = line.endswith(b"\n") or len(piece) < _LONGEST_TEXT_BYTES
        if not is_whole:
            cut = line.rfind(b" ") + 1
            if not cut:
                raise DataError(
                    f"{path}:{number}: a word longer than {_LONGEST_TEXT_BYTES:,} bytes at offset {offset:,}",
                    "the file is not running text or SMILES",
                )
            line, held = line[:cut], line[cut:]
        yield number, decode_line(path, line, number, offset)
        offset += len(line)
        number += is_whole
    if held:
        yield number, decode_line(path, held, number, offset)


def _read_csv(path: Path, file: BinaryIO, kind: RowKind, column: str | None, *, is_tsv: bool) -> Iterator[Row]:
    records = csv_records(path, file, is_tsv=is_tsv)
    _, header = next(records, (1, None))
    if header is None:
        return
    index = header.index(choose_column(str(path), header, kind, column))
    for line, record in records:
        if index < len(record):
            yield Row(str(path), line, record[index].strip())
        elif record:
            problem = f"has {len(record)} columns, `{header[index]}` is column {index + 1}"
            yield Row(str(path), line, ("\t" if is_tsv else ",").join(record), problem=problem)


def _read_json_lines(path: Path, file: BinaryIO, kind: RowKind, column: str | None) -> Iterator[Row]:
    for number, line in decoded_lines(path, file):
        if not line.strip():
            continue
        record, problem = parse_row(line)
        if problem is not None:
            yield Row(str(path), number, line.strip(), problem=problem)
            continue
        if column is None and isinstance(record, dict):
            column = choose_column(f"{path}:{number}", list(record), kind, None)
        yield _json_row(path, number, record, column)


def _read_json(path: Path, file: io.BufferedReader, kind: RowKind, column: str | None) -> Iterator[Row]:
    """Read a JSON array element by element, or JSON Lines under another name."""
    if not starts_array(file):
        yield from _read_json_lines(path, file, kind, column)
        return
    blocks = codecs.iterdecode(iter(partial(file.read, BUFFER_BYTES), b""), "utf-8-sig")
    for number, (record, problem) in enumerate(array_elements(path, blocks), start=1):
        if problem is not None:
            yield Row(str(path), number, "", problem=problem)
            continue
        if column is None and isinstance(record, dict):
            column = choose_column(f"{path}, record {number}", list(record), kind, None)
        yield _json_row(path, number, record, column)


def _json_row(path: Path, number: int, record: Any, column: str | None) -> Row:
    if isinstance(record, dict) and column not in record:
        return Row(str(path), number, "", problem=f"has no `{column}`; it has {_listed(record)}")
    value = record[column] if isinstance(record, dict) else record
    if value is None:
        return Row(str(path), number, "")
    if not isinstance(value, str):
        return Row(str(path), number, as_json(value), problem="is not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        problem = f"holds half a surrogate pair at position {error.start + 1}"
        return Row(str(path), number, ascii(value), problem=problem)
    return Row(str(path), number, value.strip())


def _read_parquet(path: Path, file: BinaryIO, kind: RowKind, column: str | None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        name = choose_column(str(path), table.schema_arrow.names, kind, column)
        number = 0
        for batch in table.iter_batches(_PARQUET_BATCH_ROWS, columns=[name]):
            for value in batch.column(0).to_pylist():
                number += 1
                if value is None or isinstance(value, str):
                    yield Row(str(path), number, (value or "").strip())
                else:
                    yield Row(str(path), number, str(value), problem="is not a string")
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: not a Parquet file that can be read: {reason}") from error
