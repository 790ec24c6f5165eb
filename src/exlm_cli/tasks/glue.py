"""GLUE (App. M): sentences and pairs of sentences, from the official TSV files, other tables, or the Hub."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exlm_cli.config.tasks import GlueTaskConfig
from exlm_cli.data.rows.hub import HubSource, iter_hub_records
from exlm_cli.data.rows.records import RECORD_FORMATS, Record, SkippedRow, iter_records
from exlm_cli.errors import DataError
from exlm_cli.format import format_number_of, is_unicode, printable
from exlm_cli.progress import Progress
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import (
    NO_TEST_NOTE,
    FloatArray,
    Loss,
    NewRows,
    SeedOutputs,
    Split,
    TrainedTask,
)
from exlm_cli.tasks.rows.splits import choose_rows
from exlm_cli.tasks.rows.task import LabelledRows, RowTask, ScoredRows, rows_to_predict
from exlm_cli.tasks.sources import LOCAL_HINT, OfficialFiles, counted, find_parts

MISMATCHED_PREFIX = "mismatched_"
_INDEX_COLUMNS = ("index", "id", "idx")
_NO_LABEL = ("", "-1", "-1.0")

_PROTOCOL_NOTE = (
    "GLUE has no public test labels: `valid` is the development set, as in the paper; the best epoch is chosen on it"
)


@dataclass(frozen=True)
class Columns:
    """Columns of the one or two texts and of the label in one layout of a task."""

    texts: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class GlueTaskInfo:
    """One task.

    Attributes:
        name: As in `glue/rte`; also the Hub's configuration.
        folder: Its folder in the official download.
        layouts: Columns of the official TSV, and of the Hub if they differ.
        classes: Names of the classes in the Hub's order; none for STS-B, which is a number from 0 to 5.
        metrics: Metrics of GLUE; the first one chooses the best epoch and is in Table 3. Tasks of classes also have
            Matthews' correlation: that of a guess is 0, while its accuracy depends on the rows.
        num_train, num_valid: Rows of the official files; MNLI's `num_valid` counts the matched ones.
        header: Columns of the official TSV if it has no header line.
        has_numbered_classes: The official files and predictions have classes by number, not by name.
    """

    name: str
    folder: str
    layouts: tuple[Columns, ...]
    classes: tuple[str, ...]
    metrics: tuple[str, ...]
    num_train: int
    num_valid: int
    header: tuple[str, ...] | None = None
    has_numbered_classes: bool = False

    @property
    def files(self) -> OfficialFiles:
        """Where its files are; MNLI has two development sets."""
        parts = {"train": ("train", "train"), "valid": ("dev", "validation")}
        if self.name == "mnli":
            parts["valid"] = ("dev_matched", "validation_matched")
            parts["mismatched"] = ("dev_mismatched", "validation_mismatched")
        return OfficialFiles(
            "nyu-mll/glue", self.name, (self.folder, self.name), parts, RECORD_FORMATS, ("mismatched",)
        )

    @property
    def loss(self) -> Loss:
        """A softmax over the classes; STS-B is a regression."""
        return "classes" if self.classes else "regression"

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the classes, or of STS-B's number."""
        return self.classes or ("similarity",)


_PAIR = ("sentence1", "sentence2")
_QUESTIONS = ("question1", "question2")
_ENTAILED = ("entailment", "not_entailment")
_ACCURACY = ("accuracy", "matthews_corrcoef")
_ACCURACY_F1 = ("accuracy", "f1", "matthews_corrcoef")

GLUE_TASKS = {
    info.name: info
    for info in (
        GlueTaskInfo("mnli", "MNLI", (Columns(_PAIR, "gold_label"), Columns(("premise", "hypothesis"), "label")),
                     ("entailment", "neutral", "contradiction"), _ACCURACY, 392_702, 9_815),
        GlueTaskInfo("qqp", "QQP", (Columns(_QUESTIONS, "is_duplicate"), Columns(_QUESTIONS, "label")),
                     ("not_duplicate", "duplicate"), _ACCURACY_F1, 363_846, 40_430, has_numbered_classes=True),
        GlueTaskInfo("qnli", "QNLI", (Columns(("question", "sentence"), "label"),),
                     _ENTAILED, _ACCURACY, 104_743, 5_463),
        GlueTaskInfo("sst2", "SST-2", (Columns(("sentence",), "label"),),
                     ("negative", "positive"), _ACCURACY, 67_349, 872, has_numbered_classes=True),
        GlueTaskInfo("cola", "CoLA", (Columns(("sentence",), "label"),),
                     ("unacceptable", "acceptable"), ("matthews_corrcoef", "accuracy"), 8_551, 1_043,
                     header=("source", "label", "mark", "sentence"), has_numbered_classes=True),
        GlueTaskInfo("rte", "RTE", (Columns(_PAIR, "label"),), _ENTAILED, _ACCURACY, 2_490, 277),
        GlueTaskInfo("mrpc", "MRPC", (Columns(("#1 String", "#2 String"), "Quality"), Columns(_PAIR, "label")),
                     ("not_equivalent", "equivalent"), _ACCURACY_F1, 3_668, 408, has_numbered_classes=True),
        GlueTaskInfo("stsb", "STS-B", (Columns(_PAIR, "score"), Columns(_PAIR, "label")),
                     (), ("spearmanr", "pearsonr"), 5_749, 1_500),
    )
}  # fmt: skip
"""Tasks by name, in the order of Table 3."""

