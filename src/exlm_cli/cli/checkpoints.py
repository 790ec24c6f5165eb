"""The newest fitting run, for commands that are given none."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.errors import CheckpointError, ExlmError
from exlm_cli.progress import Progress
from exlm_cli.run_dir import RUNS_ROOT, find_newest_run, read_run_json


def choose_checkpoint(
    given: Path | None,
    fits_by_kind: Mapping[str, Callable[[PretrainRecipe], bool]],
    recipe_to_make_one: str,
    progress: Progress,
) -> Path:
    """Return the checkpoint that was given, or else the newest pre-training run that fits, and print its path.

    Args:
        given: `--checkpoint`.
        fits_by_kind: Description of a kind of run -> whether a recipe is of it. The first kind with any run is taken;
            the error names the last.
        recipe_to_make_one: Recipe that makes such a run, for the hint.
        progress: Prints the path.

    Raises:
        CheckpointError: None was given and none fits.
    """
    if given is not None:
        return given
    for kind, fits in fits_by_kind.items():
        newest = find_newest_run(RUNS_ROOT, partial(_is_pretrained, fits=fits))
        if newest is not None:
            progress.message(f"checkpoint: {newest}, the newest {kind}")
            return newest
    raise CheckpointError(
        f"no `--checkpoint` was given, and there is no {[*fits_by_kind][-1]} with a checkpoint under {RUNS_ROOT}/",
        f"make one with `exlm pretrain --recipe {recipe_to_make_one}`; a cell of a sweep is given by its path",
    )


def newest_run(*, takes_sweep: bool, progress: Progress) -> Path:
    """Return the newest run that can be scored and print its path; cells of a sweep are not looked at.

    Args:
        takes_sweep: Whether a sweep with a finished cell fits too.
        progress: Prints the path.

    Raises:
        CheckpointError: There is none.
    """
    from exlm_cli.experiments.results import RESULT_FILE, is_sweep_run
    from exlm_cli.finetune.results import RESULTS_FILE

    def is_scorable(run: Path) -> bool:
        try:
            command = read_run_json(run).command
            if is_sweep_run(run):
                return takes_sweep and any((run / "cells").rglob(RESULT_FILE))
        except ExlmError:
            # skip a damaged run
            return False
        is_finished = command == "finetune" and (run / RESULTS_FILE).is_file()
        return is_finished or (command == "pretrain" and any((run / "checkpoints").glob("step-*")))

    newest = find_newest_run(RUNS_ROOT, is_scorable)
    if newest is None:
        raise CheckpointError(
            f"no run was given, and there is none with a checkpoint under {RUNS_ROOT}/",
            "make one with `exlm pretrain --recipe quickstart-text`; a cell of a sweep is given by its path",
        )
    progress.message(f"run: {newest}, the newest one")
    return newest


def _is_pretrained(run: Path, fits: Callable[[PretrainRecipe], bool]) -> bool:
    if not any((run / "checkpoints").glob("step-*")):
        return False
    try:
        return read_run_json(run).command == "pretrain" and fits(load_recipe(str(run / "recipe.yaml")))
    except ExlmError:
        # skip a damaged run
        return False
