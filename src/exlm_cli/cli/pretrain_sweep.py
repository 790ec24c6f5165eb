"""`exlm pretrain --sweep`: variants of one pre-training side by side, from training to tables and Figure 12."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exlm_cli.cli.grid_options import collect_grid_overrides, load_grid_recipe
from exlm_cli.cli.grid_output import tell_sweep
from exlm_cli.cli.options import Device, OnInvalid
from exlm_cli.errors import ConfigError

if TYPE_CHECKING:
    from exlm_cli.config.sweep import SweepRecipe

SweepOption = Annotated[
    str | None,
    typer.Option(
        "--sweep", metavar="NAME-OR-FILE", help="Train the variants of a sweep instead, like table-2 or a YAML file."
    ),
]
VariantsOption = Annotated[
    str | None, typer.Option("--variants", metavar="LIST", help="Of a sweep: only these variants, like mlm,exlm.")
]
SweepSeedsOption = Annotated[
    str | None, typer.Option("--seeds", metavar="LIST", help="Of a sweep: seeds of pre-training, like 1,2,3.")
]


def is_sweep(run: Path) -> bool:
    """Say whether a run directory, or what is taken for one, is that of a sweep."""
    from exlm_cli.config.load import recipe_kind
    from exlm_cli.config.sweep import SweepRecipe

    path = run / "recipe.yaml"
    return path.is_file() and recipe_kind(str(path)) is SweepRecipe


def refuse_sweep_options(given: Mapping[str, object]) -> None:
    """Refuse options that a single run has no use for.

    Raises:
        ConfigError: One of them has a value.
    """
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"`{name} {value}` is for a sweep", "name one with `--sweep`, or leave it out")


def pretrain_sweep(
    *,
    sweep: str | None,
    resume: Path | None,
    recipe: str | None,
    seed: int | None,
    variants: str | None,
    tasks: str | None,
    seeds: str | None,
    jobs: int | None,
    sets: list[str] | None,
    out: Path | None,
    device: Device | None,
    on_invalid: OnInvalid | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run a sweep, or go on with one; arguments are the options of `exlm pretrain`.

    Raises:
        ConfigError: Options that do not go together, or a mistake in the recipe.
    """
    from exlm_cli.cli import console
    from exlm_cli.config.sweep import SweepRecipe

    whole = "a sweep" if sweep is None else f"`--sweep {sweep}`"
    if recipe is not None:
        raise ConfigError(
            f"`--recipe {recipe}` does not go with {whole}",
            "what its variants have in common is changed with `--set pretrain.KEY=VALUE`",
        )
    if seed is not None:
        raise ConfigError(f"`--seed {seed}` is of one run; {whole} has several", f"for example `--seeds {seed}`")
    overrides = collect_grid_overrides(sets, seeds=seeds, tasks=tasks, device=device)
    if on_invalid is not None:
        overrides.append(f"pretrain.data.on_invalid={on_invalid}")
    resolved = load_grid_recipe(
        sweep, resume, out, overrides, kind=SweepRecipe, default=SweepRecipe.example, option="--sweep"
    )
    if variants is not None:
        resolved = _choose(resolved, variants)
    if dry_run:
        return console.emit_recipe(resolved, as_json=as_json)
    from exlm_cli.experiments.sweep import run_grid

    result = run_grid(resolved, out=out, resume=resume, jobs=jobs, progress=console.open_progress())
    tell_sweep(result.run_dir, result.cells, resolved.name, as_json=as_json)
    if result.num_diverged:
        raise typer.Exit(1)


def _choose(recipe: "SweepRecipe", given: str) -> "SweepRecipe":
    """Return the sweep with the variants that `--variants` names."""
    from exlm_cli.config.sweep import choose_variants

    labels = [label.strip() for label in given.split(",")]
    for label in labels:
        if label not in recipe.variants:
            near = difflib.get_close_matches(label, recipe.variants, n=1, cutoff=0.5)
            there = f"{recipe.name} has {', '.join(recipe.variants)}"
            raise ConfigError(
                f"`--variants {given}`: {recipe.name} has no variant `{label}`",
                f"did you mean `{near[0]}`? {there}" if near else there,
            )
        if labels.count(label) > 1:
            raise ConfigError(f"`--variants {given}` gives {label} twice", "give each once")
    return choose_variants(recipe, labels)
