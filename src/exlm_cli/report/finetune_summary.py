"""The results of a fine-tuning run in a terminal: scores over seeds, what they were made with, where they are."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from exlm_cli.format import NOT_DEFINED, format_count, format_counts, format_duration, format_number, format_percent


def render_summary(results: Mapping[str, Any], run_dir: str) -> RenderableType:
    """Return the scores of each split, those of the yardstick below, and notes; readable at 80 columns.

    Args:
        results: Content of `results.json`.
        run_dir: Where it is.
    """
    return Group(
        Text(_heading(results)),
        "",
        _scores(results),
        "",
        *(Text(line) for line in _footing(results, run_dir)),
    )


def format_score(summary: Mapping[str, Any], aggregate: str) -> str:
    """Return `0.8123 ± 0.0101` (sample standard deviation), or `0.8123 (0.80 to 0.82)` around a median."""
    value = summary[aggregate]
    if value is None:
        return NOT_DEFINED
    known = [v for v in summary["values"] if v is not None]
    if len(known) == 1:
        return format_number(value)
    if aggregate == "median":
        least, most = (format_number(bound, beside=value) for bound in (min(known), max(known)))
        return f"{format_number(value)} ({least} to {most})"
    return f"{format_number(value)} ± {format_number(summary['std'], beside=value)}"


def _heading(results: Mapping[str, Any]) -> str:
    init, seeds = results["init"], results["seeds"]
    sizes = format_counts(results["split_sizes"].values())
    begun = f"{init['objective']} {init['recipe']}"
    if init["checkpoint"] is not None:
        begun += f" after {init['steps']:,} steps"
    over = f"{results['aggregate']} of {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    return f"{results['task']}, {sizes} rows: {begun}, {over}"


def _scores(results: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("metric", no_wrap=True)
    splits = list(results["metrics"])
    for split in splits:
        table.add_column(split, justify="right")
    _add_rows(table, results["metrics"], results["aggregate"], first=results["selection_metric"])
    yardstick = results.get("yardstick")
    if yardstick is not None:
        table.add_section()
        table.add_row(Text(yardstick["name"]))
        _add_rows(table, yardstick["metrics"], results["aggregate"], first=results["selection_metric"])
    return table


def _add_rows(table: Table, metrics: Mapping[str, Any], aggregate: str, *, first: str) -> None:
    """Add the metrics, the one that chose the epoch first and the loss last."""
    names = sorted(next(iter(metrics.values())), key=lambda name: (name != first, name == "loss"))
    for name in names:
        table.add_row(name, *(format_score(of_split[name], aggregate) for of_split in metrics.values()))


def _footing(results: Mapping[str, Any], run_dir: str) -> list[str]:
    lines = [f"note: {note}" for note in results["notes"]]
    if results["grid_best"] is not None:
        chosen = ", ".join(f"{key}={value}" for key, value in results["grid_best"]["values"].items())
        lines.append(f"best of {len(results['grid'])} grid points: {chosen}")
    epochs = ", ".join(str(epoch) for epoch in results["best_epochs"])
    lines.append(f"best epochs by validation {results['selection_metric']}: {epochs}")
    lines.append(
        f"trained in {format_duration(results['elapsed_s'])}, {format_count(results['tokens_per_s'])} tokens/s, "
        f"{format_percent(results['outside_model_share'])} of it outside the model"
    )
    return [*lines, f"results: {run_dir}/results.json"]
