"""Decompression, text decoding, and the parsing of CSV, TSV and JSON into rows.

Every function names the file, and the line or record, in its errors.
"""

import codecs
import csv
import gzip
import io
import json
import lzma
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from exlm_cli.errors import DataError
from exlm_cli.files import READ_HINT, nearest_file, reason_of

BUFFER_BYTES = 1 << 20
LONGEST_LINE_BYTES = 1 << 20
"""Longer lines of running text come in pieces."""

RECORD_LIMIT_VARIABLE = "EXLM_MAX_RECORD_BYTES"
"""Environment variable with the bytes of the largest record: a line, a CSV row, an element of JSON, a Parquet row."""

MAX_UNPACKING = 100
"""How many times its packed size a Parquet file, or a column chunk in it, may have when it is unpacked."""

LARGEST_CSV_FIELD = 2**31 - 1
"""For `csv.field_size_limit`, whose default is 128 kB."""

_RECORD_BYTES = 1 << 24
_MAX_DIGITS = 15
_QUOTING_HINTS = {
    ",": "a cell that holds a comma, a quote or a line end is quoted, and a quote in it is doubled",
    "\t": "put a cell that holds a quote in quotes and double the quotes in it, or write the file as CSV; files of "
    "GLUE are not quoted, `exlm finetune glue` reads them",
}
LINE_END_HINT = "save the file with Unix or Windows line endings"
_ENCODING_HINT = "the file is binary or in another encoding; `iconv -f ENCODING -t UTF-8` converts text"
_ARRAY_HINT = "write the file again, or as JSON Lines: one object a line"
_BYTES_PER_LINE = 64
"""Minimum mean bytes of a line within one CSV row."""
_DECLARATION = re.compile(rb"""(?i:"?sep=(?P<delimiter>[^\w\s"'.+-]|\t)"?)[ ,;\t]*(?:\r?\n|\Z)""")
"""First line of a table, in any case, that names its delimiter for Excel."""
_BLANKS = re.compile(r"\s*")
_NUMBER = re.compile(r"[-+.eE\d]*")
_LONGEST_TOKEN = 12
r"""Length of `\uD800\uDC00`, the longest part of JSON that may be cut in the middle, besides strings and numbers."""


def record_limit() -> int:
    """Return the bytes of the largest record that is read: 16 MiB, or what `EXLM_MAX_RECORD_BYTES` says.

    Raises:
        DataError: The variable is not a number of bytes.
    """
    given = os.environ.get(RECORD_LIMIT_VARIABLE, str(_RECORD_BYTES))
    if not (given.isdecimal() and len(given) < _MAX_DIGITS and int(given) >= BUFFER_BYTES):
        raise DataError(
            f"{RECORD_LIMIT_VARIABLE} is `{given[:_MAX_DIGITS]}`; accepted: bytes, at least {BUFFER_BYTES}",
            f"unset it for {_RECORD_BYTES} bytes",
        )
    return int(given)


def too_large(where: str, limit: int, found: str | None = None) -> DataError:
    """Return the error for a record over `limit` bytes, or with more lines (`found`) than that allows."""
    return DataError(
        f"{where}: the record has more than {found or f'{limit:,} bytes'}",
        f"if that is meant, raise the limit: `{RECORD_LIMIT_VARIABLE}={4 * limit} exlm ...`",
    )


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
def open_file(
    path: Path, raw: io.BufferedReader | None = None, *, is_seekable: bool = False
) -> Iterator[io.BufferedReader]:
    """Open a file for reading; `.gz` and `.xz` are decompressed.

    Args:
        path: The file; its suffix names the compression.
        raw: The same file if it is open already.
        is_seekable: Decompress into a temporary file first, for formats that are read from their end.

    Raises:
        DataError: The file is missing, unreadable, truncated or damaged; also while it is read inside the context.
    """
    try:
        with ExitStack() as stack:
            opened = raw or stack.enter_context(open_raw(path))
            yield stack.enter_context(_decompress(path, opened, is_seekable=is_seekable))
    except EOFError as error:
        raise DataError(f"{path}: the compressed file is truncated", "fetch or write it again") from error
    except (zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the compressed file is damaged: {error}", "fetch or write it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason_of(error)}", READ_HINT) from error


