"""Fine-tuning recipe: values that do not go together, warm-up by ratio, and the points of a grid."""

from typing import Any

import pytest
from pydantic import ValidationError

from exlm_cli.config.finetune import NO_GRID, FinetuneRecipe, grid_points
from exlm_cli.errors import ConfigError


def recipe(**sections: Any) -> FinetuneRecipe:
    content = {"name": "tiny", "task": {"name": "csv"}, "optim": {"lr": 1e-3}} | sections
    return FinetuneRecipe.model_validate(content)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"seeds": [1, 2, 1]}, "`seeds` [1, 2, 1] names a seed twice"),
        ({"optim": {"lr": 1e-3, "warmup_steps": 5, "warmup_ratio": 0.1}},
         "`optim.warmup_steps` 5 and `optim.warmup_ratio` 0.1 are both above 0; give one of them"),
    ],
)  # fmt: skip
def test_values_that_do_not_go_together_are_refused(sections, message):
    with pytest.raises(ValidationError) as caught:
        recipe(**sections)
    (finding,) = caught.value.errors()
    assert finding["msg"] == f"Value error, {message}"


GRID = {"optim.lr": [2e-5, 3e-5], "train.max_epochs": [2, 3, 5]}


def test_every_combination_of_a_grid_is_a_point_with_its_values_in_the_recipe():
    (alone,) = grid_points(recipe(grid=GRID), use_grid=False)
    assert (alone.label, alone.values, alone.recipe) == (NO_GRID, {}, recipe())
    points = grid_points(recipe(grid=GRID), use_grid=True)
    assert [(p.recipe.optim.lr, p.recipe.train.max_epochs) for p in points] == [
        (lr, epochs) for lr in (2e-5, 3e-5) for epochs in (2, 3, 5)
    ]
    assert (points[1].label, points[1].values) == ("lr-2e-05_max_epochs-3", {"optim.lr": 2e-5, "train.max_epochs": 3})
    assert len({p.label for p in points}) == 6
    assert all(p.recipe.grid == {} for p in points)
    (point,) = grid_points(recipe(grid={"optim.betas": [[0.9, 0.98]]}), use_grid=True)
    assert (point.label, point.recipe.optim.betas) == ("betas-0.9-0.98", (0.9, 0.98))


@pytest.mark.parametrize(
    ("grid", "key"),
    [
        ({"optim.lrr": [1]}, "optim.lrr"),
        ({"task.name": ["glue/rte"]}, "task.name"),
        ({"optim": [{}]}, "optim"),
        ({"optim.lr": []}, "optim.lr"),
        ({"optim.lr": [1e-5, 1e-5]}, "optim.lr"),
        ({"optim.lr": [1e-5, 7]}, "optim.lr"),
    ],
)
def test_a_grid_that_cannot_be_searched_is_refused_by_its_key(grid, key):
    with pytest.raises(ConfigError, match=rf"^tiny: .*`{key}`"):
        grid_points(recipe(grid=grid), use_grid=True)
