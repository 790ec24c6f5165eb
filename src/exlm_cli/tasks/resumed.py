"""The recipe of a fine-tuning run to go on with. Importing this loads no torch."""

from collections.abc import Sequence
from pathlib import Path

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.errors import CheckpointError
from exlm_cli.run_dir import read_run_json


def resumed_recipe(run: Path, overrides: Sequence[str] = ()) -> FinetuneRecipe:
    """Return the recipe of a run to continue.

    Raises:
        CheckpointError: `run` is no run directory of fine-tuning.
        ConfigError: An override that is not accepted.
    """
    if not (run / "recipe.yaml").is_file() or read_run_json(run).get("command") != "finetune":
        raise CheckpointError(
            f"{run}: no run of `exlm finetune` to resume", "give the directory that `exlm finetune` named"
        )
    return load_recipe(str(run / "recipe.yaml"), overrides, kind=FinetuneRecipe)
