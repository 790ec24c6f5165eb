"""Splits by group and by time: groups and molecules are on one side, and tested rows are later than training rows."""

import datetime
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm_cli.errors import DataError
from exlm_cli.tasks.base import SPLITS
from exlm_cli.tasks.rows.splits import split_by_group
from tests.unit.tasks.rows.test_assays import load
from tests.unit.tasks.rows.test_splits import assert_keys_are_whole


def alkane(number: int) -> str:
    return "C" * (number + 1) + "O"


@settings(max_examples=30)
@given(st.lists(st.integers(0, 9), min_size=10, max_size=60), st.integers(0, 3))
def test_no_group_is_in_two_splits_and_three_groups_fill_all(groups, seed):
    parts = split_by_group(groups, seed)
    assert_keys_are_whole(parts, groups)
    assert [part for part in SPLITS if len(parts.get(part, ()))] == [*SPLITS[: len(set(groups))]]


def test_groups_of_a_table_stay_whole_and_compounds_too(tmp_path):
    """Of ten series two share a salt and its base; rows without a series are each on their own."""
    rows = [f"{alkane(n)},{n % 10 if n > 3 else ''},{n}" for n in range(40)]
    rows += [f"CN,4,{1}", f"CN.Cl,5,{2}"]
    task = load(tmp_path, "smiles,series,y", rows, split="group", group_column="series", split_seed=1)
    series = {
        part: {rows[row].split(",")[1] for row in found.tolist()} - {""} for part, found in task.split_indices.items()
    }
    assert sum(map(len, series.values())) == 10
    assert any({"4", "5"} <= members for members in series.values())
    assert "4 rows without a group, each a group of its own" in task.notes
    assert "1 group of `series` joined with others, as they share compounds" in task.notes
    assert (task.split_name, task.split_imitates) == ("group", "rows of another `series` than all training rows")
    assert task.resplit is not None
    assert task.resplit(2).split_indices["test"].tolist() != task.split_indices["test"].tolist()


def test_groups_that_a_reference_compound_makes_one_are_refused(tmp_path):
    rows = [f"{alkane(n)},{'AB'[n % 2]},{n}" for n in range(20)]
    rows += ["c1ccccc1,A,1", "c1ccccc1,B,1"]
    with pytest.raises(DataError, match="all rows are of one group of `series`, or the groups share compounds"):
        load(tmp_path, "smiles,series,y", rows, split="group", group_column="series")


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%Y/%m/%d", "%Y-%m-%dT%H:%M:%S+00:00", "%Y"])
def test_what_is_tested_is_later_than_what_is_trained(tmp_path, form):
    """Years are ties: they stay together, and the cuts are those that come nearest."""
    days = [datetime.date(2015, 1, 1) + datetime.timedelta(days=100 * n) for n in range(40)]
    order = random.Random(0).sample(range(40), 40)
    rows = [f"{alkane(n)},{days[n].strftime(form)},{n}" for n in order]
    rows.insert(7, "CN,,1")
    task = load(tmp_path, "smiles,when,y", rows, split="time", time_column="when")
    used = {part: [rows[row].split(",")[1] for row in found] for part, found in task.split_indices.items()}
    assert max(used["train"]) < min(used["valid"]) <= max(used["valid"]) < min(used["test"])
    assert sum(map(len, used.values())) == 40
    if form != "%Y":
        assert task.split_sizes == {"train": 32, "valid": 4, "test": 4}
    assert "1 row in no split: `when` is empty" in task.notes
    assert task.split_imitates == f"rows later than the training rows (`when` from {min(used['test'])} on)"
    assert task.split_name == "time"


def test_a_molecule_that_is_measured_again_stays_where_it_was_first(tmp_path):
    rows = [f"{alkane(n)},{2000 + n},{n}" for n in range(20)]
    rows += [f"{alkane(0)},2030,5", f"{alkane(18)},2031,6"]
    task = load(tmp_path, "smiles,when,y", rows, split="time", time_column="when")
    part_of = {row: part for part, found in task.split_indices.items() for row in found.tolist()}
    assert (part_of[20], part_of[21]) == ("train", part_of[18])
    assert "2 rows of compounds that were measured before stay with the first of them" in task.notes
    assert not any("more than one split" in note for note in task.notes)


@pytest.mark.parametrize(
    ("whens", "said"),
    [
        (["03/04/2024"] * 12, "a.csv:2: `when` is `03/04/2024`; accepted: dates such as 2024-05-31"),
        (["2024"] * 6 + ["2024-05-01"] * 6, "`when` is `2024`; accepted"),
        (["2023"] * 6 + ["2024"] * 6, "`when` has 2 different times; a split needs three"),
    ],
)
def test_times_that_cannot_be_told_apart_are_refused(tmp_path, whens, said):
    rows = [f"{alkane(n)},{when},{n}" for n, when in enumerate(whens)]
    with pytest.raises(DataError, match=said):
        load(tmp_path, "smiles,when,y", rows, split="time", time_column="when")


def test_texts_are_split_by_group_and_time_too(tmp_path):
    rows = [f"text {n % 15},{2000 + n},{n}" for n in range(30)]
    for options in ({"split": "time", "time_column": "when"}, {"split": "group", "group_column": "when"}):
        task = load(tmp_path, "text,when,y", rows, text_column="text", **options)
        keys = [set(keys) for keys in (task.training_keys, task.validation_keys, task.test_keys)]
        assert sum(map(len, keys)) == len(set.union(*keys))
