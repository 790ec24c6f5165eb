"""Scalars are text, what is no recipe is refused, and what is dumped is read back."""

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exlm_cli.config.yaml import describe_yaml_error, dump_yaml, parse_yaml, show_value

TEXTS = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None), ("", None), ("'null'", "null"), ("''", ""),
        ("[08, null]", ["08", None]),
        *((text, text) for text in ("1e-4", "12", "no", "1:30", "2025-01-01", "0x10", "<<")),
    ],
)  # fmt: skip
def test_every_scalar_but_null_is_text(text, value):
    assert parse_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "line 3, column 1: key `a` is given a second time"),
        ("{a: {b: 1, b: 2}}", "line 1, column 12: key `b` is given a second time"),
        ("? [a]\n: 1", "line 1, column 3: a key must be one word"),
        ("a: &x 1\nb: *x", "line 2, column 4: quote a text that begins with *"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_is_refused_with_its_place(text, message):
    with pytest.raises(yaml.YAMLError) as caught:
        parse_yaml(text)
    assert describe_yaml_error(caught.value) == message


@pytest.mark.parametrize("text", ["[" * 500, r'"\UFFFFFFFF"', "!!python/object:os.system x", "a: \x00"])
def test_a_damaged_or_hostile_file_of_a_run_is_an_error_of_yaml_and_runs_nothing(text):
    with pytest.raises(yaml.YAMLError):
        parse_yaml(text)


@settings(max_examples=50)
@example(["a b", " x ", "a: b #c", "", "-", "1e-4", "no", "null", "to do...", "..."])
@given(st.recursive(st.none() | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=8))
def test_every_text_is_read_back_as_it_was_dumped(value):
    assert parse_yaml(dump_yaml({"key": value})) == {"key": value}


def test_a_value_is_shown_on_one_line_as_people_write_it():
    assert show_value(["8", "1e-4", None, "", 8, 1e-5, True]) == "[8, 1e-4, null, '', 8, 1e-05, true]"
    assert show_value({"optim.lr": (0.1, {}), "a": "x\n y"}) == "{optim.lr: [0.1, {}], a: x y}"
