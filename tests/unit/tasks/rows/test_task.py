"""Tasks of rows: encoding, scores and predictions of a table; expected values are worked out by hand."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from scipy.special import expit
from sklearn.metrics import roc_auc_score
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from exlm_cli.config.tasks import CsvTaskConfig
from exlm_cli.data.smiles import train_smiles_vocabulary
from exlm_cli.data.tokenizer import Tokenizer, train_bpe
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import Loss, NewRows, TrainedTask
from exlm_cli.tasks.metrics import to_probabilities
from exlm_cli.tasks.rows.assays import Measured
from exlm_cli.tasks.rows.labels import Labels
from exlm_cli.tasks.rows.splits import RowSplit
from exlm_cli.tasks.rows.table import InputRows, Table
from exlm_cli.tasks.rows.task import LabelledRows, RowTask, encode_texts, longest_first
from exlm_cli.tasks.user_table import read_new_table, table_task
from tests.tiny import word_level
from tests.unit.finetune.finetuned_runs import read_rows, write_rows

NAN = math.nan
TEXTS = ["CCO", "CCN", "CCCCCCCC", "CO", "CN", "C"]
INDICES: Any = {"train": np.array([0, 1, 2]), "valid": np.array([3, 4]), "test": np.array([5])}


def make(loss: Loss, targets: Any, names: tuple[str, ...] = ("y",), **options: Any) -> RowTask:
    indices = options.pop("indices", INDICES)
    labels = Labels(loss, names, np.array(targets, dtype=float), ("a note",))
    usable = InputRows(Table(Path("a.csv"), {}, tuple(range(2, 8))), tuple(TEXTS), ("",) * len(TEXTS))
    return table_task(
        CsvTaskConfig(name="csv", label_columns=("y",), **options),
        usable,
        Measured(labels),
        RowSplit("random", indices),
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_smiles_vocabulary(TEXTS, 20, 1, SilentProgress())


def test_the_labels_of_a_table_have_one_hash_however_it_is_split():
    targets = np.arange(6.0)[:, None]
    others: Any = {"train": np.array([2, 4, 5]), "valid": np.array([0]), "test": np.array([1, 3])}
    own, resplit = (make("regression", targets, indices=indices).labels_sha256 for indices in (INDICES, others))
    fewer = make("regression", targets, indices={**others, "test": np.array([1])}).labels_sha256
    changed = make("regression", targets[::-1]).labels_sha256
    assert own == resplit
    assert len({own, fewer, changed}) == 3


@pytest.mark.parametrize("budget", [3, 8])
def test_a_pair_is_cut_as_tokenizers_cut_it(budget):
    """An exported model is read by that library."""
    theirs = tokenizers.Tokenizer(WordLevel({"[CLS]": 0, "[SEP]": 1, "a": 2, "b": 3}, unk_token="[SEP]"))
    theirs.pre_tokenizer = WhitespaceSplit()
    special = [("[CLS]", 0), ("[SEP]", 1)]
    theirs.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=special
    )
    theirs.enable_truncation(budget + 3, strategy="longest_first")
    for first, second in itertools.product(range(budget + 3), repeat=2):
        ids = theirs.encode("a " * first, "b " * second).ids
        assert longest_first([first, second], budget) == [ids.count(2), ids.count(3)]


def test_pairs_that_are_too_long_are_cut_and_counted():
    pair = ("The ferry leaves at dawn.", "A boat departs early.")
    tokenizer = train_bpe(pair, 300, 2, SilentProgress())
    first, second = (tokenizer.encode(text) for text in pair)
    encoded = encode_texts([pair, ("The", "A")], tokenizer, 9)
    assert encoded.token_ids[0].tolist() == [1, *first[:3], 2, *second[:3], 2]
    assert encoded.notes == ("cut 1 of 2 rows to 9 tokens (`sequence_length`)",)
    assert encode_texts([pair], tokenizer, 100).notes == ()
    assert not len(encode_texts([], tokenizer, 9))


def test_rows_with_tokens_that_the_vocabulary_lacks_are_counted_and_the_first_three_are_named():
    """The vocabulary is C, N and O; rows of a table are named by their lines, others by their numbers."""
    only_c, tokenizer = word_level(["C"]), word_level(["C", "N", "O"])
    table = make("binary", [[0], [1], [1], [0], [1], [1]])
    (note,) = table.encode("train", only_c, 16).notes
    assert note.endswith(": 2 of 3; the first: `O` (line 2); `N` (line 3)")
    assert table.encode("train", tokenizer, 16).notes == ()
    pairs = [("CO", "CN"), ("S[Se]S", "F"), ("C", "S"), ("F", "F"), ("C", "P")]
    task = RowTask(
        "pairs", "binary", ("y",), {"valid": LabelledRows(pairs, np.zeros((5, 1)), np.array([0, 3, 4, 8, 9]))}
    )
    (note,) = task.encode("valid", tokenizer, 16).notes
    assert note.endswith(": 4 of 5; the first: `S`, `[Se]`, `F` (row 4); `S` (row 5); `F` (row 9)")


@pytest.mark.parametrize(
    ("loss", "targets", "names", "outputs", "scores", "metric", "noted"),
    [
        # the positive row has the smaller logit; `b` does not count
        ("binary", [[0, 1], [1, 1], [1, 0], [0, NAN], [1, NAN], [0, 1]], ("a", "b"), [[0.1, 0.0], [-0.1, 0.0]],
         {"roc_auc": 0, "accuracy": 0}, "roc_auc", ["16.7 %", "valid:", "test:"]),
        # validation has one class, for which there is no ROC-AUC
        ("binary", [[0], [1], [1], [1], [1], [0]], ("y",), [[0.1], [-0.1]], {"accuracy": 1 / 2}, "accuracy",
         ["valid:", "test:", "valid has"]),
        ("classes", [[0], [1], [1], [1], [1], [0]], ("a", "b"), [[0.0, 1.0]] * 2, {"accuracy": 1}, "accuracy",
         ["valid:", "test:", "valid has"]),
        ("classes", [[0], [1], [2], [0], [2], [1]], ("a", "b", "c"), [[2.0, 1.0, 0.0]] * 2,
         {"accuracy": 1 / 2}, "accuracy", ["test:"]),
        ("regression", [[0.0], [1], [2], [10], [20], [5]], ("y",), [[11.0], [19.0]], {"rmse": 1}, "rmse", []),
    ],
)  # fmt: skip
def test_scores_selection_and_notes_follow_from_the_loss(
    loss, targets, names, outputs, scores, metric, noted, tokenizer
):
    task = make(loss, targets, names)
    found = task.encode("valid", tokenizer, 16).score(to_probabilities(loss, np.array(outputs))[None])
    assert {name: found[name] for name in scores} == scores
    assert (task.selection_metric, task.is_greater_better) == (metric, loss != "regression")
    assert len(task.notes) == 1 + len(noted)
    assert all(note.startswith(begin) for note, begin in zip(task.notes[1:], noted, strict=True)), task.notes


@pytest.mark.parametrize(
    ("loss", "targets", "names", "weights"),
    [
        # a negative for three positives; `b` has no positive to weigh
        ("binary", [[1, 0], [1, 0], [1, 0], [0, NAN]], ("a", "b"), [1 / 3, 1.0]),
        # a weight of 0 negatives for 4 positives would leave no loss
        ("binary", [[1, 0], [1, 1], [1, 0], [1, 1]], ("a", "b"), [1.0, 1.0]),
        # scikit-learn's n / (number of classes present * count): 4 / (2 * 3), 4 / (2 * 1); `c` does not occur
        ("classes", [[0], [0], [0], [1]], ("a", "b", "c"), [4 / 6, 2.0, 1.0]),
    ],
)
def test_balanced_weights_are_those_of_the_training_rows(loss, targets, names, weights):
    indices: Any = {"train": np.arange(4), "valid": np.array([4, 5])}
    given = [*targets, [1] * len(targets[0]), [0] * len(targets[0])]
    task = make(loss, given, names, indices=indices, class_weights="balanced")
    assert task.class_weights is not None
    assert task.class_weights.tolist() == weights


def predict(
    folder: Path,
    loss: Loss,
    names: tuple[str, ...],
    columns: list[str],
    rows: list[list[str]],
    outputs: Any,
    **task: Any,
) -> tuple[NewRows, dict[str, float], list[dict[str, str]]]:
    """Return what is read of a table, the scores of the outputs, and the table of predictions."""
    config = CsvTaskConfig(name="csv", **{"smiles_column": "mol", **task})
    path = write_rows(folder / "new.csv", columns, rows)
    new = read_new_table(TrainedTask(config, config.input_kind, loss, names), path, (), SilentProgress())
    encoded = new.encode(train_smiles_vocabulary(TEXTS, 20, 1, SilentProgress()), 16)
    by_seed = np.stack([to_probabilities(loss, np.array(seed, dtype=float)) for seed in outputs])
    (folder / "out.csv").write_bytes(new.as_csv(encoded.prediction_columns(by_seed))[0])
    scores = encoded.score(by_seed) if encoded.is_labelled else {}
    return new, scores, read_rows(folder / "out.csv")


def test_every_row_comes_back_in_its_place_and_bad_ones_with_a_reason(tmp_path):
    rows = [["x1", "CCO", "1"], ["x2", "C1CC", "0"], ["x3", "", ""], ["x4", "CCN", "0"], ["x5", "CN", ""]]
    outputs = np.array([[[0.0, 1.0], [-1.0, 2.0], [0.5, 0.5]], [[1.0, 0.0], [0.0, 2.0], [0.5, 1.5]]])
    new, scores, found = predict(tmp_path, "binary", ("active", "toxic"), ["id", "mol", "active"], rows, outputs)
    assert (new.num_rows, len(new.keys)) == (5, 3)
    assert new.notes == ("scored without the labels that the table lacks: toxic",)
    assert [[row[name] for name in ("line", "id", "mol", "active")] for row in found] == [
        [str(i + 2), *row] for i, row in enumerate(rows)
    ]
    assert [bool(row["problem"]) for row in found] == [row["active_probability"] == "" for row in found]
    mean, std = expit(outputs).mean(0), expit(outputs).std(0, ddof=1)
    for row, means, stds in zip((found[0], *found[3:]), mean, std, strict=True):
        assert float(row["toxic_probability"]) == pytest.approx(means[1], rel=1e-5)
        assert float(row["active_seed_spread"]) == pytest.approx(stds[0], rel=1e-5, abs=1e-9)
    assert scores["roc_auc"] == pytest.approx(roc_auc_score([1, 0], mean[:2, 0]))
    assert scores["accuracy"] == 1  # means of 0.62 and 0.38 for the labels 1 and 0; their sums are both above 0.5


def test_scores_of_rows_without_labels_are_not_defined_and_a_table_of_such_rows_has_none(tmp_path, tokenizer):
    columns, rows = ["mol", "active"], [["CCO", ""], ["CCN", ""], ["CN", "1"]]
    new, scores, _ = predict(tmp_path, "binary", ("active", "toxic"), columns, rows[:2], [[[0.0, 0.0]] * 2])
    assert (scores, new.notes) == ({}, ())
    new, scores, _ = predict(tmp_path, "binary", ("active",), columns, rows, [[[1.0]] * 3])
    assert scores["accuracy"] == 1
    encoded = new.encode(tokenizer, 16)
    assert math.isnan(encoded.score(np.full((1, 3, 1), 0.75), np.array([True, True, False]))["accuracy"])


def test_columns_of_a_file_of_predictions_are_replaced(tmp_path):
    columns = ["problem", "mol", "active_probability", "mine", "line"]
    rows = [["p", "CCO", "9", "kept", "7"]]
    new, scores, (row,) = predict(tmp_path, "binary", ("active",), columns, rows, [[[0.0]]])
    assert (row["mine"], row["problem"], row["active_probability"], row["line"]) == ("kept", "", "0.5", "2")
    assert new.notes == ("lines of the file replace the table's own column `line`",)
    _, (note,) = new.as_csv({"active_probability": ["0.5"]})
    assert note == "predictions replace the table's own columns `problem`, `active_probability`"
    assert scores == {}


def test_the_likeliest_class_is_named(tmp_path):
    outputs, names = [[[0.0, 1.0, 0.0], [2.0, 0.0, 0.0]]], ("blue", "green", "red")
    rows = [["a", "red"], ["b", "blue"]]
    columns = ["text", "colour"]
    text = {"smiles_column": None, "text_column": "text", "label_columns": ("colour",)}
    _, scores, found = predict(tmp_path, "classes", names, columns, rows, outputs, **text)
    assert [row["predicted_class"] for row in found] == ["green", "blue"]
    assert sum(float(found[0][f"{name}_probability"]) for name in names) == pytest.approx(1, 1e-5)
    assert scores["accuracy"] == 0.5
