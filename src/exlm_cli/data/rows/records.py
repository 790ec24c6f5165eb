"""One reader for rows of every format: text lines (also .gz, .xz), CSV, TSV, JSON, Parquet and SDF (also .gz).

`iter_records` yields each row with its place in the file. Two views build on it: `Row` (one text or SMILES, for a
corpus) here, and `Table` (all columns, for a task) in `tasks/rows/table.py`. A row that cannot be read carries its
problem; the caller decides whether to stop.
"""

import io
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from exlm_cli.data.rows import decode, sdf
from exlm_cli.errors import DataError
from exlm_cli.format import format_number_of, name_some

RowKind = Literal["text", "smiles"]

LINE_FORMATS = (".txt", ".smi", ".smiles")
RECORD_FORMATS = (".tsv", ".csv", ".jsonl", ".json", ".parquet", ".sdf")
FORMATS = (*LINE_FORMATS, *RECORD_FORMATS)
COMPRESSIONS = {".gz": FORMATS, ".xz": LINE_FORMATS}
"""Suffix of a compressed file -> formats that it may hold."""
KNOWN_EXTENSIONS = f"{' '.join(LINE_FORMATS)}, also with .gz or .xz, and {' '.join(RECORD_FORMATS)}, also with .gz"

SKIPPED_FILE = "rejected.csv"
"""File of a run or of shards that lists its skipped rows."""
SKIPPED_COLUMNS = ("file", "row", "reason", "text")

_PLAUSIBLE_COLUMNS: dict[RowKind, frozenset[str]] = {
    "text": frozenset({"text", "sentence", "content", "document", "article"}),
    "smiles": frozenset({"smiles", "canonical_smiles", "isomeric_smiles", "mol"}),
}
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_ARCHIVES = frozenset({".7z", ".bz2", ".lz4", ".rar", ".tar", ".tgz", ".xz", ".zip", ".zst"})
_NUMBER = re.compile(r"[+-]?\d*\.?\d+")
_ARRAY_HINT = "correct it, or write the rows as JSON Lines: one object a line, as `jq -c '.[]' FILE > rows.jsonl` does"
_PARQUET_BATCH_ROWS = 256


