"""The points of a fine-tuning recipe's grid (Table 11)."""

import itertools
import re
from dataclasses import dataclass
from typing import Any

from exlm_cli.config.check import check_recipe
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.keys import find_field
from exlm_cli.config.layers import Layers
from exlm_cli.config.yaml import dump_yaml
from exlm_cli.errors import ConfigError

NO_GRID = "single"
"""Label of the only point where no grid is searched."""

_SECTIONS = ("model", "optim", "train")


@dataclass(frozen=True)
class GridPoint:
    """One combination of a grid.

    Attributes:
        label: Names its folder.
        values: By dotted key; empty where no grid is searched.
        recipe: With these values, and no grid of its own.
    """

    label: str
    values: dict[str, Any]
    recipe: FinetuneRecipe


def grid_points(recipe: FinetuneRecipe, *, use_grid: bool) -> list[GridPoint]:
    """Return every combination of the recipe's grid, the last key running fastest; without a grid the recipe itself.

    Raises:
        ConfigError: No grid to search; a key that is none of `model`, `optim` or `train`; a value that is not accepted;
            a value given twice.
    """
    bare = recipe.model_copy(update={"grid": {}})
    if not use_grid:
        return [GridPoint(NO_GRID, {}, bare)]
    if not recipe.grid:
        raise ConfigError(
            f"{recipe.name}: the recipe has no `grid` to search",
            "give one, for example `grid.optim.lr=[1e-5,2e-5,3e-5]`",
        )
    for key, values in recipe.grid.items():
        _check_axis(recipe.name, key, values)
    points = []
    for combination in itertools.product(*recipe.grid.values()):
        chosen = dict(zip(recipe.grid, combination, strict=True))
        points.append(GridPoint(_label(chosen), chosen, _with_values(bare, chosen)))
    return points


def _check_axis(name: str, key: str, values: tuple[Any, ...]) -> None:
    field = find_field(FinetuneRecipe, key)
    if field is None or "." not in key or key.partition(".")[0] not in _SECTIONS:
        raise ConfigError(
            f"{name}: `grid` has the key `{key}`; accepted: keys of {', '.join(f'`{s}`' for s in _SECTIONS)}",
            "for example `optim.lr`, `train.max_epochs`, `train.batch_sequences`",
        )
    shown = [_text(value) for value in values]
    if not shown or len(set(shown)) < len(shown):
        raise ConfigError(
            f"{name}: `grid` gives `{key}` the values [{', '.join(shown)}]", "give at least one, each of them once"
        )


def _with_values(recipe: FinetuneRecipe, chosen: dict[str, Any]) -> FinetuneRecipe:
    layers = Layers.read_from(recipe.model_dump(mode="json"), recipe.name)
    for key, value in chosen.items():
        section, _, leaf = key.partition(".")
        layers = Layers.read_from({section: {leaf: value}}, f"{recipe.name}: grid").over(layers)
    return check_recipe(layers, f"{recipe.name}: grid point {_label(chosen)}", FinetuneRecipe)


def _label(chosen: dict[str, Any]) -> str:
    """Return `lr-2e-05_max_epochs-3`."""
    leaves = [key.partition(".")[2] for key in chosen]
    names = [key.partition(".")[2] if leaves.count(key.partition(".")[2]) == 1 else key for key in chosen]
    texts = (re.sub(r"[^0-9A-Za-z.+-]+", "-", _text(value)).strip("-") for value in chosen.values())
    return "_".join(f"{name}-{text}" for name, text in zip(names, texts, strict=True))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return " ".join(dump_yaml(value, on_one_line=True).split())