NUM_MISMATCHED = 9_832
"""Rows of MNLI's official dev_mismatched."""

MAX_SIMILARITY = 5.0
"""STS-B's scale is 0 to 5."""


class GlueRow(NamedTuple):
    """One row: one or two texts, and a class or similarity, NaN if it is not known.

    `row` is its number in the file, counted from 0. `key` is its cell in the column `index`, `id` or `idx`, on one
    line; without such a column it is `row`.
    """

    texts: tuple[str, ...]
    target: float
    row: int
    key: str


@dataclass
class GlueFile:
    """Rows of one file or Hub split: `num_rows` in all, those that can be used, and the others."""

    source: str
    examples: list[GlueRow] = field(default_factory=list)
    num_rows: int = 0
    skipped: list[SkippedRow] = field(default_factory=list)


def load_glue(config: GlueTaskConfig, progress: Progress) -> RowTask:
    """Read the examples of one GLUE task.

    They come from `task.files`; else from `train` and `dev` (MNLI: `dev_matched`, `dev_mismatched`) in `task.data_dir`
    or its folder named like the task, as .tsv, .csv, .jsonl, .json or .parquet, also .gz; else from the Hub.

    Raises:
        DataError: A file is missing, malformed or lacks a column, or a row cannot be used while `task.on_invalid` is
            `error`.
    """
    info = GLUE_TASKS[config.name.removeprefix("glue/")]
    parts = {}
    for part, place in find_parts(config, info.files):
        with progress.bar(f"reading {part}", None) as bar:
            parts[part] = _read(info, str(place), counted(_iter_rows(info, place), bar))
    notes = [_PROTOCOL_NOTE]
    for part, found in parts.items():
        notes += _part_notes(info, part, found, config)
    skipped = tuple(row for found in parts.values() for row in found.skipped)
    if "test" in parts and not parts["test"].examples:
        del parts["test"]
        notes.append(NO_TEST_NOTE)
    if info.name == "mnli" and "mismatched" not in parts:
        notes.append("there is no mismatched development set, so no mismatched accuracy")
    train = parts["train"].examples
    matched, mismatched = parts["valid"], parts.get("mismatched", GlueFile(""))
    counted_on = [example._replace(row=example.row + matched.num_rows) for example in mismatched.examples]
    used = []
    limited: list[tuple[Split, list[GlueRow], str]]
    limited = [("train", train, "rows"), ("valid", matched.examples, "rows"), ("valid", counted_on, "mismatched rows")]
    for split, examples, what in limited:
        chosen, limit_notes = choose_rows(config, split, len(examples), what)
        used.append([examples[index] for index in chosen])
        notes += limit_notes
    splits: dict[Split, LabelledRows] = {
        "train": _labelled(info, used[0]),
        "valid": _labelled(info, used[1] + used[2], num_mismatched=len(used[2])),
    }
    if "test" in parts:
        splits["test"] = _labelled(info, parts["test"].examples)
    notes += _single_label_notes(info, splits)
    task = RowTask(config.name, info.loss, info.output_names, splits)
    task.selection_metric = info.metrics[0]
    task.score_fingerprint = f"mismatched: {len(used[2])}" if used[2] else ""
    task.split_name = "official" if config.files.valid is None else "files"
    task.notes, task.skipped = tuple(notes), skipped
    return task


