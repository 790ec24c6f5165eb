"""Files of rows with masks: reading them, and the table of their fillings."""

import contextlib
import csv
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.dag.inspection import NOTE_ON_PROOF
from exlm_cli.dag.read import read_masked
from exlm_cli.data.rows.records import ColumnChoice
from exlm_cli.errors import ConfigError, DataError
from exlm_cli.files import csv_bytes, folder_for_results, write_atomically
from exlm_cli.fill.engine import FilledRow, FillSettings, Line, fill_texts, score_of
from exlm_cli.fill.score import score_texts
from exlm_cli.finetune.prediction.predict import own_file, refuse_overwriting, stem_of
from exlm_cli.format import format_number, format_percent, format_plain
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.report.tables import ReportTable
from exlm_cli.tasks.base import PredictionSummary
from exlm_cli.tasks.rows.table import Table, read_input_columns, read_table
from exlm_cli.train.pretrained import Pretrained

COLUMNS = ("rank", "filling", "filled", "probability", "probability_alone", "proven", "problem")
"""Columns behind those of the file."""
Predict = Callable[[Sequence[str]], Mapping[str, Sequence[object]]]
"""Returns columns of predictions for molecules."""
SCORE_COLUMNS = ("log_probability", "tokens", "problem")


def fill_file(
    pretrained: Pretrained,
    path: Path,
    out: Path | None,
    *,
    folder: Path,
    columns: tuple[str, ...] = (),
    settings: FillSettings,
    targets: str | None = None,
    predict: Predict | None = None,
    progress: Progress,
) -> PredictionSummary:
    """Fill the masks of each row of a file, and write a CSV whose lines are fillings, row after row, best first.

    Args:
        path: CSV, TSV or Parquet, also .gz, or lines of text or SMILES (.txt, .smi).
        out: The CSV; None: `fillings-<name of the file>` in `folder`, or with a number after it where another file of
            that name has it.
        folder: Folder of the CSV without `out`.
        columns: Column of the text or SMILES; empty: the one that the run was trained on, else one with a usual name.
        targets: Words that may stand at masks: a column of the file with a list for each row, a file of words, or a
            list with commas; None: all.
        predict: Returns columns of predictions for molecules; None: no predictions.

    Raises:
        ConfigError: `out` is no CSV, or the input file; or there are no targets.
        DataError: The file or its column cannot be read.
        CheckpointError: The CSV cannot be written.
    """

    def answer(table: Table, texts: tuple[str, ...]) -> Answers:
        words = None if targets is None else _targets_of_rows(targets, table)
        rows = list(fill_texts(pretrained, texts, settings, progress, words))
        names, lines = lines_of(rows, settings, predict)
        problems, notes = [row.problem for row in rows], [row.notes for row in rows]
        return Answers(names, lines, problems, notes, (describe_way(settings),))

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
    """A model's answers to R rows.

    Attributes:
        columns: Columns behind those of the file, `problem` the last.
        lines: R lists of lines, each with its values by column.
        problems: R strings, why a row has no line; empty where it has.
        notes: R tuples of notes on a row.
        notes_on_all: What is to be said of all rows.
    """

    columns: tuple[str, ...]
    lines: Sequence[Sequence[Mapping[str, object]]]
    problems: Sequence[str]
    notes: Sequence[tuple[str, ...]]
    notes_on_all: tuple[str, ...] = ()


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
    notes = (*answers.notes_on_all, *notes, *_notes_on_rows(table, answers.notes), *notes_on_table)
    return PredictionSummary((out,), len(texts), sum(map(bool, answers.problems)), {}, notes)


def fill_one(
    pretrained: Pretrained,
    text: str,
    out: Path | None,
    *,
    settings: FillSettings,
    targets: str | None = None,
    predict: Predict | None = None,
) -> tuple[FilledRow, list[dict[str, object]], tuple[Path, ...]]:
    """Fill the masks of one text, and write the CSV if one is asked for; return fillings, their lines and the files.

    Raises:
        DataError: The text cannot be filled.
        ConfigError, CheckpointError: As for `fill_file`.
    """
    _check_name(out)
    with contextlib.nullcontext() if out is None else folder_for_results(out.parent, out):
        read_masked(pretrained, text)  # its error has a hint
        words = None if targets is None else [read_targets(targets)]
        (row,) = fill_texts(pretrained, [text], settings, SilentProgress(), words)
        if row.problem:
            raise DataError(row.problem, "change the text, or choose another model with `--checkpoint RUN`")
        columns, (lines,) = lines_of([row], settings, predict)
        if out is not None:
            write_atomically(out, _as_csv(Table(out, {}, (1,)), Answers(columns, [lines], [""], [()]))[0])
    return row, lines, () if out is None else (out,)


