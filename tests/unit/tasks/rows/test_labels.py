"""What labels are follows from their cells by the documented rules; a cell that does not fit is named with its row."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exlm_cli.errors import DataError
from exlm_cli.tasks.rows.classes import find_positive
from exlm_cli.tasks.rows.labels import LabelKind, Labels, read_known_targets, read_labels
from exlm_cli.tasks.rows.table import Table

NAN = math.nan


def table_of(**columns: str) -> Table:
    cells = {name: tuple(text.split("|")) for name, text in columns.items()}
    return Table(Path("a.csv"), cells, tuple(range(2, 2 + len(next(iter(cells.values()))))))


def read(kind: LabelKind = "auto", **columns: str) -> Labels:
    return read_labels(table_of(**columns), list(columns), kind)


def read_one(cells: str, kind: LabelKind = "auto", **rules: Any) -> Labels:
    return read_labels(table_of(y=cells), ["y"], kind, **rules)


@pytest.mark.parametrize(
    ("columns", "loss", "names", "targets"),
    [
        ({"y": "1|0||1.0"}, "binary", ("y",), [[1], [0], [NAN], [1]]),
        ({"y": "Yes|no|NA|TRUE"}, "binary", ("y",), [[1], [0], [NAN], [1]]),
        ({"y": "inactive|active|-|active"}, "classes", ("inactive", "active"), [[0], [1], [NAN], [1]]),
        ({"y": "low|high|mid|low|mid"}, "classes", ("high", "low", "mid"), [[1], [0], [2], [1], [2]]),
        ({"y": "10|9|10"}, "classes", ("9", "10"), [[1], [0], [1]]),
        ({"y": "-1|1|1"}, "classes", ("-1", "1"), [[0], [1], [1]]),
        ({"y": "2|1.0|1|2.0||1"}, "classes", ("1", "2"), [[1], [0], [0], [1], [NAN], [0]]),
        ({"y": "8|7|007|8|7|007"}, "classes", ("7", "007", "8"), [[2], [0], [1], [2], [0], [1]]),
        ({"a": "1.00|0.00|0.00", "b": "0.|1.000|0,0"}, "binary", ("a", "b"), [[1, 0], [0, 1], [0, 0]]),
        ({"y": "t|F|T"}, "binary", ("y",), [[1], [0], [1]]),
        ({"a": "t|f", "b": "n|y"}, "binary", ("a", "b"), [[1, 0], [0, 1]]),
        ({"y": "t|f|y|n|t|f|y|n"}, "classes", ("f", "n", "t", "y"), [[2], [0], [3], [1]] * 2),
        ({"y": "a|1|1.0|b|a|b"}, "classes", ("1", "1.0", "a", "b"), [[2], [0], [1], [3], [2], [3]]),
        ({"y": "\u22120.5|2|1e\u22123|null"}, "regression", ("y",), [[-0.5], [2], [0.001], [NAN]]),
        ({"a": "1|0", "b": "0.5|2"}, "regression", ("a", "b"), [[1, 0.5], [0, 2]]),
        ({"y": "2C9|3A4|2D6|2C9|3A4"}, "classes", ("2C9", "2D6", "3A4"), [[0], [2], [1], [0], [2]]),
    ],
)
def test_what_labels_are_is_found_and_further_rows_are_read_alike(columns, loss, names, targets):
    labels = read(**columns)
    assert (labels.loss, labels.names) == (loss, names)
    np.testing.assert_array_equal(labels.targets, np.array(targets, dtype=float))
    known, *_ = read_known_targets(table_of(**columns), list(columns), loss, names)
    np.testing.assert_array_equal(known, labels.targets)


def test_few_whole_numbers_are_values_and_a_warning_names_both_kinds():
    (warning,) = read_one("0|1|2|1.0").notes
    assert warning.startswith("warning: `y` has 3 whole numbers (0, 1, 2)")
    assert re.findall(r"task\.label_kind=(\w+)", warning) == ["classes", "regression"]
    kinds: dict[str, LabelKind] = {"0|1|2|1.5": "auto", "|".join(map(str, range(11))): "auto", "0|1|2": "regression"}
    for cells, kind in kinds.items():
        labels = read_one(cells, kind)
        assert labels.loss == "regression"
        assert not labels.notes[0].startswith("warning: ")


@pytest.mark.parametrize(
    ("kind", "cells", "loss", "names"),
    [
        ("classes", "0|1|2|1.0|-1.0", "classes", ("-1.0", "0", "1", "2")),
        ("classes", "1.1|1.10|3.2|3.20", "classes", ("1.1", "1.10", "3.2", "3.20")),
        ("classes", "1e3|1000|1.00|1", "classes", ("1", "1.00", "1e3", "1000")),
        ("regression", "0|1|1", "regression", ("y",)),
        ("multi_label", "0|1|1", "binary", ("y",)),
    ],
)
def test_the_kind_can_be_said(kind, cells, loss, names):
    assert (read(kind, y=cells).loss, read(kind, y=cells).names) == (loss, names)


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        ("auto", {"y": "|NA"}, "a.csv: label column `y` is empty"),
        ("auto", {"y": "1|1|"}, "a.csv: `y` is 1 in every row"),
        ("classes", {"y": "7|7.0"}, "a.csv: `y` is `7` in every row"),
        ("auto", {"y": "0.5|n.d.|<10|7|8|n.d.|1"}, "a.csv:3: `y` is `n.d.`, one of 2 such cells"),
        ("auto", {"a": "1|0", "b": "active|0"}, "a.csv:2: `b` is `active`"),
        ("auto", {"a": "t|f", "b": "t|n"}, "a.csv:2: `b` is `t`"),
        ("multi_label", {"y": "1|active"}, "a.csv:3: `y` is `active`"),
        ("regression", {"y": "1|nan|inf"}, "a.csv:4: `y` is `inf`"),
        ("regression", {"y": "1|-1e101"}, "a.csv:3: `y` is `-1e101`"),
        ("classes", {"a": "x|y", "b": "x|y"}, "a.csv: 2 label columns cannot be `classes`"),
        ("auto", {"y": "|".join(f"text {i}" for i in range(101))}, "a.csv: `y` has 101 different texts"),
    ],
)
def test_what_does_not_fit_is_refused(kind, columns, message):
    with pytest.raises(DataError, match=re.escape(message)):
        read(kind, **columns)


@pytest.mark.parametrize(
    ("loss", "cell"), [("binary", "active"), ("classes", "pink"), ("regression", "inf"), ("regression", "1.355,5")]
)
def test_a_label_that_a_known_task_does_not_have_is_missing_and_named_with_its_row(loss, cell):
    """Of a file with decimal commas, no number has a point. Of a table without the column, all labels are missing."""
    table = table_of(y=f"|{cell}|{cell}")
    targets, _, (note,) = read_known_targets(table, ["y"], loss, ["blue", "red"], decimal_comma="," in cell)
    assert np.isnan(targets).all()
    assert note.startswith("warning: 2 cells ")
    assert f"a.csv:3: `y` is `{cell}`" in note
    lacking, *_ = read_known_targets(table_of(x="a|b"), ["y"], loss, ["blue", "red"])
    assert np.isnan(lacking).all()


def test_numbers_with_a_decimal_comma_are_values_on_request():
    """Among numbers and among texts, the hint names the key; a point is then no part of a number."""
    commas = "1,5|2|-0,25|3,0e-2|NA|\u22120,5"
    for cells in ("2|3|1,5", "1,5|2,5|-0,25"):
        with pytest.raises(DataError, match=r"`y` is `1,5`") as caught:
            read_one(cells)
        assert "`--set task.decimal_comma=true`" in str(caught.value.hint)
    labels = read_one(commas, decimal_comma=True)
    assert labels.loss == "regression"
    np.testing.assert_array_equal(labels.targets[:, 0], [1.5, 2, -0.25, 0.03, NAN, -0.5])
    with pytest.raises(DataError, match=r"^a.csv:4: `y` is `1\.234,5`; others are numbers$"):
        read_one("1,5|2|1.234,5", decimal_comma=True)
    assert read_one("a,b|1,5|a,b|1,5", decimal_comma=True).names == ("1,5", "a,b")


def test_rows_that_lack_their_class_are_none_of_the_classes():
    """Splits keep the shares of `classes`: a row without a label must not count as one of class 1."""
    assert read(y="a||b|a").classes == [0, -1, 1, 0]
    assert read(y="0.5|2|3").classes is None
    assert read(a="1|0", b="0|1").classes is None


def test_classes_most_of_which_have_one_row_are_refused_unless_they_are_asked_for():
    cells = "active|active|actve|inactive|inactive|nactive|?"
    with pytest.raises(DataError, match="; 3 of 5 classes have one row") as caught:
        read_one(cells)
    assert "`--set task.label_kind=classes`" in str(caught.value.hint)
    assert read_one(cells, "classes").loss == "classes"
    assert read_one("a|a|b|b|c|d").loss == "classes"


@pytest.mark.parametrize(
    ("cells", "positive", "names"),
    [
        ("Active|Inactive|Inactive", "Inactive", ("Active", "Inactive")),
        ("b|a|b", "a", ("b", "a")),
        ("0|1|1", "0", ("1", "0")),
        ("1.0|2|1", "1.0", ("2", "1")),
    ],
)
def test_the_positive_class_can_be_said(cells, positive, names):
    """It has the index 1, and so have the cells that name it."""
    labels = read_one(cells, positive=positive)
    assert (labels.loss, labels.names) == ("classes", names)
    expected = [float(cell.removesuffix(".0") == names[1]) for cell in cells.split("|")]
    np.testing.assert_array_equal(labels.targets[:, 0], expected)
    assert labels.notes[0].endswith(f"`{names[1]}` is the positive one, as `task.positive_class` says")
    again, *_ = read_known_targets(table_of(y=cells), ["y"], labels.loss, labels.names)
    np.testing.assert_array_equal(again, labels.targets)


def test_a_positive_class_that_is_none_of_two_is_refused():
    for cells, message in (
        ("Active|Inactive|Active", "is `hit`; the classes of `y` are `Active` and `Inactive`"),
        ("a|b|c|a|b|c", "is for two classes; `y` has 3"),
        ("0.5|1|2", "is for two classes; found values to predict"),
    ):
        with pytest.raises(DataError, match=re.escape(f"a.csv: `task.positive_class` {message}")):
            read_one(cells, positive="hit")


def test_a_word_that_counts_as_missing_among_classes_is_named_with_its_count():
    """The list in the note is the default without the word, and keeps the rows."""
    cells = "mild|none|severe|None|none|NA|mild||severe|NA"
    said = ("`none` (2), `NA` (2), `None` (1) of `y`", "task.missing_values=[n/a,nan,null,-]")
    assert [note for note in read_one(cells).notes if all(words in note for words in said)]
    assert read_one(cells).missing == [1, 3, 4, 5, 7, 9]
    assert read_one(cells, missing=("n/a", "nan", "null", "-")).names == ("NA", "None", "mild", "none", "severe")


def test_the_words_of_missing_labels_can_be_said():
    """`n.d.` is a word in a column of numbers, and errors name the key that lists it, or which words were missing."""
    for cells, hint in (("0.5|n.d.|2", "`task.missing_values`"), ("+|-|-|+", "`-` (2) of `y` counts as missing")):
        with pytest.raises(DataError) as caught:
            read_one(cells)
        assert hint in str(caught.value.hint)
    assert read_one("+|-|-|+", missing=()).names == ("-", "+")
    labels = read_one("0.5|N.D.|2||7", missing=("n.d.",))
    np.testing.assert_array_equal(labels.targets[:, 0], [0.5, NAN, 2, NAN, 7])
    known, _, notes = read_known_targets(table_of(y="n.d.|NA|1"), ["y"], "regression", ["y"], missing=("n.d.",))
    np.testing.assert_array_equal(known[:, 0], [NAN, NAN, 1])
    assert "`y` is `NA`" in notes[0]


def test_minus_one_can_be_said_to_be_a_negative_label():
    table = table_of(a="-1|1||\u22121.0", b="+1|-1|1|NA", c="0|1|1|0")
    labels = read_labels(table, ["a", "b", "c"], "multi_label")
    expected = [[0, 1, 0], [1, 0, 1], [NAN, 1, 1], [0, NAN, 0]]
    assert labels.loss == "binary"
    np.testing.assert_array_equal(labels.targets, expected)
    known, *_ = read_known_targets(table, ["a", "b", "c", "d"], "binary", ["a", "b", "c", "d"], "multi_label")
    np.testing.assert_array_equal(known[:, :3], expected)
    assert read_one("-1|1|1", "classes").names == ("-1", "1")
    assert "task.label_kind=multi_label" in read(a="-1|1", b="1|-1").notes[1]
    assert "`a` is `-1`; accepted: 0/1" in read_known_targets(table, ["a"], "binary", ["a"])[2][0]
    with pytest.raises(DataError, match=r"^a.csv:3: `y` is `-1`, and on line 4 it is 0"):
        read_one("1|-1|0", "multi_label")


def test_names_tell_which_class_is_positive_unless_they_have_no_known_meaning():
    for positive, negative in (
        ("Active", "Inactive"),
        ("active", "non-active"),
        ("Toxic", "Non Toxic"),
        ("hit", "no hit"),
        ("high", "low"),
        ("substrate", "non_substrate"),
        ("hERG blocker", "hERG non-blocker"),
        ("active compound", "inactive compound"),
        ("BBB+", "BBB\u2212"),
        ("agonist", "inactive"),
    ):
        assert find_positive((positive, negative)) == find_positive((negative, positive)) == positive
    for one, two in (("mild", "severe"), ("agonist", "antagonist"), ("0", "1")):
        assert find_positive((one, two)) is find_positive((two, one)) is None


def test_classes_that_are_lists_of_labels_have_a_warning():
    for cells, example in (("[0, 1, 0]|[1, 0, 0]|", "[0, 1, 0]"), ("cat;dog|cat|dog|", "cat;dog")):
        assert f"seem to be lists, such as `{example}`" in read_one(2 * cells).notes[1]
    assert len(read_one("1,2-diol|alcohol|" * 2).notes) == 1


@pytest.mark.parametrize(
    ("one", "two", "kind", "marks"),
    [
        ("non-toxic", "non\u2011toxic", "look alike", "U+2011"),
        ("not active", "not\u00a0active", "look alike", "U+00A0"),
        ("Low", "low", "differ in capital letters alone", ""),
        ("1.1", "1.10", "are equal as numbers", ""),
    ],
)
def test_classes_that_a_reader_takes_for_one_are_two_and_have_a_warning(one, two, kind, marks):
    labels = read_one("|".join([one, two, "3"] * 2), "classes")
    assert set(labels.names) == {one, two, "3"}
    (warning,) = [note for note in labels.notes if note.startswith("warning: ")]
    assert all(part in warning for part in (kind, one, two, marks))
    assert not [note for note in read_one("a|b|3" * 2, "classes").notes if note.startswith("warning: ")]


INF = math.inf


@pytest.mark.parametrize(
    ("cells", "low", "high"),
    [
        ("1.5|>10000|<0.5||3", [1.5, 10000, -INF, -INF, 3], [1.5, INF, 0.5, INF, 3]),
        ("1|2|>= 3|\u2264 -4|\u22655|<=6e-1", [1, 2, 3, -INF, 5, -INF], [1, 2, INF, -4, INF, 0.6]),
    ],
)
def test_bounds_beside_numbers_are_censored_values(cells, low, high):
    labels = read_one(cells)
    assert labels.loss == "regression"
    assert labels.bounds is not None
    assert labels.bounds[:, 0].T.tolist() == [low, high]
    is_known = np.equal(low, high)
    assert np.isnan(labels.targets[:, 0]).tolist() == (~is_known).tolist()
    assert labels.missing == [row for row, cell in enumerate(cells.split("|")) if cell in ("", "na")]
    assert any("censored values" in note for note in labels.notes)
    known, bounds, notes = read_known_targets(table_of(y=cells), ["y"], "regression", ["y"])
    np.testing.assert_array_equal(known, labels.targets)
    np.testing.assert_array_equal(bounds, labels.bounds)
    assert notes == ()


def test_bounds_alone_are_classes_and_values_without_bounds_have_none():
    assert read_one("<10|>10|<10|>10").loss == "classes"
    assert read_one("1|2|>2|1").loss == "regression"
    assert read_one("1|2.5|3").bounds is None


@pytest.mark.parametrize("cell", [">", "~5", "5>", "<1,000", "1-2"])
def test_what_is_no_bound_is_refused_beside_numbers(cell):
    with pytest.raises(DataError, match=re.escape(f"`y` is `{cell}`")):
        read_one(f"1|2|3|4.5|{cell}")


def test_logarithms_of_values_and_bounds():
    labels = read_one("1|100|>1000|<0.1|", log10=True)
    assert labels.names == ("log10 y",)
    assert labels.bounds is not None
    np.testing.assert_allclose(labels.targets[:, 0], [0, 2, NAN, NAN, NAN])
    np.testing.assert_allclose(labels.bounds[:, 0], [[0, 0], [2, 2], [3, INF], [-INF, -1], [-INF, INF]])
    for cell in ("0", "-3", "> -1"):
        with pytest.raises(DataError, match=rf"`y` is `{cell}`; accepted: a number above 0"):
            read_one(f"1|2|5|{cell}", log10=True)
    with pytest.raises(DataError, match=r"`task\.log10` is for values to predict; found classes"):
        read_one("red|blue|red|blue", log10=True)


def test_values_of_more_than_two_decades_are_noted():
    said = "warning: `y` spans 4.6 decades (0.5 to 20417): `--log10` trains and scores logarithms"
    assert read_one("0.5|20417|3").notes[1:] == (said,)
    for cells, log10 in (("1|100|3.5", False), ("-1|1000|3.5", False), ("1|20417|3.5", True)):
        assert len(read_one(cells, log10=log10).notes) == 1
