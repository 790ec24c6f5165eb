"""What two recipes differ in: by key for programs, in words for who changed one and went on with a run."""

from collections.abc import Iterator, Mapping
from typing import Any

from exlm_cli.config.yaml import dump_yaml

_MOST_TOLD = 3


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of every key that differs.

    Args:
        before: Nested mappings, as `Recipe.model_dump(mode="json")` gives them.
        after: The same keys with other values, or other keys; what only one of them has is None in the other.

    Returns:
        Dotted key -> (before, after), in the order of `before`.
    """
    then, now = dict(_leaves(before)), dict(_leaves(after))
    pairs = {key: (then.get(key), now.get(key)) for key in (*then, *now)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def describe_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return a clause like ": `optim.lr` was 0.001 and is 0.01"; empty where nothing differs."""
    changed = changed_keys(before, after)
    told = [
        f"`{key}` was {dump_yaml(then, on_one_line=True).strip()} and is {dump_yaml(now, on_one_line=True).strip()}"
        for key, (then, now) in list(changed.items())[:_MOST_TOLD]
    ]
    rest = [f"{len(changed) - _MOST_TOLD} more"] if len(changed) > _MOST_TOLD else []
    return ": " + ", ".join([*told, *rest]) if told else ""


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
