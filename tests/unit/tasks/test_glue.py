"""GLUE tasks read from small files of the official layouts, and what of them is encoded, scored and answered."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from exlm_cli.config.tasks import GlueTaskConfig
from exlm_cli.data.tokenizer import Tokenizer, train_bpe
from exlm_cli.errors import DataError
from exlm_cli.finetune.cells.trainer import encode_task
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import NO_TEST_NOTE, NewRows, TrainedTask
from exlm_cli.tasks.glue import GLUE_TASKS, load_glue, read_new_glue
from exlm_cli.tasks.metrics import metric
from exlm_cli.tasks.rows.task import RowTask
from tests.unit.tasks.glue_files import LINES, ROWS, content, write_glue


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([text for rows in ROWS.values() for row in rows for text in row[:2]] * 3, 400, 2, SilentProgress())


def load(task: str, root: Path | None, **values: Any) -> RowTask:
    data_dir = None if root is None else str(root)
    return load_glue(GlueTaskConfig(name=f"glue/{task}", data_dir=data_dir, **values), SilentProgress())


def content_of(task: RowTask) -> Any:
    return {split: (e.texts, e.targets.tolist(), e.rows.tolist()) for split, e in task.examples.items()}


REPORTED = {
    "cola": ("matthews_corrcoef", "accuracy"), "stsb": ("spearmanr", "pearsonr"),
    "mrpc": ("accuracy", "f1", "matthews_corrcoef"), "qqp": ("accuracy", "f1", "matthews_corrcoef"),
}  # fmt: skip
OF_CLASSES = ("accuracy", "matthews_corrcoef")


@pytest.mark.parametrize("name", GLUE_TASKS)
def test_official_files_are_read_encoded_and_scored(name, tmp_path, tokenizer):
    """What each metric is, is in `test_metrics.py`."""
    write_glue(tmp_path, name, copies=4)
    task = load(name, tmp_path)
    rows = ROWS[name] * 4
    assert (task.name, task.splits) == (f"glue/{name}", ("train", "valid"))
    assert task.split_sizes == {"train": len(rows), "valid": len(rows) * (2 if name == "mnli" else 1)}
    encoded = task.encode("train", tokenizer, 128)
    targets = np.array([target for *_, target in rows])
    assert encoded.targets[:, 0].tolist() == targets.tolist()
    for ids, (first, second, _, _) in zip(encoded.token_ids, rows, strict=True):
        tail = [*tokenizer.encode(second), 2] if second else []
        assert ids.tolist() == [1, *tokenizer.encode(first.strip()), 2, *tail]

    rng, num_classes = np.random.default_rng(3), max(1, len(task.output_names))
    predicted = targets + (rng.normal(size=len(rows)) if name == "stsb" else rng.random(len(rows)) < 0.3)
    predicted = predicted if name == "stsb" else predicted % num_classes
    expected = {of: metric(of, targets, predicted) for of in REPORTED.get(name, OF_CLASSES)}
    if name == "mnli":
        mismatched = rng.integers(0, 3, size=len(rows)).astype(float)
        expected |= {f"mismatched_{of}": metric(of, targets, mismatched) for of in OF_CLASSES}
        predicted = np.concatenate([predicted, mismatched])
    found = task.encode("valid", tokenizer, 20).score([outputs_for(name, predicted.tolist())])
    assert found == pytest.approx(expected)
    assert [*found] == [*expected]
    assert task.selection_metric == next(iter(expected))


@pytest.mark.parametrize("name", ["mnli", "mrpc", "stsb"])
def test_the_hubs_columns_give_the_same_examples(name, tmp_path, monkeypatch):
    write_glue(tmp_path / "official", name)
    official = load(name, tmp_path / "official")
    columns = GLUE_TASKS[name].layouts[-1]
    records = []
    for first, second, _, target in ROWS[name]:
        texts = dict(zip(columns.texts, (first, second), strict=False))
        records.append(texts | {columns.label: target if name == "stsb" else int(target), "idx": len(records)})
    asked = []

    def load_dataset(source: str, config: str, *, split: str, **_: Any) -> datasets.IterableDataset:
        asked.append((source, config, split))
        return datasets.Dataset.from_list(records).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert content_of(load(name, None)) == content_of(official)
    valid = ["validation_matched", "validation_mismatched"] if name == "mnli" else ["validation"]
    assert asked == [("nyu-mll/glue", name, split) for split in ["train", *valid]]


def outputs_for(name: str, predicted: list[float]) -> list[np.ndarray]:
    if name == "stsb":
        return [np.array([value]) for value in predicted]
    num_classes = len(GLUE_TASKS[name].classes)
    return [np.eye(num_classes)[int(value)] * 2 - 0.5 for value in predicted]


def test_mismatched_rows_follow_the_matched_ones(tmp_path, tokenizer):
    """A run is known by which rows they are: the same rows in the same order, one of them in the other file, differ."""
    folder = write_glue(tmp_path, "mnli")
    task = load("mnli", tmp_path)
    first = encode_task(task, tokenizer, 20, 1).fingerprint
    assert encode_task(load("mnli", tmp_path), tokenizer, 20, 1).fingerprint == first
    header, moved, *rest = (folder / "dev_mismatched.tsv").read_text().splitlines(keepends=True)
    with (folder / "dev_matched.tsv").open("a") as file:
        file.write(moved)
    (folder / "dev_mismatched.tsv").write_text("".join([header, *rest]))
    moved_task = load("mnli", tmp_path)
    assert moved_task.split_indices["valid"].tolist() == [0, 1, 2, 3, 4, 5]
    assert encode_task(moved_task, tokenizer, 20, 1).fingerprint != first


def test_mnli_without_mismatched_rows_and_named_files_with_a_test_split(tmp_path, tokenizer):
    folder = write_glue(tmp_path, "mnli")
    (folder / "dev_mismatched.tsv").unlink()
    alone = load("mnli", tmp_path)
    assert any("392,702" in note for note in alone.notes)
    named = load("mnli", None, files={part: str(folder / "dev_matched.tsv") for part in ("train", "valid", "test")})
    assert (named.splits, named.split_name) == (("train", "valid", "test"), "files")
    for task, split in ((alone, "valid"), (named, "test")):
        assert tuple(task.encode(split, tokenizer, 20).score([outputs_for("mnli", [0, 1, 2])])) == OF_CLASSES


def test_a_limit_of_validation_rows_holds_for_each_set_of_mnli(tmp_path, tokenizer):
    write_glue(tmp_path, "mnli", copies=4)
    task = load("mnli", tmp_path, max_valid_rows=5)
    assert task.split_sizes == {"train": 12, "valid": 10}
    assert len([note for note in task.notes if "max_valid_rows" in note]) == 2
    assert (task.split_indices["valid"] < 12).tolist() == [True] * 5 + [False] * 5
    matched, mismatched = np.split(task.examples["valid"].targets[:, 0], 2)
    outputs = outputs_for("mnli", [*matched, *(mismatched + 1) % 3])
    scores = task.encode("valid", tokenizer, 20).score([outputs])
    assert (scores["accuracy"], scores["mismatched_accuracy"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("task", "changes", "problem"),
    [
        ("rte", {"label": "maybe"}, "`label` is `maybe`"),
        ("qqp", {"second": " "}, "`question2` is empty"),
        ("stsb", {"label": "5.5"}, "`score` is `5.5`"),
        ("stsb", {"label": "high"}, "`score` is `high`"),
        ("qqp", {"first": "a\tb"}, "the row has 7 cells"),
    ],
)
def test_a_row_that_cannot_be_used_stops_or_is_left_out_and_told(task, changes, problem, tmp_path):
    path = write_glue(tmp_path, task) / "train.tsv"
    (first, second, label, _), row = ROWS[task][0], len(ROWS[task]) + 2
    given = {"index": 9, "first": first, "second": second, "label": label} | changes
    path.write_text(content(task) + LINES[task].format(**given) + "\n", encoding="utf-8")
    loaded = load(task, tmp_path)
    assert loaded.split_sizes["train"] == len(ROWS[task])
    assert [note for note in loaded.notes if f"train.tsv:{row}: {problem}" in note]
    assert [(skipped.file, skipped.row) for skipped in loaded.skipped] == [(str(path), str(row))]
    with pytest.raises(DataError, match=re.escape(f"{path}:{row}: {problem}")) as caught:
        load(task, tmp_path, on_invalid="error")
    assert "`--set task.on_invalid=skip`" in caught.value.hint


def test_what_no_row_of_a_file_can_be_used_for_is_told(tmp_path):
    """Without a label in any row a test file is left out; a validation file, an empty one and other columns stop."""
    folder = write_glue(tmp_path, "sst2")
    for name, rows in {"hidden": "fine\t-1\n", "same": "a\t1\nb\t1\n", "empty": ""}.items():
        (tmp_path / f"{name}.tsv").write_text(f"sentence\tlabel\n{rows}", encoding="utf-8")
    (tmp_path / "odd.tsv").write_text("text\tlabel\na\t1\n", encoding="utf-8")
    files = {"train": str(folder / "train.tsv"), "valid": str(folder / "dev.tsv")}
    task = load("sst2", None, files={**files, "test": str(tmp_path / "hidden.tsv")})
    assert task.splits == ("train", "valid")
    assert NO_TEST_NOTE in task.notes
    for name, said in (("hidden", r"hidden\.tsv:2: `label` is `-1`"), ("empty", "no rows"), ("odd", "`sentence`")):
        with pytest.raises(DataError, match=said):
            load("sst2", None, files={**files, "valid": str(tmp_path / f"{name}.tsv")})
    for part in files:
        notes = load("sst2", None, files={**files, part: str(tmp_path / "same.tsv")}).notes
        assert [note for note in notes if note.startswith(f"{part}: every row has the label")]


def test_values_of_json_are_texts_and_classes_which_may_be_whole_numbers_with_a_point(tmp_path):
    """pandas writes `1.0` for 1 in a column that has a gap."""
    labels = [1.0, 0.0, "1.0", "0", 1, 0.5, True, "1.00", "positive.0"]
    rows = [{"sentence": "words", "label": label} for label in labels]
    rows += [{"sentence": text, "label": 1} for text in (5, "half \ud83d")]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = load("sst2", None, files={"train": str(path), "valid": str(path)})
    assert task.examples["train"].targets[:, 0].tolist() == [1, 0, 1, 0, 1]
    assert [row.reason.split(", ")[0] for row in task.skipped[:6]] == [
        *(f"`label` is `{text}`" for text in ("0.5", "True", "1.00", "positive.0")),
        "`sentence` is 5",
        "`sentence` contains a lone surrogate",
    ]
    new = new_rows("sst2", tmp_path / "new.jsonl", "\n".join(path.read_text(encoding="utf-8").splitlines()[:5]))
    assert new.columns["label"] == ["positive", "negative", "positive", "negative", "positive"]


def new_rows(name: str, path: Path, text: str) -> NewRows:
    path.write_text(text, encoding="utf-8")
    task = TrainedTask(GlueTaskConfig(name=f"glue/{name}"), "text", "classes", ())
    return read_new_glue(task, path, (), SilentProgress())


def predict(
    new: NewRows, name: str, predicted: list[float], tokenizer: Tokenizer
) -> tuple[dict[str, float], list[list[str]]]:
    """Return the scores and the server's table of two seeds that agree."""
    encoded, outputs = new.encode(tokenizer, 20), outputs_for(name, predicted)
    (content,) = encoded.official_files([outputs, outputs])
    scores = encoded.score([outputs, outputs]) if encoded.is_labelled else {}
    return scores, [line.split("\t") for line in content.decode().splitlines()]


