"""Every format and compression gives the same rows with the right numbers; every fault is named with its place."""

import codecs
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exlm_cli.data.rows import readers
from exlm_cli.data.rows.readers import Row, RowKind, choose_column, format_of, read_file
from exlm_cli.errors import DataError

_CHOOSE = "choose one with `--set data.column=NAME` (in a grid or sweep `--set pretrain.data.column=NAME`)"
TEXTS = ["One fish.", 'Two, "quoted" fish\tand more.', "Grün \N{GRINNING FACE}."]


def _read(path: Path, kind: RowKind = "text", column: str | None = None) -> list[Row]:
    with path.open("rb") as raw:
        return list(read_file(path, raw, kind, column))


def _csv(delimiter: str, quoting: int) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, quoting=quoting, quotechar=None if quoting == csv.QUOTE_NONE else '"')
    writer.writerows([("id", "text"), *((n, t.replace("\t", " ")) for n, t in enumerate(TEXTS))])
    return out.getvalue().encode()


def _parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"id": [0, 1, 2], "text": [t.replace("\t", " ") for t in TEXTS]}), out)
    return out.getvalue()


RECORDS = [{"id": n, "text": t.replace("\t", " ")} for n, t in enumerate(TEXTS)]
CONTENT: dict[str, Callable[[], bytes]] = {
    "txt": lambda: "\n".join(str(r["text"]) for r in RECORDS).encode(),
    "csv": lambda: _csv(",", csv.QUOTE_MINIMAL),
    "tsv": lambda: _csv("\t", csv.QUOTE_NONE),
    "jsonl": lambda: "\n".join(map(json.dumps, RECORDS)).encode(),
    "json": lambda: json.dumps(RECORDS, indent=2).encode(),
    "parquet": _parquet,
}
FIRST_NUMBER = {"txt": 1, "csv": 2, "tsv": 2, "jsonl": 1, "json": 1, "parquet": 1}


@pytest.mark.parametrize("compress", ["", ".gz", ".xz"])
@pytest.mark.parametrize("extension", list(CONTENT))
def test_every_format_and_compression_gives_the_same_texts(tmp_path: Path, extension: str, compress: str) -> None:
    content = CONTENT[extension]()
    path = tmp_path / f"rows.{extension}{compress}"
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[compress](content))
    rows = _read(path)
    assert [row.text for row in rows] == [r["text"] for r in RECORDS]
    assert [row.number for row in rows] == [FIRST_NUMBER[extension] + i for i in range(3)]
    assert {row.source for row in rows} == {str(path)}
    assert all(row.problem is None for row in rows)


@pytest.mark.parametrize(
    ("name", "format_"),
    [
        ("a.txt", ".txt"),
        ("A.CSV.GZ", ".csv"),
        ("a.b.smi.xz", ".smi"),
        ("a.gz", None),
        ("a.pdf", None),
        ("README", None),
    ],
)
def test_the_format_is_told_by_the_extension(name: str, format_: str | None) -> None:
    assert format_of(Path(name)) == format_


def test_blank_lines_of_text_begin_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n  two  \n\n \t\nthree\n\nfour")
    assert _read(path) == [
        Row(str(path), 1, "one", starts_document=True),
        Row(str(path), 2, "  two", starts_document=False),
        Row(str(path), 5, "three", starts_document=True),
        Row(str(path), 7, "four", starts_document=True),
    ]


