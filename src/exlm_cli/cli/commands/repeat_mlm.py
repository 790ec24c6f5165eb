"""`exlm repeat-mlm`: the sweep of section 3 over repetitions k and mask ratios p, from pre-training to figures."""

from typing import Annotated

import typer

from exlm_cli.cli.commands.sweep import JobsOption, SeedsOption, TasksOption, load_sweep_recipe, run_and_print
from exlm_cli.cli.options import (
    DeviceOption,
    DryRunOption,
    JsonOption,
    OutOption,
    ResumeOption,
    SetOption,
    parse_numbers,
)
from exlm_cli.errors import ConfigError

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
    resolved = load_sweep_recipe(recipe, resume, out, sets, seeds=seeds, tasks=tasks, device=device)
    if not resolved.cells:
        what, words = (
            (f"`{recipe}` is a recipe", recipe) if resume is None else (f"{resume}: a run", f"--resume {resume}")
        )
        raise ConfigError(f"{what} of `exlm sweep`, not of `exlm repeat-mlm`", f"`exlm sweep {words}` takes it")
    notes = []
    if num_repeats is not None or mask_ratios is not None:
        ks = parse_numbers("--num-repeats", num_repeats, int, "a whole number from 1 to 64", 1, 64)
        ps = parse_numbers("--mask-ratios", mask_ratios, float, "a number above 0 and below 1", 1e-9, 1 - 1e-9)
        resolved, left_out = resolved.choose_cells(ks, ps)
        notes = [
            f"left out: k = {k}, p = {100 * p:g}%, which corrupts only {100 * p**k:.2g}% of the tokens"
            for k, p in left_out
        ]
    run_and_print(resolved, out=out, resume=resume, jobs=jobs, dry_run=dry_run, as_json=as_json, notes=notes)
