"""A table of molecules or of text becomes a task by its columns, files or split column; what contradicts is refused."""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exlm_cli.config.tasks import CsvTaskConfig, TaskFiles
from exlm_cli.errors import ConfigError, DataError
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import NO_TEST_NOTE, TrainedTask
from exlm_cli.tasks.registry import load_task
from exlm_cli.tasks.rows.task import RowTask
from exlm_cli.tasks.user_table import load_user_table, read_new_table
from tests.recorder import Recorder
from tests.tiny import word_level
from tests.unit.tasks.rows.test_splits import as_lists

CHAINS = [f"{'C' * n}O" for n in range(1, 31)]


def write(path: Path, header: str, rows: list[str]) -> str:
    path.write_text("\n".join([header, *rows, ""]))
    return path.name


def load(folder: Path, **options: Any) -> RowTask:
    files = options.pop("files", {"train": "a.csv"})
    options.setdefault("label_columns", ("y",))
    return load_user_table(CsvTaskConfig(name="csv", data_dir=str(folder), files=files, **options), SilentProgress())


def texts(task: RowTask, split: Any) -> list[str]:
    return [text for (text,) in task.examples[split].texts]


def test_molecules_with_classes(tmp_path):
    """Each split has its share of each class; a class that no usable row has is none of the task."""
    rows = [f"{i},{s},{'active' if i % 3 else 'inactive'}" for i, s in enumerate(CHAINS)]
    write(tmp_path / "a.csv", "id,smiles,y", [*rows, "30,no molecule,broken"])
    task = load(tmp_path, split="random")
    assert (task.input_kind, task.loss, task.output_names) == ("smiles", "classes", ("inactive", "active"))
    assert task.split_sizes == {"train": 24, "valid": 3, "test": 3}
    assert Counter(task.examples["valid"].targets[:, 0].tolist()) == {1: 2, 0: 1}
    for split in task.splits:
        assert texts(task, split) == [CHAINS[row] for row in task.split_indices[split]]
        np.testing.assert_array_equal(task.examples[split].targets[:, 0], task.split_indices[split] % 3 > 0)


@pytest.mark.parametrize(
    ("split", "large", "said"),
    [("scaffold", "C", "no ring"), ("scaffold-balanced", "c1ccccc1C", "the scaffold c1ccccc1")],
)
def test_a_scaffold_of_most_rows_is_trained_on_and_told(tmp_path, split, large, said):
    """17 of 20 molecules are of one scaffold; three others of one each are left to validate and test on."""
    molecules = [*(large + "C" * i for i in range(17)), "C1CC1", "C1CCC1", "C1CCCC1"]
    write(tmp_path / "a.csv", "smiles,y", [f"{smiles},{i / 7}" for i, smiles in enumerate(molecules)])
    task = load(tmp_path, split=split)
    assert as_lists(task.split_indices)["train"] == list(range(17))
    assert task.split_sizes == {"train": 17, "valid": 1, "test": 2}
    assert any(f"17 of 20 molecules have {said}" in note for note in task.notes)
    assert not any("20 molecules" in note for note in load(tmp_path, split="random").notes)


def test_smiles_as_written_are_read_as_they_are_with_a_note(tmp_path):
    written = [f"O{'C' * n}" for n in range(1, 31)]
    write(tmp_path / "a.csv", "smiles,y", [f"{smiles},{i % 2}" for i, smiles in enumerate(written)])
    for is_canonical, read in ((True, CHAINS), (False, written)):
        task = load(tmp_path, split="random", canonical_smiles=is_canonical)
        assert set(texts(task, "train")) <= set(read)
        assert any("spelling alone may give labels away" in note for note in task.notes) == (not is_canonical)


def test_a_split_column_is_followed(tmp_path):
    parts = ["train", "Train", "TRAINING", "val", "dev", "validation", "test", ""]
    write(tmp_path / "a.csv", "smiles,y,part", [f"{CHAINS[i]},{i % 2},{part}" for i, part in enumerate(parts)])
    task = load(tmp_path, split_column="part")
    assert as_lists(task.split_indices) == {"train": [0, 1, 2], "valid": [3, 4, 5], "test": [6]}
    assert task.split_name == "column"
    assert any(note.startswith("1 row in no split") for note in task.notes)


FORMS = (
    ("[C@H](N)F", "[C@@H](N)F"),  # mirror images
    ("/C=C/Cl", "/C=C\\Cl"),
    ("CO", "CO[2H]", "[13CH2]O"),  # isotopes
    ("C(N)F", "[C@H](N)F", "[C@@H](N)F"),  # stereo beside flat
    ("N", "N.Cl", "[NH3+].[Br-]"),  # salts
    ("c1ccnc(O)c1", "c1cc[nH]c(=O)c1"),  # tautomers
    ("C(=O)CC", "C(O)=CC"),  # keto and enol
    ("CCN", "CCN"),  # one molecule
)


