"""Base classes of recipes and their sections, and the identity of a recipe: the values that decide its results.

A run is continued only with a recipe of the same identity. A field that does not decide results has a mark beside its
declaration, like `Annotated[int, Mark.RECORD]`.
"""

import functools
import operator
import re
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Self, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from exlm_cli.files import hash_json

_TYPES_IN_YAML = {"model_type": "a section of keys", "tuple_type": "a list", "dict_type": "a mapping"}
"""What a value should be, for recipe authors, by the type of pydantic's finding."""

_WHOLE_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE]\+?[0-9]+")
"""A way to write an integer that pydantic does not read."""

_RIVALS = {"warmup_steps": ("warmup_ratio", None), "warmup_ratio": ("warmup_steps", 0)}
"""Key -> another key of its section that says the same, and the value with which that one says nothing."""


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


def coerce_value(value: Any, annotation: Any) -> Any:
    """Return a value as pydantic reads it for a type: `a.txt` as a list of one, and `1e3` as a whole number."""
    if isinstance(value, str) and annotation in (int, int | None) and _WHOLE_NUMBER.fullmatch(value):
        return float(value)
    return (value,) if get_origin(annotation) is tuple and isinstance(value, str | int | float) else value


class StrictModel(BaseModel):
    """Base of recipes and sections: frozen, and without unknown keys, so that a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _coerce(cls, value: Any, info: ValidationInfo) -> Any:
        return coerce_value(value, cls.model_fields[info.field_name or ""].annotation)

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return a validated copy with other values.

        Args:
            values: By dotted key.

        Raises:
            pydantic.ValidationError: One is not accepted.
        """
        content = self.model_dump()
        for path, value in {**silenced_rivals(values), **values}.items():
            *sections, key = path.split(".")
            functools.reduce(operator.getitem, sections, content)[key] = value
        return self.model_validate(content)


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


def identity_values(section: BaseModel, *, without: Collection[Mark] = (), is_short: bool = False) -> dict[str, Any]:
    """Return the values of a recipe or section that decide its results, as JSON.

    Args:
        without: Marks whose fields are left out, besides `Mark.RECORD`.
        is_short: Leave out defaults, and sections that have nothing else.
    """
    left_out = {Mark.RECORD, *without}
    values = section.model_dump(mode="json", exclude_defaults=is_short)
    for name, field in type(section).model_fields.items():
        inner = getattr(section, name)
        if name in values and isinstance(inner, BaseModel):
            values[name] = identity_values(inner, without=without, is_short=is_short)
        if not left_out.isdisjoint(mark for mark in field.metadata if isinstance(mark, Mark)) or (
            is_short and values.get(name) == {}
        ):
            values.pop(name, None)
    return values


def identity_of(recipe: BaseModel, *, without: Collection[Mark] = ()) -> str:
    """Return the SHA-256 of the `identity_values` that are not defaults, so that a new key changes no recipe's."""
    return hash_json(identity_values(recipe, without=without, is_short=True))


def describe_finding(finding: Any, subject: str = "it") -> str:
    """Describe one of `ValidationError.errors()` in a clause about `subject`, the value at fault."""
    if finding["type"] == "missing":
        return "a value is missing"
    if finding["type"] in _TYPES_IN_YAML:
        return f"{subject} should be {_TYPES_IN_YAML[finding['type']]}"
    said = finding["msg"].removeprefix("Value error, ").partition(", unable to ")[0]
    return re.sub("^(Input|Tuple|String)(?= should)", lambda _: subject, said)


def silenced_rivals(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that say in another way what `values` give, each with the value that says nothing.

    Args:
        values: By key, or by dotted key; one that is null gives nothing.
    """
    given = (key.rpartition(".") for key, value in values.items() if value is not None)
    found = ((f"{section}{dot}", *_RIVALS[leaf]) for section, dot, leaf in given if leaf in _RIVALS)
    return {prefix + rival: nothing for prefix, rival, nothing in found if prefix + rival not in values}
