"""`exlm repeat-mlm`: the grid of section 3, from pre-training to figures."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exlm_cli.cli.grid_options import (
    JobsOption,
    SeedsOption,
    TasksOption,
    collect_grid_overrides,
    load_grid_recipe,
    parse_numbers,
)
from exlm_cli.cli.options import (
    DeviceOption,
    DryRunOption,
    JsonOption,
    OutOption,
    RecipeOption,
    ResumeOption,
    SetOption,
)
from exlm_cli.errors import ConfigError

if TYPE_CHECKING:
    from exlm_cli.config.repeat_mlm import RepeatMlmRecipe

_DEFAULT_RECIPE = "repeat-mlm"


def repeat_mlm(
    recipe: RecipeOption = None,
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
    from exlm_cli.config.load import dump_recipe
    from exlm_cli.config.repeat_mlm import RepeatMlmRecipe

    overrides = collect_grid_overrides(sets, seeds=seeds, tasks=tasks, device=device)
    resolved = load_grid_recipe(recipe, resume, out, overrides, kind=RepeatMlmRecipe, default=_DEFAULT_RECIPE)
    resolved, left_out = _choose_cells(resolved, num_repeats, mask_ratios)
    if dry_run:
        return console.emit_text(dump_recipe(resolved))
    from exlm_cli.analysis.grid import run_grid
    from exlm_cli.report.grid_report import write_grid_report
    from exlm_cli.report.grid_table import markdown_text

    progress = console.open_progress()
    for k, p in left_out:
        progress.message(f"left out: k = {k}, p = {100 * p:g}%, which corrupts only {100 * p**k:.2g}% of the tokens")
    result = run_grid(resolved, out=out, resume=resume, jobs=jobs, progress=progress)
    rows, files = write_grid_report(result.run_dir, result.cells, title=f"Repeated MLM: {resolved.name}")
    if as_json:
        console.emit_json(_as_json(result.run_dir, files, rows))
    else:
        console.emit_text(markdown_text(rows, title=f"Repeated MLM: {resolved.name}"))
        console.emit_pairs({"run": result.run_dir, **{f"{path.name}": path for path in files if path.suffix != ".svg"}})
    if result.num_diverged:
        raise typer.Exit(1)


def _choose_cells(
    recipe: "RepeatMlmRecipe", num_repeats: str | None, mask_ratios: str | None
) -> "tuple[RepeatMlmRecipe, tuple[tuple[int, float], ...]]":
    from exlm_cli.config.repeat_mlm import choose_cells

    if num_repeats is None and mask_ratios is None:
        return recipe, ()
    ks = parse_numbers("--num-repeats", num_repeats, int, "a whole number from 1 to 64", 1, 64)
    ps = parse_numbers("--mask-ratios", mask_ratios, float, "a number above 0 and below 1", 1e-9, 1 - 1e-9)
    cells, left_out = choose_cells(recipe.cells, ks, ps)
    if not cells:
        raise ConfigError(
            f"no cell is left with {_given(num_repeats, mask_ratios)}",
            f"the cells of {recipe.name} are " + ", ".join(f"({k}, {p:g})" for k, p in recipe.cells),
        )
    return recipe.with_cells(cells), left_out


def _given(num_repeats: str | None, mask_ratios: str | None) -> str:
    given = {"--num-repeats": num_repeats, "--mask-ratios": mask_ratios}
    return " and ".join(f"`{name} {value}`" for name, value in given.items() if value is not None)


def _as_json(run: Path, files: list[Path], rows: Any) -> dict[str, Any]:
    from exlm_cli.report.grid_table import agreements

    return {
        "run_dir": str(run),
        "files": [str(path) for path in files],
        "cells": [
            {
                "num_repeats": row.num_repeats,
                "mask_ratio": row.mask_ratio,
                "seeds": list(row.seeds),
                "diverged_seeds": list(row.diverged_seeds),
                **{f"corrupted_{name}": value for name, value in row.corrupted.items()},
                **{name: row.mean(name) for name in row.figures},
            }
            for row in rows
        ],
        "agreement": {
            name: {
                "spearman": found.spearman,
                "spread_equal_share": found.spread_equal_share,
                "spread_equal_ratio": found.spread_equal_ratio,
            }
            for name, found in agreements(rows).items()
        },
    }
