"""`exlm sweep` and `exlm repeat-mlm`: variants of one pre-training run, or the grid of section 3, up to the report."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exlm_cli.cli.options import (
    Device,
    DeviceOption,
    DryRunOption,
    JsonOption,
    OnInvalidOption,
    OutOption,
    ResumeOption,
    SetOption,
    WorkersOption,
    collect_overrides,
    complete_recipes,
    parse_numbers,
    parse_seeds,
    refuse_with_resume,
    split_list,
)
from exlm_cli.errors import ConfigError
from exlm_cli.format import name_some

if TYPE_CHECKING:
    from exlm_cli.config.sweep import SweepRecipe

_DEFAULT_GRID = "repeat-mlm"

RecipeArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME-OR-FILE",
        help="A recipe by name (see `exlm recipes`), like table-2, or YAML file.",
        autocompletion=complete_recipes,
    ),
]
VariantsOption = Annotated[
    str | None, typer.Option("--variants", metavar="LIST", help="Only these variants, like mlm,exlm.")
]
NumRepeatsOption = Annotated[
    str | None, typer.Option("--num-repeats", metavar="LIST", help="Copies of every token (k), like 1,2,4.")
]
MaskRatiosOption = Annotated[
    str | None, typer.Option("--mask-ratios", metavar="LIST", help="Mask ratios (p), like 0.15,0.387.")
]
SeedsOption = Annotated[
    str | None, typer.Option("--seeds", "--seed", metavar="LIST", help="Seeds of pre-training, like 1,2,3.")
]
TasksOption = Annotated[
    str | None,
    typer.Option("--task", metavar="LIST", help="Tasks to fine-tune on, like glue/mnli,glue/rte; or none."),
]


def sweep(
    recipe: RecipeArgument = None,
    only: VariantsOption = None,
    tasks: TasksOption = None,
    seeds: SeedsOption = None,
    workers: WorkersOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    device: DeviceOption = None,
    on_invalid: OnInvalidOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train variants of a pre-training recipe (Tables 2, 4, 13).

    Pre-trains, measures and fine-tunes each variant with each seed on all cores or GPUs, then writes tables, curves and
    Figure 12. `--resume` continues a stopped sweep; finished cells are kept.
    """
    if recipe is None and resume is None:
        raise ConfigError(
            "no sweep is given", "for example `exlm sweep quickstart-ablations`; `exlm recipes` lists the recipes"
        )
    refuse_with_resume(resume, {"": recipe, "--out": out})
    others = {"only": split_list(only), "pretrain.data.on_invalid": on_invalid}
    resolved = _load(recipe, resume, sets, seeds=seeds, tasks=tasks, device=device, others=others)
    changed = [re.split("[.=]", value)[1] for value in sets or [] if value.startswith("variants.")]
    left_out = [name for name in changed if resolved.only and name not in resolved.only]
    notes = [f"note: not run, since `--variants` or `only` leaves it out: {name_some(left_out)}"] if left_out else []
    _run_and_print(resolved, out=out, resume=resume, workers=workers, dry_run=dry_run, as_json=as_json, notes=notes)


def repeat_mlm(
    recipe: RecipeArgument = None,
    num_repeats: NumRepeatsOption = None,
    mask_ratios: MaskRatiosOption = None,
    tasks: TasksOption = None,
    seeds: SeedsOption = None,
    workers: WorkersOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    device: DeviceOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train the Repeated-MLM grid over repeats k and ratios p, by default that of the recipe repeat-mlm.

    Pre-trains, measures and fine-tunes each cell, then draws Figures 3, 4, 5, 8 and 9. `--resume` continues a stopped
    run; finished cells are kept. `--num-repeats` and `--mask-ratios` together train all combinations that corrupt at
    least 0.1 % of the tokens; either one alone selects cells of the recipe.
    """
    refuse_with_resume(resume, {"": recipe, "--out": out})
    if recipe is None and resume is None:
        recipe = _DEFAULT_GRID
    resolved = _load(recipe, resume, sets, seeds=seeds, tasks=tasks, device=device)
    if not resolved.cells:
        what, given = (
            (f"`{recipe}` is a recipe", recipe) if resume is None else (f"{resume}: a run", f"--resume {resume}")
        )
        raise ConfigError(f"{what} of `exlm sweep`, not of `exlm repeat-mlm`", f"`exlm sweep {given}` takes it")
    notes = []
    if num_repeats is not None or mask_ratios is not None:
        resolved, left_out = resolved.choose_cells(
            parse_numbers("--num-repeats", num_repeats, int, "a whole number from 1 to 64", 1, 64),
            parse_numbers("--mask-ratios", mask_ratios, float, "a number above 0 and below 1", 1e-9, 1 - 1e-9),
        )
        notes = [
            f"left out: k = {k}, p = {100 * p:g} %, which corrupts only {100 * p**k:.2g} % of the tokens"
            for k, p in left_out
        ]
    _run_and_print(resolved, out=out, resume=resume, workers=workers, dry_run=dry_run, as_json=as_json, notes=notes)


def _load(
    recipe: str | None,
    resume: Path | None,
    sets: list[str] | None,
    *,
    seeds: str | None,
    tasks: str | None,
    device: Device | None,
    others: Mapping[str, object] | None = None,
) -> "SweepRecipe":
    """Return the recipe of a new sweep, or of the one to resume, with `--set` and then the options laid over it."""
    from exlm_cli.config.load import load_recipe, resumed_recipe
    from exlm_cli.config.sweep import SweepRecipe

    names = [] if tasks == "none" else split_list(tasks)
    options = {"device": device, "seeds": parse_seeds(seeds), "tasks": names, **(others or {})}
    overrides = collect_overrides(sets, options)
    if resume is not None:
        return resumed_recipe(resume, SweepRecipe, overrides)
    assert recipe is not None, "one of the two is given"
    return load_recipe(recipe, overrides, kind=SweepRecipe)


def _run_and_print(
    recipe: "SweepRecipe",
    *,
    out: Path | None,
    resume: Path | None,
    workers: int | None,
    dry_run: bool,
    as_json: bool,
    notes: Sequence[str] = (),
) -> None:
    """Run a sweep and print its report, or only its recipe; exit code 1 where some training diverged."""
    from exlm_cli.cli import console
    from exlm_cli.cli.reports import Output, emit_dry_run, emit_sweep

    if dry_run:
        return emit_dry_run(recipe, as_json=as_json)
    from exlm_cli.experiments.sweep import run_sweep

    progress = console.open_progress()
    for note in notes:
        progress.message(note)
    run = run_sweep(recipe, out=out, resume=resume, workers=workers, progress=progress)
    emit_sweep(run, Output(as_json=as_json), progress)
    if run.num_diverged:
        raise typer.Exit(1)
