"""JSON arrays equal `json.loads` whatever the blocks; damaged files are refused with their name."""

import gzip
import io
import json
import lzma
import re
from pathlib import Path

import pytest

from exlm_cli.data.rows import decode
from exlm_cli.data.rows.decode import array_elements, as_json, open_file, parse_json
from exlm_cli.errors import DataError

LIMIT = 4300
TOO_LONG = "not JSON that can be read: an integer has more than 4,300 digits"
TOO_DEEP = "not JSON that can be read: nested too deeply"
LONG, DEEP = "1" + "0" * LIMIT, "[" * 20_000 + "]" * 20_000


def buffered(content: bytes) -> io.BufferedReader:
    return io.BufferedReader(io.BytesIO(content))  # type: ignore[arg-type]  # BytesIO reads like a raw file


def elements(text: str) -> list[object]:
    return list(array_elements(Path("a"), buffered(text.encode())))


def test_elements_are_the_same_whatever_the_size_of_blocks(monkeypatch):
    values = ["a]b", {"k": [1, {"q": '"\\'}]}, -12.5e3, 123, None, True, [], "ü", {}]
    for text in (json.dumps(values), "\n " + json.dumps(values, indent=1, ensure_ascii=False) + "\n"):
        for size in range(1, len(text) + 1):
            monkeypatch.setattr(decode, "BUFFER_BYTES", size)
            assert elements(text) == values


@pytest.mark.parametrize(
    ("element", "problem"),
    [
        (f"-{LONG}", TOO_LONG),
        (f'{{"text": "}}", "n": [{LONG}, "\\"]"]}}', TOO_LONG),
        ('{"text": "]", "n": ' + DEEP + ', "m": "\\\\"}', TOO_DEEP),
        ('{"a":' * 15_000 + "1" + "}" * 15_000, TOO_DEEP),
    ],
)
def test_an_element_beyond_a_limit_is_named(element, problem, monkeypatch):
    for size in (997, 1 << 20):
        monkeypatch.setattr(decode, "BUFFER_BYTES", size)
        with pytest.raises(DataError, match=f"^a, record 2: {re.escape(problem)}$"):
            elements(f'["before", {element}, "after"]')
    assert parse_json(element) == (None, problem)


@pytest.mark.parametrize(
    ("text", "record"),
    [
        ("[1, 2", 3),
        ('["a", "b', 2),
    ],
)
def test_an_array_that_breaks_off_is_refused_with_its_record(text, record):
    with pytest.raises(DataError, match=rf"^a: malformed JSON array: .* in record {record}$"):
        elements(text)


@pytest.mark.parametrize(
    ("text", "record"),
    [
        ("[1 2]", 2),
        ('[{"a": 1},, {"a": 2}]', 2),
        ('["a", ]', 2),
        ("[, 1]", 1),
        ("[1, 2]\n[3]", 3),
        ('[1, {"a" 2}, "' + "long" * 100 + '"]', 2),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_an_array_against_the_grammar_is_refused_with_its_record_however_large_the_rest_is(
    monkeypatch, text, record, size
):
    monkeypatch.setattr(decode, "BUFFER_BYTES", size)
    monkeypatch.setattr(decode, "record_limit", lambda: 100)
    with pytest.raises(DataError, match=rf"^a: malformed JSON array: .* in record {record}$"):
        elements(text)


def test_a_line_is_its_value_or_its_problem():
    assert parse_json('{"a": 1}\n') == ({"a": 1}, None)
    assert parse_json("null") == (None, None)
    assert parse_json("9" * LIMIT) == (10**LIMIT - 1, None)
    value, problem = parse_json('{"a"')
    assert value is None
    assert problem is not None
    assert "column 5" in problem


def test_values_are_json_again_unless_they_are_too_deep():
    assert as_json({"a": [1, "b"]}) == '{"a": [1, "b"]}'
    deep_list: list[object] = []
    for _ in range(100_000):
        deep_list = [deep_list]
    assert as_json(deep_list) == "[...]"
    assert as_json({"a": deep_list}) == "{...}"


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_compressed_file_that_is_truncated_or_damaged_is_named(tmp_path, suffix, compress):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(b"".join(b"line %d\n" % (n * n) for n in range(5000)))[:-20])
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: .*truncated"), open_file(path) as file:
        file.read()
    path.write_bytes(b"just plain text, long enough for a header\n" * 10)
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: .*damaged"), open_file(path) as file:
        file.read()


def test_all_streams_of_an_xz_file_are_read_and_checked(tmp_path):
    """`cat` of files makes several; `lzma.decompress` of each alone is the truth."""
    path, texts = tmp_path / "a.txt.xz", [b"one\n" * 9000, b"", b"three\n", bytes(range(256)) * 2000]
    streams = [lzma.compress(text) for text in texts]
    path.write_bytes(b"".join(stream + bytes(4 * number) for number, stream in enumerate(streams)))
    with open_file(path) as file:
        assert file.read() == b"".join(texts)
    with open_file(path, is_seekable=True) as file:
        assert file.read() == b"".join(texts)
    altered = bytearray(streams[2])
    altered[2] ^= 1
    for ending, found in ((bytes(altered), "damaged"), (b"junk", "damaged"), (streams[3][:-9], "truncated")):
        path.write_bytes(streams[0] + ending)
        with pytest.raises(DataError, match=f"the compressed file is {found}"), open_file(path) as file:
            file.read()


def test_a_missing_file_a_folder_and_a_failing_disk_are_named(tmp_path):
    path = tmp_path / "a.txt"
    with pytest.raises(DataError, match=rf"^{re.escape(str(tmp_path))}: .*Is a directory$"), open_file(tmp_path):
        pass
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: no such file$"), open_file(path):
        pass
    path.write_text("one\n")
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: .*Input/output error$"), open_file(path):
        raise OSError(5, "Input/output error")
