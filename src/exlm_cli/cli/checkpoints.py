"""Which run a command means where `--checkpoint` is left out."""

from collections.abc import Callable
from pathlib import Path

from exlm_cli.config.load import load_recipe
from exlm_cli.config.recipes import PretrainRecipe
from exlm_cli.errors import CheckpointError, ExlmError
from exlm_cli.progress import Progress
from exlm_cli.run_dir import RUNS_ROOT, find_newest_run, read_run_json


def choose_checkpoint(
    given: Path | None, fits: Callable[[PretrainRecipe], bool], kind: str, recipe_to_make_one: str, progress: Progress
) -> Path:
    """Return the checkpoint that was given, or the newest pre-training run that fits, and say which one that is.

    Args:
        given: `--checkpoint`.
        fits: Whether a run with this recipe will do.
        kind: What is looked for, in words; for the error.
        recipe_to_make_one: Named in the hint.
        progress: Told which run was taken.

    Raises:
        CheckpointError: None was given and none fits.
    """
    if given is not None:
        return given
    newest = find_newest_run(RUNS_ROOT, lambda run: _is_pretrained(run, fits))
    if newest is None:
        raise CheckpointError(
            f"no `--checkpoint` was given, and there is no {kind} run with a checkpoint under {RUNS_ROOT}/",
            f"make one with `exlm pretrain --recipe {recipe_to_make_one}`",
        )
    progress.message(f"checkpoint: {newest}, the newest {kind} run")
    return newest


def _is_pretrained(run: Path, fits: Callable[[PretrainRecipe], bool]) -> bool:
    if not any((run / "checkpoints").glob("step-*")):
        return False
    try:
        return read_run_json(run).get("command") == "pretrain" and fits(load_recipe(str(run / "recipe.yaml")))
    except ExlmError:
        # a damaged run is no reason to refuse the others
        return False
