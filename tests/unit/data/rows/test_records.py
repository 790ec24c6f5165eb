"""Every format and compression gives the same rows with the right numbers; every fault is named with its place."""

import codecs
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exlm_cli.data.rows import decode
from exlm_cli.data.rows.records import ColumnChoice, Record, Row, RowKind, iter_file_rows, iter_records
from exlm_cli.errors import DataError

VALUES = [{"id": "a", "text": "One fish."}, {"id": "b", "text": 'Two, "quoted" fish.'}, {"id": "c", "text": "Grün 😀."}]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def rows_of(path: Path, kind: RowKind = "text", column: str | None = None) -> list[Row]:
    with path.open("rb") as raw:
        return list(iter_file_rows(path, raw, ColumnChoice(kind, column)))


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


CONTENT: dict[str, Callable[[], bytes]] = {
    "txt": lambda: "\n".join(row["text"] for row in VALUES).encode(),
    "csv": lambda: pd.DataFrame(VALUES).to_csv(index=False).encode(),
    "tsv": lambda: pd.DataFrame(VALUES).to_csv(index=False, sep="\t").encode(),
    "jsonl": lambda: "\n".join(map(json.dumps, VALUES)).encode(),
    "json": lambda: json.dumps(VALUES, indent=2).encode(),
    "parquet": lambda: pd.DataFrame(VALUES).to_parquet(),
}


@pytest.mark.parametrize(
    ("extension", "compression"),
    [(extension, end) for extension in CONTENT for end in COMPRESS if end != ".xz" or extension == "txt"],
)
def test_every_format_and_compression_gives_the_same_rows(tmp_path, extension, compression):
    """With the byte-order mark of text, too."""
    path = tmp_path / f"rows.{extension}{compression}"
    mark = codecs.BOM_UTF8 if compression and extension != "parquet" else b""
    path.write_bytes(COMPRESS[compression](mark + CONTENT[extension]()))
    first = 2 if extension in ("csv", "tsv") else 1
    expected = [Row(str(path), first + index, row["text"]) for index, row in enumerate(VALUES)]
    if extension == "txt":
        expected = [row._replace(starts_document=row.number == 1) for row in expected]
    else:
        records = list(iter_records(path))
        assert [record.values for record in records] == VALUES
        place = ", record " if extension in ("json", "parquet") else ":"
        assert [record.where for record in records] == [f"{path}{place}{first + index}" for index in range(3)]
    assert rows_of(path) == expected


def test_blank_lines_of_text_are_counted_and_begin_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf\n\r\none\r\n  two  \n\n \t\nthree\n")
    assert rows_of(path) == [
        Row(str(path), 3, "one", starts_document=True),
        Row(str(path), 4, "  two", starts_document=False),
        Row(str(path), 7, "three", starts_document=True),
    ]


def test_a_line_beyond_the_limit_comes_in_pieces_cut_at_blanks_else_at_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "LONGEST_LINE_BYTES", 16)
    words = [f"wörd{n}" for n in range(30)]
    rows = rows_of(write(tmp_path / "a.txt", " ".join(words) + "\nnext line"))
    assert " ".join(row.text for row in rows).split() == [*words, "next", "line"]
    assert all(len(row.text.encode()) < 32 for row in rows)
    assert [row.number for row in rows][-1] == 2
    assert [row.starts_document for row in rows] == [True] + [False] * (len(rows) - 1)
    monkeypatch.setattr(decode, "LONGEST_LINE_BYTES", 8)
    assert [row.text for row in rows_of(write(tmp_path / "b.txt", "abc defg"))] == ["abc", "defg"]
    chinese = "吾輩は猫である名前はまだ無い"
    rows = rows_of(write(tmp_path / "c.txt", f"fine\n{chinese}\n"))
    assert "".join(row.text for row in rows[1:]) == chinese
    assert {row.number for row in rows[1:]} == {2}
    # a table has each line whole
    (first, whole) = iter_records(tmp_path / "c.txt", bare="text")
    assert (first.values, whole.values) == ({"text": "fine"}, {"text": chinese})


