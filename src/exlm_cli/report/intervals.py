"""Table of a run's intervals: the share of test values that they promise to hold, and the share that they hold."""

from exlm_cli.finetune.evaluation.calibration import (
    DEFAULT_LEVEL,
    MIN_SCALED_ROWS,
    Calibration,
    ConformalResiduals,
    Coverage,
    read_calibration,
)
from exlm_cli.finetune.results import FinetunedRun
from exlm_cli.format import format_count, format_number, format_percent, name_some
from exlm_cli.report.tables import ReportTable

_SIGNS = {"similarity": "Tanimoto similarity {} to {}", "spread": "seed spread {} to {}", "rows": "all rows"}


def interval_tables(run: FinetunedRun) -> list[ReportTable]:
    """Return the table of a run that predicts values and has a test split; none for other runs.

    Raises:
        CheckpointError: The calibration of the run is missing or altered.
    """
    if run.results.loss != "regression" or "test" not in run.results.split_sizes:
        return []
    calibration = read_calibration(run.folder)
    if not calibration.coverage:
        return []
    table = ReportTable(
        name="intervals",
        title=f"Intervals of {100 * DEFAULT_LEVEL:g} %, test",
        columns=("rows", "number", "inside", "95 % interval of inside", "mean width"),
        entries=tuple(
            tuple(_row(part, name if len(calibration.coverage) > 1 else "") for part in parts)
            for name, parts in calibration.coverage.items()
        ),
        notes=_notes(calibration, run.results.output_names),
    )
    return [table]


def _row(part: Coverage, name: str) -> tuple[str, ...]:
    """Return the cells of a third of the rows; the interval is Wilson's, of independent rows."""
    from scipy.stats import binomtest

    ends = (part.most, part.least) if part.by == "similarity" else (part.least, part.most)
    sign = _SIGNS[part.by].format(*(f"{end:.2g}" for end in ends))
    interval = binomtest(part.num_inside, part.num_rows).proportion_ci(0.95, method="wilson")
    return (
        f"{name}: {sign}" if name else sign,
        format_count(part.num_rows),
        format_percent(part.num_inside / part.num_rows),
        f"{format_percent(interval.low)} to {format_percent(interval.high)}",
        format_number(part.mean_width),
    )


def _notes(calibration: Calibration, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return what is promised, and which outputs have intervals of one width."""
    promise = (
        f"promised: {100 * DEFAULT_LEVEL:g} % of the rows that come from where the validation rows come from; a "
        "scaffold split, or new chemistry, breaks that"
    )
    few = [
        f"`{name}`"
        for name, output in zip(names, calibration.outputs, strict=True)
        if isinstance(output, ConformalResiduals) and len(output.residuals) < MIN_SCALED_ROWS
    ]
    plain = f"equally wide for all rows: fewer than {MIN_SCALED_ROWS} validation rows: {name_some(few)}"
    return (promise, plain) if few else (promise,)
