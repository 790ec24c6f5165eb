"""Numbers as people read them; what each must look like is written out by hand."""

import math
from collections.abc import Callable

import pytest

from exlm_cli import format as formats
from exlm_cli.format import NOT_DEFINED, name_some, number_repeated, printable, shorten

CASES: dict[Callable[..., str], dict[object, str]] = {
    formats.format_number: {
        0.0: "0.0000", 0.81234: "0.8123", -2.5: "-2.5000", 0.00012345: "0.0001234", 12345678.9: "1.235e+07",
        math.nan: NOT_DEFINED, None: NOT_DEFINED,
    },
    formats.format_measure: {0.00004: "0.0000", 2.5: "2.5000", 12345.67: "12,345.7", math.nan: NOT_DEFINED},
    formats.format_percent: {
        0.0: "0.0 %", 1.0: "100.0 %", 0.8521: "85.2 %", 0.00996: "1.0 %", 0.0034: "0.34 %", 0.000096: "0.0096 %",
        1e-6: "0.00010 %", 5e-8: "<0.0001 %", math.nan: NOT_DEFINED,
    },
    formats.format_ratio: {0.0225: "2.25 %", 0.15: "15 %", 0.387: "38.7 %", (0.0, 0.6): "0-60 %"},
    formats.format_bytes: {999: "999 bytes", 1234: "1.23 kB", 999_999: "1 MB", 50_500_000: "50.5 MB", 1.3e9: "1.3 GB"},
    formats.format_plain: {1280069: "1280069", 61.0: "61", 7.8e-8: "7.8e-08", 1 / 3: "0.3333333333", None: ""},
    formats.format_duration: {3723.4: "1:02:03", 90061: "1 day, 1:01:01"},
    formats.format_span: {
        0.25: "0.2 seconds", 90: "90 seconds", 150: "2.5 minutes", 3600: "60 minutes", 4 * 3600: "4.0 hours",
        40 * 3600: "40 hours", 9.96 * 86400: "10 days", 1234.5 * 86400: "1,200 days",
    },
    formats.format_value: {True: "yes", 1234: "1,234", 0.5: "0.5000", None: NOT_DEFINED, "text": "text"},
}  # fmt: skip


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_values_are_written_as_people_read_them(function):
    assert {value: function(value) for value in CASES[function]} == CASES[function]


def test_long_texts_are_cut_and_what_a_terminal_would_obey_is_escaped():
    assert shorten("internationalisation", 6) == "inter…"
    assert shorten("short", 5) == "short"
    assert printable("a\x1b[31mb\n\u202e\xa0c é 字") == "a\\x1b[31mb\\n\\u202e\\xa0c é 字"


def test_names_of_a_list_are_few_and_short():
    assert name_some("abc", limit=3) == "a, b, c"
    assert name_some(range(9)) == "0, 1, 2, 3, 4 and 4 more"
    assert name_some(["x" * 10_000, "y"]) == f"{'x' * 66}…{'x' * 33}, y"


def test_a_repeated_name_gets_a_number():
    assert number_repeated(["a", "b", "a", "a"]) == ["a", "b", "a-2", "a-3"]
    assert number_repeated(["a", "a", "a-2", "a-2"]) == ["a", "a-3", "a-2", "a-2-2"]
