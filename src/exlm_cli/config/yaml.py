"""YAML of recipes: every scalar but null is a string, which pydantic types; no duplicate keys, no tags, no code."""

import copy
import functools
import re
from collections.abc import Hashable
from typing import Any

import yaml

MAX_CHARACTERS = 1_000_000
"""Limit of a recipe: one of 10 MB would take minutes to read."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character, which YAML can escape and UTF-8 cannot hold."""

_SCALARS = {
    "null": (r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    "int": (r"^[-+]?(?:0|[1-9][0-9_]*)$", list("-+0123456789")),
    "float": (
        r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
}
"""Tag -> pattern of a scalar in YAML 1.2, and the characters that it can begin with; strings like them are quoted."""


class _RecipeLoader(yaml.SafeLoader):
    """SafeLoader to which every scalar but null is a string, as it is written."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's declaration

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, refusing aliases and tags: a recipe has no use for them, and an alias can hold itself."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        refused = None
        if isinstance(event, yaml.AliasEvent):
            refused = f"alias `*{event.anchor}` is not accepted; quote a text that begins with *"
        elif getattr(event, "tag", None) is not None:
            refused = f"tag `{event.tag}` is not accepted; quote a text that begins with !"
        if refused is not None:
            raise yaml.composer.ComposerError(None, None, refused, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build a mapping with keys as they are written; a key given twice would lose the first in silence."""
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be one word", key_node.start_mark)
            self.construct_scalar(key_node)
            if key_node.value in mapping:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key `{key_node.value}` is given a second time", key_node.start_mark
                )
            mapping[key_node.value] = self.construct_object(value_node, deep=deep)
        return mapping

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Return the string of a key or value, refusing what no file or message can hold."""
        if isinstance(node.value, str) and _SURROGATE.search(node.value):
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value[:20]!a} holds a character that is not text", node.start_mark
            )
        return super().construct_scalar(node)


class _RecipeDumper(yaml.SafeDumper):
    """SafeDumper that quotes what either YAML 1.1 or 1.2 would not read back as a string."""


class _LineDumper(_RecipeDumper):
    """Dumper for messages: a string like `8` is shown as it is written in a recipe."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Quote strings with the rarer line breaks, which escapes them: written raw, they are read back as newlines."""
    style = '"' if any(character in text for character in "\r\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_as_written(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    tag: str = dumper.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    is_typed = tag.endswith((":int", ":float", ":bool"))
    return dumper.represent_scalar(tag, text) if is_typed else _represent_text(dumper, text)


_RecipeDumper.add_representer(str, _represent_text)
_LineDumper.add_representer(str, _represent_as_written)
for _tag, (_pattern, _first) in _SCALARS.items():
    for _class in (_RecipeDumper, _RecipeLoader) if _tag == "null" else (_RecipeDumper,):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text: mappings, lists, strings and None.

    Raises:
        yaml.YAMLError: Wrong syntax, a duplicate key, an alias, a tag, or a text or value beyond a limit.
    """
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"{len(text):,} characters; at most {MAX_CHARACTERS:,} are read")
    try:
        return copy.deepcopy(_parse(text))
    except (ValueError, OverflowError) as error:
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error
    except RecursionError as error:
        raise yaml.YAMLError("lists or mappings are nested too deeply") from error


@functools.lru_cache(maxsize=128)
def _parse(text: str) -> Any:
    """Parse a text once: the list of recipes reads most files ten times, as the base of others."""
    return yaml.load(text, Loader=_RecipeLoader)  # noqa: S506 - a SafeLoader


def dump_yaml(value: Any, *, on_one_line: bool = False) -> str:
    """Return a value as YAML.

    `parse_yaml` reads it back with numbers and truth values as strings, a YAML 1.1 reader as the same value;
    `on_one_line` is for messages, and leaves a text like `8` without quotes.
    """
    width, flow, dumper = (10**6, True, _LineDumper) if on_one_line else (100, False, _RecipeDumper)

    def dump(allow_unicode: bool) -> str:
        text: str = yaml.dump(
            value,
            Dumper=dumper,
            sort_keys=False,
            allow_unicode=allow_unicode,
            width=width,
            default_flow_style=flow,
        )
        return text

    text = dump(allow_unicode=True)
    if not text.replace("\n", "").isprintable():
        text = dump(allow_unicode=False)  # a terminal would obey a bidirectional mark
    return text.removesuffix("\n...\n") + "\n" if text.endswith("\n...\n") else text


def describe_yaml_error(error: yaml.YAMLError) -> str:
    """Return a YAML error in one line, with its place where there is one."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    what = error.problem or error.context or "not valid YAML"
    mark = error.problem_mark or error.context_mark
    return what if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {what}"