@pytest.mark.parametrize("split", ["random", "scaffold", "scaffold-deepchem", "scaffold-balanced"])
def test_forms_of_one_compound_are_in_one_split(tmp_path, split):
    """Each compound has a chain and, for scaffolds, a ring of its own; its rows are apart, so a split of rows would
    part them.
    """
    bodies = [f"C1{'C' * n}N1{'C' * n}" for n in range(1, 25)]
    forms = [(i, f"N{body}{end}", n) for i, body in enumerate(bodies) for n, end in enumerate(FORMS[i % 8])]
    compounds = [(i, smiles) for i, smiles, _ in sorted(forms, key=lambda form: form[2])]
    write(tmp_path / "a.csv", "smiles,y", [f"{smiles},{i / 7}" for i, smiles in compounds])
    task = load(tmp_path, split=split)
    homes = [{compounds[row][0] for row in rows} for rows in task.split_indices.values()]
    assert len(homes) == 3
    assert sum(map(len, homes)) == 24 == len(set().union(*homes))
    assert any("21 compounds in several forms" in note for note in task.notes)
    assert not any("different forms" in note for note in task.notes)


def test_few_compounds_of_several_rows_each_leave_rows_to_validate_on(tmp_path):
    write(tmp_path / "a.csv", "smiles,y", [f"{chain},{i / 7}" for i, chain in enumerate(CHAINS[:5]) for _ in range(3)])
    assert load(tmp_path, split="random").split_sizes == {"train": 12, "valid": 3}


PARTS = ["train"] * 20 + ["valid"] * 5 + ["test"] * 5


@pytest.mark.parametrize(
    ("columns", "label", "said"),
    [
        ("y", lambda i: "b" if i >= 20 else "a", "`y` is `a`"),
        ("y", lambda i: int(i >= 20), "`y` is 0"),
        ("y", lambda i: "" if i < 20 and i % 2 else 4 if i < 20 else i / 7, "`y` is 4"),
        ("y,z", lambda i: "2.5,7" if i < 20 else f"{i / 7},{i}", "`y` is 2.5, `z` is 7"),
    ],
    ids=["classes", "label", "blanks", "two columns"],
)
def test_training_rows_of_one_label_are_refused(tmp_path, columns, label, said):
    """Also if rows that are no molecules have other values."""
    rows = [f"{CHAINS[i]},{PARTS[i]},{label(i)}" for i in range(30)] + [f"C1C,train,{label(29)}"]
    write(tmp_path / "a.csv", f"smiles,part,{columns}", rows)
    with pytest.raises(DataError, match=re.escape(f"a.csv: {said} in every training row: nothing to learn")):
        load(tmp_path, split_column="part", label_columns=tuple(columns.split(",")))


def test_a_class_or_value_that_no_training_row_tells_of_has_a_warning(tmp_path):
    rows = [
        f"{CHAINS[i]},{PARTS[i]},{'abc'[i % 2] if i < 27 else 'c'},{i if i > 19 else 2.5},{i / 7}" for i in range(30)
    ]
    write(tmp_path / "a.csv", "smiles,part,y,u,v", rows)
    task = load(tmp_path, split_column="part")
    assert "warning: no training row has the class `c`: the model never predicts it" in task.notes
    values = load(tmp_path, split_column="part", label_columns=("u", "v"))
    assert "warning: `u` is 2.5 in every training row: nothing to learn of it" in values.notes


@pytest.mark.parametrize(("column", "labels"), [("smiles", ("1.5", "2.5", "7")), ("text", ("good", "bad"))])
def test_a_header_in_the_middle_and_a_row_of_units_are_no_rows(tmp_path, column, labels):
    rows = [f"{chain},{labels[i % len(labels)]}" for i, chain in enumerate(CHAINS)]
    write(tmp_path / "a.csv", f"{column},y", [",(unit)", *rows, f"{column},y", *rows])
    task = load(tmp_path, split="random", **{f"{column}_column": column})
    assert (task.output_names, sum(task.split_sizes.values())) == (("y",) if len(labels) == 3 else ("bad", "good"), 60)
    assert [(row.row, row.reason) for row in task.skipped][1:] == [("33", "it repeats the header")]
    assert any("header" in note and "33" in note for note in task.notes)


