"""Keys of a recipe and what each accepts, in words, read from the pydantic models."""

import difflib
import itertools
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from exlm_cli.config.base import Recipe

_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


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


def is_union_of_sections(field: FieldInfo) -> bool:
    """Return whether a section has one of several models; pydantic then puts a tag into the path of its errors."""
    return len(_sections(field.annotation)) > 1


def child_keys(schema: type[BaseModel], section: str) -> list[str]:
    """Return the keys directly in the section at a dotted path (empty: the top); empty where it is no section."""
    prefix = f"{section}." if section else ""
    below = [path.removeprefix(prefix) for path in key_paths(schema) if path.startswith(prefix)]
    return [key for key in below if "." not in key]


def nearest_key(schema: type[BaseModel], path: str) -> str | None:
    """Return the key that a misspelt or misplaced path most likely means; None where nothing is near."""
    section, _, leaf = path.rpartition(".")
    by_leaf = {
        key.rpartition(".")[2]: key for key in reversed(list(key_paths(schema))) if not path.startswith(f"{key}.")
    }
    if leaf in by_leaf:
        return by_leaf[leaf]
    close = difflib.get_close_matches(leaf, child_keys(schema, section), n=1, cutoff=0.6)
    if close:
        return f"{section}.{close[0]}" if section else close[0]
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)
    return by_leaf[close[0]] if close else None


def recipe_sections(schema: type[BaseModel]) -> dict[str, type[Recipe]]:
    """Return the sections that are recipes of another kind; such a section can extend one by name."""
    sections = {name: _sections(field.annotation) for name, field in schema.model_fields.items()}
    return {name: kinds[0] for name, kinds in sections.items() if kinds and issubclass(kinds[0], Recipe)}


def describe_accepted(field: FieldInfo) -> str:
    """Return in words what a field accepts: its type and every bound, those of a list's values too."""
    return _describe(field.annotation, field.metadata)


def _describe(annotation: Any, metadata: Sequence[Any]) -> str:
    kinds, is_optional = _alternatives(annotation)
    words = " or ".join(dict.fromkeys(_describe_type(kind) for kind in kinds))
    bounds = [
        f"{word} {bound if isinstance(bound, int) else format(bound, 'g')}"
        for constraint in metadata
        for name, word in _BOUNDS.items()
        if (bound := getattr(constraint, name, None)) is not None
    ]
    pattern = next((p for c in metadata if (p := getattr(c, "pattern", None)) is not None), None)
    if any(getattr(constraint, "min_length", None) for constraint in metadata):
        words += ", not empty"
    if bounds:
        words += " " + " and ".join(bounds)
    if pattern is not None:
        words += f" matching `{pattern}`"
    return words + (", or null" if is_optional else "")


def accepts_list_of_texts(field: FieldInfo) -> bool:
    """Return whether a field is a list of texts; one text is read as a list of one."""
    return get_origin(field.annotation) is tuple and get_args(field.annotation) == (str, ...)


def accepts_booleans(field: FieldInfo) -> bool:
    """Return whether `true` and `false` are values of a field."""
    return bool in _alternatives(field.annotation)[0]


def accepts_mapping(field: FieldInfo) -> bool:
    """Return whether a field maps keys of the user's choice to values, unlike a section."""
    return get_origin(field.annotation) is dict


def _describe_type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is dict:
        is_nested = get_origin(get_args(kind)[1]) is dict
        return (
            "changes by name like {wide: {model.width: 256}}"
            if is_nested
            else "lists by key like {optim.lr: [1e-5, 2e-5]}"
        )
    if get_origin(kind) is tuple:
        *values, last = [_describe_value(inner) for inner in get_args(kind)]
        if last == "...":
            return f"a list like [a, b], each {values[0]}"
        if {*values} == {last}:
            return f"{len(values) + 1} values in brackets, each {last}"
        return f"[{', '.join([*values, last])}]"
    if _sections(kind):
        return "a section of keys"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]


def _describe_value(annotation: Any) -> str:
    """Return what a value in a list accepts; its bounds are in its annotation, not in a field."""
    if annotation is Ellipsis:
        return "..."
    if get_origin(annotation) is not Annotated:
        return _describe(annotation, ())
    kind, *constraints = get_args(annotation)
    return _describe(
        kind, [c for given in constraints for c in (given.metadata if isinstance(given, FieldInfo) else (given,))]
    )


def _alternatives(annotation: Any) -> tuple[list[Any], bool]:
    """Return the types of a union without None, and whether None is one of them."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return [annotation], False
    kinds = get_args(annotation)
    return [kind for kind in kinds if kind is not type(None)], type(None) in kinds


def _sections(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Return the models of a section, several of a union; none for a plain value."""
    kinds = (get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in _alternatives(annotation)[0])
    return tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
