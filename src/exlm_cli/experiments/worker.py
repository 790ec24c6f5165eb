"""Worker of sweeps and of series of fine-tunings: `workers.pool` starts it as a process. Imports wait for a job."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exlm_cli.progress import Progress
from exlm_cli.workers.pool import serve


def do_cell(folder: Path, values: Mapping[str, Any], progress: Progress) -> None:
    """Finish a cell of a sweep; `values` are those of its `SweepCell`."""
    from exlm_cli.config.sweep import SweepCell
    from exlm_cli.experiments.cell import run_cell

    run_cell(SweepCell.model_validate(values), folder, progress)


def do_task(folder: Path, values: Mapping[str, Any], progress: Progress) -> dict[str, str] | None:
    """Finish a fine-tuning run of a series; return message and hint where it diverged."""
    from exlm_cli.experiments.series import run_task

    return run_task(folder, values, progress)


FUNCTIONS = {"cell": do_cell, "task": do_task}
"""What a job can name."""

if __name__ == "__main__":
    serve(FUNCTIONS)