def test_three_files_are_three_splits(tmp_path):
    write(tmp_path / "a.csv", "smiles,y", [f"{s},{i % 2}" for i, s in enumerate(CHAINS[:4])])
    write(tmp_path / "b.csv", "y,smiles", ["1,N", "0,OC"])
    write(tmp_path / "c.csv", "smiles,y", ["CCC,0", "C1CC,1"])
    task = load(tmp_path, files={"train": "a.csv", "valid": "b.csv", "test": "c.csv"})
    assert as_lists(task.split_indices) == {"train": [0, 1, 2, 3], "valid": [4, 5], "test": [6]}
    assert (task.split_name, texts(task, "valid")) == ("files", ["N", "CO"])
    assert [row.row for row in task.skipped] == ["3"]
    # CO of line 2 of the training file is OC of line 3 of the validation file
    assert "1 molecule in more than one split: a.csv:2 (train) = b.csv:3 (valid)" in task.notes


def test_a_file_that_is_two_splits_is_warned_of_and_its_texts_noted(tmp_path):
    """However its path is written. Values of two columns: the epoch is chosen by an error without a unit."""
    write(tmp_path / "a.csv", "text,y,z", [f"row {i},{i},{100 * i}" for i in range(4)])
    files = TaskFiles(train="a.csv", valid=f"../{tmp_path.name}/a.csv")
    columns: dict[str, Any] = {"text_column": "text", "label_columns": ("y", "z")}
    progress = Recorder()
    task = load_task(CsvTaskConfig(name="csv", data_dir=str(tmp_path), files=files, **columns), progress)
    assert any(said.startswith(f"warning: {tmp_path}/a.csv ") for said in progress.said)
    assert any(note.startswith("4 texts in more than one split") for note in task.notes)
    assert (task.selection_metric, task.is_greater_better) == ("standardised_rmse", False)


def test_a_test_file_without_a_row_to_score_is_left_out_and_told(tmp_path):
    write(tmp_path / "a.csv", "smiles,y", [f"{s},{i % 2}" for i, s in enumerate(CHAINS[:4])])
    write(tmp_path / "b.csv", "smiles,y", ["N,1", "OC,0"])
    write(tmp_path / "c.csv", "smiles,y", ["CCC,", "CCCC,NA", "C1CC,1"])
    task = load(tmp_path, files={"train": "a.csv", "valid": "b.csv", "test": "c.csv"})
    assert as_lists(task.split_indices) == {"train": [0, 1, 2, 3], "valid": [4, 5]}
    assert NO_TEST_NOTE in task.notes
    for split in ("train", "valid"):
        files = {"train": "a.csv", "valid": "b.csv", split: "c.csv"}
        with pytest.raises(DataError, match=f"no rows in `{split}`"):
            load(tmp_path, files=files)


def test_rows_are_drawn_for_training_and_for_validation_by_the_split_seed(tmp_path):
    write(tmp_path / "a.csv", "smiles,y", [f"{s},{i % 2}" for i, s in enumerate(CHAINS)])
    whole = as_lists(load(tmp_path, split="random").split_indices)
    limits = {"split": "random", "max_rows": 5, "max_valid_rows": 2}
    task = load(tmp_path, **limits)
    assert task.split_sizes == {"train": 5, "valid": 2, "test": 3}
    assert all(set(rows) <= set(whole[split]) for split, rows in as_lists(task.split_indices).items())
    assert as_lists(load(tmp_path, **limits).split_indices) == as_lists(task.split_indices)


def test_a_table_without_smiles_is_told_which_columns_hold_texts(tmp_path):
    for rows, hint in (
        (["It was a good film.,1,C", "So very dull it was,0,CC"], "`a` holds texts: `--text-column a` reads them"),
        (
            ["A cat is old,A cat was young,1", "Dogs do bark,All dogs bark,0"],
            "`a`, `b` hold texts: `--text-column a,b`",
        ),
    ):
        write(tmp_path / "a.csv", "a,b,y", rows)
        with pytest.raises(DataError, match="which column holds the SMILES") as error:
            load(tmp_path)
        assert error.value.hint.startswith(hint)


