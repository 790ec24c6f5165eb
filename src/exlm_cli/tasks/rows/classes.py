"""Names of classes: which one is positive, which look alike, and which are lists of labels."""

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Sequence

from exlm_cli.format import name_some
from exlm_cli.tasks.rows.table import Parser

_POSITIVE = (
    "active", "hit", "binder", "toxic", "positive", "pos", "yes", "true", "high", "pass", "passed", "mutagenic",
    "blocker",
)  # fmt: skip
_NEGATIVE = (
    "inactive", "negative", "neg", "no", "not", "non", "false", "low", "none", "fail", "failed", "miss", "absent",
    "safe", "decoy", "control", "-",
)  # fmt: skip
_DENIALS = ("in", "im", "un", "non", "non-", "non ", "not ", "not-", "no ")


def find_positive(names: tuple[str, str]) -> str | None:
    """Return the positive one of two classes by their names; None where the names do not tell.

    `inactive`, `non-toxic` and `not toxic` deny `active` and `toxic`. Else one of the names is in a short list. Words
    that both names begin or end with are left out: of `BBB+` and `BBB-`, the signs tell.
    """
    words = [re.findall(r"[^\W_]+|[-+]$", name.casefold().replace("\N{MINUS SIGN}", "-")) for name in names]
    for end in (0, -1):
        while all(words) and words[0][end] == words[1][end]:
            for of_name in words:
                del of_name[end]
    first, second = (" ".join(of_name) for of_name in words)
    denies = [
        any(one == f"{word}{other}".strip() for word in _DENIALS) for one, other in ((first, second), (second, first))
    ]
    for is_negative in (denies, [first in _NEGATIVE, second in _NEGATIVE], [second in _POSITIVE, first in _POSITIVE]):
        if is_negative[0] != is_negative[1]:
            return names[1] if is_negative[0] else names[0]
    return None


def describe_alike(names: Sequence[str], number: Parser) -> list[str]:
    """Return warnings on classes that differ in capital letters, in what nobody sees, or in how a number is written."""
    kinds: dict[str, list[str]] = {}
    first: dict[Hashable, str] = {}
    for name in names:
        seen = _as_seen(name)
        keys = {
            "differ in capital letters alone": name.casefold(),
            "look alike": seen,
            "are equal as numbers": number(name),
        }
        for kind, key in keys.items():
            other = first.setdefault((kind, key), name)
            if key is not None and other != name:
                marks = " ".join(f"U+{ord(c):04X}" for c in sorted(set(other) ^ set(name)) if not c.isascii())
                kinds.setdefault(kind, []).append(f"`{other}` and `{name}`" + (f" ({marks})" if marks else ""))
                break
    return [f"warning: classes that {kind}: {name_some(pairs, limit=3)}" for kind, pairs in kinds.items()]


def find_list(names: Sequence[str]) -> str | None:
    """Return a class that is a list of labels, such as `[0, 1, 0]` or `cat;dog` where `cat` is in another class too."""
    for delimiter in ";|,":
        parts = {name: {part.strip("[](){}'\" ") for part in name.split(delimiter)} for name in names}
        uses = Counter(part for found in parts.values() for part in found)
        for name, found in parts.items():
            if delimiter in name and any(uses[part] > 1 for part in found):
                return name
    return None


def _as_seen(text: str) -> str:
    """Return a text with one hyphen, one blank and one writing of each letter, without characters of no width."""
    marks = {"Pd": "-", "Cf": ""}
    plain = "".join("-" if c == "\N{MINUS SIGN}" else marks.get(unicodedata.category(c), c) for c in text)
    return " ".join(unicodedata.normalize("NFKC", plain).casefold().split())
