"""The recipe of a run to go on with. Importing this loads no torch."""

from collections.abc import Sequence
from pathlib import Path

from exlm_cli.config.check import RecipeT
from exlm_cli.config.load import load_recipe, recipe_kind
from exlm_cli.errors import CheckpointError
from exlm_cli.run_dir import RUN_FILE


def resumed_recipe(run: Path, kind: type[RecipeT], overrides: Sequence[str] = ()) -> RecipeT:
    """Return the recipe that a run directory was begun with, `overrides` laid over it.

    Args:
        run: Its directory.
        kind: Of recipe, which the command that goes on with it takes.
        overrides: `section.key=value`.

    Raises:
        CheckpointError: `run` is no run directory, or one of another command.
        ConfigError: An override that is not accepted.
    """
    for name in ("recipe.yaml", RUN_FILE):
        if not (run / name).is_file():
            raise CheckpointError(
                f"{run}: not a run directory: it has no {name}", f"give the directory that `exlm {kind.command}` named"
            )
    path = str(run / "recipe.yaml")
    begun = recipe_kind(path)
    if begun is not kind:
        command = begun.command.partition(" ")[0]
        raise CheckpointError(
            f"{run}: a run of `exlm {begun.command}`, not of `exlm {kind.command}`",
            f"`exlm {command} --resume {run}` goes on with it",
        )
    return load_recipe(path, overrides, kind=kind)