def fillings_table(
    row: FilledRow, lines: Sequence[Mapping[str, object]], settings: FillSettings, title: str
) -> ReportTable:
    """Return the fillings of one text for the terminal."""
    names = ["rank", "filling", "filled", "probability", "probability_alone"]
    names += ["tokens", _compared_by(settings)] if settings.max_tokens > 1 else []
    names += [
        name for name in (lines[0] if lines else ()) if name not in (*names, *COLUMNS, "tokens", "log_probability")
    ]
    shown = {"probability": format_percent, "probability_alone": format_percent}
    entries = tuple(
        tuple(shown[name](float(str(line[name]))) if name in shown else _shown(line[name]) for name in names)
        for line in lines
    )
    notes = [describe_way(settings)]
    if settings.passes == 1 and not settings.samples and not all(line.is_proven for line in row.lines):
        notes.append(NOTE_ON_PROOF)
    columns = tuple(name.replace("_", " ") for name in names)
    return ReportTable("fillings", title, columns, (entries,), tuple(notes), num_keys=3)


def _shown(value: object) -> str:
    return format_number(value) if isinstance(value, float) else str(value)


def describe_way(settings: FillSettings) -> str:
    """Return in words how the masks are filled."""
    joint = "all masks of a row jointly, in one pass"
    if settings.passes > 1:
        joint = f"in {settings.passes} passes, the surest masks first, those of a pass jointly"
    if settings.samples:
        return f"drawn with seed {settings.seed} at temperature {settings.temperature:g}: {joint}"
    return f"filled {joint}"


def read_targets(given: str) -> list[str]:
    """Return the words of a file, one a line or in a column, or of a list with commas.

    Raises:
        ConfigError: There are none.
        DataError: The file cannot be read.
    """
    if os.path.isfile(given):  # noqa: PTH113 - False also for a list that is too long
        table = read_table(Path(given), bare="text")
        names = [*table.columns]
        name = names[0] if len(names) == 1 else ColumnChoice("text", is_of_task=True).choose(given, names)
        words = list(table.columns[name])
    else:
        words = [word.strip() for word in next(csv.reader([given], skipinitialspace=True), [])]
    words = [word for word in words if word]
    if not words:
        raise ConfigError(
            f"`--targets {given}`: there are no words", "give words with commas, a file or a column of them"
        )
    return words


def _targets_of_rows(given: str, table: Table) -> Sequence[Sequence[str]]:
    """Return the words of each row: its own from a column of the table, or the same for all."""
    if given in table.columns:
        return [read_targets(cell) if cell else [] for cell in table.columns[given]]
    return [read_targets(given)] * len(table)


def _check_name(out: Path | None) -> None:
    if out is not None and out.suffix.lower() != ".csv":
        raise ConfigError(f"`--out {out}`: fillings are a .csv file", f"give `--out {out.stem}.csv`")


def _compared_by(settings: FillSettings) -> str:
    return "log_probability_per_token" if settings.is_length_normalised else "log_probability"


def lines_of(
    rows: Sequence[FilledRow], settings: FillSettings, predict: Predict | None
) -> tuple[tuple[str, ...], list[list[dict[str, object]]]]:
    """Return the columns of fillings, and the values of those of each row by column.

    Where fillings have different lengths, a column names what they are compared by.
    """
    lengths = () if settings.max_tokens == 1 else ("tokens", _compared_by(settings))
    lines = [[_values(rank, line, settings) for rank, line in enumerate(row.lines, start=1)] for row in rows]
    added: tuple[str, ...] = ()
    if predict is not None:
        molecules = list(dict.fromkeys(str(line["filled"]) for row in lines for line in row if not line["problem"]))
        predicted = predict(molecules) if molecules else {}
        added = tuple(predicted)
        of_molecule = dict(zip(molecules, zip(*predicted.values(), strict=True), strict=True)) if predicted else {}
        for line in itertools.chain.from_iterable(lines):
            line |= zip(added, of_molecule.get(str(line["filled"]), ()), strict=False)
    return (*COLUMNS[:-2], *lengths, COLUMNS[-2], *added, COLUMNS[-1]), lines


def _values(rank: int, line: Line, settings: FillSettings) -> dict[str, object]:
    return {
        "rank": rank,
        "filling": line.filling,
        "filled": line.filled,
        "probability": math.exp(line.log_prob),
        "probability_alone": math.exp(line.log_prob_alone),
        "tokens": line.num_tokens,
        _compared_by(settings): score_of(line, settings),
        "proven": "" if settings.samples else line.is_proven,
        "problem": line.problem,
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

    def lines() -> Iterator[Sequence[object]]:
        for number, (found, problem) in enumerate(zip(answers.lines, answers.problems, strict=True)):
            cells = [table.columns[name][number] for name in own]
            for line in found or [{}]:
                yield [*cells, *(_cell(line.get(name, "")) for name in columns[:-1]), line.get("problem") or problem]

    return csv_bytes([*own, *columns], lines()), notes


def _notes_on_rows(table: Table, notes: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the notes on rows, each once, with the places of its rows."""
    places: dict[str, list[int]] = {}
    for number, of_row in enumerate(notes):
        for note in of_row:
            places.setdefault(note, []).append(number)
    return [f"{note}: {table.short_places(numbers)}" for note, numbers in places.items()]
