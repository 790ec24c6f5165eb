"""Files of rows with masks: reading them, and the table of their fillings."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.dag.inspection import NOTE_ON_PROOF
from exlm_cli.dag.read import read_masked
from exlm_cli.errors import ConfigError, DataError
from exlm_cli.files import csv_bytes, folder_for_results, write_atomically
from exlm_cli.fill.engine import FilledRow, FillSettings, Line, fill_texts
from exlm_cli.fill.score import score_texts
from exlm_cli.finetune.prediction.predict import own_file, refuse_overwriting, stem_of
from exlm_cli.format import format_percent, format_plain
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.report.tables import ReportTable
from exlm_cli.tasks.base import PredictionSummary
from exlm_cli.tasks.rows.table import Table, read_input_columns
from exlm_cli.train.pretrained import Pretrained

COLUMNS = ("rank", "filling", "filled", "probability", "probability_alone", "proven", "problem")
"""Columns behind those of the file."""
SCORE_COLUMNS = ("log_probability", "tokens", "problem")


def fill_file(
    pretrained: Pretrained,
    path: Path,
    out: Path | None,
    *,
    folder: Path,
    columns: tuple[str, ...] = (),
    settings: FillSettings,
    progress: Progress,
) -> PredictionSummary:
    """Fill the masks of each row of a file, and write a CSV whose lines are fillings, row after row, best first.

    Args:
        path: CSV, TSV or Parquet, also .gz, or lines of text or SMILES (.txt, .smi).
        out: The CSV; None: `fillings-<name of the file>` in `folder`, or with a number after it where another file of
            that name has it.
        folder: Folder of the CSV without `out`.
        columns: Column of the text or SMILES; empty: the one that the run was trained on, else one with a usual name.

    Raises:
        ConfigError: `out` is no CSV, or the input file.
        DataError: The file or its column cannot be read.
        CheckpointError: The CSV cannot be written.
    """

    def answer(_: Table, texts: tuple[str, ...]) -> Answers:
        rows = list(fill_texts(pretrained, texts, settings, progress))
        lines = [[line_values(rank, line) for rank, line in enumerate(row.lines, start=1)] for row in rows]
        return Answers(COLUMNS, lines, [row.problem for row in rows], [row.notes for row in rows])

    return _answer_file(pretrained, path, out, folder / f"fillings-{stem_of(path)}.csv", columns, answer)


def score_file(
    pretrained: Pretrained,
    path: Path,
    out: Path | None,
    *,
    folder: Path,
    columns: tuple[str, ...] = (),
    progress: Progress,
) -> PredictionSummary:
    """Score the filling of each row of a file, its column `filling`; without that column or cell, the text itself.

    Arguments and errors are those of `fill_file`; the CSV is called `scores-<name of the file>`.
    """

    def answer(table: Table, texts: tuple[str, ...]) -> Answers:
        fillings = [cell or None for cell in table.columns.get("filling", ("",) * len(texts))]
        rows = list(score_texts(pretrained, texts, fillings, progress))
        lines = [
            [{"log_probability": row.log_prob, "tokens": row.num_tokens}] if not row.problem else [] for row in rows
        ]
        return Answers(SCORE_COLUMNS, lines, [row.problem for row in rows], [row.notes for row in rows])

    return _answer_file(pretrained, path, out, folder / f"scores-{stem_of(path)}.csv", columns, answer)


@dataclass(frozen=True)
class Answers:
    """What a model says of R rows.

    Attributes:
        columns: Columns behind those of the file, `problem` the last.
        lines: R lists of lines, each with its values by column.
        problems: R strings, why a row has no line; empty where it has.
        notes: R tuples, what is to be said of a row.
    """

    columns: tuple[str, ...]
    lines: Sequence[Sequence[Mapping[str, object]]]
    problems: Sequence[str]
    notes: Sequence[tuple[str, ...]]


def _answer_file(
    pretrained: Pretrained,
    path: Path,
    out: Path | None,
    usual: Path,
    columns: tuple[str, ...],
    answer: Callable[[Table, tuple[str, ...]], Answers],
) -> PredictionSummary:
    """Write the answers to the rows of a file as CSV, whole or not at all."""
    _check_name(out)
    data = pretrained.recipe.data
    with contextlib.ExitStack() as stack:
        if out is None:
            out = stack.enter_context(own_file(usual, path))
        refuse_overwriting(path, out)
        stack.enter_context(folder_for_results(out.parent, out))
        usual_columns = () if data.column is None else (data.column,)
        table, (texts,), notes = read_input_columns(path, data.kind, columns=columns, usual_columns=usual_columns)
        answers = answer(table, texts)
        content, notes_on_table = _as_csv(table, answers)
        write_atomically(out, content)
    notes = (*notes, *_notes_on_rows(table, answers.notes), *notes_on_table)
    return PredictionSummary((out,), len(texts), sum(map(bool, answers.problems)), {}, notes)


def fill_one(
    pretrained: Pretrained, text: str, out: Path | None, settings: FillSettings
) -> tuple[FilledRow, tuple[Path, ...]]:
    """Fill the masks of one text, and write the CSV if one is asked for; return the fillings and the files.

    Raises:
        DataError: The text cannot be filled.
        ConfigError, CheckpointError: As for `fill_file`.
    """
    _check_name(out)
    with contextlib.nullcontext() if out is None else folder_for_results(out.parent, out):
        read_masked(pretrained, text)  # its error has a hint
        (row,) = fill_texts(pretrained, [text], settings, SilentProgress())
        if row.problem:
            raise DataError(row.problem, "change the text, or choose another model with `--checkpoint RUN`")
        files = () if out is None else (out,)
        lines = [[line_values(rank, line) for rank, line in enumerate(row.lines, start=1)]]
        for path in files:
            write_atomically(path, _as_csv(Table(path, {}, (1,)), Answers(COLUMNS, lines, [""], [()]))[0])
    return row, files


def fillings_table(row: FilledRow, title: str) -> ReportTable:
    """Return the fillings of one text for the terminal."""
    columns = ("rank", "filling", "filled", "probability", "alone")
    entries = tuple(
        (
            str(rank),
            line.filling,
            line.filled,
            *map(format_percent, (math.exp(line.log_prob), math.exp(line.log_prob_alone))),
        )
        for rank, line in enumerate(row.lines, start=1)
    )
    notes = () if all(line.is_proven for line in row.lines) else (NOTE_ON_PROOF,)
    return ReportTable("fillings", title, columns, (entries,), notes, num_keys=3)


def _check_name(out: Path | None) -> None:
    if out is not None and out.suffix.lower() != ".csv":
        raise ConfigError(f"`--out {out}`: fillings are a .csv file", f"give `--out {out.stem}.csv`")


def line_values(rank: int, line: Line) -> dict[str, object]:
    """Return the values of one filling by column."""
    return {
        "rank": rank,
        "filling": line.filling,
        "filled": line.filled,
        "probability": math.exp(line.log_prob),
        "probability_alone": math.exp(line.log_prob_alone),
        "proven": line.is_proven,
    }


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return format_plain(value) if isinstance(value, float) else str(value)


def _as_csv(table: Table, answers: Answers) -> tuple[bytes, tuple[str, ...]]:
    """Return the CSV, and a note on columns of the table that ours replace."""
    columns = answers.columns
    own = [name for name in table.columns if name not in columns]
    replaced = [f"`{name}`" for name in table.columns if name in columns]
    notes = (f"the result replaces the table's own columns {', '.join(replaced)}",) if replaced else ()

    def lines() -> Iterator[Sequence[str]]:
        for number, (found, problem) in enumerate(zip(answers.lines, answers.problems, strict=True)):
            cells = [table.columns[name][number] for name in own]
            for line in found or [{}]:
                yield [*cells, *(_cell(line.get(name, "")) for name in columns[:-1]), problem]

    return csv_bytes([*own, *columns], lines()), notes


def _notes_on_rows(table: Table, notes: Sequence[tuple[str, ...]]) -> list[str]:
    """Return what is to be said of rows, each note once with the places of its rows."""
    places: dict[str, list[int]] = {}
    for number, of_row in enumerate(notes):
        for note in of_row:
            places.setdefault(note, []).append(number)
    return [f"{note}: {table.short_places(numbers)}" for note, numbers in places.items()]