@dataclass(frozen=True, kw_only=True)
class ScoredGlue(ScoredRows):
    """Rows of a GLUE task.

    Attributes:
        num_mismatched: Number of MNLI's mismatched rows, the last ones.
        keys: `index` of each row.
    """

    info: GlueTaskInfo
    num_mismatched: int
    keys: tuple[str, ...]

    @property
    def is_labelled(self) -> bool:
        """Whether every row has a label."""
        return not np.isnan(self.targets).any()

    @property
    def scored_targets(self) -> FloatArray:
        """(N, 1) targets; of MNLI's `valid` those of the matched rows."""
        return self.targets[: len(self.targets) - self.num_mismatched]

    def _metrics(self, mean_NC: FloatArray, targets_NC: FloatArray) -> dict[str, float]:
        """Return the task's metrics; of MNLI's `valid` those of the matched rows, and `mismatched_...` beside them."""
        targets, predicted = targets_NC[:, 0], mean_NC[:, 0]
        if self.loss == "classes":
            targets, predicted = targets.astype(np.int64), mean_NC.argmax(axis=1)
        num_matched = len(targets) - self.num_mismatched
        parts = {"": slice(num_matched)}
        parts |= {MISMATCHED_PREFIX: slice(num_matched, None)} if self.num_mismatched else {}
        return {
            f"{prefix}{name}": metrics.metric(name, targets[part], predicted[part])
            for prefix, part in parts.items()
            for name in self.info.metrics
        }

    def official_files(self, outputs: SeedOutputs) -> tuple[bytes, ...]:
        """Return `index` and `prediction` of every row, tab-separated, as the benchmark's server takes them: classes by
        number for QQP, SST-2, CoLA and MRPC, else by name.
        """
        mean_NC = np.mean(outputs, axis=0)
        lines = [f"{key}\t{_answer(self.info, row_C)}" for key, row_C in zip(self.keys, mean_NC, strict=True)]
        return (("\n".join(["index\tprediction", *lines]) + "\n").encode(),)


def read_new_glue(task: TrainedTask, path: Path, columns: tuple[str, ...], progress: Progress) -> NewRows:
    """Read a file to predict, in any layout of the task; columns are found by name, and `columns` is ignored.

    The column of labels may be missing. A label may be empty, or -1 as in the Hub's test sets; a text may be empty.

    Raises:
        DataError: The file or a row of it cannot be read; every row needs a prediction.
    """
    del columns
    info = GLUE_TASKS[task.config.name.removeprefix("glue/")]
    with progress.bar(f"reading {path.name}", None) as bar:
        file = _read(info, str(path), counted(_iter_rows(info, path), bar), needs_labels=False)
    if file.skipped:
        raise DataError(str(file.skipped[0]), "every row needs a prediction: correct the row or remove it")
    examples = _labelled(info, file.examples)
    keys, targets = [example.key for example in file.examples], examples.targets[:, 0].tolist()
    names = info.layouts[-1].texts
    cells: dict[str, Sequence[object]] = {
        "index": keys,
        **dict(zip(names, zip(*examples.texts, strict=True), strict=True)),
        "label": [_label(info, target) for target in targets],
    }
    num_unlabelled = int(np.isnan(targets).sum())
    note = f"not scored: {num_unlabelled:,} of {len(keys):,} rows have no label"
    notes = (note,) if 0 < num_unlabelled < len(keys) else ()
    return rows_to_predict(examples, info.loss, info.output_names, cells, notes=notes)


def new_texts(info: GlueTaskInfo, texts: Sequence[tuple[str, ...]]) -> NewRows:
    """Return texts or pairs of them, in memory, as rows to predict."""
    rows = [GlueRow(given, math.nan, row, str(row)) for row, given in enumerate(texts)]
    return rows_to_predict(_labelled(info, rows), info.loss, info.output_names, {})


def _label(info: GlueTaskInfo, target: float) -> str:
    if math.isnan(target):
        return ""
    return info.classes[int(target)] if info.classes else f"{target:g}"


def _labelled(info: GlueTaskInfo, rows: Sequence[GlueRow], *, num_mismatched: int = 0) -> LabelledRows:
    """Return the rows of a split, to be scored with the task's metrics; the last of them may be mismatched ones."""
    keys = tuple(row.key for row in rows)
    return LabelledRows(
        [row.texts for row in rows],
        np.array([row.target for row in rows], dtype=np.float64)[:, None],
        np.array([row.row for row in rows], dtype=np.int64),
        scored=partial(ScoredGlue, info=info, num_mismatched=num_mismatched, keys=keys),
    )


def _answer(info: GlueTaskInfo, outputs_C: FloatArray) -> str:
    if not info.classes:
        return f"{min(max(float(outputs_C[0]), 0.0), MAX_SIMILARITY):.6f}"
    best = int(outputs_C.argmax())
    return str(best) if info.has_numbered_classes else info.classes[best]


def _iter_rows(info: GlueTaskInfo, place: Path | HubSource) -> Iterator[Record]:
    """Yield rows in a layout of the task; quotes in a TSV are part of its cells."""
    if isinstance(place, HubSource):
        return iter_hub_records(place, hint=LOCAL_HINT)
    return iter_records(place, header=info.header, has_literal_tsv=True)


