"""`exlm recipes`: the shipped recipes, one of them with its size, or what it costs on GPUs."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exlm_cli.cli.options import (
    JsonOption,
    SetOption,
    collect_overrides,
    complete_recipes,
    refuse_together,
    refuse_without,
)
from exlm_cli.errors import ConfigError

if TYPE_CHECKING:
    from exlm_cli.config.base import Recipe


NameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="Print this recipe (or YAML file), every key resolved.", autocompletion=complete_recipes
    ),
]
CommandOption = Annotated[
    str | None, typer.Option("--for", metavar="COMMAND", help="List the recipes of one command, like pretrain.")
]
GpuOption = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="Print what pre-training NAME costs on this GPU, like h100.")
]
GpusOption = Annotated[int | None, typer.Option("--gpus", min=1, metavar="N", help="GPUs; default: 1.")]
UtilisationOption = Annotated[
    float | None,
    typer.Option(
        "--utilisation",
        min=0.01,
        max=1,
        metavar="SHARE",
        help="Share of the GPU's peak FLOP/s; default: the least time, by measured rates.",
    ),
]
DescribeOption = Annotated[bool, typer.Option("--describe", help="Print NAME with the meaning of each key.")]
_TOLD_GPU = "h100"
"""GPU whose time a printed recipe begins with."""


def recipes(
    name: NameArgument = None,
    command: CommandOption = None,
    gpu: GpuOption = None,
    gpus: GpusOption = None,
    utilisation: UtilisationOption = None,
    describe: DescribeOption = False,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the recipes, print one, or estimate its cost.

    The list shows parameters and tokens per step of pre-training recipes. A printed one begins with comments that give
    its FLOPs and, unless it is for a CPU, its time on a GPU. With `--gpu`: hours, memory of each GPU, and the steps of
    an MLM for the same FLOPs.
    """
    from exlm_cli.cli import console
    from exlm_cli.config.load import dump_recipe, load_recipe, recipe_kind

    named = {"--gpu": gpu, "--set": sets, "--describe": describe or None}
    refuse_without("a recipe", name, named, "name one, like `exlm recipes text-base`")
    refuse_without("`--gpu`", gpu, {"--gpus": gpus, "--utilisation": utilisation}, "for example `--gpu h100`")
    if name is not None:
        refuse_together(name, {"--for": command is not None}, "leave one of them out")
    if gpu or as_json:
        refuse_together("--gpu" if gpu else "--json", {"--describe": describe}, "leave one of them out")
    if name is None:
        return _list_recipes(command, as_json=as_json)
    recipe: Recipe = load_recipe(name, collect_overrides(sets, {}), kind=recipe_kind(name))
    if gpu is not None:
        return _emit_cost(recipe, gpu, gpus or 1, utilisation, as_json=as_json)
    if as_json:
        return console.emit_json(recipe.as_written())
    return console.emit_text(_describe_cost(recipe) + dump_recipe(recipe, with_meanings=describe))


def _list_recipes(command: str | None, *, as_json: bool) -> None:
    """Print all recipes, or those of one command."""
    from exlm_cli.cli import console
    from exlm_cli.config.load import KINDS, list_recipes, load_recipe

    starts = {kind.example for kind in KINDS}
    all_recipes = [load_recipe(name, kind=kind) for kind in KINDS for name in list_recipes(kind)]
    commands = list(dict.fromkeys(recipe.run_by for recipe in all_recipes))
    if command is not None and command not in commands:
        raise ConfigError(f"`--for {command}`: accepted are {', '.join(commands)}", "choose one, or leave `--for` out")
    entries = [_entry(recipe, starts) for recipe in all_recipes if command in (None, recipe.run_by)]
    if as_json:
        return console.emit_json(entries)
    console.emit_listing(
        ["recipe", "command", "parameters", "tokens per step"],
        [_row(entry) for entry in entries],
        [[entry["purpose"], entry["paper"]] for entry in entries],
    )
    console.emit_text("\n* start with this one; `exlm recipes NAME` prints a recipe and its cost,")
    console.emit_text("  with `--describe` also the meaning of each key")


def _emit_cost(recipe: "Recipe", gpu: str, gpus: int, utilisation: float | None, *, as_json: bool) -> None:
    from exlm_cli.cli import console
    from exlm_cli.config.pretrain import PretrainRecipe
    from exlm_cli.cost.estimate import describe_cost, estimate_cost
    from exlm_cli.cost.gpus import GPUS

    if not isinstance(recipe, PretrainRecipe):
        raise ConfigError(
            f"`{recipe.name}` is a recipe of `exlm {recipe.run_by}`; costs are estimated for one pre-training",
            "`exlm recipes --for pretrain` lists the recipes that have one",
        )
    estimate = estimate_cost(recipe, gpu, gpus, utilisation)
    if as_json:
        return console.emit_json(estimate.model_dump(mode="json"))
    console.emit_text(f"{recipe.name} on {gpus} x {GPUS[gpu].product}\n\n")
    console.emit_pairs(describe_cost(estimate))


def _entry(recipe: "Recipe", starts: set[str]) -> dict[str, Any]:
    from exlm_cli.cost.estimate import recipe_size

    return {
        "name": recipe.name,
        "command": recipe.run_by,
        **asdict(recipe_size(recipe)),
        "is_start": recipe.name in starts,
        "purpose": recipe.purpose,
        "paper": recipe.paper,
    }


def _row(entry: dict[str, Any]) -> list[str]:
    from exlm_cli.format import format_count, format_parameters

    parameters, tokens = entry["parameters"], entry["tokens_per_step"]
    return [
        f"{entry['name']} *" if entry["is_start"] else entry["name"],
        entry["command"],
        "" if parameters is None else format_parameters(parameters),
        "" if tokens is None else format_count(tokens),
    ]


def _describe_cost(recipe: "Recipe") -> str:
    """Return size, cost and, of a long run, time on a GPU as YAML comments; nothing for a recipe without pre-training.

    The time of a short run is in the recipe's purpose, for the CPU that it is meant for.
    """
    from exlm_cli.config.pretrain import PretrainRecipe
    from exlm_cli.cost.estimate import describe_long_run, describe_size, describe_time
    from exlm_cli.cost.gpus import GPUS

    pairs = describe_size(recipe)
    if isinstance(recipe, PretrainRecipe) and (recipe.train.known_steps is None or describe_long_run(recipe)):
        pairs[f"on one {GPUS[_TOLD_GPU].product}"] = describe_time(recipe, _TOLD_GPU)
    return "".join(f"# {name}: {value}\n" for name, value in pairs.items())
