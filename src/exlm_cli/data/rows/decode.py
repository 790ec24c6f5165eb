"""Bytes of a local file into text: unpacked, decoded, cut into lines and into the records of CSV and TSV."""

import csv
import gzip
import io
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from exlm_cli.errors import DataError

BUFFER_BYTES = 1 << 20
_LARGEST_CSV_FIELD = 2**31 - 1


@contextmanager
def explaining_damage(path: Path) -> Iterator[None]:
    """Turn what reading a damaged or unreadable file raises into a `DataError` that names it."""
    try:
        yield
    except EOFError as error:
        raise DataError(f"{path}: the compressed file is truncated", "fetch or write it again") from error
    except (zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the compressed file is damaged: {error}", "fetch or write it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def decompress(path: Path, raw: io.BufferedReader, *, is_seekable: bool = False) -> io.BufferedReader:
    """Return the file unpacked, by its suffix (`.gz`, `.xz`), or as it is.

    Args:
        path: Names the suffix.
        raw: The open file.
        is_seekable: Unpack into a temporary file first, for formats that are read from their end.
    """
    opened: Any
    match path.suffix.lower():
        case ".gz":
            opened = gzip.GzipFile(fileobj=raw)
        case ".xz":
            opened = lzma.LZMAFile(raw)  # noqa: SIM115 (the caller closes what it is on)
        case _:
            return raw
    if not is_seekable:
        return io.BufferedReader(opened, BUFFER_BYTES)
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    shutil.copyfileobj(opened, unpacked, BUFFER_BYTES)
    unpacked.seek(0)
    return cast(io.BufferedReader, unpacked)


def decoded_lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield line numbers, from 1, and lines, line ends included.

    Raises:
        DataError: A line is no UTF-8 text, or holds a zero byte.
    """
    offset = 0
    for number, line in enumerate(file, start=1):
        yield number, decode_line(path, line, number, offset)
        offset += len(line)


def decode_line(path: Path, line: bytes, number: int, offset: int) -> str:
    """Return one line as text; a byte-order mark at the file's beginning is dropped.

    Raises:
        DataError: It is no UTF-8 text, or holds a zero byte.
    """
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{number}: not UTF-8 text: byte 0x{line[error.start]:02x} at offset {offset + error.start:,}",
            "the file is binary or in another encoding; `iconv -f ENCODING -t UTF-8` converts text",
        ) from error
    if "\0" in text:
        raise DataError(
            f"{path}:{number}: not text: byte 0x00 at offset {offset + line.index(0):,}",
            "the file is binary or in another encoding; `iconv -f ENCODING -t UTF-8` converts text",
        )
    return text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}") if offset == 0 else text


def csv_records(path: Path, file: BinaryIO, *, is_tsv: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield the line on which each record begins, from 1, and its cells; an empty line is an empty record.

    Args:
        path: Names the file in errors.
        file: Unpacked bytes.
        is_tsv: Cells are set apart by tabs and never quoted: a lone quotation mark must not swallow the lines after it.

    Raises:
        DataError: Undecodable bytes or broken quoting.
    """
    csv.field_size_limit(_LARGEST_CSV_FIELD)
    lines = (line for _, line in decoded_lines(path, file))
    if is_tsv:
        reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    else:
        reader = csv.reader(lines, strict=True)
    first_line = 1
    try:
        for record in reader:
            yield first_line, record
            first_line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: malformed: {error}") from error