@pytest.mark.parametrize("extension", ["smi", "txt"])
def test_the_first_column_of_a_line_is_the_smiles(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"a.{extension}"
    path.write_text("CCO ethanol 46.07\n\n  C\tmethane\n")
    assert [(row.number, row.text) for row in _read(path, "smiles")] == [(1, "CCO"), (3, "C")]


def test_a_line_beyond_the_limit_comes_in_pieces_cut_at_blanks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_LONGEST_TEXT_BYTES", 16)
    path = tmp_path / "a.txt"
    words = [f"wörd{n}" for n in range(30)]
    path.write_text(" ".join(words) + "\nnext line")
    rows = _read(path)
    assert " ".join(row.text for row in rows).split() == [*words, "next", "line"]
    assert all(len(row.text.encode()) < 32 for row in rows)
    assert [row.number for row in rows][-1] == 2
    assert [row.starts_document for row in rows] == [True] + [False] * (len(rows) - 1)


def test_a_long_line_may_end_the_file_at_the_very_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_LONGEST_TEXT_BYTES", 8)
    path = tmp_path / "a.txt"
    path.write_text("abc defg")
    assert [row.text for row in _read(path)] == ["abc", "defg"]


def test_a_word_beyond_the_limit_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_LONGEST_TEXT_BYTES", 16)
    path = tmp_path / "a.txt"
    path.write_text("fine\n" + "x" * 40)
    message = f"{path}:2: a word longer than 16 bytes at offset 5"
    with pytest.raises(DataError, match=rf"^{re.escape(message)}$"):
        _read(path)


def test_quoted_csv_fields_may_span_lines_and_rows_are_numbered_by_their_first_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,y\n"one\n\ntwo",1\n\nthree,0\nonly\n')
    rows = _read(path)
    assert [(r.number, r.text, r.problem) for r in rows] == [
        (2, "one\n\ntwo", None),
        (6, "three", None),
        (7, "only", None),
    ]


def test_a_csv_row_without_the_column_is_a_problem_of_that_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("y,text\n1,one\n2\n")
    assert _read(path)[1] == Row(str(path), 3, "2", problem="has 1 columns, `text` is column 2")


def test_a_malformed_csv_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text\nfine\n"broken" quote\n')
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}:3: malformed: ',' expected after '\"'$"):
        _read(path)


def test_quotation_marks_mean_nothing_in_tsv(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('text\ty\n"half quoted\t1\nnext\t2\n')
    assert [row.text for row in _read(path)] == ['"half quoted', "next"]


def test_a_csv_of_nothing_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b""))
    assert _read(path) == []


def test_fields_may_be_longer_than_the_csv_modules_default(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text\n" + "x " * 200_000 + "\n")
    assert len(_read(path)[0].text) == 399_999


def test_json_lines_have_problems_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        '{"text": "one"}',
        "",
        "{oops",
        '{"other": 1}',
        '{"text": null}',
        '{"text": 7}',
        '"plain"',
        '{"text": "\\ud83d"}',
    ]
    path.write_text("\n".join(lines))
    assert [(row.number, row.text, row.problem) for row in _read(path)] == [
        (1, "one", None),
        (3, "{oops", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        (4, "", "has no `text`; it has `other`"),
        (5, "", None),
        (6, "7", "is not a string"),
        (7, "plain", None),
        (8, "'\\ud83d'", "holds half a surrogate pair at position 1"),
    ]


ODD = {
    "1" + "0" * 5000: "not JSON that can be read: an integer has more than 4,300 digits",
    "[" * 9000 + "]" * 9000: "not JSON that can be read: nested too deeply",
}


@pytest.mark.parametrize("odd", ODD, ids=["long", "deep"])
def test_a_json_row_that_python_cannot_hold_is_a_problem_of_its_own(tmp_path: Path, odd: str) -> None:
    lines, array = tmp_path / "a.jsonl", tmp_path / "a.json"
    rows = ['{"text": "one"}', f'{{"text": "two", "n": {odd}}}', '{"text": "three"}']
    lines.write_text("\n".join(rows))
    array.write_text(f"[{', '.join(rows)}]")
    for path in (lines, array):
        read = [(row.number, row.problem) for row in _read(path)]
        assert read == [(1, None), (2, ODD[odd]), (3, None)]
        assert [row.text for row in _read(path) if row.problem is None] == ["one", "three"]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz"])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_byte_order_mark_is_no_part_of_json(tmp_path: Path, name: str, indent: int | None) -> None:
    is_array = name != "a.jsonl"
    content = json.dumps(RECORDS, indent=indent) if is_array else "\n".join(map(json.dumps, RECORDS))
    data = codecs.BOM_UTF8 + content.encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert [(row.number, row.text, row.problem) for row in _read(path)] == [
        (number, record["text"], None) for number, record in enumerate(RECORDS, start=1)
    ]


def test_json_lines_may_be_called_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [row.text for row in _read(path)] == ["one", "two"]


def test_a_json_array_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BUFFER_BYTES", 7)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([*RECORDS, "plain"], indent=1))
    assert [row.text for row in _read(path)] == [*(r["text"] for r in RECORDS), "plain"]


def test_a_broken_json_array_is_named_with_its_record(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "one"}, {"text": "tw')
    message = f"{path}: malformed JSON array: Unterminated string starting at in record 2"
    with pytest.raises(DataError, match=rf"^{re.escape(message)}$"):
        _read(path)


def test_a_json_array_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes('["one", "grün"]'.encode("latin-1"))
    message = f"{path}: not UTF-8 text: invalid start byte in record 1"
    with pytest.raises(DataError, match=rf"^{re.escape(message)}$"):
        _read(path)


def test_parquet_values_that_are_no_strings_are_problems(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [7, None]}), path)
    assert _read(path) == [Row(str(path), 1, "7", problem="is not a string"), Row(str(path), 2, "")]


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"not at all a parquet file")
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: not a Parquet file that can be read: .+$"):
        _read(path)


