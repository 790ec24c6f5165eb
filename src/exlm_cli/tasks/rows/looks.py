"""What a cell of a label column looks like that is no number: refused, because to guess is to err.

`_LOOKS` is the table; `labels.py` reads numbers, such as `-1.5`, `.5` and `2e-3`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_SIGN = "[-+\N{MINUS SIGN}]?"
_DIGITS = r"(?:\d+(?:[.,]\d+){0,2}|[.,]\d+)"
_NUMBER = rf"{_SIGN}{_DIGITS}(?:[eE]{_SIGN}\d+)?"
_UNITS = (
    r"[numkcpfµμ]?(?:M|mol|molar|g|L|l|m|s|V|J|eV|cal|Da|U|IU|Hz|W)|h|hr|hrs|hours?|min|days?|d|°[CFK]?|Å²?"
    r"|ppm|ppb|bp|rpm|x|X|fold|eq|equiv|wt|v/v|w/w|log|units?|[$€£¥₹]|USD|EUR|GBP|CHF"
)
_MONTHS = "(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_PM = r"(?:±|\+/-|\+-|\+/\N{MINUS SIGN})"


MAYBE_THOUSANDS = re.compile(rf"{_SIGN}[1-9]\d{{0,2}}\.\d{{3}}")
"""A number whose point may separate thousands."""


@dataclass(frozen=True)
class Look:
    """What a cell looks like.

    Attributes:
        cells: Pattern of the whole cell.
        what: Its name, with an article.
        advice: What to write instead.
        may_be_bins: A few such texts, like `<10` and `10-20`, can be the names of classes.
    """

    cells: re.Pattern[str]
    what: str
    advice: str
    may_be_bins: bool = False


def _look(pattern: str, what: str, advice: str, *, may_be_bins: bool = False) -> Look:
    return Look(re.compile(pattern), what, advice, may_be_bins)


THOUSANDS = _look(
    rf"{_SIGN}[1-9]\d{{0,2}}(?P<mark>[,'’`´_\s])\d{{3}}(?:(?P=mark)\d{{3}})*(?:\.\d+)?",
    "a number with separators of thousands",
    "write it without separators, such as 1355",
)
DECIMAL_COMMA = _look(
    rf"{_SIGN}\d*,\d+(?:[eE]{_SIGN}\d+)?",
    "a number with a decimal comma",
    "`task.decimal_comma=true` reads numbers with a decimal comma",
)
LIMIT = _look(
    rf"(?:[<>≤≥~≈∼≲≳]|(?i:ca\.|ca |approx|about |under |over |up to |(?:less|more|greater) than )).*?{_NUMBER}.*",
    "a limit or an estimate",
    "write the number that stands for it, or leave the cell empty",
    may_be_bins=True,
)
_LOOKS = (
    THOUSANDS,
    DECIMAL_COMMA,
    _look(
        rf"{_SIGN}\d{{1,3}}(?:\.\d{{3}})+(?:,\d+|\.\d{{3}})",
        "a number with points between thousands",
        "write it without separators of thousands",
    ),
    _look(
        rf"\d{{4}}([-/.])\d{{1,2}}\1\d{{1,2}}(?:[ T].*)?|\d{{1,2}}([-/.])\d{{1,2}}\2(?:\d{{2}}|\d{{4}})(?: .*)?"
        rf"|\d{{1,2}}[- .]*{_MONTHS}(?:[- .,]*\d+)?|{_MONTHS}[- .]\d+(?:[-, ]+\d+)?",
        "a date",
        "a spreadsheet may have made it of a number or a range: export the column as text",
    ),
    LIMIT,
    _look(
        rf"{_NUMBER}\s*(?:{_PM}\s*{_NUMBER}.*|\(\s*{_PM}?\s*{_NUMBER}\s*\).*)",
        "a number with its error",
        "write the number alone, and the error into a column of its own",
    ),
    _look(
        rf"{_NUMBER}\s*(?:[x×*·⋅]\s*10\s*(?:\^|\*\*)?\s*{_SIGN}[\d⁻⁺⁰¹²³⁴-⁹]+|[eE]\s*{_SIGN}\s*\d+|[dD]{_SIGN}\d+)"
        rf"|10\s*(?:\^|\*\*)\s*{_SIGN}[\d.]+|10[⁻⁺]?[⁰¹²³⁴-⁹]+",
        "a number with a power of ten",
        "write it as 1.2e-3",
    ),
    _look(
        rf"{_NUMBER}\s*(?:[-–—\N{{MINUS SIGN}}/:;…]|to|\.\.+)\s*{_NUMBER}(?:\s*(?:%|{_UNITS}))?",
        "a range or a ratio",
        "write one number that stands for it, such as the middle of the range",
        may_be_bins=True,
    ),
    _look(rf"{_NUMBER}\s*[%‰].*", "a percentage", "write the number alone: 12 for 12 %"),
    _look(
        rf"{_NUMBER}\s*(?:{_UNITS})(?:[\s/·⋅*^²³⁻¹\N{{MINUS SIGN}}-].*)?|[$€£¥₹]\s*{_NUMBER}",
        "a number with a unit",
        "write numbers alone, all in the same unit, and put the unit into the name of the column",
    ),
    _look(
        rf"(?:[^\w\s]{{1,3}}|\s){{0,3}}{_NUMBER}\D*",
        "a number with something else",
        "write the number alone",
        may_be_bins=True,
    ),
)


def look_of(cell: str) -> Look | None:
    """Return what a cell that is no number looks like; None where it does not look like one."""
    return next((look for look in _LOOKS if look.cells.fullmatch(cell)), None)


def looks_of(cells: Iterable[str]) -> dict[str, Look]:
    """Return the looks of different cells that are no numbers, of one column, if they look like one.

    `1,355` has a decimal comma where another cell of the column, like `0,5`, can have nothing else.
    """
    looks = {cell: look for cell in dict.fromkeys(cells) if (look := look_of(cell)) is not None}
    if DECIMAL_COMMA in looks.values():
        looks |= {cell: DECIMAL_COMMA for cell in looks if DECIMAL_COMMA.cells.fullmatch(cell)}
    return looks


def with_decimal_point(cell: str) -> str:
    """Return `1,5` as `1.5`, and any other cell as it is."""
    return cell.replace(",", ".") if DECIMAL_COMMA.cells.fullmatch(cell) else cell
