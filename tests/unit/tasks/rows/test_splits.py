"""Splits follow their rules: worked examples by hand, and what must hold of any split."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm_cli.config.tasks import GlueTaskConfig
from exlm_cli.errors import DataError
from exlm_cli.tasks.base import SplitIndices
from exlm_cli.tasks.rows.splits import (
    choose_rows,
    read_split_file,
    split_at_random,
    split_balanced,
    split_by_scaffold,
    split_fingerprint,
)

SCAFFOLDS = st.lists(st.integers(0, 8), min_size=10, max_size=80)
CLASSES = st.lists(st.sampled_from("abc"), min_size=10, max_size=200)


def as_lists(indices: SplitIndices) -> dict[str, list[int]]:
    return {str(name): rows.tolist() for name, rows in indices.items()}


@pytest.mark.parametrize(
    ("scaffolds", "parts"),
    [
        # groups by size, the later of equals first: a (0 1 4 6), b (2 5), e (9), d (8), f (7), c (3); train takes up to
        # 8 rows: a, b, e, d; valid up to 9 with them: f; test: c
        ("aabcabafde", {"train": [0, 1, 2, 4, 5, 6, 8, 9], "valid": [7], "test": [3]}),
        # a (5 rows) fills train to 5, b (4) would make it 9 > 8 and valid too 9 <= 9: b goes to valid, c (1) to train
        ("aaaaabbbbc", {"train": [0, 1, 2, 3, 4, 9], "valid": [5, 6, 7, 8]}),
    ],
)
def test_scaffold_splits_of_ten_rows_by_hand(scaffolds, parts):
    assert as_lists(split_by_scaffold(scaffolds)) == parts


@pytest.mark.parametrize(
    ("scaffolds", "uni_mol", "trained"),
    [
        # a (9 of 10) is more than 8: Uni-Mol's rule leaves it to valid, and b alone trains
        ("aaaaaaaaab", {"train": 1, "valid": 9}, {"train": 9, "valid": 1}),
        # a (17 of 20) trains; of the 3 others valid takes 1, test 2
        ("a" * 17 + "bcd", {"train": 3, "valid": 17}, {"train": 17, "valid": 1, "test": 2}),
        # no scaffold of the others is as small as half the room: valid takes the first, and test has none
        ("a" * 18 + "bb", {"train": 2, "valid": 18}, {"train": 18, "valid": 2}),
        # exactly 80 % fits
        ("a" * 8 + "bc", {"train": 8, "valid": 1, "test": 1}, {"train": 8, "valid": 1, "test": 1}),
    ],
)
def test_a_scaffold_too_large_for_train_is_trained_on_where_that_is_asked_for(scaffolds, uni_mol, trained):
    def sizes(parts: SplitIndices) -> dict[str, int]:
        return {str(split): len(rows) for split, rows in parts.items()}

    assert sizes(split_by_scaffold(scaffolds)) == uni_mol
    for parts in (split_by_scaffold(scaffolds, trains_on_largest=True), split_balanced(scaffolds, 0)):
        assert sizes(parts) == trained
        assert {scaffolds[row] for row in parts["train"]} == {"a"}


def test_balanced_split_puts_no_large_group_behind_a_small_one():
    # of 40 rows a group is large from 3 on; the two large ones fit into train in either order
    keys = ["big"] * 20 + ["large"] * 8 + [f"single {i}" for i in range(12)]
    for seed in range(20):
        parts = split_balanced(keys, seed)
        assert set(range(28)) <= set(parts["train"].tolist())
        assert [len(parts[name]) for name in ("train", "valid", "test")] == [32, 4, 4]


def assert_keys_are_whole(parts: SplitIndices, keys: Sequence[object]) -> None:
    """Every row is in one split, and so are all rows of a key."""
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(keys)))
    homes = [{keys[row] for row in rows} for rows in parts.values()]
    assert sum(map(len, homes)) == len(set(keys))


@settings(max_examples=50)
@given(scaffolds=SCAFFOLDS, seed=st.integers(0, 3), is_balanced=st.booleans())
def test_no_scaffold_is_in_two_splits(scaffolds, seed, is_balanced):
    parts = split_balanced(scaffolds, seed) if is_balanced else split_by_scaffold(scaffolds)
    assert_keys_are_whole(parts, scaffolds)
    most = max(Counter(scaffolds).values()) if is_balanced else 0
    assert len(parts["train"]) <= max(0.8 * len(scaffolds), most)
    if most <= 0.8 * len(scaffolds):
        assert 10 * len(parts["valid"]) <= (1 if is_balanced else 9) * len(scaffolds)


@settings(max_examples=50)
@given(classes=CLASSES, seed=st.integers(0, 5))
def test_a_stratified_split_gives_each_split_its_share_of_each_class(classes, seed):
    parts = split_at_random(len(classes), seed, classes)
    assert_keys_are_whole(parts, range(len(classes)))
    for name, share in (("train", 0.8), ("valid", 0.1), ("test", 0.1)):
        counts = Counter(classes[row] for row in parts.get(name, []))  # type: ignore[call-overload]
        for label, total in Counter(classes).items():
            # the rounding of the whole may move a border by one row of each class
            assert abs(counts[label] - share * total) <= 2


@settings(max_examples=50)
@given(keys=st.lists(st.integers(0, 30), min_size=10, max_size=120), seed=st.integers(0, 3))
def test_a_random_split_of_compounds_parts_none_and_is_80_10_10_of_rows_where_each_has_one(keys, seed):
    assert_keys_are_whole(split_at_random(len(keys), seed, compounds=keys), keys)
    order = np.random.default_rng(seed).permutation(len(keys))
    cut = np.split(order, [8 * len(keys) // 10, 9 * len(keys) // 10])
    for compounds in (None, range(len(keys))):
        alone = split_at_random(len(keys), seed, compounds=compounds)
        assert [rows.tolist() for rows in alone.values()] == [sorted(part.tolist()) for part in cut]


def test_a_split_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"train": [4, 0], "valid": [2], "test": [1], "sha256": "not read"}))
    assert as_lists(read_split_file(path, 5)) == {"train": [0, 4], "valid": [2], "test": [1]}
    for test in ({}, {"test": []}, {"test": None}):
        path.write_text(json.dumps({"indices": {"train": [4, 0], "valid": [2], **test}}))
        assert as_lists(read_split_file(path, 5)) == {"train": [0, 4], "valid": [2]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "`train` must be a list"),
        ('{"train": [0], "valid": []}', "`valid` must be a list"),
        ('{"train": [0], "valid": [5]}', "`valid` names row 5"),
        ('{"train": [0, 1], "valid": [1]}', "row 1 is in `train` and in `valid`"),
        ("{", "not readable as JSON"),
        (None, ""),
    ],
)
def test_a_split_file_that_cannot_be_followed_is_refused(tmp_path, content, message):
    path = tmp_path / "split.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=re.escape(f"{path}: {message}")):
        read_split_file(path, 5)


def test_the_fingerprint_is_the_hash_of_the_rows():
    indices = {"test": np.array([1]), "train": np.array([0, 2])}
    expected = hashlib.sha256(b'{"train":[0,2],"test":[1]}').hexdigest()
    assert split_fingerprint(indices) == expected
    assert split_fingerprint({**indices, "train": np.array([2, 0])}) != expected


def test_training_rows_are_drawn_once_each_in_order_by_the_split_seed_alone():
    def draw(num_rows: int, **values: int) -> list[int]:
        return choose_rows(GlueTaskConfig(name="glue/rte", **values), "train", num_rows)[0].tolist()

    assert draw(5) == draw(5, max_rows=9) == [0, 1, 2, 3, 4]
    drawn = draw(1000, max_rows=30)
    assert (len(set(drawn)), sorted(drawn)) == (30, drawn)
    assert drawn == draw(1000, max_rows=30) != draw(1000, max_rows=30, split_seed=1)