def test_a_parquet_string_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    offsets, text = pa.py_buffer(np.array([0, 2], dtype=np.int32)), pa.py_buffer(b"\xff\xfe")
    pq.write_table(pa.table({"text": pa.StringArray.from_buffers(1, offsets, text)}), path)
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: not a Parquet file that can be read: .*utf-8.*$"):
        _read(path)


def test_undecodable_text_is_named_with_line_byte_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\nstill fine\nbad \xff here\n")
    message = f"{path}:3: not UTF-8 text: byte 0xff at offset 20"
    with pytest.raises(DataError, match=rf"^{re.escape(message)}$") as caught:
        _read(path)
    assert "iconv" in caught.value.hint


@pytest.mark.parametrize("extension", ["txt", "csv", "jsonl"])
def test_binary_content_is_named_with_its_offset(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"a.{extension}"
    path.write_bytes(b"text\nab\0c\n")
    message = f"{path}:2: not text: byte 0x00 at offset 7"
    with pytest.raises(DataError, match=rf"^{re.escape(message)}$"):
        _read(path, column="text") if extension != "jsonl" else _read_after_broken_line(path)


def _read_after_broken_line(path: Path) -> None:
    path.write_bytes(b"null\nab\0c\n")
    _read(path)


@pytest.mark.parametrize("extension", [".gz", ".xz"])
def test_a_truncated_compressed_file_is_named(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"a.txt{extension}"
    compress = gzip.compress if extension == ".gz" else lzma.compress
    path.write_bytes(compress(b"".join(b"line %d\n" % (n * n) for n in range(5000)))[:-20])
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: the compressed file is truncated$"):
        _read(path)


@pytest.mark.parametrize("extension", [".gz", ".xz"])
def test_a_file_that_is_not_compressed_as_it_says_is_named(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"a.txt{extension}"
    path.write_bytes(b"just plain text, long enough for a header\n" * 10)
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: the compressed file is damaged: .+$"):
        _read(path)


def test_a_failing_disk_is_an_error_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n")

    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(readers, "_bounded_lines", fail)
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: cannot be read: Input/output error$"):
        _read(path)


def test_the_given_column_is_taken_whatever_its_name() -> None:
    assert choose_column("a.csv", ["text", "abstract"], "text", "abstract") == "abstract"


@pytest.mark.parametrize(("kind", "name"), [("smiles", "SMILES"), ("smiles", "mol"), ("text", "Sentence")])
def test_the_one_plausible_column_is_taken(kind: RowKind, name: str) -> None:
    assert choose_column("a.csv", ["id", name, "y"], kind, None) == name


def test_a_missing_column_is_named_with_those_that_are_there() -> None:
    with pytest.raises(DataError, match=r"^a\.csv: no column `smi`; there are `id`, `smiles`$") as caught:
        choose_column("a.csv", ["id", "smiles"], "smiles", "smi")
    assert caught.value.hint == _CHOOSE


@pytest.mark.parametrize(("names", "which"), [(["a", "b"], "none"), (["smiles", "mol"], "more than one")])
def test_the_column_must_be_clear(names: list[str], which: str) -> None:
    listed = ", ".join(f"`{name}`" for name in names)
    message = f"a.csv: which column holds the smiles? There are {listed}; {which} of them is named like it"
    with pytest.raises(DataError, match=rf"^{re.escape(message)}$") as caught:
        choose_column("a.csv", names, "smiles", None)
    assert caught.value.hint == _CHOOSE
