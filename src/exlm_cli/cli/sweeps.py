"""Parts that `exlm sweep`, `exlm repeat-mlm` and `exlm eval` share: options, the run of a sweep, its printed report."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exlm_cli.cli.options import (
    Device,
    OnInvalid,
    collect_overrides,
    parse_seeds,
    refuse_with_resume,
    split_words,
)
from exlm_cli.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from exlm_cli.config.sweep import SweepRecipe
    from exlm_cli.experiments.results import SweepRun

SeedsOption = Annotated[
    str | None, typer.Option("--seeds", "--seed", metavar="LIST", help="Seeds of pre-training, like 1,2,3.")
]
TasksOption = Annotated[
    str | None,
    typer.Option("--task", metavar="LIST", help="Tasks to fine-tune on, like glue/mnli,glue/rte; or none."),
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, metavar="N", help="Cells at once; default: one a GPU, else one a CPU core."),
]


def load_sweep_recipe(
    recipe: str | None,
    resume: Path | None,
    out: Path | None,
    sets: list[str] | None,
    *,
    seeds: str | None,
    tasks: str | None,
    device: Device | None,
    variants: str | None = None,
    on_invalid: OnInvalid | None = None,
    is_grid: bool = False,
) -> "SweepRecipe":
    """Return the recipe of a new sweep, or of the one to resume, with `--set` and then the options laid over it.

    Args:
        recipe: Name or file; None where `resume` is given.
        resume: Run directory of the sweep to continue.
        out: Run directory of a new one.
        sets: `key=value`.
        seeds, tasks, device, variants, on_invalid: Options that set a key of the recipe.
        is_grid: Only a grid of k and p is accepted.

    Raises:
        ConfigError: A recipe or `--out` together with `--resume`, or a mistake in the recipe.
        CheckpointError: `--resume` names no run directory, or one of another command.
    """
    from exlm_cli.config.load import load_recipe, resumed_recipe
    from exlm_cli.config.sweep import SweepRecipe

    options = {
        "device": device,
        "seeds": parse_seeds(seeds),
        "tasks": [] if tasks == "none" else split_words(tasks),
        "only": split_words(variants),
        "pretrain.data.on_invalid": on_invalid,
    }
    overrides = collect_overrides(sets, options)
    if resume is None:
        assert recipe is not None, "one of the two is given"
        resolved = load_recipe(recipe, overrides, kind=SweepRecipe)
    else:
        refuse_with_resume(resume, {"recipe": recipe, "out": out})
        resolved = resumed_recipe(resume, SweepRecipe, overrides)
    if is_grid and not resolved.cells:
        if resume is not None:
            raise CheckpointError(
                f"{resume}: a run of `exlm sweep`, not of `exlm repeat-mlm`", f"`exlm sweep --resume {resume}` does it"
            )
        raise ConfigError(
            f"`{recipe}` is a recipe of `exlm sweep`, not of `exlm repeat-mlm`",
            f"`exlm sweep {recipe}` runs it; `quickstart-repeat-mlm` is one of `exlm repeat-mlm`",
        )
    return resolved


def run_and_print(
    recipe: "SweepRecipe",
    *,
    out: Path | None,
    resume: Path | None,
    jobs: int | None,
    dry_run: bool,
    as_json: bool,
    notes: Sequence[str] = (),
) -> None:
    """Run a sweep and print its report, or only its recipe (`dry_run`); exit code 1 where some training diverged.

    `out`, `resume` and `jobs` are those of `experiments.sweep.run_sweep`; `notes` are messages before the run.
    """
    from exlm_cli.cli import console

    if dry_run:
        return console.emit_recipe(recipe, as_json=as_json)
    from exlm_cli.experiments.sweep import run_sweep

    progress = console.open_progress()
    for note in notes:
        progress.message(note)
    run = run_sweep(recipe, out=out, resume=resume, jobs=jobs, progress=progress)
    print_sweep_report(run, as_json=as_json)
    if run.num_diverged:
        raise typer.Exit(1)


def print_sweep_run(
    path: Path,
    *,
    folder: Path | None,
    formats: Sequence[str],
    has_figures: bool,
    as_json: bool,
    say: Callable[[str], None],
) -> None:
    """Print the report of a sweep as far as it is done; arguments are those of `print_sweep_report`.

    Raises:
        CheckpointError: No cell is done yet, or a result is damaged.
    """
    from exlm_cli.experiments.results import load_sweep_run, resume_command

    run = load_sweep_run(path)
    if len(run.results) < run.num_cells:
        command = resume_command(run.recipe, run.folder)
        say(f"{len(run.results)} of {run.num_cells} cells are done; `{command}` does the others")
    print_sweep_report(run, folder=folder, formats=formats, has_figures=has_figures, as_json=as_json)


def print_sweep_report(
    run: "SweepRun",
    *,
    folder: Path | None = None,
    formats: Sequence[str] = (),
    has_figures: bool = True,
    as_json: bool = False,
) -> None:
    """Write the report of a sweep and print its tables.

    Args:
        run: What is done of it.
        folder: Of the report; none: `report/` of the run.
        formats: Further files of the tables, by their names in `report.tables`.
        has_figures: Draw figures.
        as_json: Print for programs.
    """
    from exlm_cli.cli import console
    from exlm_cli.experiments.results import RepeatMlmResult, VariantResult
    from exlm_cli.report.repeat_mlm import write_grid_report
    from exlm_cli.report.sweeps import write_sweep_report
    from exlm_cli.report.tables import write_tables

    folder, name = folder or run.folder / "report", run.recipe.name
    if run.recipe.cells:
        grid = [result for result in run.results if isinstance(result, RepeatMlmResult)]
        report = write_grid_report(run.folder, grid, folder, name=name, has_figures=has_figures)
    else:
        variants = [result for result in run.results if isinstance(result, VariantResult)]
        report = write_sweep_report(run.folder, variants, folder, name=name, has_figures=has_figures)
    files = [*report.files, *write_tables(report.tables, folder, formats)]
    if as_json:
        return console.emit_json({"run_dir": str(run.folder), "files": [str(file) for file in files], **report.content})
    for table in report.tables:
        console.emit_renderable(table)
        console.emit_text("")
    console.emit_pairs({"run": run.folder, **{path.name: path for path in files if path.suffix != ".svg"}})
