"""Decompression and decoding of files: lines of text, and JSON.

Every function names the file, and the line, in its errors.
"""

import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
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
_XZ_BLOCK_BYTES = 1 << 16
_ENCODING_HINT = "the file is binary or in another encoding; `iconv -f ENCODING -t UTF-8` converts text"


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


class _XzReader(io.RawIOBase):
    """Decompressed bytes of a `.xz` file with one stream or several, as `cat` of files makes them.

    `lzma.LZMAFile` takes zeros between streams, and a damaged stream after the first, for the end of the file.
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


_GZIP_MAGIC = b"\x1f\x8b"
_UNPACKERS: dict[str, Callable[[Any], Any]] = {".gz": lambda raw: gzip.GzipFile(fileobj=raw), ".xz": _XzReader}


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
