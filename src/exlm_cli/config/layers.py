"""Recipe values laid over each other, each remembering the file or override it came from."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layers:
    """Merged recipe values.

    Attributes:
        values: Nested mappings as in YAML.
        origins: Dotted key path -> where it was given last.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str]

    @classmethod
    def read_from(cls, values: Mapping[str, Any], origin: str) -> "Layers":
        """Return values that all come from one place."""
        return cls(values, dict.fromkeys(_paths(values), origin))

    def over(self, base: "Layers") -> "Layers":
        """Return `base` with these values set in it: sections key by key, lists as a whole."""
        return Layers(_merge(base.values, self.values), {**base.origins, **self.origins})

    def without(self, keys: Iterable[str]) -> "Layers":
        """Return the same values but some top-level keys."""
        dropped = set(keys)
        return Layers({key: value for key, value in self.values.items() if key not in dropped}, self.origins)

    def under(self, section: str) -> "Layers":
        """Return the same values as those of a top-level section."""
        return Layers({section: self.values}, {f"{section}.{path}": origin for path, origin in self.origins.items()})

    def origin(self, path: str) -> str | None:
        """Return where the key at a dotted path, or the nearest section around it, was given last."""
        while path and path not in self.origins:
            path = path.rpartition(".")[0]
        return self.origins.get(path)

    def value(self, path: str) -> Any:
        """Return what was given at a dotted path; None where nothing was."""
        value: Any = self.values
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every key, sections included."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
