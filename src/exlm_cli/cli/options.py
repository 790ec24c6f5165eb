"""Options shared by several commands: their types, their parsing, and their names in messages of the library.

Messages of the library name a setting or a function argument as `` `key=VALUE` ``. `to_options` replaces it by the
option of the running command, or else by `--set key=VALUE`.
"""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from exlm_cli.errors import ConfigError
from exlm_cli.format import shorten
from exlm_cli.paths import expand_path

if TYPE_CHECKING:
    from exlm_cli.config.base import Recipe

NumberT = TypeVar("NumberT", int, float)

Device = Literal["auto", "cpu", "cuda"]


def complete_recipes(context: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: return the recipes of a command whose names begin with `incomplete`."""
    from exlm_cli.config.load import list_recipes

    kind = _kind_of_recipes(context.info_name)
    return [] if kind is None else [name for name in list_recipes(kind) if name.startswith(incomplete)]


RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        metavar="NAME-OR-FILE",
        help="A recipe by name (see `exlm recipes`) or YAML file.",
        autocompletion=complete_recipes,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one value of the recipe, like optim.lr=1e-4; repeatable."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", parser=expand_path, help="Where results go; default: runs/<name>-<time>."),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume", metavar="RUN", parser=expand_path, help="Continue the run in this directory from its checkpoint."
    ),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Seed of weights, data order, masks, dropout.")
]
DeviceOption = Annotated[Device | None, typer.Option("--device", help="Where the model runs; default: the recipe's.")]
ScoringDeviceOption = Annotated[
    Device, typer.Option("--device", help="Where the model runs; auto: on a CUDA device if there is one.")
]
OnInvalidOption = Annotated[
    Literal["error", "skip"] | None,
    typer.Option("--on-invalid", help="Rows that cannot be used: stop, or skip and list in a CSV."),
]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", min=1, metavar="N", help="Runs at once; default: one per GPU, or per CPU core."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe and stop.")]
SmilesColumnOption = Annotated[
    str | None, typer.Option("--smiles-column", metavar="NAME", help="Column with the SMILES.")
]
TextColumnOption = Annotated[str | None, typer.Option("--text-column", metavar="NAME", help="Column with the text.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def collect_overrides(sets: list[str] | None, options: Mapping[str, object]) -> list[str]:
    """Return the overrides of `--set` and then of the options for single keys, which win.

    Args:
        sets: `key=value`, as given.
        options: Key -> value of its option; None: not given. Values are quoted, so that YAML reads a text as it is.

    Raises:
        ConfigError: `--set` gives a key twice: the first value would be lost.
    """
    first: dict[str, str] = {}
    for override in sets or []:
        key, equals, _ = override.partition("=")
        key = key.strip() if equals else ""  # what is not `key=value` is refused where it is read
        if key and key in first:
            raise ConfigError(
                f"`--set {first[key]}` and `--set {shorten(override, 40)}` both give `{key}`",
                "give it once; several values of a list are written `KEY=[A,B]`",
            )
        first[key] = shorten(override, 40)
    given = {key: value for key, value in options.items() if value is not None}
    return [*(sets or []), *(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items())]


def refuse_with_resume(run: Path | None, options: Mapping[str, object]) -> None:
    """Refuse options that start a run where one is continued.

    Args:
        run: `--resume`; None: a new run is started.
        options: Parameter or key -> its value; None: not given.

    Raises:
        ConfigError: One is given together with `--resume`.
    """
    for key, value in options.items():
        if run is not None and value is not None:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(
                f"`{key}={shown}` cannot be combined with `--resume`", f"{run} keeps the settings it began with"
            )


def split_words(text: str | None) -> list[str] | None:
    """Return the words of a list with commas, without blanks around them; None where the option was not given.

    A word with a comma is written as in CSV, in quotes.

    Raises:
        ConfigError: It is not one line of CSV.
    """
    if text is None:
        return None
    try:
        words = next(csv.reader([text], skipinitialspace=True))
    except csv.Error as error:
        shown = shorten(text, 40)
        raise ConfigError(f"`{shown}`: not a list with commas: {error}", "write it in one line, like `A,B`") from None
    return [word.strip() for word in words or [""]]


def parse_formats(text: str | None, accepted: Sequence[str]) -> tuple[str, ...]:
    """Return the formats of `--format`; none where it was not given or is `none`.

    Raises:
        ConfigError: One is not accepted.
    """
    names = [] if text == "none" else split_words(text) or []
    for name in names:
        if name not in accepted:
            raise ConfigError(
                f"`--format {text}`: `{name}` is not one of {', '.join(accepted)}",
                "choose from these, or give only `none`",
            )
    return tuple(names)


def parse_seeds(text: str | None) -> list[int] | None:
    """Return the seeds of `--seeds`; None where the option was not given.

    Raises:
        ConfigError: As `parse_numbers`.
    """
    return parse_numbers("--seeds", text, int, "an integer of at least 0", 0, 2**63 - 1)


def parse_numbers(
    option: str, text: str | None, kind: type[NumberT], accepted: str, minimum: float, maximum: float
) -> list[NumberT] | None:
    """Return the numbers of a list with commas; None where the option was not given.

    Raises:
        ConfigError: A word is not a number, a number is out of bounds or given twice.
    """
    if text is None:
        return None
    numbers: list[NumberT] = []
    for word in text.split(","):
        try:
            number = kind(word.strip())
        except ValueError:
            number = None
        if number is None or not minimum <= number <= maximum:
            raise ConfigError(f"`{option} {text}`: `{word}` is not {accepted}", "numbers are separated by commas")
        if number in numbers:
            raise ConfigError(f"`{option} {text}` gives {number} twice", "give each once")
        numbers.append(number)
    return numbers


running_command: ContextVar[Any] = ContextVar("running_command", default=None)
"""The click command that runs; None: none does, and messages stay as they are."""

_OVERRIDE = re.compile(r"(override )?`([a-z][\w.-]*)=([^`]*)`|override `([^`]*)`")

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "checkpoint": ("checkpoint", "run", "runs"),
    "data.column": ("column",),
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
"""Possible command parameters by recipe key. A key without a dot that is not here is its own parameter name."""

_COMMANDS_OF_RECIPES = {"tokenize": "pretrain", "recipes": "pretrain", "repeat-mlm": "sweep"}
"""Commands that take recipes of another command's kind."""


def to_options(text: str) -> str:
    """Replace each `` `key=VALUE` `` of a message by the option of the running command."""
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
    words = _words(value)
    if parameter.param_type_name == "argument":
        return f"`{' '.join(words)}`"
    option = next(name for name in parameter.opts if name.startswith("--"))
    if parameter.multiple:
        return f"`{' '.join(f'{option} {word}' for word in words)}`"
    if not parameter.is_flag:
        return f"`{option} {','.join(words)}`"
    if value == "true":
        return f"`{option}`"
    return f"`{parameter.secondary_opts[0]}`" if parameter.secondary_opts else f"no `{option}`"


def _path_in_recipe(command: Any, key: str) -> str | None:
    """Return the path of a key in the command's recipes, with its section in a sweep; None for any other text."""
    from exlm_cli.config.overrides import find_field

    kind = _kind_of_recipes(command.name)
    if kind is None:
        return None
    paths = (f"{prefix}{key}" for prefix in ("", "pretrain.", "finetune."))
    return next((path for path in paths if path.startswith("grid.") or find_field(kind, path) is not None), None)


def _kind_of_recipes(command: str | None) -> "type[Recipe] | None":
    """Return the kind of recipe that a command takes; None where it takes none."""
    from exlm_cli.config.load import KINDS

    name = _COMMANDS_OF_RECIPES.get(command or "", command)
    return next((kind for kind in KINDS if kind.command == name), None)


def _words(value: str) -> list[str]:
    """Return a value, or those of a list, without the brackets and quotes that YAML needs and an option does not."""
    if value.startswith("[") and value.endswith("]"):
        return [word for part in value[1:-1].split(",") for word in _words(part.strip())]
    return [value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value]
