"""Paths of inputs in a recipe: made absolute, so that they mean the same in any folder, cut to names, or checked.

The recipe of a run directory is written here, since its paths are absolute.
"""

import glob
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exlm_cli.config.base import Mark, Recipe
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import dump_recipe
from exlm_cli.config.overrides import RecipeT
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import DataConfig, TokenizerConfig
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.config.tasks import TaskSection
from exlm_cli.errors import DataError
from exlm_cli.files import write_atomically
from exlm_cli.paths import expand_path
from exlm_cli.run_dir import end_beginning

_PRETRAIN_PATHS = {
    section: [name for name, field in config.model_fields.items() if Mark.INPUT in field.metadata]
    for section, config in (("data", DataConfig), ("tokenizer", TokenizerConfig))
}
"""Keys of a pre-training recipe that hold paths, by section."""

_SCHEMES = ("hub:", "bundled:")


def with_absolute_paths(recipe: RecipeT) -> RecipeT:
    """Return a recipe whose relative paths are joined to the current directory.

    Names that begin with `~`, `hub:` or `bundled:` mean the same everywhere and are kept.
    """
    return _changed(recipe, _absolute)


def write_run_recipe(run: Path, recipe: Recipe) -> None:
    """Write `recipe.yaml` of a run directory, the last file that a resumption needs: from now on it is a run.

    Raises:
        CheckpointError: The file system refuses.
    """
    write_atomically(run / "recipe.yaml", dump_recipe(with_absolute_paths(recipe)).encode())
    end_beginning(run)


def with_names_alone(recipe: RecipeT) -> RecipeT:
    """Return a recipe whose paths have lost their folders, for readers who have other machines."""
    return _changed(recipe, _name)


def check_task_files(task: TaskSection) -> None:
    """Check that the folder and files which a task section names are there.

    Raises:
        DataError: One is not.
    """
    folder = Path()
    if task.data_dir is not None and not task.data_dir.startswith(_SCHEMES):
        folder = expand_path(task.data_dir)
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder", "`task.data_dir=DIR` names the folder with the task's files")
    for given in task.files.model_dump().values():
        if given is not None and not (folder / expand_path(given)).exists():
            raise DataError(f"{folder / given}: no such file", "give the path of the file as it is seen from here")


def _changed(recipe: RecipeT, change: Callable[[Any], Any]) -> RecipeT:
    return recipe.model_copy(update=_changed_values(recipe, change))


def _changed_values(recipe: Recipe, change: Callable[[Any], Any]) -> dict[str, Any]:
    if isinstance(recipe, PretrainRecipe):
        return {
            section: (config := getattr(recipe, section)).model_copy(
                update={key: change(getattr(config, key)) for key in keys}
            )
            for section, keys in _PRETRAIN_PATHS.items()
        }
    if isinstance(recipe, FinetuneRecipe):
        return {"task": _changed_task(recipe.task, change)}
    assert isinstance(recipe, SweepRecipe), f"{type(recipe)} names no inputs"
    keys = {f"{section}.{key}" for section, names in _PRETRAIN_PATHS.items() for key in names}
    variants = {
        label: {key: change(value) if key in keys else value for key, value in changes.items()}
        for label, changes in recipe.variants.items()
    }
    return {
        "pretrain": _changed(recipe.pretrain, change),
        "finetune": _changed(recipe.finetune, change),
        "variants": variants,
    }


def _changed_task(task: TaskSection, change: Callable[[Any], Any]) -> TaskSection:
    keys = [key for key in ("data_dir", "split_file") if key in type(task).model_fields]
    update: dict[str, Any] = {key: change(getattr(task, key)) for key in keys}
    if task.data_dir is None:  # else files are looked for in that folder
        files = {name: change(value) for name, value in task.files.model_dump().items()}
        update["files"] = task.files.model_copy(update=files)
    return task.model_copy(update=update)


def _absolute(given: Any) -> Any:
    """Return one path, or each of several, as an absolute one."""
    if isinstance(given, list | tuple):
        return type(given)(_absolute(one) for one in given)
    if not isinstance(given, str) or not given.strip() or given.startswith(("~", *_SCHEMES)):
        return given
    folder = str(Path.cwd())
    if glob.has_magic(given) and not Path(given).exists():
        folder = glob.escape(folder)  # a pattern stays one, whatever the folder is called
    return str(Path(folder) / given)


def _name(given: Any) -> Any:
    """Return the last part of a path, or of each of several."""
    if isinstance(given, list | tuple):
        return type(given)(_name(one) for one in given)
    return Path(given).name if isinstance(given, str) and not given.startswith(_SCHEMES) else given
