"""Laying values over each other, worked out by hand."""

from exlm_cli.config.overrides import Layers

BASE = Layers.read_from({"model": {"width": 8, "rope": "2d"}, "train": [1, 2]}, "base.yaml")
OVER = Layers.read_from({"model": {"width": 16}, "train": [3]}, "--set")


def test_sections_are_merged_key_by_key_and_lists_are_replaced() -> None:
    assert OVER.over(BASE).values == {"model": {"width": 16, "rope": "2d"}, "train": [3]}


def test_a_section_replaces_a_value_and_a_value_a_section() -> None:
    assert Layers.read_from({"model": 3}, "x").over(BASE).values["model"] == 3
    assert BASE.over(Layers.read_from({"model": 3}, "x")).values["model"] == {"width": 8, "rope": "2d"}


def test_the_origin_of_a_key_is_where_it_was_given_last() -> None:
    both = OVER.over(BASE)
    assert both.origin("model.width") == "--set"
    assert both.origin("model.rope") == "base.yaml"
    assert both.origin("model.rope.no.such") == "base.yaml"
    assert both.origin("optim") is None


def test_a_value_is_found_by_its_path() -> None:
    assert BASE.value("model.width") == 8
    assert BASE.value("model.none") is None
    assert BASE.value("train.width") is None


def test_top_level_keys_can_be_left_out() -> None:
    assert BASE.without(["train", "name"]).values == {"model": {"width": 8, "rope": "2d"}}
