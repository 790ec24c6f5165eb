"""`exlm eval` of a grid of pre-training runs: its report again, of what is done so far."""

from collections.abc import Sequence
from pathlib import Path

from exlm_cli.cli.commands.eval import Output
from exlm_cli.cli.grid_output import tell_repeat_mlm, tell_sweep
from exlm_cli.errors import ConfigError
from exlm_cli.progress import Progress


def holds_grid(runs: Sequence[Path]) -> bool:
    """Say whether one of the runs is a grid."""
    from exlm_cli.experiments.cell_files import is_grid_run

    return any(is_grid_run(run) for run in runs)


def show_grid(runs: Sequence[Path], output: Output, progress: Progress) -> None:
    """Print the tables of a grid and write its report anew.

    Raises:
        ConfigError: More runs than one.
        CheckpointError: Nothing is done yet, or a result is damaged.
    """
    from exlm_cli.config.sweep import SweepRecipe
    from exlm_cli.experiments.cell_files import load_grid_run

    if len(runs) > 1:
        raise ConfigError(
            "a sweep or a grid is told alone", "give one, or the single runs under `cells/` of it beside others"
        )
    grid = load_grid_run(runs[0])
    if len(grid.cells) < grid.num_cells:
        command = grid.recipe.resume_command(grid.folder)
        progress.message(f"{len(grid.cells)} of {grid.num_cells} cells are done; `{command}` does the others")
    tell = tell_sweep if isinstance(grid.recipe, SweepRecipe) else tell_repeat_mlm
    tell(
        grid.folder,
        grid.cells,
        grid.recipe.name,
        folder=output.folder,
        formats=output.formats,
        has_figures=output.has_figures,
        as_json=output.as_json,
    )
