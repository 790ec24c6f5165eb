"""GLUE: sentences and pairs of sentences, from the official TSV files, other tables, or the Hub."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from exlm_cli.config.spelling import how_to_set
from exlm_cli.config.tasks import GlueTaskConfig
from exlm_cli.data.masking import IntArray
from exlm_cli.data.rows.hub import iter_hub_records
from exlm_cli.data.rows.records import RECORD_FORMATS, Record, SkippedRow, iter_records
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.progress import Progress
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import EncodedSplit, FloatArray, Loss, Split
from exlm_cli.tasks.glue_tasks import GLUE_TASKS, HIGHEST_SIMILARITY, NUM_MISMATCHED, Columns, GlueTaskInfo
from exlm_cli.tasks.pairs import encode_pairs
from exlm_cli.tasks.table_task import NO_TEST_NOTE
from exlm_cli.tasks.task_files import (
    LOCAL_HINT,
    choose_rows,
    counted,
    existing_folder,
    find_file,
    given_file,
    hub_source,
)

HUB_NAME = "nyu-mll/glue"
MISMATCHED_PREFIX = "mismatched_"
_INDEX_COLUMNS = ("index", "id", "idx")
_NO_LABEL = ("", "-1", "-1.0")

_PROTOCOL_NOTE = (
    "GLUE has no public test labels: `valid` is the development set, as in the paper; the best epoch is chosen on it"
)
_SCORES = {
    "accuracy": metrics.accuracy,
    "f1": metrics.f1,
    "matthews_corrcoef": metrics.matthews_corrcoef,
    "pearsonr": metrics.pearsonr,
    "spearmanr": metrics.spearmanr,
}


@dataclass(frozen=True)
class GlueExample:
    """One row: its one or two texts, its class or similarity (NaN: not known), its place in the file counted from 0."""

    texts: tuple[str, ...]
    target: float
    row: int


@dataclass
class GlueFile:
    """What one file or Hub split holds.

    Attributes:
        source: Its name.
        examples: Rows that can be used.
        indices: Of each, what the file calls it (`index`, or `id`), else its place counted from 0.
        num_rows: All of them.
        left_out: The others.
    """

    source: str
    examples: list[GlueExample] = field(default_factory=list)
    indices: list[str] = field(default_factory=list)
    num_rows: int = 0
    left_out: list[SkippedRow] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """What is wrong with rows that cannot be used, a line each."""
        return [str(row) for row in self.left_out]


def load_glue(config: GlueTaskConfig, progress: Progress) -> "GlueTask":
    """Read the examples of one GLUE task.

    They are `task.files`, else `train` and `dev` (MNLI: `dev_matched`, `dev_mismatched`) in `task.data_dir` or its
    folder named like the task, as .tsv, .csv, .jsonl, .json or .parquet, also .gz and .xz, else the Hub's.

    Raises:
        DataError: A file is missing, malformed or lacks a column, or a row cannot be used while `task.on_invalid` is
            `error`.
    """
    name = config.name.partition("/")[2]
    info = GLUE_TASKS[name]
    parts = {}
    for part, source, records in _sources(config, info):
        with progress.bar(f"reading {part}", None) as bar:
            parts[part] = _read(info, source, counted(records, bar))
    notes = [_PROTOCOL_NOTE]
    for part, found in parts.items():
        notes += _part_notes(info, part, found, config.on_invalid)
    left_out = [row for found in parts.values() for row in found.left_out]
    if "test" in parts and not parts["test"].examples:
        del parts["test"]
        notes.append(NO_TEST_NOTE)
    if name == "mnli" and "mismatched" not in parts:
        notes.append("there is no mismatched development set: its accuracy is missing")
    train = parts["train"].examples
    chosen = choose_rows(len(train), config)
    if len(chosen) < len(train):
        notes.append(f"trained on {len(chosen):,} of {len(train):,} rows (`task.max_rows`)")
    matched, mismatched = parts["valid"], parts.get("mismatched", GlueFile(""))
    valid = matched.examples + [GlueExample(e.texts, e.target, e.row + matched.num_rows) for e in mismatched.examples]
    splits: dict[Split, list[GlueExample]] = {"train": [train[index] for index in chosen], "valid": valid}
    if "test" in parts:
        splits["test"] = parts["test"].examples
    split_name = "official" if config.files.valid is None else "files"
    return GlueTask(info, splits, len(mismatched.examples), notes, split_name=split_name, left_out=left_out)


def _sources(config: GlueTaskConfig, info: GlueTaskInfo) -> Iterator[tuple[str, str, Iterable[Record]]]:
    """Yield `train`, `valid` and where they are there `mismatched` and `test`: name, source and records."""
    files = config.files
    if files.train is not None or files.valid is not None:
        for part in ("train", "valid", "test"):
            given = getattr(files, part)
            if given is not None:
                path = given_file(config, given)
                yield part, str(path), iter_records(path, header=info.header)
        return
    stems = {"train": "train", "valid": "dev"}
    hub_splits = {"train": "train", "valid": "validation"}
    if info.name == "mnli":
        stems |= {"valid": "dev_matched", "mismatched": "dev_mismatched"}
        hub_splits |= {"valid": "validation_matched", "mismatched": "validation_mismatched"}
    for part in stems:
        source = hub_source(config, HUB_NAME, info.name, hub_splits[part])
        if source is not None:
            yield part, str(source), iter_hub_records(source, hint=LOCAL_HINT)
            continue
        folder = existing_folder(config, (info.folder, info.name))
        found = find_file(folder, stems[part], RECORD_FORMATS)
        if found is None and part != "mismatched":
            accepted = f"`{stems[part]}.tsv` (or {', '.join(RECORD_FORMATS[1:])}, also with .gz or .xz)"
            raise DataError(
                f"{folder}: no {accepted}",
                f"{how_to_set('task.data_dir', 'DIR', '--data-dir DIR')} names the folder that holds the files or "
                f"`{info.folder}/`",
            )
        if found is not None:
            yield part, str(found), iter_records(found, header=info.header)


def read_glue_file(info: GlueTaskInfo, path: Path, progress: Progress, *, needs_labels: bool = True) -> GlueFile:
    """Read one file of a task.

    Args:
        info: Whose columns.
        path: .tsv, .csv, .jsonl, .json or .parquet, also .gz and .xz.
        progress: Told how far it is.
        needs_labels: Without, the column of labels may be missing, a label empty or -1 as in the Hub's test sets, and a
            text empty.

    Raises:
        DataError: The file is missing, malformed or lacks a column.
    """
    with progress.bar(f"reading {path.name}", None) as bar:
        records = counted(iter_records(path, header=info.header), bar)
        return _read(info, str(path), records, needs_labels=needs_labels)


def _read(info: GlueTaskInfo, source: str, records: Iterable[Record], *, needs_labels: bool = True) -> GlueFile:
    part = GlueFile(source)
    columns: Columns | None = None
    for record in records:
        problem = record.problem
        if problem is None:
            columns = columns or _choose_columns(info, source, list(record.values), needs_labels=needs_labels)
            try:
                example = _example(info, columns, record.values, part.num_rows, needs_labels=needs_labels)
            except ValueError as error:
                problem = str(error)
            else:
                part.examples.append(example)
                named = (str(record.values[name]) for name in _INDEX_COLUMNS if name in record.values)
                part.indices.append(next(named, str(part.num_rows)))
        if problem is not None:
            text = "\t".join(str(value) for value in record.values.values())
            part.left_out.append(record.skipped(text, problem))
        part.num_rows += 1
    if not part.num_rows:
        raise DataError(f"{source}: no rows in it")
    return part


def _choose_columns(info: GlueTaskInfo, source: str, names: list[str], *, needs_labels: bool) -> Columns:
    for columns in info.layouts:
        if {*columns.texts, columns.label} <= set(names):
            return columns
    if not needs_labels:
        for columns in info.layouts:
            if set(columns.texts) <= set(names):
                return columns
    wanted_columns = ((*c.texts, c.label) if needs_labels else c.texts for c in info.layouts)
    wanted = " or ".join(dict.fromkeys(" ".join(f"`{name}`" for name in columns) for columns in wanted_columns))
    has = ", ".join(f"`{name}`" for name in names)
    raise DataError(
        f"{source}: {info.name} needs the columns {wanted}; there are {has}",
        f"the first line of a {info.folder} table names its columns",
    )


def _example(
    info: GlueTaskInfo, columns: Columns, values: dict[str, Any], row: int, *, needs_labels: bool
) -> GlueExample:
    """Return one row as an example.

    Raises:
        ValueError: What is wrong with it.
    """
    texts = tuple(_text(name, values.get(name), may_be_empty=not needs_labels) for name in columns.texts)
    given = values.get(columns.label)
    if not needs_labels and str("" if given is None else given) in _NO_LABEL:
        return GlueExample(texts, math.nan, row)
    target = _class_index(info, columns.label, given) if info.classes else _similarity(columns.label, given)
    return GlueExample(texts, target, row)


def _text(name: str, value: Any, *, may_be_empty: bool) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"`{name}` is {value!r}, not a text")
    if value is None or not value.strip():
        if may_be_empty:
            return ""
        raise ValueError(f"`{name}` is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"`{name}` holds half a surrogate pair at position {error.start + 1}") from None
    return value.strip()


def _class_index(info: GlueTaskInfo, name: str, value: Any) -> float:
    """Return the class that a name or a number stands for."""
    text = str(value)
    if text in info.classes:
        return float(info.classes.index(text))
    if text in map(str, range(len(info.classes))):
        return float(text)
    accepted = ", ".join(f"{index} or {known}" for index, known in enumerate(info.classes))
    raise ValueError(f"`{name}` is `{text}`, accepted: {accepted}")


def _similarity(name: str, value: Any) -> float:
    try:
        similarity = float(value)
    except (TypeError, ValueError):
        similarity = math.nan
    if not 0 <= similarity <= HIGHEST_SIMILARITY:
        raise ValueError(f"`{name}` is `{value}`, accepted: a number from 0 to {HIGHEST_SIMILARITY:g}")
    return similarity


def _part_notes(info: GlueTaskInfo, part: str, found: GlueFile, on_invalid: Literal["error", "skip"]) -> list[str]:
    notes = []
    if found.problems:
        if on_invalid == "error" or not (found.examples or part == "test"):
            raise DataError(found.problems[0], f"{how_to_set('task.on_invalid', 'skip')} leaves such rows out")
        first = found.problems[0]
        notes.append(f"{part}: left out {len(found.problems):,} rows that cannot be used; the first: {first}")
    official = {"train": info.num_train, "valid": info.num_valid, "mismatched": NUM_MISMATCHED}.get(part)
    if official is not None and found.num_rows != official:
        notes.append(f"{part}: {found.source} has {found.num_rows:,} rows, the official file {official:,}")
    return notes


@final
class GlueTask:
    """A `DownstreamTask`: one class or one similarity for each sentence or pair."""

    input_kind: Literal["text", "smiles"] = "text"
    is_greater_better = True
    class_weights: FloatArray | None = None

    def __init__(
        self,
        info: GlueTaskInfo,
        examples: dict[Split, list[GlueExample]],
        num_mismatched: int,
        notes: Sequence[str] = (),
        *,
        split_name: str = "official",
        left_out: Sequence[SkippedRow] = (),
    ) -> None:
        """Hold what was read; the last `num_mismatched` examples of `valid` are MNLI's mismatched ones."""
        self.name = f"glue/{info.name}"
        self.split_name = split_name
        self.loss: Loss = "classes" if info.classes else "regression"
        self.output_names = info.classes or ("similarity",)
        self.selection_metric = info.metrics[0]
        self.splits: tuple[Split, ...] = tuple(examples)
        self._metrics = info.metrics
        self._examples = examples
        self._num_mismatched = num_mismatched
        self._notes = tuple(notes)
        self.left_out = tuple(left_out)
        self.num_cut: dict[Split, int] = {}
        self._sequence_length = 0

    @property
    def split_sizes(self) -> dict[str, int]:
        """Rows of each split; of MNLI's `valid`, matched and mismatched together."""
        return {split: len(rows) for split, rows in self._examples.items()}

    @property
    def split_indices(self) -> dict[str, IntArray]:
        """Row of the file, from 0; MNLI's mismatched rows are counted on from the last matched one."""
        return {split: np.array([e.row for e in rows], dtype=np.int64) for split, rows in self._examples.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report has to say; once a split is encoded, also how many rows were cut."""
        fit = f"to {self._sequence_length} tokens (`task.sequence_length`)"
        cut = [
            f"{split}: cut {number:,} of {len(self._examples[split]):,} rows {fit}"
            for split, number in self.num_cut.items()
            if number
        ]
        return (*self._notes, *cut)

    @property
    def score_fingerprint(self) -> str:
        """How many of the last rows of `valid` are MNLI's mismatched ones."""
        return f"mismatched: {self._num_mismatched}" if self._num_mismatched else ""

    def encode(self, split: Split, tokenizer: Tokenizer, sequence_length: int) -> EncodedSplit:
        """Tokenise a split as [CLS] a [SEP] or [CLS] a [SEP] b [SEP]; what is too long loses its longer text."""
        rows = self._examples[split]
        self._sequence_length = sequence_length
        token_ids, self.num_cut[split] = encode_pairs([row.texts for row in rows], tokenizer, sequence_length)
        return EncodedSplit(token_ids, np.array([[row.target] for row in rows], dtype=np.float64))

    def score(self, split: Split, outputs: Sequence[FloatArray]) -> dict[str, float]:
        """Return the task's metrics, of MNLI's `valid` those of the matched rows, and beside them `mismatched_...`."""
        outputs_NC = np.stack(list(outputs)).astype(np.float64)
        targets = np.array([row.target for row in self._examples[split]])
        if self.loss == "classes":
            targets, predicted = targets.astype(np.int64), outputs_NC.argmax(axis=1)
        else:
            predicted = outputs_NC[:, 0]
        num_mismatched = self._num_mismatched if split == "valid" else 0
        matched = slice(len(targets) - num_mismatched)
        scores = {name: _SCORES[name](targets[matched], predicted[matched]) for name in self._metrics}
        if num_mismatched:
            rest = slice(matched.stop, None)
            scores |= {
                f"{MISMATCHED_PREFIX}{name}": _SCORES[name](targets[rest], predicted[rest]) for name in self._metrics
            }
        return scores
