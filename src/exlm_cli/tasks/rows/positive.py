"""Which of two classes is the positive one, that of ROC-AUC, average precision and F1: found from their names.

1. Words that both names begin or end with are left out: of `hERG blocker` and `hERG non-blocker`, `non` remains.
2. A name that denies the other is negative: `non-toxic`, `not toxic`, `nontoxic`, `inactive`, `BBB-` beside `BBB+`.
3. Else a name of `_POSITIVE` is positive, and one of `_NEGATIVE` negative, if the other name is not of the same kind.
4. Else the names do not tell, and the later one in order is positive.
"""

import re

_POSITIVE = frozenset(
    {
        "active",
        "hit",
        "binder",
        "binding",
        "ligand",
        "toxic",
        "positive",
        "pos",
        "yes",
        "true",
        "high",
        "good",
        "strong",
    }
    | {"blocker", "inhibitor", "sensitive", "mutagenic", "mutagen", "carcinogenic", "carcinogen", "substrate"}
    | {"permeable", "penetrant", "soluble", "stable", "responder", "responsive", "present", "pass", "passed", "case"}
    | {"p", "+"}
)
_NEGATIVE = frozenset(
    {"inactive", "negative", "neg", "no", "not", "non", "false", "low", "bad", "weak", "none", "resistant", "safe"}
    | {"absent", "decoy", "fail", "failed", "miss", "control", "n", "-"}
)
_SYLLABLES = ("in", "im", "un", "non")
_WORDS = re.compile(r"[^\W_]+|[-+]$")


def find_positive(names: tuple[str, str]) -> str | None:
    """Return the positive one of two classes by their names; None where the names do not tell."""
    words = [_WORDS.findall(name.casefold().replace("\N{MINUS SIGN}", "-")) for name in names]
    for end in (0, -1):
        while all(words) and words[0][end] == words[1][end]:
            for of_name in words:
                del of_name[end]
    first, second = (" ".join(of_name) for of_name in words)
    negative = [_denies(first, second), _denies(second, first)]
    for kind in (negative, [first in _NEGATIVE, second in _NEGATIVE], [second in _POSITIVE, first in _POSITIVE]):
        if kind[0] != kind[1]:
            return names[1] if kind[0] else names[0]
    return None


def _denies(name: str, other: str) -> bool:
    return name in [f"{syllable}{other}" for syllable in _SYLLABLES if other] + [
        f"{word} {other}".strip() for word in ("non", "not", "no")
    ]
