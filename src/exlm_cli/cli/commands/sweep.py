"""`exlm sweep`: variants of one pre-training run side by side, from training to tables and Figure 12."""

from typing import Annotated

import typer

from exlm_cli.cli.options import (
    DeviceOption,
    DryRunOption,
    JsonOption,
    OnInvalidOption,
    OutOption,
    ResumeOption,
    SetOption,
    split_words,
)
from exlm_cli.cli.sweeps import JobsOption, SeedsOption, TasksOption, load_sweep_recipe, run_and_print
from exlm_cli.errors import ConfigError


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
        recipe,
        resume,
        out,
        sets,
        seeds=seeds,
        tasks=tasks,
        device=device,
        others={"only": split_words(variants), "pretrain.data.on_invalid": on_invalid},
    )
    run_and_print(resolved, out=out, resume=resume, jobs=jobs, dry_run=dry_run, as_json=as_json)