class SkippedRow(NamedTuple):
    """A row that is not used.

    Attributes:
        row: Its line, record or question in that file.
        where: File and row as errors name them: `train.tsv:7`, or `train.parquet, record 6`.
        text: What the model would have read.
    """

    file: str
    row: str
    where: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Values under `SKIPPED_COLUMNS`."""
        return self.file, self.row, self.reason, self.text


class Record(NamedTuple):
    """One row.

    Attributes:
        number: Its line (text, CSV, TSV, JSON Lines, SDF) or record (JSON arrays, Parquet, Hub), counted from 1.
        values: By column; strings in text, CSV, TSV and SDF. Incomplete or empty where there is a problem, and in SDF
            where a molecule lacks a property.
        text: The row as the file has it, where there is a problem and the format is text.
        has_lines: Whether `number` counts lines.
    """

    source: str
    number: int
    values: dict[str, Any]
    problem: str | None = None
    text: str = ""
    has_lines: bool = True

    @property
    def where(self) -> str:
        """Place of the row as errors name it: `train.tsv:7`, or `train.parquet, record 6`."""
        return f"{self.source}:{self.number}" if self.has_lines else f"{self.source}, record {self.number}"

    def skipped(self, text: str, reason: str) -> SkippedRow:
        """Return this row as one that is not used."""
        return SkippedRow(self.source, str(self.number), self.where, text, reason)


class Row(NamedTuple):
    """One text or one SMILES of a corpus.

    Attributes:
        number: Line or record, counted from 1.
        text: Empty where the record has no value.
        starts_document: Whether a document begins with it; lines of a text file continue one until a blank line.
        is_null: Whether its problem is that it has no value at all, which never stops a run.
        spellings: Other SMILES of the same molecule, where `read_smiles` is asked for them.
    """

    source: str
    number: int
    text: str
    starts_document: bool = True
    problem: str | None = None
    is_null: bool = False
    spellings: tuple[str, ...] = ()


class ColumnChoice(NamedTuple):
    """The one column to read.

    Attributes:
        name: Column; None takes the one whose name is plausible for the kind: a usual one, or one with `smiles` in it.
        is_of_task: Whether it is of a table for a task, for hints; else of a corpus.
    """

    kind: RowKind
    name: str | None = None
    is_of_task: bool = False

    def choose(self, origin: str, names: Sequence[str]) -> str:
        """Return the column to read out of those that `origin` has.

        Raises:
            DataError: The named column is missing, or none is named and not exactly one is plausible.
        """
        option = f"`--{self.kind}-column NAME`"
        if not self.is_of_task:
            option = f"`--set data.column=NAME`, or in `exlm eval` with {option}"
        hint = f"choose one with {option}"
        if self.name is not None:
            if self.name not in names:
                raise DataError(f"{origin}: no column `{self.name}`; there are {_listed(names)}", hint)
            return self.name
        if self.kind == "smiles" and format_of(Path(origin)) == ".sdf":
            return sdf.SMILES
        plausible = [name for name in names if name.lower() in _PLAUSIBLE_COLUMNS[self.kind]]
        if self.kind == "smiles":
            plausible = plausible or [name for name in names if "smiles" in name.lower()]
            # beside SMILES it may be a drawing
            plausible = plausible or [name for name in names if name.lower() == "structure"]
        if len(plausible) != 1:
            words = "SMILES" if self.kind == "smiles" else self.kind
            which = "more than one has" if plausible else "none has"
            if not plausible and any(map(_NUMBER.fullmatch, names)):
                hint += "; if the first line is a row, put a line with the names of the columns before it"
            raise DataError(
                f"{origin}: which column holds the {words}? There are {_listed(names)}; {which} a usual name", hint
            )
        return plausible[0]


def format_of(path: Path) -> str | None:
    """Return a file's format ("`.csv`" of "a.csv.gz"), or None where the extension is not known."""
    *_, first, last = ("", "", *(suffix.lower() for suffix in path.suffixes))
    known, found = (COMPRESSIONS[last], first) if last in COMPRESSIONS else (FORMATS, last)
    return found if found in known else None


def conversion_hint(path: Path, formats: Sequence[str]) -> str:
    """Return how to turn an archive, or a file or folder of `datasets`, into one of `formats`; empty for others."""
    if not _ARCHIVES.isdisjoint(suffix.lower() for suffix in path.suffixes):
        return "unpack it, or compress it as .gz"
    if os.path.isfile(path / "state.json"):  # noqa: PTH113 - False also for a name that is too long
        read = f'load_from_disk("{path}")'
    elif path.suffix == ".arrow":
        read = f'Dataset.from_file("{path}")'
    else:
        return ""
    name, write = ("Parquet", "to_parquet") if ".parquet" in formats else ("CSV", "to_csv")
    return f'write it as {name}: `datasets.{read}.{write}("rows.{name.lower()}")`'


def iter_records(
    path: Path,
    *,
    raw: io.BufferedReader | None = None,
    formats: Sequence[str] = RECORD_FORMATS,
    header: Sequence[str] | None = None,
    bare: RowKind | None = None,
    only: ColumnChoice | None = None,
    has_literal_tsv: bool = False,
) -> Iterator[Record]:
    """Yield the rows of a file one after the other; empty lines are passed over.

    Where one column is read, an empty line of JSON Lines is a record without values.

    Args:
        path: The file; its suffix names format and compression.
        raw: The same file if it is open already; its position then says how far reading has come.
        formats: Those to accept.
        header: Columns of a TSV or CSV that may have no header: its first row is data unless it names one of them.
        bare: Column under which a line of text, or a JSON value that is not an object, is given; accepts `.txt` and
            `.smi` too. For "smiles", the value is the first word of a line, and the rest is the column `name` unless
            `only` is given. None: such JSON values are problems.
        only: Read this column alone, and give a line of text beyond 1 MiB in pieces with the same number.
        has_literal_tsv: Quotes in a TSV are part of its cells, as in GLUE's files; False: cells are quoted as in CSV.

    Raises:
        DataError: The file is missing, damaged or of another format; a CSV or TSV is empty or names a column twice; or
            the column to read is missing.
    """
    accepted = (*formats, *LINE_FORMATS) if bare else tuple(formats)
    file_format = format_of(path)
    if file_format not in accepted:
        raise DataError(
            f"{path}: not a table that can be read; accepted are {' '.join(accepted)}, also with .gz",
            conversion_hint(path, accepted) or "convert the file to one of these",
        )
    with decode.open_file(path, raw) as file:
        match file_format:
            case ".csv" | ".tsv":
                yield from _read_cells(path, file, header, only, is_literal=has_literal_tsv and file_format == ".tsv")
            case ".json" | ".jsonl":
                yield from _read_json(path, file, bare, only)
            case ".parquet":
                yield from _read_parquet(path, file, only)
            case ".sdf":
                yield from _read_sdf(path, file, only)
            case _:
                assert bare is not None
                yield from _read_lines(path, file, bare, only)


