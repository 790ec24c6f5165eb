"""Grid points: all combinations, their labels, and grids that make no sense."""

from typing import Any

import pytest

from exlm_cli.config.finetune import NO_GRID, FinetuneRecipe, grid_points
from exlm_cli.errors import ConfigError


def recipe(grid: dict[str, Any]) -> FinetuneRecipe:
    return FinetuneRecipe.model_validate({"name": "tiny", "task": {"name": "csv"}, "optim": {"lr": 1e-3}, "grid": grid})


GRID = {"optim.lr": [2e-5, 3e-5], "train.max_epochs": [2, 3, 5]}


def test_without_a_grid_there_is_the_recipe_alone() -> None:
    (point,) = grid_points(recipe(GRID), use_grid=False)
    assert (point.label, point.values) == (NO_GRID, {})
    assert point.recipe == recipe({})


def test_every_combination_is_a_point_of_its_own_with_its_values_in_the_recipe() -> None:
    points = grid_points(recipe(GRID), use_grid=True)
    assert [(p.recipe.optim.lr, p.recipe.train.max_epochs) for p in points] == [
        (lr, epochs) for lr in (2e-5, 3e-5) for epochs in (2, 3, 5)
    ]
    assert len({p.label for p in points}) == 6
    assert points[1].label == "lr-2e-05_max_epochs-3"
    assert points[1].values == {"optim.lr": 2e-5, "train.max_epochs": 3}
    assert all(p.recipe.grid == {} for p in points)


def test_a_label_is_a_name_of_one_folder() -> None:
    (point,) = grid_points(recipe({"optim.betas": [[0.9, 0.98]]}), use_grid=True)
    assert point.label == "betas-0.9-0.98"
    assert point.recipe.optim.betas == (0.9, 0.98)


KEYS = "accepted: keys of `model`, `optim`, `train`"


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "tiny: the recipe has no `grid` to search"),
        ({"optim.lrr": [1]}, f"tiny: `grid` has the key `optim.lrr`; {KEYS}"),
        ({"task.name": ["glue/rte"]}, f"tiny: `grid` has the key `task.name`; {KEYS}"),
        ({"optim": [{}]}, f"tiny: `grid` has the key `optim`; {KEYS}"),
        ({"optim.lr": []}, "tiny: `grid` gives `optim.lr` the values []"),
        ({"optim.lr": [1e-5, 1e-5]}, "tiny: `grid` gives `optim.lr` the values [1e-05, 1e-05]"),
        ({"optim.lr": [1e-5, 7]}, "tiny: grid: `optim.lr` is 7; accepted: a number above 0 and at most 1"),
    ],
)
def test_a_grid_that_makes_no_sense_is_told(grid: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        grid_points(recipe(grid), use_grid=True)
    assert caught.value.message == message