def _decompress(path: Path, raw: io.BufferedReader, *, is_seekable: bool) -> io.BufferedReader:
    opened: Any
    match path.suffix.lower():
        case ".gz":
            opened = gzip.GzipFile(fileobj=raw)
        case ".xz":
            opened = _XzReader(raw)
        case _:
            return raw
    if not is_seekable:
        return io.BufferedReader(opened, BUFFER_BYTES)
    with ExitStack() as stack:
        unpacked = stack.enter_context(tempfile.TemporaryFile())
        for block in iter(partial(opened.read, BUFFER_BYTES), b""):
            unpacked.write(block)
            if unpacked.tell() > max(BUFFER_BYTES, MAX_UNPACKING * raw.tell()):
                raise DataError(
                    f"{path}: unpacked, the file is over {MAX_UNPACKING} times larger",
                    "unpack it yourself if you trust it, or let Parquet compress its own columns",
                )
        unpacked.seek(0)
        stack.pop_all()  # the caller closes it
        return cast(io.BufferedReader, unpacked)


_XZ_BLOCK_BYTES = 1 << 16  # copied at the end of each stream


class _XzReader(io.RawIOBase):
    """Decompressed bytes of a `.xz` file with one stream or several.

    `lzma.LZMAFile` takes a damaged stream after the first one for the end of the file.
    """

    def __init__(self, raw: io.BufferedReader) -> None:
        self._raw, self._decompressor, self._waiting = raw, lzma.LZMADecompressor(), b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; 0 at the end of the last stream.

        Raises:
            EOFError: The last stream is truncated.
            lzma.LZMAError: A stream is damaged, or no stream.
        """
        data = b""
        while not data:
            if self._decompressor.eof:
                # zeros may stand between streams, and behind the last one
                self._waiting = self._decompressor.unused_data.lstrip(b"\0")
                while not self._waiting and (block := self._raw.read(_XZ_BLOCK_BYTES)):
                    self._waiting = block.lstrip(b"\0")
                if not self._waiting:
                    return 0
                self._decompressor = lzma.LZMADecompressor()
            if self._decompressor.needs_input and not self._waiting:
                self._waiting = self._raw.read(_XZ_BLOCK_BYTES)
                if not self._waiting:
                    raise EOFError
            data = self._decompressor.decompress(self._waiting, len(buffer))
            self._waiting = b""
        buffer[: len(data)] = data
        return len(data)


def decoded_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield line numbers, from 1, and lines, line ends included.

    Raises:
        DataError: A line is not UTF-8 text, holds a zero byte, or is longer than `record_limit`.
    """
    offset, limit = 0, record_limit()
    for number, line in enumerate(iter(partial(file.readline, limit + 1), b""), start=1):
        if len(line) > limit:
            raise too_large(f"{path}:{number}", limit)
        yield number, _decode_line(path, line, number, offset)
        offset += len(line)


def bounded_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield lines as `decoded_lines`, without blank ones; a line beyond 1 MiB comes in pieces with the same number.

    A long line is cut at blanks, or in a text without blanks, like one in Chinese, between two characters.

    Raises:
        DataError: A line is not UTF-8 text, or holds a zero byte.
    """
    number, offset, held = 1, 0, b""
    for piece in iter(partial(file.readline, LONGEST_LINE_BYTES), b""):
        if not held and piece.isspace() and piece.endswith(b"\n"):  # ten times as fast for a file of blank lines
            number, offset = number + 1, offset + len(piece)
            continue
        line = held + piece
        held = b""
        is_whole = line.endswith(b"\n") or len(piece) < LONGEST_LINE_BYTES
        if not is_whole:
            cut = line.rfind(b" ") + 1 or _start_of_last_character(line)
            line, held = line[:cut], line[cut:]
        yield number, _decode_line(path, line, number, offset)
        offset += len(line)
        number += is_whole
    if held:
        yield number, _decode_line(path, held, number, offset)


def _start_of_last_character(line: bytes) -> int:
    """Return where the last UTF-8 character of a line begins, which may be cut off."""
    start = len(line) - 1
    while start > 1 and line[start] & 0xC0 == 0x80:
        start -= 1
    return start


def _decode_line(path: Path, line: bytes, number: int, offset: int) -> str:
    """Return one line as text, without the byte-order mark of the file."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        found = f"not UTF-8 text: byte 0x{line[error.start]:02x} at offset {offset + error.start:,}"
        raise DataError(f"{path}:{number}: {found}", _ENCODING_HINT) from error
    if "\0" in text:
        found = f"not text: byte 0x00 at offset {offset + line.index(0):,}"
        raise DataError(f"{path}:{number}: {found}", _ENCODING_HINT)
    return text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}") if offset == 0 else text


