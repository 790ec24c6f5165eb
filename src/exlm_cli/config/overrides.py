"""Recipe values in layers, each with the file or override that gave it, checked into a recipe with one-line errors."""

import difflib
import functools
import itertools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from exlm_cli.config.base import Recipe, StrictModel, UnfitValueError, coerce_value, describe_finding, silenced_rivals
from exlm_cli.config.yaml import describe_yaml_error, parse_yaml, show_value
from exlm_cli.errors import ConfigError
from exlm_cli.format import shorten

RecipeT = TypeVar("RecipeT", bound=Recipe)

_MAX_SHOWN_CHARACTERS = 100
"""Length of an override in a message: `exlm tokenize *.txt` becomes one that names every file."""

_MAX_SHOWN_CHANGES = 3
_BY_OPTION = "`--set "
"""Beginning of the origin of an override."""
_SYNTAX_HINT = "lists are written [a, b]; put the whole of `key=value` in quotes for the shell"
_CHANGE_HINT = "change it in the recipe or with `--set KEY=VALUE`; `exlm recipes NAME` shows every key of a recipe"


def key_paths(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every key, sections before what they hold."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        inner = (key_paths(section, f"{prefix}{name}.") for section in _sections(field.annotation))
        yield from dict.fromkeys(itertools.chain.from_iterable(inner))


def find_field(schema: type[BaseModel], path: str) -> FieldInfo | None:
    """Return the field at a dotted path, or None where there is none."""
    first, _, rest = path.partition(".")
    field = schema.model_fields.get(first)
    if field is None or not rest:
        return field
    found = (find_field(section, rest) for section in _sections(field.annotation))
    return next((inner for inner in found if inner is not None), None)


def typed_value(schema: type[BaseModel], path: str, value: Any) -> Any:
    """Return a value as JSON, typed by the field at a dotted path; unchanged where it does not fit or there is none."""
    field = find_field(schema, path)
    if field is None or isinstance(value, Mapping):
        return value
    annotation: Any = Annotated[field.annotation, field]
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    try:
        return adapter.dump_python(adapter.validate_python(coerce_value(value, field.annotation)), mode="json")
    except ValidationError:
        return value


def child_keys(schema: type[BaseModel], section: str) -> list[str]:
    """Return the keys directly in the section at a dotted path (empty: the top); empty where it is not a section."""
    prefix = f"{section}." if section else ""
    below = [path.removeprefix(prefix) for path in key_paths(schema) if path.startswith(prefix)]
    return [key for key in below if "." not in key]


def nearest_key(schema: type[BaseModel], path: str) -> str | None:
    """Return the key that a misspelt or misplaced path most likely means; None where nothing is near."""
    section, _, leaf = path.rpartition(".")
    top = f"{path.partition('.')[0]}."
    keys = [key for key in reversed(list(key_paths(schema))) if not path.startswith(f"{key}.")]
    # of keys with the same name, the first in the same top-level section, else the first of all
    by_leaf = {key.rpartition(".")[2]: key for key in sorted(keys, key=lambda key: key.startswith(top))}
    in_section = {key: f"{section}.{key}" if section else key for key in child_keys(schema, section)}
    for keys_of, cutoff in ((by_leaf, 1.0), (in_section, 0.6), (by_leaf, 0.7)):
        if close := difflib.get_close_matches(leaf, keys_of, n=1, cutoff=cutoff):
            return keys_of[close[0]]
    return None


def recipe_sections(schema: type[BaseModel]) -> dict[str, type[Recipe]]:
    """Return the sections that are recipes of another kind; such a section can extend one by name."""
    sections = {name: _sections(field.annotation) for name, field in schema.model_fields.items()}
    return {name: kinds[0] for name, kinds in sections.items() if kinds and issubclass(kinds[0], Recipe)}


def _sections(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Return the models of a section, several of a union; none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return (annotation,)
    if get_origin(annotation) not in (Annotated, Union, types.UnionType):
        return ()
    return tuple(section for kind in get_args(annotation) for section in _sections(kind))


class Layer(NamedTuple):
    """Values of a recipe as one file or override gives them; in a list of layers, later ones replace earlier ones.

    Attributes:
        origin: The file or override, as messages name it.
        values: Nested mappings as in YAML.
    """

    origin: str
    values: Mapping[str, Any]

    def gives(self, path: str) -> bool:
        """Return whether there is a value at a dotted path."""
        return any(path == given for given, _ in _walk(self.values))


def merge(layers: Sequence[Layer]) -> dict[str, Any]:
    """Return the values of layers together: sections key by key, lists as a whole.

    Of two keys that say the same in two ways, such as the steps and the ratio of the warm-up, the later one is kept.
    """
    return functools.reduce(_merge, (layer.values for layer in layers), {})


def parse_override(override: str, kind: type[Recipe]) -> Layer:
    """Return the values of one override, `section.key=value` with the value in YAML, for a kind of recipe.

    Raises:
        ConfigError: Another form, an unknown key, a value that is not YAML, or a key that the command sets itself.
    """
    path, equals, text = override.partition("=")
    path = path.strip()
    origin = f"{_BY_OPTION}{shorten(override, _MAX_SHOWN_CHARACTERS)}`"
    if not equals or not path:
        raise ConfigError(
            f"{origin} is not of the form section.key=value", "for example `--set masking.mask_ratio=0.3`"
        )
    first, *inner = path.split(".")
    mapping = find_field(kind, first)
    if inner and mapping is not None and get_origin(mapping.annotation) is dict:
        inner = [".".join(inner)]  # `grid.optim.lr` is the key `optim.lr` of `grid`
    elif find_field(kind, path) is None:
        raise unknown_key(origin, path, kind)
    try:
        value = text if _is_plain_text(text) else parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: the value is not YAML: {describe_yaml_error(error)}", _SYNTAX_HINT) from error
    layer = Layer(origin, {first: functools.reduce(lambda value, key: {key: value}, reversed(inner), value)})
    refuse_decided(layer, kind.decided_by, kind.command)
    return layer


def refuse_decided(override: Layer, decided_by: Mapping[str, str], command: str) -> None:
    """Check that an override changes no key that `command` sets itself.

    Raises:
        ConfigError: It changes a key of `decided_by`; the hint names what decides it.
    """
    for key, decides in decided_by.items():
        if override.gives(key):
            raise ConfigError(
                f"{override.origin}: `exlm {command}` sets `{key}` itself, in every cell", f"use {decides}"
            )


def check_recipe(layers: Sequence[Layer], described: str, kind: type[RecipeT]) -> RecipeT:
    """Build a recipe from its values; errors of several keys name the file `described` and the overrides at fault.

    Raises:
        ConfigError: A key or value that is not accepted.
    """
    try:
        return kind.model_validate(merge(layers))
    except ValidationError as error:
        raise _explain(error, layers, described, kind) from None


def unknown_key(origin: str, path: str, kind: type[Recipe]) -> ConfigError:
    """Return the error for a key that no recipe of a kind has; its hint names the nearest key."""
    near = nearest_key(kind, path)
    decides = kind.decided_by.get(near or "")
    is_of_file = not origin.startswith(_BY_OPTION)
    if is_of_file and difflib.get_close_matches(path.rpartition(".")[2], ["extends"], cutoff=0.8):
        hint = "did you mean `extends`?"
    elif decides is not None:  # a hint must not lead to a key that is refused next
        hint = f"`{near}` is set in every cell; use {decides}"
    elif near is not None:
        hint = f"did you mean `{near}`?"
    else:
        section = path.rpartition(".")[0]
        while section and not child_keys(kind, section):
            section = section.rpartition(".")[0]
        hint = f"{f'`{section}`' if section else 'a recipe'} has the keys {', '.join(child_keys(kind, section))}"
    return ConfigError(f"{origin}: unknown key `{path}`", hint)


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of every key that differs.

    Args:
        before: Nested mappings, as `Recipe.model_dump(mode="json")` gives them.
        after: The same keys with other values, or other keys; a key that one of them lacks is None there.

    Returns:
        Dotted key -> (before, after), in the order of `before`.
    """
    then, now = (
        {path: value for path, value in _walk(values) if not isinstance(value, Mapping)} for values in (before, after)
    )
    pairs = {key: (then.get(key), now.get(key)) for key in (*then, *now)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def describe_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return a clause like ": `optim.lr` was 0.001 and is 0.01"; empty where nothing differs."""
    changed = changed_keys(before, after)
    shown = [f"`{key}` was {_show(then)} and is {_show(now)}" for key, (then, now) in changed.items()]
    if len(shown) > _MAX_SHOWN_CHANGES:
        shown[_MAX_SHOWN_CHANGES:] = [f"{len(changed) - _MAX_SHOWN_CHANGES} more"]
    return ": " + ", ".join(shown) if shown else ""


def _is_plain_text(text: str) -> bool:
    """Return whether to take a value as text although YAML would read an alias, tag, directive or comment in it."""
    return text.startswith(tuple("*&!%@`?|>#")) or (not text.startswith(tuple("[{'\"")) and " #" in text)


def _explain(error: ValidationError, layers: Sequence[Layer], described: str, kind: type[Recipe]) -> ConfigError:
    """Turn pydantic's findings into a one-line error about the first; unknown keys go first, as they cause others."""
    finding = min(error.errors(), key=lambda finding: finding["type"] != "extra_forbidden")
    path = _key_path(finding["loc"], kind)
    if finding["type"] == "extra_forbidden":
        unknown = f"{path}.{finding['loc'][-1]}".removeprefix(".")
        return unknown_key(_origin(layers, unknown) or described, unknown, kind)
    if finding["type"] == "value_error" and child_keys(kind, path):  # of several keys of a section
        message, cause = describe_finding(finding), finding["ctx"]["error"]
        hint = cause.hint if isinstance(cause, UnfitValueError) else _CHANGE_HINT
        return ConfigError(f"{described}{_with_overrides(layers, path, message)}: {message}", hint)
    field = find_field(kind, path)
    assert field is not None, "only values of several keys are at fault as a whole"
    value = dict(_walk(merge(layers))).get(path)
    if value is None and finding["type"] == "missing":
        hint = f"give it, or build on a recipe that has it with `extends: {kind.example}`"
        return ConfigError(f"{described}: `{path}` is missing", hint)
    is_inside = isinstance(value, list | tuple | Mapping) and finding["input"] != value
    found = describe_finding(finding, f"`{_show(finding['input'])}`" if is_inside else "it")
    about = field.description or "a section with the keys " + ", ".join(child_keys(kind, path))
    return ConfigError(f"{_origin(layers, path)}: `{path}` is {_show(value)}; {found}", f"`{path}`: {about}")


def _with_overrides(layers: Sequence[Layer], section: str, message: str) -> str:
    """Return ` with ...`: the overrides whose keys a message names, else all of them; empty where there are none."""
    overrides = [layer for layer in layers if layer.origin.startswith(_BY_OPTION)]
    keys = [key for name in re.findall(r"`([\w.]+)", message) for key in (name, f"{section}.{name}")]
    at_fault = [layer for layer in overrides if any(map(layer.gives, keys))] or overrides
    return f" with {', '.join(layer.origin for layer in at_fault)}" if at_fault else ""


def _origin(layers: Sequence[Layer], path: str) -> str | None:
    """Return the file or override that gave the value at a dotted path, or that of the nearest section around it."""
    while path:
        if found := [layer.origin for layer in layers if layer.gives(path)]:
            return found[-1]
        path = path.rpartition(".")[0]
    return None


def _key_path(location: Sequence[int | str], kind: type[Recipe]) -> str:
    """Return the longest dotted key in the place where pydantic found something.

    Pydantic puts a tag behind a section with one of several models, and a number or key behind a list or mapping.
    """
    path = ""
    for part in location:
        longer = f"{path}.{part}" if path else str(part)
        path = path if find_field(kind, longer) is None else longer
    return path


def _show(value: Any) -> str:
    return shorten(show_value(value), _MAX_SHOWN_CHARACTERS)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = {key: value for key, value in base.items() if key not in silenced_rivals(over)}
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _walk(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and value of every key, sections before what they hold."""
    for key, value in values.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{key}.")
