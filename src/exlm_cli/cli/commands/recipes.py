"""`exlm recipes`: the shipped recipes, or one of them with its size and cost."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exlm_cli.cli.options import JsonOption
from exlm_cli.errors import ConfigError

if TYPE_CHECKING:
    from exlm_cli.config.base import Recipe


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print this recipe (or YAML file), every key resolved.")
    ] = None,
    command: Annotated[
        str | None, typer.Option("--for", metavar="COMMAND", help="List the recipes of one command, like pretrain.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the recipes of every command, or print one.

    Recipes of pre-training show their parameters and the tokens of a step; one that is printed has its FLOPs in
    comments on top.
    """
    from exlm_cli.cli import console
    from exlm_cli.config.load import KINDS, dump_recipe, list_recipes, load_recipe, recipe_kind

    if name is not None:
        if command is not None:
            raise ConfigError(f"`--for {command}` does not go with `{name}`", "leave one of them out")
        recipe: Recipe = load_recipe(name, kind=recipe_kind(name))
        if as_json:
            return console.emit_json(recipe.model_dump(mode="json"))
        return console.emit_text(_describe(recipe) + dump_recipe(recipe))
    starts = {kind.example for kind in KINDS}
    entries = [_entry(load_recipe(name, kind=kind), starts) for kind in KINDS for name in list_recipes(kind)]
    commands = list(dict.fromkeys(entry["command"] for entry in entries))
    if command is not None:
        if command not in commands:
            raise ConfigError(f"`--for {command}`: accepted are {', '.join(commands)}")
        entries = [entry for entry in entries if entry["command"] == command]
    if as_json:
        return console.emit_json(entries)
    console.emit_listing(
        ["recipe", "of exlm", "parameters", "tokens a step"],
        [_row(entry) for entry in entries],
        [[entry["purpose"], entry["paper"]] for entry in entries],
    )
    console.emit_text("\n* start with this one; `exlm recipes NAME` prints a recipe and its cost")


def _entry(recipe: "Recipe", starts: set[str]) -> dict[str, Any]:
    from exlm_cli.config.describe import recipe_size

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


def _describe(recipe: "Recipe") -> str:
    """Return size and cost as YAML comments; nothing for a recipe without pre-training."""
    from exlm_cli.config.describe import recipe_size
    from exlm_cli.format import format_count, format_parameters

    size = recipe_size(recipe)
    if size.parameters is None or size.tokens_per_step is None:
        return ""
    lines = [
        f"parameters: {format_parameters(size.parameters)}",
        f"tokens of a step: {format_count(size.tokens_per_step)}",
    ]
    if size.flops_per_step is not None:
        lines.append(f"FLOPs of a step: {size.flops_per_step:.2e}")
    if size.flops is not None:
        lines.append(f"FLOPs of the whole pre-training: {size.flops:.2e}; seconds: divide by your FLOP/s")
    return "".join(f"# {line}\n" for line in lines).replace("e+", "e")
