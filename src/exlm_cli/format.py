"""How numbers and strings are written in messages, tables and figures. Files for programs hold numbers unrounded."""

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial

NOT_DEFINED = "not defined"
"""In place of a value that does not exist, such as the rank correlation of constant predictions."""

_NAME_CHARACTERS = 100

NO_VALUE = "-"
"""Text of a table cell for which nothing was measured."""


def format_number(value: float | None, *, beside: float | None = None) -> str:
    """Return a score or loss: four decimals, or four digits where the value is very small or large.

    Args:
        value: None and NaN are not defined.
        beside: Write the value like this one, as a deviation is written like its mean.
    """
    if value is None or math.isnan(value):
        return NOT_DEFINED
    magnitude = abs(value if beside is None else beside)
    return f"{value:.4f}" if magnitude == 0 or 1e-3 <= magnitude < 1e6 else f"{value:.4g}"


def format_fixed(value: float | None, decimals: int) -> str:
    """Return a value with a given number of decimals."""
    return NOT_DEFINED if value is None or math.isnan(value) else f"{value:.{decimals}f}"


def decimals(number: int) -> Callable[[float], str]:
    """Return a function that writes values with a number of decimals."""
    return partial(format_fixed, decimals=number)


def format_measure(value: float | None) -> str:
    """Return a validation metric with four decimals; from 1,000 on with one decimal and commas."""
    if value is None or math.isnan(value):
        return NOT_DEFINED
    return f"{value:.4f}" if value < 1000 else f"{value:,.1f}"


def format_plain(value: float | None) -> str:
    """Return a number for programs: whole, or with ten digits; nothing for None and NaN."""
    if value is None or math.isnan(value):
        return ""
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def format_percent(share: float | None, decimals: int | None = None) -> str:
    """Return a share as a percentage: one decimal from 1 % on, two digits below, never an exponent.

    `85.2 %`, `3.4 %`, `0.34 %`, `0.0052 %`; `<0.0001 %` below that. `decimals`, if given, is the number of decimals.
    """
    if share is None or math.isnan(share):
        return NOT_DEFINED
    if decimals is not None:
        return f"{100 * share:.{decimals}f} %"
    percent = float(f"{100 * share:.1e}") if abs(share) < 0.01 else 100 * share
    if 0 < abs(percent) < 1e-4:
        return "<0.0001 %"
    decimals = 1 if percent == 0 or abs(percent) >= 1 else 1 - math.floor(math.log10(abs(percent)))
    return f"{percent:.{decimals}f} %"


def format_ratio(ratio: float | tuple[float, float]) -> str:
    """Return a mask ratio as a percentage with the digits that it was given with: `15 %`, `38.7 %`, `0-60 %`."""
    shares = ratio if isinstance(ratio, tuple) else (ratio,)
    return f"{'-'.join(f'{100 * share:g}' for share in shares)} %"


def format_masks(at: float) -> str:
    """Return a number of masks or a mask ratio, as `train.validate_at` has it: `1 mask`, `5 masks`, `38.7 %`."""
    return format_number_of(int(at), "mask") if at >= 1 else format_ratio(at)


def describe_ratio(ratio: float | tuple[float, float]) -> str:
    """Return a mask ratio as a recipe has it: `0.387`, `[0, 0.6]`."""
    return f"[{ratio[0]:g}, {ratio[1]:g}]" if isinstance(ratio, tuple) else f"{ratio:g}"


def format_count(number: float) -> str:
    """Return a whole number with commas: `1,234,567`."""
    return f"{number:,.0f}"


def format_number_of(number: int, thing: str) -> str:
    """Return `1 thread` or `2 threads`."""
    return f"{format_count(number)} {thing}{'' if number == 1 else 's'}"


def format_counts(numbers: Iterable[int]) -> str:
    """Return the sizes of splits: `1,210/151/152`."""
    return "/".join(map(format_count, numbers))


def format_large(number: float) -> str:
    """Return a large number with three digits: 5,230,000 is `5.23 M`; below 1,000 it is written in full."""
    return _scale(number, ("B", "M", "k")) or format_count(number)


def format_parameters(number: float) -> str:
    """Return a number of parameters in millions with one decimal, as the paper does: `50.5 M`."""
    return f"{number / 1e6:.1f} M"


def format_duration(seconds: float) -> str:
    """Return hours, minutes and seconds: `1:02:03`, days before them where there are any."""
    return str(timedelta(seconds=round(seconds)))


def format_span(seconds: float) -> str:
    """Return a time that is only estimated, with two digits: `40 seconds`, `3.5 hours`, `1,500 days`."""
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds")):
        # two days are still hours
        if seconds >= 2 * size or unit == "seconds":
            rounded = float(f"{seconds / size:.2g}")
            return f"{rounded:,.1f} {unit}" if rounded < 10 else f"{rounded:,.0f} {unit}"
    raise AssertionError("seconds fit everything")


def format_bytes(num_bytes: float) -> str:
    """Return a size in decimal units: `82.3 MB`; below 1,000 in bytes."""
    return _scale(num_bytes, ("GB", "MB", "kB")) or f"{num_bytes:.0f} bytes"


def format_value(value: object) -> str:
    """Return a value of any type as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return format_count(value)
    if value is None or isinstance(value, float):
        return format_number(value)
    return str(value)


def _scale(number: float, units: tuple[str, str, str]) -> str:
    """Return a number in the largest of the units 1e9, 1e6 and 1e3 that it reaches; empty if it reaches none."""
    rounded = float(f"{number:.2e}")
    for size, unit in zip((1e9, 1e6, 1e3), units, strict=True):
        if rounded >= size:
            return f"{rounded / size:.3g} {unit}"
    return ""


def shorten(text: str, max_characters: int) -> str:
    """Cut a string to a number of characters, the last of them an ellipsis."""
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


def name_some(names: Iterable[object], *, limit: int = 5) -> str:
    """Return `1, 2, 3 and 4 more`; long names are cut."""
    listed = [str(name) for name in names]
    rest = f" and {len(listed) - limit:,} more" if len(listed) > limit else ""
    return ", ".join(shorten_middle(name, _NAME_CHARACTERS) for name in listed[:limit]) + rest


def number_repeated(names: Sequence[str]) -> list[str]:
    """Return names of files or tables that are all different: `scores`, `scores-2`, `scores-3`."""
    numbered: list[str] = []
    for name in names:
        number, new = 1, name
        while new in numbered or (number > 1 and new in names):
            number += 1
            new = f"{name}-{number}"
        numbered.append(new)
    return numbered


def shorten_middle(text: str, max_characters: int) -> str:
    """Shorten a string to a length: an ellipsis replaces its middle, since messages end with the reason."""
    if len(text) <= max_characters:
        return text
    head = max_characters * 2 // 3
    return f"{text[:head]}…{text[head + 1 - max_characters :]}"


def printable(text: str) -> str:
    r"""Return a text on one line: a line break, bidirectional mark or other control character as `\n` or `\x1b`."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can hold a text; Python and JSON also allow lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