@pytest.mark.parametrize(
    ("name", "predicted", "written"),
    [
        ("rte", [0, 0], ["entailment", "entailment"]),
        ("mrpc", [1, 1], ["1", "1"]),
        ("stsb", [1.25, 7.0, 7.0], ["1.250000", "5.000000", "5.000000"]),
    ],
)
def test_a_development_file_is_predicted_and_scored(name, predicted, written, tmp_path, tokenizer):
    new = new_rows(name, tmp_path / "dev.tsv", content(name))
    scores, (header, *rows) = predict(new, name, predicted, tokenizer)
    assert header == ["index", "prediction"]
    assert rows == [[str(i), answer] for i, answer in enumerate(written)]
    assert scores.get("accuracy") == (None if name == "stsb" else 1 / 2)


TEST_FILES = {
    "cola": ("index\tsentence\n0\tBirds sing.\n7\t\n", ["0", "7"]),
    "qqp": ("id\tquestion1\tquestion2\n5\ta\tb\n", ["5"]),
    "mrpc": ("index\t#1 ID\t#2 ID\t#1 String\t#2 String\n3\t1\t2\ta\tb\n", ["3"]),
    "sst2": ("sentence\nfine\n", ["0"]),
    "rte": ("index\tsentence1\tsentence2\tlabel\n41\ta b\tc\t-1\n7\tamber\t\t-1\n", ["41", "7"]),
}
"""As the official test files are laid out; CoLA's has a header, unlike its other files, and the Hub's labels are -1."""


def test_files_without_labels_are_predicted_and_not_scored(tmp_path, tokenizer):
    for name, (text, indices) in TEST_FILES.items():
        new = new_rows(name, tmp_path / "test.tsv", text)
        scores, (_, *rows) = predict(new, name, [0.0] * len(indices), tokenizer)
        assert [row[0] for row in rows] == indices
        assert (scores, new.notes) == ({}, ())
    new = new_rows("rte", tmp_path / "test.tsv", TEST_FILES["rte"][0].replace("c\t-1", "c\tentailment"))
    scores, _ = predict(new, "rte", [0.0, 1.0], tokenizer)
    assert (scores, new.notes) == ({}, ("not scored: 1 of 2 rows have no label",))


def test_a_file_that_does_not_fit_is_refused_whole(tmp_path):
    for text, message in (
        ("index\tsentence1\n0\ta\n", "rte needs the columns `sentence1` `sentence2`"),
        ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tactive\n", "dev.tsv:2: `label` is `active`"),
    ):
        with pytest.raises(DataError, match=message):
            new_rows("rte", tmp_path / "dev.tsv", text)
