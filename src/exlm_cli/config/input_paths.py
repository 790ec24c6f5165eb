"""Input paths of a recipe: make them absolute, or cut them to file names.

The recipe of a run directory is written here, because its paths are absolute.
"""

import glob
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from exlm_cli.config.base import Mark, Recipe, StrictModel
from exlm_cli.config.load import dump_recipe
from exlm_cli.config.overrides import RecipeT, find_field
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.config.tasks import TaskSection, TrainFile
from exlm_cli.files import write_atomically
from exlm_cli.run_dir import mark_resumable

SectionT = TypeVar("SectionT", bound=StrictModel)

SCHEMES = ("hub:", "bundled:")
"""Beginnings of inputs that are no paths."""


def with_absolute_paths(recipe: RecipeT) -> RecipeT:
    """Return a recipe whose relative paths are joined to the current directory.

    Names that begin with `~`, `hub:` or `bundled:` mean the same everywhere and are kept.
    """
    return _changed(recipe, _absolute)


def write_run_recipe(run: Path, recipe: Recipe) -> None:
    """Write `recipe.yaml`, the last file that a resumption needs, and mark the run directory as resumable.

    Raises:
        CheckpointError: A file cannot be written.
    """
    write_atomically(run / "recipe.yaml", dump_recipe(with_absolute_paths(recipe)).encode())
    mark_resumable(run)


def with_names_alone(recipe: RecipeT) -> RecipeT:
    """Return a recipe with file names in place of paths, for use on other machines."""
    return _changed(recipe, _name)


def _changed(section: SectionT, change: Callable[[str], str]) -> SectionT:
    """Return a recipe or section with its paths changed: the values of fields with `Mark.INPUT`."""
    update: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if Mark.INPUT in field.metadata:
            update[name] = _changed_paths(value, change)
        elif isinstance(value, StrictModel):
            update[name] = _changed(value, change)
    if isinstance(section, TaskSection) and section.data_dir is not None and change is _absolute:
        del update["files"]  # they are looked for in that folder
    if isinstance(section, SweepRecipe):
        update["variants"] = {
            label: {key: _changed_paths(value, change) if _is_path(key) else value for key, value in changes.items()}
            for label, changes in section.variants.items()
        }
    return section.model_copy(update=update)


def _is_path(key: str) -> bool:
    """Return whether a dotted key of a pre-training recipe holds paths."""
    field = find_field(PretrainRecipe, key)
    return field is not None and Mark.INPUT in field.metadata


def _changed_paths(given: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to one path or to each of several; keep names of data sets and values that are not text."""
    if isinstance(given, TrainFile):
        return given.model_copy(update={name: _changed_paths(value, change) for name, value in given})
    if isinstance(given, list | tuple):
        return type(given)(_changed_paths(one, change) for one in given)
    return change(given) if isinstance(given, str) and not given.startswith(SCHEMES) else given


def _absolute(given: str) -> str:
    if not given.strip() or given.startswith("~"):
        return given
    folder = str(Path.cwd())
    if glob.has_magic(given) and not Path(given).exists():
        folder = glob.escape(folder)  # a pattern stays one, whatever the folder is called
    return str(Path(folder) / given)


def _name(given: str) -> str:
    """Return the last part of a path."""
    return Path(given).name
