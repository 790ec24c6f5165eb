"""Loading of downstream tasks, and of files to predict, by config. Importing this loads no data library, no torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from exlm_cli.config.tasks import GlueTaskConfig, MoleculeNetTaskConfig, RowTaskConfig, SquadTaskConfig, TaskConfig
from exlm_cli.errors import ConfigError, DataError
from exlm_cli.progress import Progress

if TYPE_CHECKING:
    from exlm_cli.tasks.base import DownstreamTask, NewRows, TrainedTask


def default_recipe(task_name: str) -> str:
    """Return the name of a task's shipped recipe: `moleculenet-bace`, `glue-rte`, `squad-v2`, `csv`."""
    return task_name.replace("/", "-")


def load_task(config: TaskConfig, progress: Progress) -> "DownstreamTask":
    """Read a task's data and split it.

    Raises:
        DataError: A file is missing or cannot be used.
        ConfigError: Values of the config do not fit the data.
    """
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
            from exlm_cli.tasks.csv import load_csv

            return load_csv(config, progress)


def read_new_rows(task: "TrainedTask", path: Path, column: str | None, progress: Progress) -> "NewRows":
    """Read a file that a fine-tuned model predicts, in the layout of its task.

    Args:
        task: Task of the model.
        path: The file.
        column: Column of the SMILES or text, for a task that has one; None: the usual one.
        progress: Shows bars.

    Raises:
        ConfigError: A column is given, and the task finds its own.
        DataError: The file cannot be read.
    """
    if column is not None and not isinstance(task.config, RowTaskConfig):
        raise ConfigError(
            f"{task.config.name} finds its own columns: leave out `task.{task.input_kind}_column={column}`",
            "a column can be chosen for MoleculeNet and CSV tasks",
        )
    match task.config:
        case GlueTaskConfig():
            from exlm_cli.tasks.glue import read_new_glue_rows

            return read_new_glue_rows(task, path, progress)
        case SquadTaskConfig():
            from exlm_cli.tasks.squad.task import read_new_questions

            return read_new_questions(task, path)
        case _:
            from exlm_cli.tasks.row_task import read_new_table

            return read_new_table(task, path, column, progress)


def check_splits(task: "DownstreamTask") -> None:
    """Check that there are rows to train and to validate on.

    Raises:
        DataError: There are none.
    """
    for split in ("train", "valid"):
        if split not in task.splits:
            raise DataError(f"{task.name}: there are no rows to use as `{split}`", "fine-tuning needs both splits")
