"""`exlm recipes`: what can be run by name."""

from typing import Annotated

import typer

from exlm_cli.cli.options import JsonOption


def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this recipe, every key resolved.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the recipes, or print one.

    Each with its purpose, parameters, tokens a step and place in the paper.
    """
    from exlm_cli.cli import console
    from exlm_cli.config.load import dump_recipe, list_recipes, load_recipe
    from exlm_cli.config.parameters import count_parameters, tokens_per_step

    if name is not None:
        recipe = load_recipe(name)
        return console.emit_json(recipe.model_dump(mode="json")) if as_json else console.emit_text(dump_recipe(recipe))
    listed = [info.recipe for info in list_recipes()]
    if as_json:
        return console.emit_json(
            [
                {
                    "name": r.name,
                    "objective": r.objective,
                    "parameters": count_parameters(r),
                    "tokens_per_step": tokens_per_step(r),
                    "purpose": r.purpose,
                    "paper": r.paper,
                }
                for r in listed
            ]
        )
    console.emit_listing(
        ["recipe", "parameters", "tokens a step"],
        [[r.name, f"{count_parameters(r) / 1e6:.1f} M", f"{tokens_per_step(r):,}"] for r in listed],
        [[r.purpose, r.paper] for r in listed],
    )
