"""Base classes of recipes and their sections, and the identity of a recipe: the values that decide its results.

A run is continued only with a recipe of the same identity. A field that does not decide results has a mark beside its
declaration, like `Annotated[int, Mark.RECORD]`.
"""

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from exlm_cli.files import hash_json

_TYPES_IN_YAML = {
    "model_type": "a section of keys",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "int_parsing_size": "between -2^63 and 2^63",
}
"""What a value should be, for recipe authors, by the type of pydantic's finding."""

_WHOLE_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE]\+?[0-9]+")
"""A way to write an integer that pydantic does not read."""


_RIVALS = {"warmup_steps": "warmup_ratio", "warmup_ratio": "warmup_steps"}
"""Keys of one section that say the same in two ways: the one that is given later replaces the other."""


class Mark(Enum):
    """Why a field is not part of a recipe's identity."""

    RECORD = "a name, the device, or how often to look and save: never part of it"
    INPUT = "names an input: left out where a fingerprint of the data is there"
    COMPUTING = "how a step is computed: it changes rounding and dropout draws alone"


class UnfitValueError(ValueError):
    """A value that does not fit another; the hint names overrides that fit."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def kinds_in(annotation: Any) -> Iterator[Any]:
    """Yield a type and those that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from kinds_in(part)


@functools.cache
def _set_of_kinds(annotation: Any) -> frozenset[Any]:
    """Return the types that a type is made of; kept, because each value of a recipe asks."""
    return frozenset(kinds_in(annotation))


def read_as_meant(value: Any, annotation: Any) -> Any:
    """Return a value as pydantic types it: `train: a.txt` is `[a.txt]`, and `1e3` a whole number.

    Raises:
        ValueError: The value is `True` or `False` where a number belongs, which pydantic reads as 1 or 0.
    """
    kinds = _set_of_kinds(annotation)
    if not kinds.isdisjoint((int, float)):
        if any(isinstance(one, bool) for one in (value if isinstance(value, list | tuple) else (value,))):
            raise ValueError("it should be a number")
        if isinstance(value, str) and float not in kinds and _WHOLE_NUMBER.fullmatch(value):
            value = float(value)
    return (value,) if get_origin(annotation) is tuple and isinstance(value, str | int | float) else value


class StrictModel(BaseModel):
    """Base of recipes and sections: frozen, and without unknown keys, so that a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_as_meant(cls, value: Any, info: ValidationInfo) -> Any:
        return read_as_meant(value, cls.model_fields[info.field_name or ""].annotation)

    @field_validator("*")
    @classmethod
    def _refuse_huge(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("it should be between -2^63 and 2^63")  # what torch and itertools take
        return value

    @classmethod
    def installed_variants(cls) -> tuple[type["StrictModel"], ...]:
        """Return the sections of other packages that are accepted where this one is declared."""
        return ()

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return a validated copy with other values.

        Args:
            values: By dotted key.

        Raises:
            pydantic.ValidationError: One is not accepted.
        """
        return self.model_validate(_changed(self.model_dump(), values))


class Recipe(StrictModel):
    """Base of the recipes of each command."""

    command: ClassVar[str] = ""
    """The command that runs recipes of this kind, as in `exlm pretrain`, and their folder in `recipes/`; empty: all."""
    groups: ClassVar[tuple[str, ...]] = ()
    """Subfolders in the order in which they are listed."""
    example: ClassVar[str]
    """A shipped recipe of this kind to build on, for hints."""
    decided_by: ClassVar[Mapping[str, str]] = {}
    """Keys that the command sets itself, each with the setting that decides it, for hints."""

    name: Annotated[str, Mark.RECORD] = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="Names the run directory")
    purpose: Annotated[str, Mark.RECORD] = Field("", description="One line: what this recipe is for")
    paper: Annotated[str, Mark.RECORD] = Field("", description="Its place in the paper")

    @property
    def run_by(self) -> str:
        """The command that runs this recipe."""
        return self.command

    def as_written(self) -> dict[str, Any]:
        """Return the content of its file, defaults included, as JSON."""
        return {"command": self.command, **self.model_dump(mode="json")}


def identity_values(section: BaseModel, *, without: Collection[Mark] = ()) -> dict[str, Any]:
    """Return the values of a recipe or section that decide its results, as JSON.

    Args:
        without: Marks whose fields are left out, besides `Mark.RECORD`.
    """
    left_out = {Mark.RECORD, *without}
    dumped = section.model_dump(mode="json")
    return {
        name: identity_values(value, without=without) if isinstance(value, BaseModel) else dumped[name]
        for name, field in type(section).model_fields.items()
        if left_out.isdisjoint(mark for mark in field.metadata if isinstance(mark, Mark))
        for value in [getattr(section, name)]
    }


def identity_of(recipe: BaseModel, *, without: Collection[Mark] = ()) -> str:
    """Return the SHA-256 of the `identity_values` that are not defaults, so that a new key changes no recipe's."""
    values, changed = identity_values(recipe, without=without), recipe.model_dump(mode="json", exclude_defaults=True)
    return hash_json(_shared(values, changed))


def describe_finding(finding: Any, subject: str = "it") -> str:
    """Describe one of `ValidationError.errors()` in a clause about `subject`, the value at fault."""
    if finding["type"] == "missing":
        return "a value is missing"
    if finding["type"] in _TYPES_IN_YAML:
        return f"{subject} should be {_TYPES_IN_YAML[finding['type']]}"
    said = finding["msg"].removeprefix("Value error, ").partition(", unable to ")[0]
    return re.sub("^(Input|Tuple|String)(?= should)", lambda _: subject, said)


def _shared(values: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose key is kept too, section by section; a section without any is left out."""
    shared = {}
    for key in values.keys() & kept.keys():
        value = values[key]
        if isinstance(value, dict) and isinstance(kept[key], dict):
            value = _shared(value, kept[key])
            if not value:
                continue
        shared[key] = value
    return shared


def without_rivals(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by key, or by dotted key, without those that say in another way what is given `over` them.

    A key that is null gives nothing.
    """
    given = (key.rpartition(".") for key, value in over.items() if value is not None)
    replaced = {f"{section}{dot}{_RIVALS[leaf]}" for section, dot, leaf in given if leaf in _RIVALS}
    return {key: value for key, value in values.items() if key not in replaced - over.keys()}


def _changed(content: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    below: dict[str, dict[str, Any]] = {}
    changed = without_rivals(content, values)
    for path, value in values.items():
        first, _, rest = path.partition(".")
        if rest:
            below.setdefault(first, {})[rest] = value
        else:
            changed[first] = value
    return changed | {first: _changed(changed[first], inner) for first, inner in below.items()}
