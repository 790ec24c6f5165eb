"""What labels are follows from their cells by the documented rules; a cell that does not fit is named with its row."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from exlm_cli.data.rows.table import Table
from exlm_cli.errors import DataError
from exlm_cli.tasks.rows.labels import LabelKind, Labels, read_known_targets, read_labels, with_decimal_points

NAN = math.nan


def table_of(**columns: str) -> Table:
    cells = {name: tuple(text.split("|")) for name, text in columns.items()}
    return Table(Path("a.csv"), cells, tuple(range(2, 2 + len(next(iter(cells.values()))))))


def read(kind: LabelKind = "auto", **columns: str) -> Labels:
    return read_labels(table_of(**columns), list(columns), kind)


@pytest.mark.parametrize(
    ("columns", "loss", "names", "targets"),
    [
        ({"y": "1|0||1.0"}, "binary", ("y",), [[1], [0], [NAN], [1]]),
        ({"y": "Yes|no|NA|TRUE"}, "binary", ("y",), [[1], [0], [NAN], [1]]),
        ({"a": "1|0", "b": "0|nan"}, "binary", ("a", "b"), [[1, 0], [0, NAN]]),
        ({"y": "inactive|active|-|active"}, "classes", ("active", "inactive"), [[1], [0], [NAN], [0]]),
        ({"y": "low|high|mid"}, "classes", ("high", "low", "mid"), [[1], [0], [2]]),
        ({"y": "10|9|10"}, "classes", ("9", "10"), [[1], [0], [1]]),
        ({"y": "-1|1"}, "classes", ("-1", "1"), [[0], [1]]),
        ({"y": "2|1.0|1|2.00||01"}, "classes", ("1", "2"), [[1], [0], [0], [1], [NAN], [0]]),
        ({"y": "a|1|1.0|b|a"}, "classes", ("1", "1.0", "a", "b"), [[2], [0], [1], [3], [2]]),
        ({"y": "0.5|2|1e-3|null"}, "regression", ("y",), [[0.5], [2], [0.001], [NAN]]),
        ({"a": "1|0", "b": "0.5|2"}, "regression", ("a", "b"), [[1, 0.5], [0, 2]]),
        ({"y": "<10|10-20|>20|<10"}, "classes", ("10-20", "<10", ">20"), [[1], [0], [2], [1]]),
        ({"y": "a|1|2|b"}, "classes", ("1", "2", "a", "b"), [[2], [0], [1], [3]]),
        ({"a": "2.5|4", "b": "4|2.5"}, "regression", ("a", "b"), [[2.5, 4], [4, 2.5]]),
    ],
)
def test_what_labels_are_is_found(columns, loss, names, targets):
    labels = read(**columns)
    assert (labels.loss, labels.names) == (loss, names)
    np.testing.assert_array_equal(labels.targets, np.array(targets, dtype=float))


@pytest.mark.parametrize(
    ("columns", "note"),
    [
        ({"y": "1|0|0|0"}, "found a 0/1 label, `y`, positive in 25.0 % of the rows"),
        ({"a": "1|0", "b": "1|1"}, "found 2 0/1 labels, positive in 50.0 %, 100.0 % of the rows"),
        ({"y": "b|a|b"}, "found 2 classes of `y`: `a` (1), `b` (2); `b` is the positive one"),
        ({"y": "1.0|2|1"}, "found 2 classes of `y`: `1` (2), `2` (1); `2` is the positive one"),
        ({"y": "1|2|3"}, "found values to predict in `y`; choose what they are with `task.label_kind=classes|"),
    ],
)
def test_what_was_found_is_told(columns, note):
    (found,) = read(**columns).notes
    assert found.startswith(note)


@pytest.mark.parametrize(
    ("kind", "cells", "loss", "names"),
    [
        ("classes", "0|1|2|1.0|-0", "classes", ("0", "1", "2")),
        ("auto", "1_000|2_000|3_000|2_000", "classes", ("1_000", "2_000", "3_000")),
        ("regression", "0|1|1", "regression", ("y",)),
        ("multi_label", "0|1|1", "binary", ("y",)),
    ],
)
def test_the_kind_can_be_said(kind, cells, loss, names):
    assert (read(kind, y=cells).loss, read(kind, y=cells).names) == (loss, names)


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        ("auto", {"y": "|NA"}, "a.csv: label column `y` is empty in every row"),
        ("auto", {"y": "1|1|"}, "a.csv: `y` is 1 in every row that has it: nothing to learn"),
        ("auto", {"y": "a|a"}, "a.csv: `y` is `a` in every row that has it: nothing to learn"),
        ("auto", {"y": "7|7"}, "a.csv: `y` is 7 in every row that has it: nothing to learn"),
        ("auto", {"y": "5.1||>10|6.0"}, "a.csv:4: `y` is `>10`; others are numbers"),
        ("auto", {"y": "0.5|n.d.|<10|n.d."}, "a.csv:3: `y` is `n.d.`, one of 3 such cells; others are numbers"),
        ("auto", {"y": "<10|0.5|<10|12|<10"}, "a.csv:2: `y` is `<10`, one of 3 such cells; others are numbers"),
        ("auto", {"a": "1|0", "b": "active|0"}, "a.csv:2: `b` is `active`; others are numbers"),
        ("auto", {"a": "yes|no", "b": "active|no"}, "a.csv:2: `b` is `active`; several columns hold"),
        ("multi_label", {"y": "1|active"}, "a.csv:3: `y` is `active`; accepted: 0/1"),
        ("regression", {"y": "1|high"}, "a.csv:3: `y` is `high`; accepted: a number"),
        ("regression", {"y": "1|nan|inf"}, "a.csv:4: `y` is `inf`; accepted: a number"),
        ("regression", {"y": "1|-1e101"}, "a.csv:3: `y` is `-1e101`; accepted: a number"),
        ("classes", {"y": "7|7.0"}, "a.csv: `y` is `7` in every row that has it: nothing to learn"),
        ("classes", {"a": "x|y", "b": "x|y"}, "a.csv: 2 label columns cannot be `classes`: each row has one class"),
        ("auto", {"y": "|".join(f"text {i}" for i in range(101))}, "a.csv: `y` has 101 different texts"),
    ],
)
def test_what_does_not_fit_is_refused(kind, columns, message):
    with pytest.raises(DataError, match=re.escape(message)):
        read(kind, **columns)


@pytest.mark.parametrize(
    ("columns", "loss", "names", "targets"),
    [
        ({"y": "1|No||TRUE|nan"}, "binary", ("y",), [[1], [0], [NAN], [1], [NAN]]),
        ({"y": "red|blue|-"}, "classes", ("blue", "green", "red"), [[2], [0], [NAN]]),
        ({"y": "10|9.0|09"}, "classes", ("9", "10"), [[1], [0], [0]]),
        ({"y": "1.0|1"}, "classes", ("1", "1.0"), [[1], [0]]),
        ({"y": "0.5|-2|n/a"}, "regression", ("y",), [[0.5], [-2], [NAN]]),
    ],
)
def test_labels_of_further_rows_are_those_of_a_known_task(columns, loss, names, targets):
    found = read_known_targets(table_of(**columns), ["y"], loss, names)
    np.testing.assert_array_equal(found, np.array(targets, dtype=float))
    lacking = read_known_targets(table_of(x="a|b"), ["y"], loss, names)
    np.testing.assert_array_equal(lacking, [[NAN], [NAN]])


@pytest.mark.parametrize(
    ("loss", "cell", "accepted"),
    [
        ("binary", "active", "0/1, true/false, yes/no, t/f, y/n"),
        ("classes", "pink", "`blue`, `red`"),
        ("regression", "inf", "a number from -1e100 to 1e100"),
    ],
)
def test_a_label_that_a_known_task_does_not_have_is_named_with_its_row(loss, cell, accepted):
    with pytest.raises(DataError) as caught:
        read_known_targets(table_of(y=f"|{cell}"), ["y"], loss, ["blue", "red"])
    assert f"a.csv:3: `y` is `{cell}`; accepted: {accepted}" in caught.value.message


def test_numbers_with_a_decimal_comma_are_classes_with_a_warning_and_values_on_request():
    """The warning names the key; with it, the numbers are those that the same cells with points give."""
    commas = table_of(y="1,5|2|-0,25|3,0e-2|NA", other="a,b|1,5|c|d|e")
    labels = read_labels(commas, ["y"], "auto")
    assert labels.loss == "classes"
    assert [note for note in labels.notes if "`task.decimal_comma=true`" in note and "`y`" in note]
    read_again = read_labels(with_decimal_points(commas, ["y"]), ["y"], "auto")
    assert read_again.loss == "regression"
    assert not [note for note in read_again.notes if "decimal" in note]
    np.testing.assert_array_equal(read_again.targets[:, 0], [1.5, 2, -0.25, 0.03, NAN])
    assert not [note for note in read(y="low,high|1,5|mid").notes if "decimal" in note]
    with pytest.raises(DataError, match=r"^a.csv:3: `y` is `1\.234,5`, but `task.decimal_comma` is true$"):
        with_decimal_points(table_of(y="1,5|1.234,5"), ["y", "absent"])


def test_classes_that_differ_in_capital_letters_are_noted():
    notes = read("auto", y="Active|active|inactive|Active").notes
    assert "warning: classes that differ in capital letters alone: `Active` and `active`" in notes


def test_a_fraction_among_names_of_classes_is_a_class():
    assert read("auto", y="3.10|3.11|3.11rc1|3.11rc1|dev|dev").names == ("3.10", "3.11", "3.11rc1", "dev")


def test_rows_that_lack_their_class_are_none_of_the_classes():
    """Splits keep the shares of `classes`: a row without a label must not count as one of class 1."""
    assert read(y="a||b|a").classes == [0, -1, 1, 0]
    assert read(y="0.5|2|3").classes is None
    assert read(a="1|0", b="0|1").classes is None


def test_a_row_with_one_of_its_labels_is_not_missing():
    """Only the third row has neither label; the second still has `a` to learn from."""
    assert read(a="1|0|", b="0||").missing == [2]


def test_a_decimal_comma_is_read_in_numbers_alone():
    """`a,b` is a text; and `ca. 2` is no number, so its point separates no thousands."""
    table = with_decimal_points(table_of(y="1,5|a,b|ca. 2"), ["y"])
    assert table.columns["y"] == ("1.5", "a,b", "ca. 2")
    assert list(with_decimal_points(table_of(y="1,5"), ["y", "absent"]).columns) == ["y"]


def test_a_hundred_classes_are_taken():
    """The error says that at most 100 are taken, so exactly 100 are."""
    assert len(read(y="|".join(f"text {i}" for i in range(100))).names) == 100
