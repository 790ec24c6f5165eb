"""Scalars are text, refusals, and that what is dumped is read back."""

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from exlm_cli.config.yaml import describe_yaml_error, dump_yaml, parse_yaml

# a reader of files is given UTF-8, which has no surrogates
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None), ("", None), ("~", None), ("'null'", "null"), ("''", ""), ("'8'", "8"),
        ("[08, null]", ["08", None]),
        *((text, text) for text in ("1e-4", "12", "no", "true", "1:30", "2025-01-01", "0x10", "<<", "9" * 5000)),
    ],
)  # fmt: skip
def test_every_scalar_but_null_is_text(text, value):
    assert parse_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "line 3, column 1: key `a` is given a second time"),
        ("{a: {b: 1, b: 2}}", "line 1, column 12: key `b` is given a second time"),
        ("a: &x 1\nb: *x", "line 2, column 4: alias `*x` is not accepted; quote a text that begins with *"),
        ("!!python/object:os.system x", "line 1, column 1: tag `tag:yaml.org,2002:python/object:os.system` is not "
         "accepted; quote a text that begins with !"),
        ("? [a]\n: 1", "line 1, column 3: a key must be one word"),
        ("a: [1", "line 1, column 6: expected ',' or ']', but got '<stream end>'"),
        ("[" * 5000, "lists or mappings are nested too deeply"),
        (r'"\U00110000"', "a value cannot be read: chr() arg not in range(0x110000)"),
        (r'"\UFFFFFFFF"', "a value cannot be read: Python int too large to convert to C int"),
        ("a: \x00", 'unacceptable character #x0000: special characters are not allowed in "<unicode string>", '
         "position 3"),
    ],
)  # fmt: skip
def test_what_a_recipe_has_no_use_for_is_refused_with_its_place(text, message):
    with pytest.raises(yaml.YAMLError) as caught:
        parse_yaml(text)
    assert describe_yaml_error(caught.value) == message


@settings(max_examples=50)
@example(["a\x85b", "\u2028", "\u2029x", "\r\n", "\ufeffx", " x ", "\t", "a: b #c", "", "-", "1e-4", "no"])
@given(
    st.recursive(
        st.none() | TEXTS,
        lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
        max_leaves=8,
    )
)
def test_every_text_is_read_back_as_it_was_dumped(value):
    for on_one_line in (False, True):
        assert parse_yaml(dump_yaml(value, on_one_line=on_one_line)) == value


@settings(max_examples=50)
@given(st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_pydantic_types_a_number_that_was_dumped_as_the_same_value(value):
    for on_one_line in (False, True):
        read = TypeAdapter(type(value)).validate_python(parse_yaml(dump_yaml(value, on_one_line=on_one_line)))
        assert (read, type(read)) == (value, type(value))


def test_in_messages_a_text_like_a_number_has_no_quotes():
    assert dump_yaml(["8", "1e-4", "true", "null", "", 8], on_one_line=True) == "[8, 1e-4, true, 'null', '', 8]\n"
    assert dump_yaml("8") == "'8'\n"


@pytest.mark.parametrize("text", ["to do...", "...", "to do...\n", ":..."])
def test_dots_at_the_end_of_a_text_are_kept(text):
    for value in (text, {"key": text}, [text]):
        dumped = dump_yaml(value)
        assert dumped.endswith("\n")
        assert parse_yaml(dumped) == value


@settings(max_examples=50)
@given(TEXTS | st.floats(allow_nan=False, allow_infinity=False))
def test_a_yaml_1_1_reader_reads_back_the_same_scalar(value):
    assert yaml.safe_load(dump_yaml({"key": value})) == {"key": value}