def delimiter_of(path: Path, *, has_literal_tsv: bool = False) -> str:
    """Return what parts the cells of a CSV or TSV that has been read; a comma for other formats."""
    usual = _DELIMITERS.get(format_of(path) or "")
    if usual is None or (has_literal_tsv and usual == "\t"):
        return usual or ","
    with decode.open_file(path) as file:
        return decode.read_cells(path, file, usual)[0]


def iter_file_rows(path: Path, raw: io.BufferedReader, column: ColumnChoice) -> Iterator[Row]:
    """Yield the texts or SMILES of one open file.

    Raises:
        DataError: As `iter_records`.
    """
    continues_documents = format_of(path) in LINE_FORMATS
    number_before = -1
    for record in iter_records(path, raw=raw, bare=column.kind, only=column):
        if continues_documents:
            # blank lines leave a gap; the pieces of one long line have the same number
            starts_document = record.number > number_before + 1 or column.kind == "smiles"
            number_before = record.number
            yield Row(record.source, record.number, record.values[column.kind], starts_document)
        else:
            yield as_row(record)


def as_row(record: Record) -> Row:
    """Return a record of one column as a row of a corpus."""
    if record.problem is not None:
        return Row(record.source, record.number, record.text, problem=record.problem)
    value = next(iter(record.values.values()), None)
    if value is None:
        problem = "is null" if record.values else "the line is empty"
        return Row(record.source, record.number, "", problem=problem, is_null=True)
    if not isinstance(value, str):
        return Row(record.source, record.number, json.dumps(value, default=str), problem="is not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        problem = f"contains a lone surrogate at position {error.start + 1}"
        return Row(record.source, record.number, ascii(value), problem=problem)
    return Row(record.source, record.number, value.strip())


_SEVERAL_ISOMERS = re.compile(r"\|(?:[^|]*,)?(?:[&o]\d+:[^|]*|r(?:,[^|]*)?)\|")
"""What CXSMILES write behind the SMILES of a racemate; its SMILES alone is one enantiomer."""


def _read_lines(path: Path, file: io.BufferedReader, kind: RowKind, only: ColumnChoice | None) -> Iterator[Record]:
    source, last, has_return = str(path), 0, False
    for number, line in decode.text_lines(path, file, -1 if only is None else decode.LONGEST_LINE_BYTES):
        text = line.rstrip()
        if text:
            last, has_return = number, has_return or "\r" in text
        if has_return and kind == "smiles":
            raise _carriage_return(path, number)
        if text and kind == "text":
            yield Record(source, number, {kind: text})
        elif text:
            # the field before a leading tab is empty: what follows is a name, not a molecule
            smiles, *name = ("", text.strip()) if text.lstrip(" ")[0] == "\t" else text.split(maxsplit=1)
            if name and (extension := _SEVERAL_ISOMERS.match(name[0])):
                smiles, name = f"{smiles} {extension[0]}", [name[0][extension.end() :].strip()]
            yield Record(source, number, {kind: smiles} | ({"name": "".join(name)} if only is None else {}))
    # in running text of several lines it is a stray character
    if has_return and last == 1:
        raise _carriage_return(path, last)


def _carriage_return(path: Path, number: int) -> DataError:
    return DataError(f"{path}:{number}: malformed: a carriage return within a line", decode.LINE_END_HINT)


def _read_cells(
    path: Path,
    file: io.BufferedReader,
    header: Sequence[str] | None,
    only: ColumnChoice | None,
    *,
    is_literal: bool,
) -> Iterator[Record]:
    source = str(path)
    delimiter, rows = decode.read_cells(path, file, _DELIMITERS[format_of(path) or ""], is_literal=is_literal)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path}: the file is empty", "its first line must name the columns")
    if header is None or not set(header).isdisjoint(first[1]):
        names = decode.column_names(first[1])
        repeated = next((name for name, count in Counter(names).items() if count > 1), None)
        if repeated is not None:
            raise DataError(f"{path}: the header names column `{repeated}` twice", "give each column a name of its own")
    else:
        names = list(header)
        rows = itertools.chain([first], rows)
    begin_row = next(rows, None)
    if begin_row is not None:
        rows = itertools.chain([begin_row], rows)
        if not is_literal and len(begin_row[1]) == len(names) + 1 and begin_row[1][0].strip() == "1":
            names = ["", *names]  # R writes the numbers of rows without a name in the header
    index = None if only is None else names.index(only.choose(source, names))
    for number, of_row in rows:
        if len(of_row) == 1 < len(names) and not of_row[0].strip():
            continue  # a line of blanks
        if index is None:
            values = {name: cell.strip() for name, cell in zip(names, of_row, strict=False)}
        else:
            values = {names[index]: of_row[index].strip()} if index < len(of_row) else {}
        if len(of_row) == len(names):
            yield Record(source, number, values)
        else:
            problem = f"the row has {format_number_of(len(of_row), 'cell')}, expected {len(names)}"
            yield Record(source, number, values, problem, delimiter.join(of_row))