def _read(info: GlueTaskInfo, source: str, records: Iterable[Record], *, needs_labels: bool = True) -> GlueFile:
    part = GlueFile(source)
    columns: Columns | None = None
    for record in records:
        problem = record.problem
        if problem is None:
            columns = columns or _choose_columns(info, source, list(record.values), needs_labels=needs_labels)
            try:
                part.examples.append(_example(info, columns, record.values, part.num_rows, needs_labels=needs_labels))
            except ValueError as error:
                problem = str(error)
        if problem is not None:
            text = "\t".join(str(value) for value in record.values.values())
            part.skipped.append(record.skipped(text, problem))
        part.num_rows += 1
    if not part.num_rows:
        raise DataError(f"{source}: no rows in it", "give a file that has rows")
    return part


def _choose_columns(info: GlueTaskInfo, source: str, names: list[str], *, needs_labels: bool) -> Columns:
    needed = {columns: (*columns.texts, columns.label) for columns in info.layouts}
    accepted = list(needed.items())
    if not needs_labels:
        accepted += [(columns, columns.texts) for columns in info.layouts]
    for columns, required in accepted:
        if set(required) <= set(names):
            return columns
    shown = [required if needs_labels else columns.texts for columns, required in needed.items()]
    wanted = " or ".join(dict.fromkeys(" ".join(f"`{name}`" for name in columns) for columns in shown))
    has = ", ".join(f"`{name}`" for name in names)
    raise DataError(
        f"{source}: {info.name} needs the columns {wanted}; there are {has}",
        f"the first line of a {info.folder} table names its columns",
    )


def _example(info: GlueTaskInfo, columns: Columns, values: dict[str, Any], row: int, *, needs_labels: bool) -> GlueRow:
    """Return one row as an example; a ValueError says why it cannot be used."""
    texts = tuple(_text(name, values.get(name), may_be_empty=not needs_labels) for name in columns.texts)
    key = next((printable(str(values[name])) for name in _INDEX_COLUMNS if name in values), str(row))
    given = values.get(columns.label)
    if not needs_labels and str("" if given is None else given) in _NO_LABEL:
        return GlueRow(texts, math.nan, row, key)
    target = _class_index(info, columns.label, given) if info.classes else _similarity(columns.label, given)
    return GlueRow(texts, target, row, key)


def _text(name: str, value: Any, *, may_be_empty: bool) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"`{name}` is {value!r}, not a string")
    if value is None or not value.strip():
        if may_be_empty:
            return ""
        raise ValueError(f"`{name}` is empty")
    if not is_unicode(value):
        raise ValueError(f"`{name}` contains a lone surrogate")
    return value.strip()


def _class_index(info: GlueTaskInfo, name: str, value: Any) -> float:
    """Return the class of a name or a number."""
    text = str(value)
    if text in info.classes:
        return float(info.classes.index(text))
    if text.removesuffix(".0") in map(str, range(len(info.classes))):  # pandas writes a column with gaps as 1.0
        return float(text)
    accepted = ", ".join(f"{index} or {known}" for index, known in enumerate(info.classes))
    raise ValueError(f"`{name}` is `{text}`, accepted: {accepted}")


def _similarity(name: str, value: Any) -> float:
    try:
        similarity = float(value)
    except (TypeError, ValueError, OverflowError):
        similarity = math.nan
    if not 0 <= similarity <= MAX_SIMILARITY:
        raise ValueError(f"`{name}` is `{value}`, accepted: a number from 0 to {MAX_SIMILARITY:g}")
    return similarity


def _single_label_notes(info: GlueTaskInfo, splits: Mapping[Split, LabelledRows]) -> list[str]:
    notes = []
    for split, examples in splits.items():
        labels = np.unique(examples.targets)
        if len(labels) == 1:
            effect = "there is nothing to learn" if split == "train" else "its scores are meaningless"
            notes.append(f"{split}: every row has the label `{_label(info, labels[0])}`, so {effect}")
    return notes


def _part_notes(info: GlueTaskInfo, part: str, found: GlueFile, config: GlueTaskConfig) -> list[str]:
    notes = []
    if found.skipped:
        first, can_skip = found.skipped[0], bool(found.examples) or part == "test"
        if config.on_invalid == "error" or not can_skip:
            hint = "no row of the file can be used: correct it, or give another"
            raise DataError(str(first), "`--set task.on_invalid=skip` leaves such rows out" if can_skip else hint)
        left_out = format_number_of(len(found.skipped), "row")
        # without its folder: notes are published with a model
        where = f"{Path(first.file).name}{first.where.removeprefix(first.file)}"
        notes.append(f"{part}: left out {left_out} that cannot be used; the first: {where}: {first.reason}")
    official = {"train": info.num_train, "valid": info.num_valid, "mismatched": NUM_MISMATCHED}.get(part)
    if official is not None and found.num_rows != official:
        notes.append(f"{part}: {Path(found.source).name}: {found.num_rows:,} rows; the official file has {official:,}")
    return notes
