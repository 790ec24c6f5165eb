"""How runs and their numbers are written in tables of scores."""

from collections.abc import Mapping
from typing import Any

from exlm_cli.report.finetune_summary import format_score
from exlm_cli.report.tables import NO_VALUE

Summary = Mapping[str, Any]


def as_is(summary: Summary | None, aggregate: str) -> str:
    """Return a score in its own unit, with its spread; a dash where there is none."""
    return NO_VALUE if summary is None or summary[aggregate] is None else format_score(summary, aggregate)


def percent(summary: Summary | None, aggregate: str) -> str:
    """Return a share in percent as `85.2 ±0.4`, or a median alone; a dash where there is none."""
    if summary is None or summary[aggregate] is None:
        return NO_VALUE
    spread = f" ±{100 * summary['std']:.1f}" if aggregate == "mean" and summary["std"] is not None else ""
    return f"{100 * summary[aggregate]:.1f}{spread}"


def pretraining_budget(init: Mapping[str, Any]) -> str:
    """Return `4,000 steps, 13.1 M tokens` of `init` in results.json."""
    if init["objective"] == "scratch":
        return "none"
    return f"{init['steps']:,} steps, {count(init['tokens'])} tokens"


def millions(number: int) -> str:
    """Return 5,230,000 as `5.2 M`."""
    return f"{number / 1e6:.1f} M"


def count(number: int) -> str:
    """Return 13,100,000 as `13.1 M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)
