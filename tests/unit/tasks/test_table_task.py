"""A table's task encodes, scores and describes what it holds; expected scores are those of the metrics by hand."""

import math
from typing import Any

import numpy as np
import pytest

from exlm_cli.data.smiles import train_smiles_vocabulary
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import DownstreamTask, Loss
from exlm_cli.tasks.table_task import NO_TEST_NOTE, TableTask, name_some, to_probabilities

NAN = math.nan
TEXTS = ["CCO", "CCN", "CCCCCCCC", "CO", "CN", "C"]
INDICES: Any = {"train": np.array([0, 1, 2]), "valid": np.array([3, 4]), "test": np.array([5])}


def make(loss: Loss, targets: Any, names: tuple[str, ...] = ("y",), **options: Any) -> TableTask:
    indices = options.pop("indices", INDICES)
    options.setdefault("split_name", "random")
    return TableTask("csv", "smiles", loss, names, TEXTS, np.array(targets, dtype=float), indices, **options)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_smiles_vocabulary(TEXTS, 20, 1, SilentProgress())


def test_it_is_a_downstream_task(tokenizer: Tokenizer) -> None:
    task: DownstreamTask = make("binary", [[0], [1], [1], [0], [1], [1]], notes=["a note"])
    assert task.split_sizes == {"train": 3, "valid": 2, "test": 1}
    assert task.splits == ("train", "valid", "test")
    assert {name: rows.tolist() for name, rows in task.split_indices.items()} == {
        "train": [0, 1, 2],
        "valid": [3, 4],
        "test": [5],
    }
    encoded = task.encode("valid", tokenizer, 16)
    assert [ids.tolist() for ids in encoded.token_ids] == [
        [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id] for text in ("CO", "CN")
    ]
    assert encoded.targets.tolist() == [[0], [1]]
    assert task.notes == ("a note", "test: not scored, for lack of both classes: `y` is 1 in every row that has it")


def test_rows_that_are_cut_are_counted(tokenizer: Tokenizer) -> None:
    task = make("binary", [[0], [1], [1], [0], [1], [0]])
    encoded = task.encode("train", tokenizer, 6)
    assert [len(ids) for ids in encoded.token_ids] == [5, 5, 6]
    assert encoded.token_ids[2][-1] == tokenizer.sep_id
    assert task.notes[-1] == "train: cut 1 rows to fit"


def test_labels_are_scored_by_their_sigmoid() -> None:
    task = make("binary", [[0, 1], [1, 1], [1, 0], [0, NAN], [1, NAN], [0, 1]], ("a", "b"))
    scores = task.score("valid", [np.array([0.1, 0.0]), np.array([-0.1, 0.0])])
    assert scores["roc_auc"] == 0  # the positive row has the smaller logit; `b` does not count
    assert scores["accuracy"] == 0
    assert task.selection_metric == "roc_auc"
    assert task.is_greater_better
    assert task.notes[0] == "16.7 % of the labels are missing; they are left out of loss and scores"
    assert "valid: not scored, for lack of both classes: `b` is missing in every row" in task.notes


def test_classes_are_scored_by_their_softmax() -> None:
    task = make("classes", [[0], [1], [2], [0], [2], [1]], ("a", "b", "c"))
    outputs = [np.array([2.0, 1.0, 0.0]), np.array([2.0, 1.0, 0.0])]
    assert task.score("valid", outputs)["accuracy"] == 1 / 2
    assert task.selection_metric == "accuracy"
    assert task.targets("valid").tolist() == [[0], [2]]
    assert task.notes == ("test: not scored, for lack of both classes: `class` is b in every row",)


def test_two_classes_are_selected_by_the_area() -> None:
    assert make("classes", [[0], [1], [1], [0], [1], [1]], ("a", "b")).selection_metric == "roc_auc"


def test_values_are_scored_as_they_are() -> None:
    task = make("regression", [[0.0], [1.0], [2.0], [10.0], [20.0], [5.0]])
    assert task.score("valid", [np.array([11.0]), np.array([19.0])])["rmse"] == 1
    assert (task.selection_metric, task.is_greater_better, task.notes) == ("rmse", False, ())


@pytest.mark.parametrize("names", [("y",), ("a", "b")])
def test_accuracy_chooses_where_validation_has_one_class(names: tuple[str, ...]) -> None:
    loss: Loss = "binary" if len(names) == 1 else "classes"
    task = make(loss, [[0], [1], [1], [1], [1], [0]], names)
    assert task.selection_metric == "accuracy"
    assert "valid has no label with both classes: accuracy, not ROC-AUC, chooses the best epoch" in task.notes


def test_balanced_weights_are_those_of_the_training_rows() -> None:
    indices: Any = {"train": np.arange(4), "valid": np.array([4, 5])}
    targets = [[1, 0], [0, 0], [0, 0], [0, NAN], [1, 1], [0, 1]]
    task = make("binary", targets, ("a", "b"), indices=indices, is_balanced=True)
    assert task.class_weights is not None
    assert task.class_weights.tolist() == [3.0, 1.0]  # three negatives for a positive; `b` has no positive to weigh
    classes = make("classes", [[0], [0], [0], [1], [1], [2]], ("a", "b", "c"), indices=indices, is_balanced=True)
    assert classes.class_weights is not None
    # scikit-learn's n / (number of classes present * count): 4 / (2 * 3), 4 / (2 * 1); `c` does not occur
    assert classes.class_weights.tolist() == [4 / 6, 2.0, 1.0]
    assert make("regression", [[0.0], [1], [2], [3], [4], [5]], is_balanced=True).class_weights is None
    assert make("binary", [[0], [1], [1], [0], [1], [1]]).class_weights is None


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_split_without_rows_is_refused(split: str) -> None:
    with pytest.raises(DataError, match=f"^csv: the split leaves no rows in `{split}`$"):
        make("binary", [[0]] * 6, indices={**INDICES, split: np.array([], dtype=int)})


def test_a_test_split_without_rows_is_left_out_and_told() -> None:
    indices = {**INDICES, "test": np.array([], dtype=int)}
    task = make("binary", [[0], [1], [1], [0], [1], [0]], indices=indices)
    assert task.splits == ("train", "valid")
    assert (task.split_sizes, set(task.split_indices)) == ({"train": 3, "valid": 2}, {"train", "valid"})
    assert task.notes == (NO_TEST_NOTE,)


def test_probabilities_by_hand() -> None:
    logits = np.array([[0.0, math.log(3)]])
    assert np.allclose(to_probabilities("binary", logits), [[1 / 2, 3 / 4]], rtol=1e-12)
    assert np.allclose(to_probabilities("classes", logits), [[1 / 4, 3 / 4]], rtol=1e-12)
    assert to_probabilities("regression", logits) is logits


def test_names_are_cut_short() -> None:
    assert name_some("abc", most=3) == "a, b, c"
    assert name_some(range(9)) == "0, 1, 2, 3, 4 and 4 more"
