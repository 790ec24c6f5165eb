"""`exlm repeat-mlm`: the grid of section 3, from pre-training to figures."""

from typing import TYPE_CHECKING, Annotated

import typer

from exlm_cli.cli.grid_options import (
    JobsOption,
    SeedsOption,
    TasksOption,
    collect_grid_overrides,
    load_grid_recipe,
    parse_numbers,
)
from exlm_cli.cli.grid_output import tell_repeat_mlm
from exlm_cli.cli.options import (
    DeviceOption,
    DryRunOption,
    JsonOption,
    OutOption,
    ResumeOption,
    SetOption,
)
from exlm_cli.errors import ConfigError

if TYPE_CHECKING:
    from exlm_cli.config.repeat_mlm import RepeatMlmRecipe

_DEFAULT_RECIPE = "repeat-mlm"


def repeat_mlm(
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            metavar="NAME-OR-FILE",
            help=f"A grid by name (see `exlm recipes`) or YAML file; default: {_DEFAULT_RECIPE}.",
        ),
    ] = None,
    num_repeats: Annotated[
        str | None, typer.Option("--num-repeats", metavar="LIST", help="Copies of every token (k), like 1,2,4.")
    ] = None,
    mask_ratios: Annotated[
        str | None, typer.Option("--mask-ratios", metavar="LIST", help="Mask ratios (p), like 0.15,0.387.")
    ] = None,
    tasks: TasksOption = None,
    seeds: SeedsOption = None,
    jobs: JobsOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    device: DeviceOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train the Repeated-MLM grid: every token k times, masked at ratio p.

    Pre-trains, measures and fine-tunes each cell, then draws Figures 3, 4, 5, 8 and 9. Stopped anywhere, `--resume`
    goes on; finished cells are kept. `--num-repeats` and `--mask-ratios` together mean all combinations that corrupt
    0.1 % of the tokens or more, one of them alone those cells of the recipe.
    """
    from exlm_cli.cli import console
    from exlm_cli.config.repeat_mlm import RepeatMlmRecipe

    overrides = collect_grid_overrides(sets, seeds=seeds, tasks=tasks, device=device)
    resolved = load_grid_recipe(recipe, resume, out, overrides, kind=RepeatMlmRecipe, default=_DEFAULT_RECIPE)
    resolved, left_out = _choose_cells(resolved, num_repeats, mask_ratios)
    if dry_run:
        return console.emit_recipe(resolved, as_json=as_json)
    from exlm_cli.experiments.sweep import run_grid

    progress = console.open_progress()
    for k, p in left_out:
        progress.message(f"left out: k = {k}, p = {100 * p:g}%, which corrupts only {100 * p**k:.2g}% of the tokens")
    result = run_grid(resolved, out=out, resume=resume, jobs=jobs, progress=progress)
    tell_repeat_mlm(result.run_dir, result.cells, resolved.name, as_json=as_json)
    if result.num_diverged:
        raise typer.Exit(1)


def _choose_cells(
    recipe: "RepeatMlmRecipe", num_repeats: str | None, mask_ratios: str | None
) -> "tuple[RepeatMlmRecipe, tuple[tuple[int, float], ...]]":
    from exlm_cli.config.repeat_mlm import LEAST_SHARE, choose_cells

    if num_repeats is None and mask_ratios is None:
        return recipe, ()
    ks = parse_numbers("--num-repeats", num_repeats, int, "a whole number from 1 to 64", 1, 64)
    ps = parse_numbers("--mask-ratios", mask_ratios, float, "a number above 0 and below 1", 1e-9, 1 - 1e-9)
    there = f"the cells of {recipe.name} are " + ", ".join(f"({k}, {p:g})" for k, p in recipe.cells)
    if ks is None or ps is None:
        # one of them alone chooses among the recipe's cells
        absent: list[float] = [*(set(ks or ()) - {k for k, _ in recipe.cells})]
        absent += set(ps or ()) - {p for _, p in recipe.cells}
        if absent:
            raise ConfigError(
                f"{_given(num_repeats, mask_ratios)}: no cell of {recipe.name} has "
                + ", ".join(f"{value:g}" for value in sorted(absent)),
                f"{there}; `--num-repeats` and `--mask-ratios` together train all combinations",
            )
    cells, left_out = choose_cells(recipe.cells, ks, ps)
    if not cells:
        raise ConfigError(
            f"{_given(num_repeats, mask_ratios)}: that corrupts less than {LEAST_SHARE:.1%} of the tokens, p^k",
            f"take a larger p or a smaller k; {there}",
        )
    return recipe.with_cells(cells), left_out


def _given(num_repeats: str | None, mask_ratios: str | None) -> str:
    given = {"--num-repeats": num_repeats, "--mask-ratios": mask_ratios}
    return " and ".join(f"`{name} {value}`" for name, value in given.items() if value is not None)
