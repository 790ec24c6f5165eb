"""JSON rows: whatever the blocks, the elements are those of `json.loads`; what it cannot hold is one row's problem."""

import io
import json
import re
import sys
from pathlib import Path

import pytest

from exlm_cli.data.rows.json_rows import array_elements, as_json, parse_row, starts_array
from exlm_cli.errors import DataError

LIMIT = 4300
TOO_LONG = "not JSON that can be read: an integer has more than 4,300 digits"
TOO_DEEP = "not JSON that can be read: nested too deeply"
LONG, DEEP = "1" + "0" * LIMIT, "[" * 20_000 + "]" * 20_000


@pytest.fixture(autouse=True)
def _default_limit() -> None:
    assert sys.get_int_max_str_digits() == LIMIT


def _blocks(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def test_elements_are_the_same_however_the_text_is_cut() -> None:
    values = ["a]b", {"k": [1, {"q": '"\\'}]}, -12.5e3, 123, None, True, [], "", {}]
    for text in (json.dumps(values), "\n " + json.dumps(values, indent=1) + "\n"):
        for size in range(1, len(text) + 1):
            assert list(array_elements(Path("a"), iter(_blocks(text, size)))) == [(value, None) for value in values]


@pytest.mark.parametrize(
    ("element", "problem"),
    [
        (LONG, TOO_LONG),
        (f"-{LONG}", TOO_LONG),
        (f'{{"text": "}}", "n": [{LONG}, "\\"]"]}}', TOO_LONG),
        (DEEP, TOO_DEEP),
        ('{"text": "]", "n": ' + DEEP + ', "m": "\\\\"}', TOO_DEEP),
        ('{"a":' * 15_000 + "1" + "}" * 15_000, TOO_DEEP),
    ],
)
def test_an_element_beyond_a_limit_is_left_out_alone(element: str, problem: str) -> None:
    text = f'["before", {element}, "after"]'
    expected = [("before", None), (None, problem), ("after", None)]
    for size in (997, 1 << 16, len(text)):
        assert list(array_elements(Path("a"), iter(_blocks(text, size)))) == expected
    assert parse_row(element) == (None, problem)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2", "Expecting value in record 3"),
        ('["a", "b', "Unterminated string starting at in record 2"),
        ("[" + "[" * 20_000, "it breaks off in record 1"),
        ('[{"a": ' + LONG + ', "b": "', "it breaks off in record 1"),
        ('[{"a": ' + LONG + ', "b": "\\', "it breaks off in record 1"),
    ],
)
def test_an_array_that_breaks_off_is_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"^a: malformed JSON array: {re.escape(message)}$"):
        list(array_elements(Path("a"), iter(_blocks(text, 4096))))


def test_a_line_is_its_value_or_what_is_wrong_with_it() -> None:
    assert parse_row('{"a": 1}\n') == ({"a": 1}, None)
    assert parse_row("null") == (None, None)
    assert parse_row("9" * LIMIT) == (10**LIMIT - 1, None)
    assert parse_row('{"a"') == (None, "not JSON: Expecting ':' delimiter at column 5")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_an_array_is_told_from_lines_by_its_first_character(mark: bytes) -> None:
    for content, is_array in ((b" \n[1]", True), (b'{"a": [1]}', False), (b'"["', False), (b"", False)):
        file = io.BufferedReader(io.BytesIO(mark + content))  # type: ignore[arg-type]  # BytesIO reads like a raw file
        assert starts_array(file) is is_array
        assert file.read() == mark + content


def test_values_are_json_again_unless_they_are_too_deep() -> None:
    assert as_json({"a": [1, "b"]}) == '{"a": [1, "b"]}'
    deep_list: list[object] = []
    for _ in range(100_000):
        deep_list = [deep_list]
    assert as_json(deep_list) == "[...]"
    assert as_json({"a": deep_list}) == "{...}"