class MalformedTableError(DataError):
    """A CSV or TSV file whose quoting is broken; `header` is its first line, unparsed."""

    def __init__(self, message: str, hint: str, header: str) -> None:
        super().__init__(message, hint)
        self.header = header


def declared_delimiter(file: io.BufferedReader) -> str | None:
    """Return the delimiter that a first line like Excel's `sep=;` names, or None; the file's position does not change.

    `csv_rows` passes over that line.
    """
    match = _DECLARATION.match(file.peek().removeprefix(codecs.BOM_UTF8))
    return None if match is None else match["delimiter"].decode()


def csv_rows(path: Path, file: BinaryIO, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line on which each row begins, from 1, and its cells, which may be quoted; empty lines are passed over.

    So is a first line like Excel's `sep=;`.

    Raises:
        DataError: Undecodable bytes, broken quoting, or a row longer than `record_limit`. If the delimiter is a tab, a
            quoted cell must not hold both a tab and a line break: more likely a quote is not closed.
    """
    csv.field_size_limit(LARGEST_CSV_FIELD)
    limit, first_line, num_characters, header = record_limit(), 1, 0, ""

    def lines() -> Iterator[str]:
        nonlocal num_characters, header
        for number, line in decoded_lines(path, file):
            if number == 1 and _DECLARATION.match(line.encode()):
                yield "\n"  # the reader counts it, and has no row of it
                continue
            header = header or line.strip()
            num_characters += len(line)
            if number - first_line > limit // _BYTES_PER_LINE:
                raise too_large(f"{path}:{first_line}", limit, f"{limit // _BYTES_PER_LINE:,} lines in quotes")
            if num_characters > limit:  # a quoted cell holds line ends
                raise too_large(f"{path}:{first_line}", limit)
            yield line

    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            spans_lines = reader.line_num > first_line
            if spans_lines and delimiter == "\t" and any("\t" in cell and "\n" in cell for cell in cells):
                raise csv.Error("a quote seems not to be closed: its cell holds a tab and a line break")
            if cells:
                yield first_line, cells
            first_line, num_characters = reader.line_num + 1, 0
    except csv.Error as error:
        reason = str(error).replace("'\t'", "a tab").replace(" expected after", " is expected after")
        hint = _QUOTING_HINTS.get(delimiter, _QUOTING_HINTS[","].replace("comma", "delimiter"))
        reason = reason.replace("unexpected end of data", "a quote is not closed")
        if "new-line character" in reason:
            reason, hint = "a carriage return outside of quotes", LINE_END_HINT
        elif reader.line_num > first_line:
            reason += f", in the row that begins on line {first_line}"
        raise MalformedTableError(f"{path}:{reader.line_num}: malformed: {reason}", hint, header) from error


def literal_tsv_rows(path: Path, file: BinaryIO) -> Iterator[tuple[int, list[str]]]:
    """Yield line numbers and cells as `csv_rows`; cells are never quoted and may hold carriage returns.

    A lone quotation mark of a GLUE sentence would make the `csv` module join the lines after it.
    """
    for number, line in decoded_lines(path, file):
        if line.strip("\r\n"):
            yield number, line.rstrip("\r\n").split("\t")


def starts_array(file: io.BufferedReader) -> bool:
    """Return whether a file holds one JSON array and not JSON Lines; its position does not change."""
    return file.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def parse_json(text: str) -> tuple[Any, str | None]:
    """Return the value of a JSON text, or None and the reason why it has none."""
    try:
        return json.loads(text), None
    except json.JSONDecodeError as error:
        return None, f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return None, beyond_limits(error)


def array_elements(path: Path, file: io.BufferedReader) -> Iterator[Any]:
    """Yield the elements of a JSON array.

    The file is read in blocks and one element is parsed at a time, so that an array of any length fits into memory.
    What is read for one element doubles until the element is whole, so that the time is linear in its length.

    Raises:
        DataError: The text is not a JSON array, not UTF-8, or has an element longer than `record_limit`, or beyond the
            limits of Python's parser.
    """
    blocks = codecs.iterdecode(iter(partial(file.read, BUFFER_BYTES), b""), "utf-8-sig")
    limit = record_limit()
    decoder = json.JSONDecoder()
    number, start, needs_comma = 1, 0, False
    try:
        buffer = next((begun for block in blocks if (begun := block.lstrip())), "")[1:]
        while True:
            start = _end_of(_BLANKS, buffer, start)
            if needs_comma and buffer.startswith(",", start):
                needs_comma, start = False, _end_of(_BLANKS, buffer, start + 1)
            trouble = "it breaks off"
            is_end = buffer.startswith("]", start) and (needs_comma or number == 1)
            if is_end and buffer[start + 1 :].strip():
                raise _malformed_array(path, number, "text follows its end")
            if needs_comma and not is_end and start < len(buffer):
                raise _malformed_array(path, number, "a comma is missing")
            end: int | None = None
            try:
                value, end = decoder.raw_decode(buffer, start)
            except json.JSONDecodeError as error:
                trouble = error.msg
                # an element that goes on beyond the buffer fails at its end, or where its last string begins
                if error.pos < len(buffer) - _LONGEST_TOKEN and not (is_end or trouble.startswith("Unterminated")):
                    raise _malformed_array(path, number, trouble) from None
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}, record {number}: {beyond_limits(error)}",
                    "correct that record, or write the file as JSON Lines, where such a row can be skipped",
                ) from error
            # a number at the end of the buffer may go on
            if end is None or _end_of(_NUMBER, buffer, end) == len(buffer):
                rest = buffer[start:]
                if len(rest) > limit:
                    raise too_large(f"{path}, record {number}", limit)
                more = _read_characters(blocks, max(1, len(rest)))
                if more:
                    buffer, start = rest + more, 0
                    continue
                if end is None:
                    if is_end and rest.rstrip() == "]":
                        return
                    raise _malformed_array(path, number, trouble)
            if end - start > limit:
                raise too_large(f"{path}, record {number}", limit)
            yield value
            start, needs_comma = end, True
            number += 1
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error.reason} in record {number}", _ENCODING_HINT) from error


def _malformed_array(path: Path, number: int, trouble: str) -> DataError:
    return DataError(f"{path}: malformed JSON array: {trouble} in record {number}", _ARRAY_HINT)


def _read_characters(blocks: Iterator[str], least: int) -> str:
    """Return the next blocks, until they have `least` characters or there are no more."""
    read: list[str] = []
    while least > 0 and (block := next(blocks, "")):
        read.append(block)
        least -= len(block)
    return "".join(read)


def beyond_limits(error: ValueError | RecursionError) -> str:
    """Return which limit of Python's JSON parser a well-formed text exceeds, given what the parser raised."""
    if isinstance(error, RecursionError):
        return "not JSON that can be read: nested too deeply"
    return f"not JSON that can be read: an integer has more than {sys.get_int_max_str_digits():,} digits"


def as_json(value: Any) -> str:
    """Return a value as JSON for an error message; a value that is nested too deeply is shown as its brackets."""
    try:
        return json.dumps(value, default=str)
    except RecursionError:
        return "[...]" if isinstance(value, list) else "{...}"


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    assert match is not None, "the pattern may match nothing"
    return match.end()
