"""Values to a checked recipe; whatever pydantic finds becomes one line on where, what was given, what is accepted."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from exlm_cli.config.base import Recipe
from exlm_cli.config.keys import (
    accepts_booleans,
    accepts_list_of_texts,
    child_keys,
    describe_accepted,
    find_field,
    is_union_of_sections,
    nearest_key,
)
from exlm_cli.config.layers import Layers
from exlm_cli.config.yaml import dump_yaml
from exlm_cli.errors import ConfigError

RecipeT = TypeVar("RecipeT", bound=Recipe)

_SET_HINT = "change it in the recipe or with override `key=value`; `exlm recipes NAME` shows every key of a recipe"


def check_recipe(layers: Layers, described: str, kind: type[RecipeT]) -> RecipeT:
    """Build the recipe.

    Args:
        layers: All values and their origins.
        kind: Of recipe.
        described: The file, for mistakes that concern several keys; the overrides they came from are named beside it.

    Raises:
        ConfigError: A key or value that is not accepted.
    """
    values = _read_as_meant(layers.values, layers, kind)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _explain(error, layers, described, kind) from None


def unknown_key(origin: str, path: str, kind: type[Recipe]) -> ConfigError:
    """Return the error for a key that no recipe of a kind has, with the key that was probably meant."""
    near = nearest_key(kind, path)
    if near is not None:
        # a hint must not lead to a key that is refused next
        decides = kind.decided_by.get(near)
        hint = f"did you mean `{near}`?" if decides is None else f"`{near}` is set in every cell; use {decides}"
        return ConfigError(f"{origin}: unknown key `{path}`", hint)
    section = path.rpartition(".")[0]
    while section and not child_keys(kind, section):
        section = section.rpartition(".")[0]
    whose = f"`{section}`" if section else "a recipe"
    return ConfigError(
        f"{origin}: unknown key `{path}`", f"{whose} has the keys {', '.join(child_keys(kind, section))}"
    )


def _read_as_meant(values: Mapping[str, Any], layers: Layers, kind: type[Recipe], prefix: str = "") -> dict[str, Any]:
    """Let `train: a.txt` stand for `[a.txt]`; refuse `true` for a number, which pydantic would read as 1."""
    read: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        field = find_field(kind, path)
        if isinstance(value, dict):
            read[key] = _read_as_meant(value, layers, kind, f"{path}.")
        elif field is not None and isinstance(value, str) and accepts_list_of_texts(field):
            read[key] = [value]
        elif field is not None and isinstance(value, bool) and not accepts_booleans(field):
            raise _bad_value(layers, path, kind)
        else:
            read[key] = value
    return read


def _explain(error: ValidationError, layers: Layers, described: str, kind: type[Recipe]) -> ConfigError:
    """Turn pydantic's findings into one line on the first; unknown keys come first, others follow from them."""
    finding = min(error.errors(), key=lambda finding: finding["type"] != "extra_forbidden")
    path = _key_path(finding, kind)
    if finding["type"] == "extra_forbidden":
        return unknown_key(layers.origin(path) or described, path, kind)
    if finding["type"] == "value_error":
        message = finding["msg"].removeprefix("Value error, ")
        return ConfigError(f"{described}{_with_sets(layers, path, message)}: {message}", _SET_HINT)
    if finding["type"] == "missing" and layers.value(path) is None:
        field = find_field(kind, path)
        assert field is not None
        return ConfigError(
            f"{described}: `{path}` is missing; accepted: {describe_accepted(field)}",
            f"give it, or build on a recipe that has it with `extends: {kind.example}`",
        )
    while find_field(kind, path) is None:
        path = path.rpartition(".")[0]  # a key of a mapping, told by the whole mapping
    return _bad_value(layers, path, kind)


def _with_sets(layers: Layers, section: str, message: str) -> str:
    """Return ` with ...`: every override whose key a message names, else how many there are; nothing without any."""
    given = dict.fromkeys(origin for origin in layers.origins.values() if origin.startswith("override "))
    keys = [key for name in re.findall(r"`([\w.]+)", message) for key in (name, f"{section}.{name}")]
    at_fault = dict.fromkeys(layers.origins[key] for key in keys if layers.origins.get(key) in given)
    if not given:
        return ""
    return (
        f" with {len(given)} overrides" if len(given) > 1 and not at_fault else f" with {', '.join(at_fault or given)}"
    )


def _bad_value(layers: Layers, path: str, kind: type[Recipe]) -> ConfigError:
    field = find_field(kind, path)
    assert field is not None, f"pydantic checks no field {path}"
    about = field.description or "a section with the keys " + ", ".join(child_keys(kind, path))
    return ConfigError(
        f"{layers.origin(path)}: `{path}` is {_show(layers.value(path))}; accepted: {describe_accepted(field)}",
        f"`{path}`: {about}",
    )


def _key_path(finding: ErrorDetails, kind: type[Recipe]) -> str:
    """Return the dotted key of a finding; for a place in a list the key of the list."""
    keys: list[str] = []
    is_tag = False
    for part in finding["loc"]:
        if isinstance(part, int):
            break
        if not is_tag:
            keys.append(part)
        field = None if is_tag else find_field(kind, ".".join(keys))
        is_tag = field is not None and is_union_of_sections(field)
    return ".".join(keys)


def _show(value: Any) -> str:
    """Return a value as it stands in YAML, on one line and not too long."""
    text = " ".join(dump_yaml(value, on_one_line=True).split())
    return text if len(text) <= 80 else text[:77] + "..."
