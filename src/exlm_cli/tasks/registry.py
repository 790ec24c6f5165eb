"""Which tasks there are by name, and who loads them. Importing this loads no data library and no torch."""

import difflib
from typing import TYPE_CHECKING, Literal

from exlm_cli.config.finetune import TaskConfig
from exlm_cli.config.spelling import how_to_set
from exlm_cli.errors import ConfigError, DataError
from exlm_cli.progress import Progress

if TYPE_CHECKING:
    from exlm_cli.tasks.base import DownstreamTask

TASKS: dict[str, tuple[str, ...]] = {
    "moleculenet": ("bace", "bbbp", "clintox", "tox21", "toxcast", "sider", "muv"),
    "glue": ("mnli", "qqp", "qnli", "sst2", "cola", "rte", "mrpc", "stsb"),
    "squad": ("v2",),
    "csv": (),
}
"""Names of tasks by suite; `csv` has none of its own, it is a file of the user's."""


def find_task(suite: str, name: str, *, as_key: bool = False) -> str:
    """Return `suite/name`.

    Args:
        suite: The part before the slash.
        name: The part behind it.
        as_key: Hints write a task like `glue/rte`, as recipes and `--task` do, not as a command.

    Raises:
        ConfigError: There is no such suite or task; the nearest one is named.
    """
    if suite not in TASKS:
        holding = [known for known, names in TASKS.items() if suite in names]
        near = holding or difflib.get_close_matches(suite, TASKS, n=1, cutoff=0.5)
        known = suite if holding else name if near and as_key and name in TASKS[near[0]] else ""
        meant = _spelt(near[0], known, as_key=as_key) if near else None
        raise ConfigError(
            f"unknown suite `{suite}`; accepted: {', '.join(TASKS)}",
            f"did you mean {meant}?" if meant else f"for example {_spelt('moleculenet', 'bace', as_key=as_key)}",
        )
    names = TASKS[suite]
    if not names:
        raise ConfigError(
            f"`{suite}` has no task `{name}`: it is a file of your own",
            f"name the task `{suite}`, and the file with {how_to_set('task.files.train', 'FILE')}"
            if as_key
            else "for example `exlm finetune csv my_assay.csv`",
        )
    if name in names:
        return f"{suite}/{name}"
    near = difflib.get_close_matches(name.lower().replace("-", "").replace("_", ""), names, n=1, cutoff=0.5)
    raise ConfigError(
        f"unknown task `{name}` of {suite}; accepted: {', '.join(names)}",
        f"did you mean {_spelt(suite, near[0], as_key=as_key)}?"
        if near
        else f"for example {_spelt(suite, names[0], as_key=as_key)}",
    )


def _spelt(suite: str, name: str, *, as_key: bool) -> str:
    """Return a task, or a suite of which no task is named, as a user writes it."""
    separator = "/" if as_key else " "
    return f"`{'' if as_key else 'exlm finetune '}{suite}{separator + name if name else ''}`"


def default_recipe(task_name: str) -> str:
    """Return the recipe of a task's own: `moleculenet-bace`, `glue-rte`, `squad-v2`, `csv`."""
    return task_name.replace("/", "-")


def input_kind_of(config: TaskConfig) -> Literal["text", "smiles"]:
    """Return which kind of checkpoint a task needs, without loading its data; a CSV is one of molecules where it does
    not name a column of text.
    """
    if config.suite == "csv":
        return "smiles" if config.text_column is None else "text"
    return "smiles" if config.suite == "moleculenet" else "text"


def check_task_name(config: TaskConfig) -> None:
    """Check that there is the task, without loading anything.

    Raises:
        ConfigError: There is no such task.
    """
    if config.name != "csv":
        suite, _, name = config.name.partition("/")
        find_task(suite, name, as_key=True)


def load_task(config: TaskConfig, progress: Progress) -> "DownstreamTask":
    """Read a task's data and split it.

    Raises:
        ConfigError: There is no such task.
        DataError: Its data cannot be had or used.
    """
    check_task_name(config)
    match config.suite:
        case "moleculenet":
            from exlm_cli.tasks.moleculenet import load_moleculenet

            return load_moleculenet(config, progress)
        case "glue":
            from exlm_cli.tasks.glue import load_glue

            return load_glue(config, progress)
        case "squad":
            from exlm_cli.tasks.squad.task import load_squad

            return load_squad(config, progress)
        case _:
            from exlm_cli.tasks.csv import load_csv

            return load_csv(config, progress)


def check_splits(task: "DownstreamTask") -> None:
    """Check that there are rows to train and to validate on.

    Raises:
        DataError: There are none.
    """
    for split in ("train", "valid"):
        if split not in task.splits:
            raise DataError(f"{task.name}: there are no rows to use as `{split}`", "fine-tuning needs both splits")
