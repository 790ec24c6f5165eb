"""`exlm repeat-mlm`: the sweep of section 3 over repetitions k and mask ratios p, from pre-training to figures."""

from typing import TYPE_CHECKING, Annotated

import typer

from exlm_cli.cli.options import (
    DeviceOption,
    DryRunOption,
    JsonOption,
    OutOption,
    ResumeOption,
    SetOption,
    parse_numbers,
)
from exlm_cli.cli.sweeps import JobsOption, SeedsOption, TasksOption, load_sweep_recipe, run_and_print
from exlm_cli.errors import ConfigError

if TYPE_CHECKING:
    from exlm_cli.config.sweep import SweepRecipe

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
    """Train the Repeated-MLM grid over repeats k and ratios p.

    Pre-trains, measures and fine-tunes each cell, then draws Figures 3, 4, 5, 8 and 9. Stopped anywhere, `--resume`
    continues; finished cells are kept. `--num-repeats` and `--mask-ratios` together mean all combinations that corrupt
    0.1 % of the tokens or more, one of them alone those cells of the recipe.
    """
    if recipe is None and resume is None:
        recipe = _DEFAULT_RECIPE
    resolved = load_sweep_recipe(recipe, resume, out, sets, seeds=seeds, tasks=tasks, device=device, is_grid=True)
    notes = []
    if num_repeats is not None or mask_ratios is not None:
        resolved, left_out = _choose_cells(resolved, num_repeats, mask_ratios)
        notes = [
            f"left out: k = {k}, p = {100 * p:g}%, which corrupts only {100 * p**k:.2g}% of the tokens"
            for k, p in left_out
        ]
    run_and_print(resolved, out=out, resume=resume, jobs=jobs, dry_run=dry_run, as_json=as_json, notes=notes)


def _choose_cells(
    recipe: "SweepRecipe", num_repeats: str | None, mask_ratios: str | None
) -> "tuple[SweepRecipe, tuple[tuple[int, float], ...]]":
    """Return the recipe with the cells that the options choose, and the combinations that corrupt too little."""
    from exlm_cli.config.sweep import MIN_CORRUPTED_SHARE, choose_cells

    given = {"--num-repeats": num_repeats, "--mask-ratios": mask_ratios}
    shown = " and ".join(f"`{name} {value}`" for name, value in given.items() if value is not None)
    ks = parse_numbers("--num-repeats", num_repeats, int, "a whole number from 1 to 64", 1, 64)
    ps = parse_numbers("--mask-ratios", mask_ratios, float, "a number above 0 and below 1", 1e-9, 1 - 1e-9)
    own = f"the cells of {recipe.name} are " + ", ".join(f"({k}, {p:g})" for k, p in recipe.cells)
    if ks is None or ps is None:
        # one of them alone chooses among the recipe's cells
        absent: list[float] = [*(set(ks or ()) - {k for k, _ in recipe.cells})]
        absent += set(ps or ()) - {p for _, p in recipe.cells}
        if absent:
            raise ConfigError(
                f"{shown}: no cell of {recipe.name} has " + ", ".join(f"{value:g}" for value in sorted(absent)),
                f"{own}; `--num-repeats` and `--mask-ratios` together train all combinations",
            )
    cells, left_out = choose_cells(recipe.cells, ks, ps)
    if not cells:
        raise ConfigError(
            f"{shown}: that corrupts less than {MIN_CORRUPTED_SHARE:.1%} of the tokens, p^k",
            f"take a larger p or a smaller k; {own}",
        )
    return recipe.replaced(cells=cells), left_out
