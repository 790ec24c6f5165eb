"""Decompression and decoding of files: lines of text, cells of CSV and TSV, and JSON.

Every function names the file, and the line, in its errors.
"""

import codecs
import csv
import gzip
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from exlm_cli.errors import DataError
from exlm_cli.files import READ_HINT, nearest_file, reason_of

LONGEST_LINE_BYTES = 1 << 20
"""Longer lines of running text come in pieces."""
LARGEST_JSON_BYTES = 1 << 30
"""Largest JSON file that is read; that takes some four times its size in memory."""

_BUFFER_BYTES = 1 << 20
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
"""All bytes of a UTF-8 character but its first."""
_ENCODING_HINT = "the file is binary or in another encoding; `iconv -f ENCODING -t UTF-8` converts text"

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


def open_raw(path: Path) -> io.BufferedReader:
    """Open a file for reading, without decompression.

    Raises:
        DataError: The file is missing or unreadable.
    """
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file", nearest_file(path) or READ_HINT) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason_of(error)}", READ_HINT) from error


@contextmanager
def open_file(path: Path, raw: io.BufferedReader | None = None) -> Iterator[io.BufferedReader]:
    """Open a file for reading; gzip, whatever its name, and `.xz` are decompressed.

    Args:
        path: The file; its suffix names the compression.
        raw: The same file if it is open already.

    Raises:
        DataError: The file is missing, unreadable, truncated or damaged; also while it is read inside the context.
    """
    try:
        with ExitStack() as stack:
            file = raw or stack.enter_context(open_raw(path))
            # the content decides: a download may be unpacked under its old name, or packed under a plain one
            suffix = ".gz" if file.peek(2).startswith(_GZIP_MAGIC) else path.suffix.lower().removesuffix(".gz")
            if unpack := _UNPACKERS.get(suffix):
                file = stack.enter_context(io.BufferedReader(unpack(file), _BUFFER_BYTES))
            yield file
    except EOFError as error:
        raise DataError(f"{path}: the compressed file is truncated", "fetch or write it again") from error
    except (zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the compressed file is damaged: {error}", "fetch or write it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason_of(error)}", READ_HINT) from error


_GZIP_MAGIC = b"\x1f\x8b"
_UNPACKERS: dict[str, Callable[[Any], Any]] = {".gz": lambda raw: gzip.GzipFile(fileobj=raw), ".xz": lzma.LZMAFile}


def text_lines(path: Path, file: BinaryIO, longest_bytes: int = -1) -> Iterator[tuple[int, str]]:
    """Yield line numbers, from 1, and lines, line ends included.

    Args:
        longest_bytes: A longer line comes in pieces with the same number, cut at blanks, or in a text without blanks,
            like one in Chinese, between two characters. -1: lines are whole.

    Raises:
        DataError: A line is not UTF-8 text, or holds a zero byte.
    """
    number, offset, held = 1, 0, b""
    for piece in iter(partial(file.readline, longest_bytes), b""):
        line, held = held + piece, b""
        is_whole = len(piece) != longest_bytes or piece.endswith(b"\n")
        if not is_whole:
            cut = line.rfind(b" ") + 1 or len(line.rstrip(_CONTINUATION_BYTES)) - 1
            line, held = line[:cut], line[cut:]
        yield number, _decode(path, line, number, offset)
        offset += len(line)
        number += is_whole
    if held:
        yield number, _decode(path, held, number, offset)


def _decode(path: Path, content: bytes, number: int, offset: int) -> str:
    """Return bytes that begin on line `number` at `offset` as text, without the byte-order mark of the file."""
    try:
        text = content.decode()
        if "\0" not in text:
            return text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}") if offset == 0 else text
        found, start = "not text", content.index(0)
    except UnicodeDecodeError as error:
        found, start = "not UTF-8 text", error.start
    line = number + content.count(b"\n", 0, start)
    place = f"byte 0x{content[start]:02x} at offset {offset + start:,}"
    raise DataError(f"{path}:{line}: {found}: {place}", _ENCODING_HINT)


def read_cells(
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
    lines = text_lines(path, file)
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


def starts_array(file: io.BufferedReader) -> bool:
    """Return whether a file holds one JSON array and not JSON Lines; its position does not change."""
    return file.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def parse_json(text: str) -> tuple[Any, str | None]:
    """Return the value of a line of JSON, or None and the reason why it has none."""
    try:
        return json.loads(text), None
    except json.JSONDecodeError as error:
        return None, _described(error)


def load_json(path: Path, file: BinaryIO, hint: str) -> Any:
    """Return the one JSON value of a file.

    Raises:
        DataError: The file is not JSON, is not UTF-8, or has more than `LARGEST_JSON_BYTES`.
    """
    content = file.read(LARGEST_JSON_BYTES + 1)
    if len(content) > LARGEST_JSON_BYTES:
        found = f"one JSON value of more than {LARGEST_JSON_BYTES:,} bytes"
        raise DataError(f"{path}: {found}, which would be read whole", hint)
    try:
        return json.loads(_decode(path, content, 1, 0))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: {_described(error)}", hint) from error


def _described(error: json.JSONDecodeError) -> str:
    return f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
