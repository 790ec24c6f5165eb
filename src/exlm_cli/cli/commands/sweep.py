"""`exlm sweep`: variants of one pre-training run side by side, from training to tables and Figure 12."""

import difflib
from typing import TYPE_CHECKING, Annotated

import typer

from exlm_cli.cli.options import (
    DeviceOption,
    DryRunOption,
    JsonOption,
    OnInvalidOption,
    OutOption,
    ResumeOption,
    SetOption,
)
from exlm_cli.cli.sweeps import JobsOption, SeedsOption, TasksOption, load_sweep_recipe, run_and_print
from exlm_cli.errors import ConfigError

if TYPE_CHECKING:
    from exlm_cli.config.sweep import SweepRecipe


def sweep(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME-OR-FILE", help="A sweep by name (see `exlm recipes`), like table-2, or YAML file."
        ),
    ] = None,
    variants: Annotated[
        str | None, typer.Option("--variants", metavar="LIST", help="Only these variants, like mlm,exlm.")
    ] = None,
    tasks: TasksOption = None,
    seeds: SeedsOption = None,
    jobs: JobsOption = None,
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
    Figure 12. Stopped anywhere, `--resume` continues; finished cells are kept.
    """
    if recipe is None and resume is None:
        raise ConfigError(
            "no sweep is given", "for example `exlm sweep quickstart-ablations`; `exlm recipes` lists the recipes"
        )
    resolved = load_sweep_recipe(
        recipe, resume, out, sets, seeds=seeds, tasks=tasks, device=device, on_invalid=on_invalid, command="sweep"
    )
    if variants is not None:
        resolved = _choose(resolved, variants)
    run_and_print(resolved, out=out, resume=resume, jobs=jobs, dry_run=dry_run, as_json=as_json)


def _choose(recipe: "SweepRecipe", given: str) -> "SweepRecipe":
    """Return the sweep with the variants that `--variants` names."""
    labels = [label.strip() for label in given.split(",")]
    known = list(recipe.variants)
    if not known:
        raise ConfigError(
            f"`--variants {given}`: {recipe.name} is a grid of k and p",
            f"`exlm repeat-mlm --recipe {recipe.name} --num-repeats LIST` runs some of its cells",
        )
    for label in labels:
        if label not in known:
            near = difflib.get_close_matches(label, known, n=1, cutoff=0.5)
            names = f"{recipe.name} has {', '.join(known)}"
            raise ConfigError(
                f"`--variants {given}`: {recipe.name} has no variant `{label}`",
                f"did you mean `{near[0]}`? {names}" if near else names,
            )
        if labels.count(label) > 1:
            raise ConfigError(f"`--variants {given}` gives {label} twice", "give each once")
    return recipe.replaced(only=tuple(labels))
