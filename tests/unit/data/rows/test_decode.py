"""JSON equals what the standard library reads; files that are damaged, or no text, are refused with their place."""

import gzip
import io
import json
import lzma
import re

import pytest

from exlm_cli.data.rows import decode
from exlm_cli.data.rows.decode import load_json, open_file
from exlm_cli.errors import DataError


def load(path, content: bytes) -> object:
    return load_json(path, io.BytesIO(content), "a hint")


def test_a_file_of_json_is_its_value(tmp_path):
    values = ["a]b", {"k": [1, {"q": '"\\'}]}, -12.5e3, 123, None, True, [], "ü", {}]
    for text in (json.dumps(values), "\ufeff\n " + json.dumps(values, indent=1, ensure_ascii=False) + "\n"):
        assert load(tmp_path / "a.json", text.encode()) == values


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1,\n 2", "2: not JSON: Expecting ',' delimiter at column 3"),
        (b'["a",\n"b', "2: not JSON: Unterminated string starting at column 1"),
        (b'[{"a": 1},, {"a": 2}]', "1: not JSON: Expecting value at column 11"),
        (b"[1, 2]\n[3]", "2: not JSON: Extra data at column 1"),
        ('["a",\n\n"ü"]'.encode("latin-1"), "3: not UTF-8 text: byte 0xfc at offset 8"),
        ('["a"]'.encode("utf-16-le"), "1: not text: byte 0x00 at offset 1"),
    ],
)
def test_a_file_that_is_not_json_is_refused_with_its_line(tmp_path, content, message):
    path = tmp_path / "a.json"
    with pytest.raises(DataError, match=f"^{re.escape(f'{path}:{message}')}$"):
        load(path, content)


def test_a_file_of_json_beyond_the_limit_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "LARGEST_JSON_BYTES", 6)
    assert load(tmp_path / "a.json", b"[1, 2]") == [1, 2]
    with pytest.raises(DataError, match=r"a\.json: one JSON value of more than 6 bytes") as caught:
        load(tmp_path / "a.json", b"[1, 23]")
    assert caught.value.hint == "a hint"


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_compressed_file_that_is_truncated_or_damaged_is_named(tmp_path, suffix, compress):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(b"".join(b"line %d\n" % (n * n) for n in range(5000)))[:-20])
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: .*truncated"), open_file(path) as file:
        file.read()
    path.write_bytes(compress(b"")[:10] + b"just plain text, long enough for a header\n" * 10)
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: .*damaged"), open_file(path) as file:
        file.read()


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.txt", "a.jsonl.gz"])
@pytest.mark.parametrize("write", [gzip.compress, bytes])
def test_gzip_is_told_by_the_content_of_a_file_and_not_by_its_name(tmp_path, name, write):
    (tmp_path / name).write_bytes(write(b"smiles,y\nCCO,1\n"))
    with open_file(tmp_path / name) as file:
        assert file.read() == b"smiles,y\nCCO,1\n"


def test_a_missing_file_a_folder_and_a_failing_disk_are_named(tmp_path):
    path = tmp_path / "a.txt"
    with pytest.raises(DataError, match=rf"^{re.escape(str(tmp_path))}: .*Is a directory$"), open_file(tmp_path):
        pass
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: no such file$"), open_file(path):
        pass
    path.write_text("one\n")
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: .*Input/output error$"), open_file(path):
        raise OSError(5, "Input/output error")


def test_all_streams_of_an_xz_file_are_read(tmp_path):
    """`cat` of files makes several; what each held alone is the truth."""
    path, texts = tmp_path / "a.txt.xz", [b"one\n" * 9000, b"", bytes(range(256)) * 2000]
    path.write_bytes(b"".join(map(lzma.compress, texts)))
    with open_file(path) as file:
        assert file.read() == b"".join(texts)
