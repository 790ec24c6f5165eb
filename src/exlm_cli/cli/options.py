"""Options that several commands share: types, completion, parsing."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from exlm_cli.errors import ConfigError
from exlm_cli.format import shorten
from exlm_cli.paths import expand_path

if TYPE_CHECKING:
    from exlm_cli.config.base import Recipe

NumberT = TypeVar("NumberT", int, float)

Device = Literal["auto", "cpu", "cuda"]


def complete_recipes(context: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: return the names of the recipes that a command takes; `exlm recipes` takes all."""
    from exlm_cli.config.load import KINDS, list_recipes

    kinds = KINDS if context.info_name == "recipes" else (_kind_of_recipes(context.info_name),)
    names = [name for kind in kinds if kind is not None for name in list_recipes(kind)]
    return [name for name in names if name.startswith(incomplete)]


def complete_settings(context: typer.Context, incomplete: str) -> list[str]:
    """Shell completion: return the keys of a command's recipes, section by section."""
    from exlm_cli.config.overrides import child_keys

    kind = _kind_of_recipes(context.info_name)
    assert kind is not None, "only commands that take recipes have `--set`"
    section = incomplete.rpartition(".")[0]
    keys = [f"{section}.{key}" if section else key for key in child_keys(kind, section)]
    return [f"{key}." if child_keys(kind, key) else f"{key}=" for key in keys if key.startswith(incomplete)]


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
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one value of the recipe, like optim.lr=1e-4; repeatable.",
        autocompletion=complete_settings,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="DIR", parser=expand_path, help="Where results go; default: runs/<name>-<time>."
    ),
]
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run of exlm pretrain or finetune, hub:OWNER/NAME or bundled:NAME.")
]
CheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="RUN",
        parser=expand_path,
        help="Pre-training run, hub:OWNER/NAME, hf:FOLDER-OR-NAME or bundled:NAME; default: the newest finished one, "
        "else a bundled one.",
    ),
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
TextColumnOption = Annotated[
    str | None,
    typer.Option("--text-column", metavar="NAME", help="Column with the text; A,B: both columns of pairs of texts."),
]
KindOption = Annotated[
    Literal["text", "smiles"] | None,
    typer.Option("--kind", help="What the input is, where it cannot be inferred."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def collect_overrides(sets: list[str] | None, options: Mapping[str, object]) -> list[str]:
    """Return the overrides of `--set` and then of the options for single keys, which win.

    Args:
        sets: `key=value`, as given.
        options: Key -> value of its option; None: not given. Values are quoted, so that YAML reads a string as it is.

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
        options: Option -> its value; None or False: not given.

    Raises:
        ConfigError: One is given together with `--resume`.
    """
    if run is not None:
        refuse_together("--resume", options, f"{run} keeps the settings it began with")


def refuse_together(given: str, options: Mapping[str, object], hint: str = "leave one of the two out") -> None:
    """Refuse options that cannot be combined with what is given.

    Args:
        given: As the message names it.
        options: Option -> its value; None or False: not given.

    Raises:
        ConfigError: One is given.
    """
    for option, value in options.items():
        if value is not None and value is not False:
            shown = option if value is True else f"{option} {value}".strip()
            raise ConfigError(f"`{shown}` cannot be combined with `{given}`", hint)


def refuse_without(needed: str, given: object, options: Mapping[str, object], hint: str | None = None) -> None:
    """Refuse options that need another one.

    Args:
        needed: What they need, as messages name it.
        given: Its value; None, False or empty: not given.
        options: Option -> its value; None: not given.
        hint: None: add what is needed.

    Raises:
        ConfigError: One is given without it.
    """
    alone = [option for option, value in options.items() if value is not None]
    if alone and not given:
        raise ConfigError(f"`{alone[0]}` needs {needed}", hint or f"add {needed}, or leave `{alone[0]}` out")


def choose_columns(kind: str, *, smiles: str | None, text: str | None) -> tuple[str, ...]:
    """Return the column of `--smiles-column`, or those of `--text-column`, for rows of a kind; empty: none was given.

    Raises:
        ConfigError: The option of the other kind was given.
    """
    other = text if kind == "smiles" else smiles
    if other is not None:
        option, reads = ("--text-column", "SMILES") if kind == "smiles" else ("--smiles-column", "text")
        raise ConfigError(
            f"`{option} {other}`: the model reads {reads}", f"name the column of {reads} with `--{kind}-column`"
        )
    return tuple(split_list(text) or ()) if kind == "text" else () if smiles is None else (smiles,)


def split_list(text: str | None) -> list[str] | None:
    """Return the items of a list with commas, without blanks around them; None where the option was not given.

    An item with a comma is written as in CSV, in quotes.
    """
    if text is None:
        return None
    return [item.strip() for item in next(csv.reader([text], skipinitialspace=True)) or [""]]


def parse_formats(text: str | None, accepted: Sequence[str]) -> tuple[str, ...]:
    """Return the formats of `--format`; none where it was not given or is `none`.

    Raises:
        ConfigError: One is not accepted.
    """
    names = [] if text == "none" else split_list(text) or []
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


def _kind_of_recipes(command: str | None) -> "type[Recipe] | None":
    """Return the kind of recipe that a command takes; None where it takes none."""
    from exlm_cli.config.load import KINDS

    name = {"tokenize": "pretrain", "recipes": "pretrain", "repeat-mlm": "sweep"}.get(command or "", command)
    return next((kind for kind in KINDS if kind.command == name), None)
