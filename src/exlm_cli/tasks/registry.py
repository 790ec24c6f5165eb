"""Loading of downstream tasks, and of files to predict, by config. Importing this loads no data library, no torch."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from exlm_cli.config.tasks import (
    GlueTaskConfig,
    MoleculeNetTaskConfig,
    SquadTaskConfig,
    TaskConfig,
)
from exlm_cli.errors import DataError
from exlm_cli.files import nearest_file
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.tasks.sources import HUB_PREFIX, existing_folder, find_parts, given_file

if TYPE_CHECKING:
    from exlm_cli.tasks.base import DownstreamTask, Layout


def load_task(config: TaskConfig, progress: Progress) -> "DownstreamTask":
    """Read a task's data and split it; warn of a file that is given for two splits.

    Raises:
        DataError: A file is missing or cannot be used.
        ConfigError: Values of the config do not fit the data.
    """
    given = [os.path.realpath(file) for file in _given_files(config)]  # Path.resolve raises for a link to itself
    for file in sorted({file for file in given if given.count(file) > 1}):
        progress.message(f"warning: {file} is the file of two splits: scores then measure memorisation")
    match config:
        case MoleculeNetTaskConfig():
            from exlm_cli.tasks.moleculenet import load_moleculenet

            return load_moleculenet(config, progress)
        case GlueTaskConfig():
            from exlm_cli.tasks.glue import load_glue

            return load_glue(config, progress)
        case SquadTaskConfig():
            from exlm_cli.tasks.squad.task import load_squad

            return load_squad(config, progress)
        case _:
            from exlm_cli.tasks.user_table import load_user_table

            return load_user_table(config, progress)


def require_local_files(config: TaskConfig) -> None:
    """Check that `task.files` and the folder `task.data_dir` exist and, for MoleculeNet and GLUE, that the folder holds
    the task's files. Nothing is read or fetched.

    Raises:
        DataError: One is missing.
    """
    _given_files(config)
    if config.data_dir is None or config.data_dir.startswith(HUB_PREFIX):
        return
    match config:
        case MoleculeNetTaskConfig():
            from exlm_cli.tasks.moleculenet import find_set_file

            find_set_file(config, SilentProgress())
        case GlueTaskConfig():
            from exlm_cli.tasks.glue import GLUE_TASKS

            list(find_parts(config, GLUE_TASKS[config.name.removeprefix("glue/")].files))
        case _:
            existing_folder(config, ())


def _given_files(config: TaskConfig) -> list[Path]:
    """Return the files of `task.files`, all of which exist."""
    files = {split: given_file(config, str(file)) for split, file in config.files.model_dump(exclude_none=True).items()}
    for split, file in files.items():
        if not os.path.lexists(file):
            hint = "relative paths start in `--data-dir DIR` if that is given, else in the current directory"
            moved = f"if it has moved, `--set task.files.{split}=FILE` says where it is"
            raise DataError(f"{file}: no such file", f"{nearest_file(file) or hint}; {moved}")
    return [*files.values()]


def columns_of(config: TaskConfig) -> tuple[str, ...]:
    """Return the names of the columns with the SMILES or texts of a task; empty where none is named."""
    match config:
        case GlueTaskConfig():
            from exlm_cli.tasks.glue import GLUE_TASKS

            return GLUE_TASKS[config.name.removeprefix("glue/")].layouts[-1].texts
        case SquadTaskConfig():
            return ("question", "context")
        case _:
            return config.input_columns


def num_texts(config: TaskConfig) -> int:
    """Return how many texts a row of a task has; a molecule is one."""
    return max(1, len(columns_of(config)))


def layout_of(config: TaskConfig) -> "Layout":
    """Return how files to predict are read, and predictions written, for a task."""
    from exlm_cli.tasks.base import Layout

    match config:
        case GlueTaskConfig():
            from exlm_cli.tasks.glue import read_new_glue

            return Layout(read_new_glue, ".tsv", ("-details.csv",))
        case SquadTaskConfig():
            from exlm_cli.tasks.squad.task import read_new_questions

            return Layout(read_new_questions, ".json", ("-no-answer.json", "-details.csv"))
        case _:
            from exlm_cli.tasks.user_table import read_new_table

            return Layout(read_new_table)
