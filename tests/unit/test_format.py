"""Numbers as people read them; what each must look like is written out by hand."""

import math

import pytest

from exlm_cli.format import (
    NO_VALUE,
    NOT_DEFINED,
    format_bytes,
    format_count,
    format_counts,
    format_duration,
    format_in_percent,
    format_large,
    format_measure,
    format_number,
    format_parameters,
    format_percent,
    format_ratio,
    format_spread,
    format_value,
    printable,
    shorten,
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.0000"),
        (0.81234, "0.8123"),
        (-2.5, "-2.5000"),
        (0.00012345, "0.0001234"),
        (12345678.9, "1.235e+07"),
        (math.nan, NOT_DEFINED),
        (None, NOT_DEFINED),
    ],
)
def test_scores_have_four_decimals_or_four_digits(value: float | None, shown: str) -> None:
    assert format_number(value) == shown


def test_validation_figures_have_four_decimals_and_large_ones_commas() -> None:
    assert [format_measure(value) for value in (0.00004, 2.5, 12345.67)] == ["0.0000", "2.5000", "12,345.7"]
    assert format_measure(math.nan) == NOT_DEFINED


def test_a_deviation_is_written_like_its_mean() -> None:
    assert format_spread(0.8123, 0.0101) == "0.8123 ± 0.0101"
    assert format_spread(12345678.9, 0.5) == "1.235e+07 ± 0.5"
    assert format_spread(0.8123, None) == format_spread(0.8123, math.nan) == "0.8123"


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.0, "0.0 %"),
        (1.0, "100.0 %"),
        (0.8521, "85.2 %"),
        (0.00996, "1.0 %"),
        (0.0034, "0.34 %"),
        (0.000096, "0.0096 %"),
        (1e-6, "0.00010 %"),
        (5e-8, "<0.0001 %"),
        (math.nan, NOT_DEFINED),
    ],
)
def test_percentages_keep_two_digits_and_have_no_exponent(share: float, shown: str) -> None:
    assert format_percent(share) == shown


def test_scores_of_the_paper_are_in_percent_without_the_sign() -> None:
    assert format_in_percent(0.85213) == format_in_percent(0.85213, math.nan) == "85.2"
    assert format_in_percent(0.85213, 0.0042) == "85.2 ±0.4"
    assert format_in_percent(None) == format_in_percent(math.nan) == NO_VALUE


def test_mask_ratios_keep_the_digits_that_they_were_given_with() -> None:
    assert [format_ratio(ratio) for ratio in (0.0225, 0.15, 0.387)] == ["2.25 %", "15 %", "38.7 %"]


@pytest.mark.parametrize(
    ("number", "large", "size"),
    [
        (999, "999", "999 bytes"),
        (1234, "1.23 k", "1.23 kB"),
        (999_999, "1 M", "1 MB"),
        (50_500_000, "50.5 M", "50.5 MB"),
        (1.3e9, "1.3 B", "1.3 GB"),
    ],
)
def test_large_numbers_have_three_digits_and_a_unit(number: float, large: str, size: str) -> None:
    assert format_large(number) == large
    assert format_bytes(number) == size


def test_counts_have_commas() -> None:
    assert format_count(1234567) == "1,234,567"
    assert format_count(12345.6) == "12,346"
    assert format_parameters(649_508) == "0.6 M"
    assert format_counts([1210, 151, 152]) == "1,210/151/152"


def test_durations_are_hours_minutes_and_seconds() -> None:
    assert format_duration(3723.4) == "1:02:03"
    assert format_duration(90061) == "1 day, 1:01:01"


def test_values_of_any_type_are_read_by_people() -> None:
    assert [format_value(value) for value in (True, 1234, 0.5, None, "text")] == [
        "yes",
        "1,234",
        "0.5000",
        NOT_DEFINED,
        "text",
    ]


def test_long_texts_are_cut_and_what_a_terminal_would_obey_is_escaped() -> None:
    assert shorten("internationalisation", 6) == "inter…"
    assert shorten("short", 5) == "short"
    assert printable("a\x1b[31mb\n\u202e\xa0c é 字") == "a\\x1b[31mb\\n\\u202e\\xa0c é 字"
