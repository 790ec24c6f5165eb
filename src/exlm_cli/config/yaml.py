"""YAML of recipes: every scalar but null is text, which pydantic types by the key that it is given to."""

import functools
import json
from collections.abc import Hashable, Mapping
from typing import Any

import yaml


class _RecipeLoader(yaml.SafeLoader):
    """SafeLoader to which `1e-4`, `no` and `08` are text; a run of somebody else can hold no alias that grows."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's declaration
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith(":null")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, refusing an alias."""
        if self.check_event(yaml.AliasEvent):
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "quote a text that begins with *", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping with keys as they are written; a key given twice would lose the first in silence."""
        mapping: dict[Hashable, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be one word", key.start_mark)
            if key.value in mapping:
                problem = f"key `{key.value}` is given a second time"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            mapping[key.value] = self.construct_object(value, deep=deep)
        return mapping


@functools.lru_cache(maxsize=128)  # the list of recipes reads most files ten times, as the base of others
def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text: mappings, lists, strings and None, shared by all who read the same text.

    Raises:
        yaml.YAMLError: Wrong syntax, a key given twice, an alias, or a value that is none.
    """
    try:
        return yaml.load(text, Loader=_RecipeLoader)  # noqa: S506 - a SafeLoader
    except (ValueError, OverflowError, RecursionError) as error:
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error


def dump_yaml(value: Any) -> str:
    """Return a mapping as YAML; `parse_yaml` reads it back with numbers and truth values as text."""
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)
    return text


def show_value(value: Any) -> str:
    """Return a value on one line as people write it in a recipe, text without quotes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(show_value, value)) + "]"
    return (" ".join(value.split()) or "''") if isinstance(value, str) else json.dumps(value)


def describe_yaml_error(error: yaml.YAMLError) -> str:
    """Return a YAML error in one line, with its place where there is one."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    what = error.problem or error.context or "not valid YAML"
    mark = error.problem_mark or error.context_mark
    return what if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {what}"
