"""Library messages in the words of the command line: `` `task.data_dir=DIR` `` becomes `` `--data-dir DIR` ``.

The library names settings as overrides in backticks, `` `key=VALUE` ``, and arguments of its functions likewise. The
command line shows the option of the running command for it, or else `--set key=VALUE`.
"""

import re
from contextvars import ContextVar
from typing import Any

running_command: ContextVar[Any] = ContextVar("running_command", default=None)
"""The click command that runs; None: none does, and messages stay as they are."""

_OVERRIDE = re.compile(r"(override )?`([a-z][\w.-]*)=([^`]*)`|override `([^`]*)`")

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "checkpoint": ("checkpoint", "run", "runs"),
    "data.on_invalid": ("on_invalid",),
    "data.train": ("inputs", "data"),
    "data.valid": ("data",),
    "only": ("variants",),
    "pretrain.data.on_invalid": ("on_invalid",),
    "seed": ("seed", "seeds"),
    "task.data_dir": ("data_dir",),
    "task.label_columns": ("label_columns",),
    "task.name": ("tasks",),
    "task.smiles_column": ("smiles_column",),
    "task.split": ("split",),
    "task.text_column": ("text_column",),
    "tokenizer.path": ("tokenizer",),
    "tokenizer.vocab_size": ("vocab_size",),
    "use_grid": ("grid",),
}
"""Parameters of commands for each key; a key of one word that is not here is the parameter of that name."""

_COMMANDS_OF_RECIPES = {"tokenize": "pretrain", "repeat-mlm": "sweep"}
"""Commands that take recipes of another command."""


def to_options(text: str) -> str:
    """Return a message with each `` `key=VALUE` `` as the running command takes it."""
    command = running_command.get()
    if command is None:
        return text

    def replace(match: re.Match[str]) -> str:
        is_given, key, value, malformed = match.groups()
        if malformed is not None:
            return f"`--set {malformed}`"
        path = _path_in_recipe(command, key)
        if is_given and path != key:
            return f"`--set {key}={value}`"  # an unknown key, as it was given
        option = _as_parameter(command, key, value)
        if option is None and path is not None:
            option = f"`--set {path}={value}`"
        return option or match.group()

    return _OVERRIDE.sub(replace, text)


def _as_parameter(command: Any, key: str, value: str) -> str | None:
    """Return the option or argument of a command for a key; None where it has none."""
    parameters = {parameter.name: parameter for parameter in command.params}
    names = _PARAMETERS.get(key, () if "." in key else (key,))
    parameter = next((parameters[name] for name in names if name in parameters), None)
    if parameter is None:
        return None
    if parameter.param_type_name == "argument":
        return f"`{_plain(value)}`"
    option = next(name for name in parameter.opts if name.startswith("--"))
    if not getattr(parameter, "is_flag", False):
        return f"`{option} {_plain(value)}`"
    if value == "true":
        return f"`{option}`"
    return f"`{parameter.secondary_opts[0]}`" if parameter.secondary_opts else f"no `{option}`"


def _path_in_recipe(command: Any, key: str) -> str | None:
    """Return the path of a key in the command's recipes, with its section in a sweep; None for any other text."""
    from exlm_cli.config.keys import find_field
    from exlm_cli.config.load import KINDS

    name = _COMMANDS_OF_RECIPES.get(command.name, command.name)
    kind = next((kind for kind in KINDS if kind.command == name), None)
    if kind is None:
        return None
    paths = (f"{prefix}{key}" for prefix in ("", "pretrain.", "finetune."))
    return next((path for path in paths if path.startswith("grid.") or find_field(kind, path) is not None), None)


def _plain(value: str) -> str:
    """Return a value without the brackets and quotes that YAML needs and an option does not."""
    if value.startswith("[") and value.endswith("]"):
        return ",".join(_plain(part.strip()) for part in value[1:-1].split(","))
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