def test_a_tsv_of_pandas_comes_back_as_it_was(tmp_path):
    """pandas writes each file, with its own rules of quoting."""
    texts = ['He said "hi" to me', "two\nlines", "a\ttab", '"', "plain, with a comma", 'ends in "']
    for extension, separator in (("tsv", "\t"), ("csv", ",")):
        path = tmp_path / f"a.{extension}"
        pd.DataFrame({"text": texts, "label": range(6)}).to_csv(path, sep=separator, index=False)
        assert [row.text for row in rows_of(path)] == texts
        assert [record.values["label"] for record in iter_records(path)] == list("012345")


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        ('"Hi" she said\t1\n', 2),
        ('plain\t0\n" so\t1\nthe "end"\t0\n', 4),
        ('" so\t1\nplain\t0\nthe end "\t1\nplain\t0\n', 4),  # one row of two cells, for the csv module
    ],
)
def test_a_quote_of_a_tsv_that_is_not_closed_is_refused_and_joins_no_lines(tmp_path, rows, place):
    path = write(tmp_path / "a.tsv", f"text\tlabel\n{rows}")
    with pytest.raises(DataError, match=re.escape(f"{path}:{place}: malformed: ")) as caught:
        list(iter_records(path))
    assert "double the quotes in it, or write the file as CSV" in caught.value.hint
    cells = [line.split("\t") for line in rows.splitlines()]
    literal = list(iter_records(path, has_literal_tsv=True))
    assert [list(record.values.values()) for record in literal] == [[cell.strip() for cell in row] for row in cells]


def test_a_literal_tsv_has_no_quotes_and_keeps_carriage_returns_inside_cells(tmp_path):
    path = write(tmp_path / "a.tsv", '\N{ZERO WIDTH NO-BREAK SPACE}text\tlabel\r\n" so\t1\r\n\r\na\rb \t0')
    assert list(iter_records(path, has_literal_tsv=True)) == [
        Record(str(path), 2, {"text": '" so', "label": "1"}),
        Record(str(path), 4, {"text": "a\rb", "label": "0"}),
    ]


def test_a_row_with_too_few_or_too_many_cells_has_a_problem(tmp_path):
    path = write(tmp_path / "a.csv", "y,text\n1,one\n2\n3,three,4\n")
    few, many = "the row has 1 cell, expected 2", "the row has 3 cells, expected 2"
    assert list(iter_records(path))[1:] == [
        Record(str(path), 3, {"y": "2"}, few, "2"),
        Record(str(path), 4, {"y": "3", "text": "three"}, many, "3,three,4"),
    ]
    # of a corpus too: a text with a comma that is not quoted would be cut, or be that of another column
    for column in ("text", "y"):
        problems = [Row(str(path), 3, "2", problem=few), Row(str(path), 4, "3,three,4", problem=many)]
        assert rows_of(path, column=column)[1:] == problems