def _read_json(
    path: Path, file: io.BufferedReader, bare: RowKind | None, only: ColumnChoice | None
) -> Iterator[Record]:
    source, name = str(path), None if only is None else only.name
    is_array = decode.starts_array(file)
    found: Iterator[tuple[Any, str | None, str]]
    if is_array:
        found = ((value, None, "") for value in decode.load_json(path, file, _ARRAY_HINT))
    else:
        found = ((*decode.parse_json(line), line.strip()) for _, line in decode.text_lines(path, file))
    for number, (value, problem, text) in enumerate(found, start=1):
        if not (text or is_array):
            if only is not None:
                yield Record(source, number, {})
            continue
        values: dict[str, Any] = {}
        if problem is None and isinstance(value, dict):
            values = value
            if only is not None:
                place = f"{source}, record {number}" if is_array else f"{source}:{number}"
                name = name or only.choose(place, list(value))
                values = {name: value[name]} if name in value else {}
                problem = None if values else f"has no `{name}`; it has {_listed(list(value))}"
                text = ""
        elif problem is None and bare is not None:
            values = {bare: value}
        elif problem is None:
            problem = f"not a JSON object, but {json.dumps(value)[:40]}"
        yield Record(source, number, values, problem, text if problem else "", has_lines=not is_array)


def _read_parquet(path: Path, file: io.BufferedReader, only: ColumnChoice | None) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        # a file of Parquet is read from its end
        table = pyarrow.parquet.ParquetFile(file if isinstance(file.raw, io.FileIO) else io.BytesIO(file.read()))
        columns = None if only is None else [only.choose(str(path), table.schema_arrow.names)]
        batches = table.iter_batches(_PARQUET_BATCH_ROWS, columns=columns)
        for number, values in enumerate((values for batch in batches for values in batch.to_pylist()), start=1):
            yield Record(str(path), number, values, has_lines=False)
    except (pyarrow.ArrowException, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: not a Parquet file that can be read: {reason}", "fetch or write it again") from error


def _read_sdf(path: Path, file: io.BufferedReader, only: ColumnChoice | None) -> Iterator[Record]:
    for number, values in sdf.read_records(path, file):
        if only is not None:
            name = only.choose(str(path), list(values))
            values = {name: values[name]}
        yield Record(str(path), number, values)


def _listed(names: Sequence[str]) -> str:
    return name_some((f"`{name}`" for name in names), limit=20)
