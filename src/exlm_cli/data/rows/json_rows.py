"""Rows out of JSON Lines and JSON arrays. One row that Python's parser cannot hold is that row's problem alone."""

import codecs
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exlm_cli.errors import DataError

_BETWEEN_ELEMENTS = re.compile(r"[\s,]*")
_NUMBER = re.compile(r"[-+.eE\d]*")
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


def starts_array(file: io.BufferedReader) -> bool:
    """Return whether a file holds one JSON array and not JSON Lines; nothing is taken from it."""
    return file.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def parse_row(line: str) -> tuple[Any, str | None]:
    """Return the value of one line, or None and why it has none."""
    try:
        return json.loads(line), None
    except json.JSONDecodeError as error:
        return None, f"not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return None, beyond_limits(error)


def array_elements(path: Path, blocks: Iterator[str]) -> Iterator[tuple[Any, str | None]]:
    """Yield the elements of an array, each as its value, or as None and why it has none.

    Args:
        path: Named in errors.
        blocks: The text, without a byte-order mark, in pieces cut anywhere.

    Raises:
        DataError: The text is no JSON array, or no UTF-8.
    """
    decoder = json.JSONDecoder()
    number, start = 1, 0
    try:
        buffer = next((begun for block in blocks if (begun := block.lstrip())), "")[1:]
        while True:
            start = _end_of(_BETWEEN_ELEMENTS, buffer, start)
            problem, trouble = None, "it breaks off"
            value: Any = None
            try:
                value, end = decoder.raw_decode(buffer, start)
            except json.JSONDecodeError as error:
                end, trouble = None, error.msg
            except (ValueError, RecursionError) as error:
                end, problem = _end_of_element(buffer, start), beyond_limits(error)
            # a number at the end of the buffer may go on
            if end is None or _end_of(_NUMBER, buffer, end) == len(buffer):
                more = next(blocks, "")
                if more:
                    buffer, start = buffer[start:] + more, 0
                    continue
                if end is None:
                    if buffer[start:].rstrip() == "]":
                        return
                    raise DataError(f"{path}: malformed JSON array: {trouble} in record {number}")
            yield value, problem
            start = end
            number += 1
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error.reason} in record {number}") from error


def beyond_limits(error: ValueError | RecursionError) -> str:
    """Return which limit of Python's a text exceeds that is not malformed; `error` is what `json` raised of it."""
    if isinstance(error, RecursionError):
        return "not JSON that can be read: nested too deeply"
    return f"not JSON that can be read: an integer has more than {sys.get_int_max_str_digits():,} digits"


def as_json(value: Any) -> str:
    """Return a parsed value as JSON again; what was just shallow enough to be read may be too deep to be written."""
    try:
        return json.dumps(value)
    except RecursionError:
        return "[...]" if isinstance(value, list) else "{...}"


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    assert match is not None, "it may be empty"
    return match.end()


def _end_of_element(text: str, start: int) -> int | None:
    """Return where an element ends by its brackets alone, parsing nothing; None where it goes on beyond the text."""
    if text[start] not in "[{":
        return _end_of(_NUMBER, text, start)  # neither a string nor a word is beyond any limit
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(text, start):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return None
