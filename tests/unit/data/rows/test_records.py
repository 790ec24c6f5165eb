"""Rows out of every format; contents are written here."""

import gzip
import json
import lzma
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from exlm_cli.data.rows.records import Record, iter_records
from exlm_cli.errors import DataError

VALUES = [{"sentence": 'so " fine', "label": 1}, {"sentence": "Grüße, all", "label": 0}]


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def test_tsv_has_no_quotes_and_keeps_carriage_returns_inside_cells(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", '\N{ZERO WIDTH NO-BREAK SPACE}sentence\tlabel\r\n" so\t1\r\n\r\na\rb \t0')
    assert list(iter_records(path)) == [
        Record(f"{path}:2", {"sentence": '" so', "label": "1"}),
        Record(f"{path}:4", {"sentence": "a\rb", "label": "0"}),
    ]


def test_csv_has_quotes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'sentence,label\n"one, two",1\n\nthree,0\n')
    assert [(record.where, record.values["sentence"]) for record in iter_records(path)] == [
        (f"{path}:2", "one, two"),
        (f"{path}:4", "three"),
    ]


@pytest.mark.parametrize(("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_json_lines_arrays_and_parquet_are_the_same_rows(tmp_path: Path, suffix: str, compress: Any) -> None:
    lines, array, table = (tmp_path / f"a.{kind}{suffix}" for kind in ("jsonl", "json", "parquet"))
    lines.write_bytes(compress("\n\n".join(map(json.dumps, VALUES)).encode()))
    array.write_bytes(compress(json.dumps(VALUES).encode()))
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(VALUES), sink)
    table.write_bytes(compress(sink.getvalue().to_pybytes()))
    assert list(iter_records(lines)) == [Record(f"{lines}:1", VALUES[0]), Record(f"{lines}:3", VALUES[1])]
    for path in (array, table):
        records = [Record(f"{path}, record {number}", values) for number, values in enumerate(VALUES, start=1)]
        assert list(iter_records(path)) == records


@pytest.mark.parametrize("indent", [None, 1])
def test_a_byte_order_mark_is_no_part_of_an_array(tmp_path: Path, indent: int | None) -> None:
    path = write(tmp_path / "a.json", "\N{ZERO WIDTH NO-BREAK SPACE}" + json.dumps(VALUES, indent=indent))
    assert [record.values for record in iter_records(path)] == VALUES


@pytest.mark.parametrize(
    ("odd", "problem"),
    [
        ("1" + "0" * 5000, "not JSON that can be read: an integer has more than 4,300 digits"),
        ("[" * 9000 + "]" * 9000, "not JSON that can be read: nested too deeply"),
    ],
    ids=["long", "deep"],
)
def test_a_row_that_python_cannot_hold_is_told_alone(tmp_path: Path, odd: str, problem: str) -> None:
    rows = ['{"a": 1}', f'{{"a": {odd}}}', odd, '{"a": 2}']
    lines, array = write(tmp_path / "a.jsonl", "\n".join(rows)), write(tmp_path / "a.json", f"[{', '.join(rows)}]")
    for path, place in ((lines, ":"), (array, ", record ")):
        assert list(iter_records(path)) == [
            Record(f"{path}{place}1", {"a": 1}),
            Record(f"{path}{place}2", {}, problem),
            Record(f"{path}{place}3", {}, problem),
            Record(f"{path}{place}4", {"a": 2}),
        ]


def test_a_first_row_is_data_where_the_columns_are_known_and_it_names_none(tmp_path: Path) -> None:
    header = ("source", "label", "mark", "sentence")
    bare = write(tmp_path / "a.tsv", "gj04\t1\t\tIt rains.\n")
    assert list(iter_records(bare, header=header)) == [
        Record(f"{bare}:1", {"source": "gj04", "label": "1", "mark": "", "sentence": "It rains."})
    ]
    named = write(tmp_path / "b.tsv", "sentence\tlabel\nIt rains.\t1\n")
    assert list(iter_records(named, header=header)) == [Record(f"{named}:2", {"sentence": "It rains.", "label": "1"})]


def test_a_first_row_of_data_may_say_the_same_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "1\t1\n")
    assert [record.values for record in iter_records(path, header=("a", "b"))] == [{"a": "1", "b": "1"}]


def test_rows_that_do_not_fit_are_told(tmp_path: Path) -> None:
    table = write(tmp_path / "a.tsv", "sentence\tlabel\nfine\t1\nlost\n")
    assert list(iter_records(table))[1] == Record(f"{table}:3", {}, "the row has 1 cells, expected 2")
    lines = write(tmp_path / "a.jsonl", '{"a": 1}\n{"a"\n[5]\n')
    assert [record.problem for record in iter_records(lines)] == [
        None,
        "not JSON: Expecting ':' delimiter at column 1",
        "not a JSON object, but [5]",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"x", "not a table that can be read; known are .tsv .csv .jsonl .json .parquet, also .gz or .xz"),
        ("a.tsv", b"", "the file is empty"),
        ("a.tsv.gz", b"", "the file is empty"),
        ("a.tsv", b"sentence\tlabel\tlabel \nIt rains.\t1\t0\n", "the header names column `label` twice"),
        ("a.csv", b"sentence,sentence\na,b\n", "the header names column `sentence` twice"),
        ("a.json", b"[1, ", "not JSON: Expecting value at line 1 column 5"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{re.escape(f'{path}: {message}')}$"):
        list(iter_records(path))


def test_a_missing_file_and_one_that_is_no_parquet_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: cannot be opened: No such file or directory$"):
        list(iter_records(path))
    path.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: not a Parquet file that can be read: "):
        list(iter_records(path))
