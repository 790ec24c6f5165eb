"""`exlm recipes`: what can be run by name."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from exlm_cli.cli.options import JsonOption

if TYPE_CHECKING:
    from exlm_cli.config.base import Recipe


def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this recipe, every key resolved.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the recipes of every command, or print one.

    Each with its purpose and place in the paper; for pre-training its parameters and tokens a step.
    """
    from exlm_cli.cli import console
    from exlm_cli.config.load import KINDS, list_recipes, load_recipe, recipe_kind
    from exlm_cli.format import format_large

    if name is not None:
        recipe: Recipe = load_recipe(name, kind=recipe_kind(name))
        return console.emit_recipe(recipe, as_json=as_json)
    entries = [_entry(info.recipe) for kind in KINDS for info in list_recipes(kind)]
    if as_json:
        return console.emit_json(entries)
    console.emit_listing(
        ["recipe", "of exlm", "parameters", "tokens a step"],
        [
            [
                e["name"],
                e["command"],
                "" if e["parameters"] is None else format_large(e["parameters"]),
                "" if e["tokens_per_step"] is None else f"{e['tokens_per_step']:,}",
            ]
            for e in entries
        ],
        [[e["purpose"], e["paper"]] for e in entries],
    )


def _entry(recipe: "Recipe") -> dict[str, Any]:
    """Return what is listed of a recipe: for a grid the size that its cells have in common, for fine-tuning none."""
    from exlm_cli.config.cells import CellsRecipe
    from exlm_cli.config.describe import count_parameters, tokens_per_step
    from exlm_cli.config.pretrain import PretrainRecipe

    sizes: dict[str, Any] = {"objective": None, "parameters": None, "tokens_per_step": None}
    sized = recipe.pretrain if isinstance(recipe, CellsRecipe) else recipe
    if isinstance(sized, PretrainRecipe):
        sizes = {
            "objective": sized.objective,
            "parameters": count_parameters(sized),
            "tokens_per_step": tokens_per_step(sized),
        }
    return {
        "name": recipe.name,
        "command": recipe.command,
        **sizes,
        "purpose": recipe.purpose,
        "paper": recipe.paper,
    }