def test_json_rows_have_their_own_problems(tmp_path):
    lines = ['{"text": "one"}', "", "{oops", '{"other": 1}', '{"text": null}', '{"text": 7}', '"plain"', "[5]"]
    path = write(tmp_path / "a.jsonl", "\n".join([*lines, '{"text": "\\ud83d"}']))
    assert [(row.number, row.text, row.problem) for row in rows_of(path)] == [
        (1, "one", None),
        (2, "", "the line is empty"),
        (3, "{oops", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        (4, "", "has no `text`; it has `other`"),
        (5, "", "is null"),
        (6, "7", "is not a string"),
        (7, "plain", None),
        (8, "[5]", "is not a string"),
        (9, "'\\ud83d'", "contains a lone surrogate at position 1"),
    ]
    assert [row.number for row in rows_of(path) if row.is_null] == [2, 5]
    problems = [record.problem for record in iter_records(path)]
    assert [problem is None for problem in problems] == [True, False, True, True, True, False, False, True]
    assert problems[-2] == "not a JSON object, but [5]"


def test_a_file_that_is_no_parquet_or_holds_no_utf8_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"not at all a parquet file")
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: not a Parquet file"):
        list(iter_records(path))
    pq.write_table(pa.table({"text": pa.array([b"\xff"]).view(pa.string())}), path)
    with pytest.raises(DataError, match=r"not a Parquet file .*utf-8"):
        rows_of(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", b"", "the file is empty"),
        ("a.tsv", b"sentence\tlabel\tlabel \nIt rains.\t1\t0\n", "column `label` twice"),
        ("a.csv", b"text,y\rIt rains,1\r", "a.csv:1: malformed: a carriage return outside of quotes"),
        ("a.csv", b"text\nstill fine\nbad \xff here\n", "a.csv:3: not UTF-8 text: byte 0xff at offset 20"),
        ("a.json", b'["a",\n"b', "a.json:2: not JSON: Unterminated string starting at column 1"),
        ("a.json", b"[1, 2]\n[3]", "a.json:2: not JSON: Extra data at column 1"),
        ("a.json", '["a",\n\n"ü"]'.encode("latin-1"), "a.json:3: not UTF-8 text: byte 0xfc at offset 8"),
        ("a.json", '["a"]'.encode("utf-16-le"), "a.json:1: not text: byte 0x00 at offset 1"),
        ("a.json", b"[" + b"1, " * 20 + b"2]", "a.json: one JSON value of more than 60 bytes"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_place(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(decode, "LARGEST_JSON_BYTES", 60)
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{re.escape(str(tmp_path))}.*{re.escape(message)}"):
        list(iter_records(path))


def test_a_folder_with_the_name_of_a_table_cannot_be_read(tmp_path):
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(DataError, match=r"a\.csv: cannot be read: Is a directory$"):
        list(iter_records(tmp_path / "a.csv"))


@pytest.mark.parametrize(
    ("kind", "names", "taken"),
    [
        ("text", ["id", "Sentence", "y"], "Sentence"),
        ("smiles", ["id", "mol", "y"], "mol"),
        ("smiles", ["salt_smiles", "SMILES"], "SMILES"),
        ("smiles", ["Canonical Smiles", "structure"], "Canonical Smiles"),
        ("smiles", ["id", "Structure"], "Structure"),
    ],
)
def test_the_named_or_the_one_plausible_column_is_taken(kind, names, taken):
    assert ColumnChoice(kind).choose("a.csv", names) == taken
    assert ColumnChoice(kind, names[0]).choose("a.csv", names) == names[0]


@pytest.mark.parametrize(
    ("names", "said", "seems_a_row"),
    [
        (["smiles", "mol"], "more than one has", False),
        (["Salt_SMILES", "Parent_SMILES", "2020"], "more than one has", False),
        (["CCO", "3.07"], "which column holds the SMILES", True),
    ],
)
def test_where_no_column_or_several_are_plausible_none_is_taken(names, said, seems_a_row):
    with pytest.raises(DataError, match=said) as caught:
        ColumnChoice("smiles").choose("a.csv", names)
    assert "`--set data.column=NAME`" in caught.value.hint
    assert ("if the first line is a row" in caught.value.hint) == seems_a_row


def test_a_file_of_another_format_is_refused_with_the_way_to_convert_it(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").touch()
    for name, hint in {
        "a.csv.xz": "compress it as .gz",
        "a.arrow": f'`datasets.Dataset.from_file("{tmp_path}/a.arrow").to_csv("rows.csv")`',
        "saved": f'`datasets.load_from_disk("{tmp_path}/saved").to_csv("rows.csv")`',
    }.items():
        with pytest.raises(DataError, match="not a table that can be read") as caught:
            list(iter_records(tmp_path / name, formats=(".csv", ".tsv")))
        assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("content", "kind", "line"),
    [("one \r" * 209_714 + "the last piece", "text", 1), ("CCO a\nCCN b\rCCC c\n", "smiles", 2)],
)
def test_carriage_returns_as_line_ends_are_named(tmp_path, content, kind, line):
    """All rows would be one text, or names of the first molecule."""
    with pytest.raises(DataError, match=rf"a\.txt:{line}: malformed: a carriage return"):
        rows_of(write(tmp_path / "a.txt", content), kind)


@pytest.mark.parametrize(("name", "first", "delimiter"), [("a.csv", '"sep=;"', ";"), ("a.tsv", "sep=,", ",")])
def test_the_first_line_of_excel_names_the_delimiter(tmp_path, name, first, delimiter):
    """Lines are counted with it, and cells may hold the delimiter of the extension."""
    rows = ["smiles,y", '"C,C",0.5', "", '"a\nb",2'.replace(",", delimiter)]
    path = write(tmp_path / name, "\n".join([first, *(row.replace(",", delimiter) for row in rows)]))
    assert [(record.number, record.values) for record in iter_records(path)] == [
        (3, {"smiles": f"C{delimiter}C", "y": "0.5"}),
        (5, {"smiles": "a\nb", "y": "2"}),
    ]


def test_a_line_of_blanks_is_no_row_of_a_table(tmp_path):
    """It is skipped as an empty line is; where the table has one column, a blank is a value of it."""
    path = write(tmp_path / "a.csv", "y,text\n1,one\n  \n2,two\n")
    assert [(record.number, record.problem) for record in iter_records(path)] == [(2, None), (4, None)]
    path = write(tmp_path / "a.csv", "text\none\n  \ntwo\n")
    assert [record.values["text"] for record in iter_records(path)] == ["one", "", "two"]


@pytest.mark.parametrize(
    ("name", "content", "values"),
    [
        ("a.csv", '"smiles";"y"\n"CCO";"1"\n', {"smiles": "CCO", "y": "1"}),
        ("a.csv", "smiles;y, in nM\nC;1,5\n", {"smiles;y": "C;1", "in nM": "5"}),  # commas give as many cells
        ("a.csv", "smiles;id;y, in nM\nC;a;1,5\n", {"smiles": "C", "id": "a", "y, in nM": "1,5"}),
        ("a.csv", "\nsmiles;y\n\nC;1,5\n", {"smiles": "C", "y": "1,5"}),
        ("a.csv", "\ufeffsmiles\ty\nC\t1,5\n", {"smiles": "C", "y": "1,5"}),
        ("a.csv.gz", "smiles|y\nC|2\n", {"smiles": "C", "y": "2"}),
        ("a.tsv", "smiles,y\nC,2\n", {"smiles": "C", "y": "2"}),
        ("a.csv", "y;smiles\n1;C;2\n", {"": "1", "y": "C", "smiles": "2"}),  # names of rows of R
        ("a.csv", "smiles,y (nM; pH 7; 37 °C)\nC,2\n", {"smiles": "C", "y (nM; pH 7; 37 °C)": "2"}),
        ("a.csv", 'text,"a;b;c"\n"1;2;3",2\n', {"text": "1;2;3", "a;b;c": "2"}),
        ("a.csv", "text\nHello; you\n", {"text": "Hello; you"}),
        ("a.csv", "smiles,,\nC,1,2\n", {"smiles": "C", "": "1", "column 3": "2"}),
        ("a.csv", "text;y\n", {}),
    ],
)
def test_cells_are_parted_by_what_parts_header_and_first_row(tmp_path, name, content, values):
    """As a German Excel writes them, whatever the extension; the delimiter of the extension comes first."""
    path, packed = tmp_path / name, content.encode()
    path.write_bytes(gzip.compress(packed) if name.endswith(".gz") else packed)
    found = [(record.values, record.problem) for record in iter_records(path)]
    assert found == ([(values, None)] if values else [])