def test_a_row_may_be_a_pair_of_texts(tmp_path):
    """Rows with one text are left out, equal pairs are one pair, and a pair the other way round is another."""
    rows = [*(f"A {i},B {i},{i % 2}" for i in range(18)), "A 0,B 0,0", "B 0,A 0,0", "Alone,,1"]
    write(tmp_path / "a.csv", "a,b,y", rows)
    task = load(tmp_path, text_column=("a", "b"))
    assert {pair for part in task.examples.values() for pair in part.texts} == {
        *((f"A {i}", f"B {i}") for i in range(18)),
        ("B 0", "A 0"),
    }
    assert [(row.row, row.reason) for row in task.skipped] == [("22", "one of its two texts is empty")]
    config = CsvTaskConfig(name="csv", text_column=("a", "b"), label_columns=("y",))
    trained = TrainedTask(config, "text", "classes", ("0", "1"))
    new = read_new_table(trained, tmp_path / "a.csv", (), SilentProgress())
    assert new.keys[0] == "A 0\0B 0"
    assert new.problems is not None
    assert [bool(problem) for problem in new.problems] == [False] * 20 + [True]
    with pytest.raises(DataError, match=r"`--text-column a`: the run reads pairs of texts"):
        read_new_table(trained, tmp_path / "a.csv", ("a",), SilentProgress())
    with pytest.raises(DataError, match=r"no column `c`"):
        read_new_table(trained, tmp_path / "a.csv", ("a", "c"), SilentProgress())


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"files": {}}, ConfigError, "table"),
        ({"label_columns": ("smiles",)}, ConfigError, "`smiles` cannot be input and label"),
        ({"label_columns": ("in_split",)}, ConfigError, "`in_split`"),
        ({"label_columns": ("words",)}, ConfigError, "`row`"),  # a class that is called like a column of predictions
        ({"class_weights": "balanced"}, ConfigError, "`task.class_weights:"),
        ({"label_columns": ("words",), "replicates": "mean"}, ConfigError, "`task.replicates: mean`"),
        ({"split_column": "part"}, DataError, "a.csv:3: `part` is `holdout`"),
        ({"split_column": "in_split"}, DataError, "a.csv: no row has `valid` in `in_split`"),
        ({"files": {"train": "a.csv", "valid": "b.csv"}}, DataError, "b.csv: no column `smiles`"),
    ],
)
def test_what_does_not_fit_the_table_is_refused(tmp_path, options, error, said):
    rows = ["C,train,train,row,1.5", "CC,test,holdout,good,2", "CN,train,,row,3"]
    write(tmp_path / "a.csv", "smiles,in_split,part,words,value", rows)
    write(tmp_path / "b.csv", "structure,value", ["C,1"])
    with pytest.raises(error, match=said):
        load(tmp_path, **{"label_columns": ("value",), **options})


def test_rules_of_a_recipe_hold_for_training_and_for_new_rows(tmp_path):
    """A word that is a class, a word that is none, the positive class, and a named delimiter; lines are the file's."""
    words = ("none", "mild", "n.d.", "mild")
    rows = [f"{chain};{words[i % 4]}" for i, chain in enumerate(CHAINS)]
    write(tmp_path / "a.csv", "sep=;", ["smiles;y", *rows])
    rules = {"missing_values": ("n.d.",), "positive_class": "none"}
    task = load(tmp_path, split="random", **rules)
    assert task.output_names == ("mild", "none")
    assert {row.row for row in task.skipped} == {str(line) for line in range(5, 33, 4)}
    config = CsvTaskConfig(name="csv", label_columns=("y",), **rules)
    trained = TrainedTask(config, "smiles", task.loss, task.output_names)
    new = read_new_table(trained, tmp_path / "a.csv", (), SilentProgress())
    assert new.num_rows == len(CHAINS)
    encoded = new.encode(word_level(["C", "O"]), 16)
    expected = [{"none": 1.0, "mild": 0.0, "n.d.": math.nan}[words[i % 4]] for i in range(len(CHAINS))]
    np.testing.assert_array_equal(encoded.targets[:, 0], expected)


@pytest.mark.parametrize("cell", ["maybe", "-1"])
def test_a_cell_that_is_no_label_is_a_warning_and_its_row_is_predicted(tmp_path, cell):
    """With -1 the labels are -1 and 0, so it is unclear which of them is the negative class."""
    config = CsvTaskConfig(name="csv", files={"train": "a.csv"}, label_columns=("y",), label_kind="multi_label")
    task = TrainedTask(config, "smiles", "binary", ("y",))
    path = tmp_path / write(tmp_path / "new.csv", "smiles,y", ["CO,0", f"CCO,{cell}", "CCCO,1"])
    rows = read_new_table(task, path, (), SilentProgress())
    targets = rows.encode(word_level(["C", "O"]), 24).targets[:, 0]
    np.testing.assert_array_equal(targets, [0, math.nan, 1])
    assert [note for note in rows.notes if note.startswith("warning: ") and f"{path}:3: `y` is `{cell}`" in note]


def test_a_table_with_decimal_commas_is_read_on_request_for_training_and_new_rows(tmp_path):
    name = write(tmp_path / "a.csv", "smiles;y", [f"{chain};{n},5" for n, chain in enumerate(CHAINS)])
    task = load(tmp_path, split="random", decimal_comma=True)
    values = [value for split in task.splits for (value,) in task.examples[split].targets.tolist()]
    assert sorted(values) == [n + 0.5 for n in range(30)]
    config = CsvTaskConfig(name="csv", label_columns=("y",), decimal_comma=True)
    trained = TrainedTask(config, "smiles", task.loss, task.output_names)
    new = read_new_table(trained, tmp_path / name, (), SilentProgress())
    np.testing.assert_array_equal(new.encode(word_level(["C", "O"]), 40).targets[:, 0], np.arange(30) + 0.5)
