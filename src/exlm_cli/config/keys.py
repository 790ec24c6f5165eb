"""Keys of a recipe by dotted path, read from the pydantic models, and the key that a misspelt one means."""

import difflib
import itertools
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from exlm_cli.config.base import Recipe, StrictModel


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


def is_mapping(field: FieldInfo) -> bool:
    """Return whether a field maps keys of the user's choice to values, unlike a section."""
    return get_origin(field.annotation) is dict


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


def _sections(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Return the models of a section, several of a union; none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return (annotation, *annotation.installed_variants())
    if get_origin(annotation) not in (Annotated, Union, types.UnionType):
        return ()
    return tuple(section for kind in get_args(annotation) for section in _sections(kind))
