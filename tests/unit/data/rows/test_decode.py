"""Files that are damaged, no text or too large are refused with their place; gzip and xz are unpacked."""

import gzip
import io
import lzma
import re

import pytest

from exlm_cli.data.rows import decode
from exlm_cli.data.rows.decode import load_json, open_file
from exlm_cli.errors import DataError


def load(path, content: bytes) -> object:
    return load_json(path, io.BytesIO(content), "a hint")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'["a",\n"b', "2: not JSON: Unterminated string starting at column 1"),
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
