"""How runs and their numbers are written in tables of scores."""

from collections.abc import Mapping
from typing import Any

from exlm_cli.format import NO_VALUE, format_in_percent, format_large
from exlm_cli.report.finetune_summary import format_score

Summary = Mapping[str, Any]


def as_is(summary: Summary | None, aggregate: str) -> str:
    """Return a score in its own unit, with its spread; a dash where there is none."""
    return NO_VALUE if summary is None or summary[aggregate] is None else format_score(summary, aggregate)


def percent(summary: Summary | None, aggregate: str) -> str:
    """Return a share in percent as `85.2 ± 0.4`, or a median alone; a dash where there is none."""
    if summary is None:
        return NO_VALUE
    return format_in_percent(summary[aggregate], summary["std"] if aggregate == "mean" else None)


def pretraining_budget(init: Mapping[str, Any]) -> str:
    """Return `4,000 steps, 13.1 M tokens` of `init` in results.json."""
    if init["objective"] == "scratch":
        return "none"
    return f"{init['steps']:,} steps, {format_large(init['tokens'])} tokens"
