"""The fine-tuning recipes have the numbers of the paper's Tables 6, 8 and 11.

ExLM (arXiv 2501.13397v5), Appendices B.2, K and O.
"""

import math

import pytest

from exlm_cli.config.finetune import FinetuneRecipe, grid_points
from exlm_cli.config.load import load_recipe
from exlm_cli.config.tasks import SUITES
from tests.test_recipes import value_at

TABLE_8_COLUMNS = (
    "train.max_epochs", "train.batch_sequences", "optim.lr", "optim.warmup_ratio", "model.dropout",
    "model.pooler_dropout",
)  # fmt: skip
TABLE_8 = {
    "bace": (60, 64, 1e-4, 0.06, 0.1, 0.2),
    "bbbp": (40, 128, 4e-4, 0.06, 0.1, 0.1),
    "tox21": (80, 128, 1e-4, 0.06, 0.1, 0.1),
    "sider": (100, 32, 5e-4, 0.4, 0.1, 0.0),
    "muv": (40, 128, 2e-5, 0.2, 0.1, 0.1),
    "clintox": (100, 256, 5e-5, 0.1, 0.1, 0.5),
    "toxcast": (80, 64, 1e-4, 0.06, 0.1, 0.1),
}
TABLE_6 = {
    "optim.lr": 5e-5,
    "train.batch_sequences": 32,
    "train.max_epochs": 3,
    "optim.warmup_ratio": 0.06,
    "task.sequence_length": None,  # 512 * k: as in pre-training
    "seeds": (1, 2, 3),
}
EXPECTED = {"repeat-mlm-finetune": TABLE_6} | {
    f"moleculenet-{task}": dict(zip(TABLE_8_COLUMNS, row, strict=True))
    | {"task.name": f"moleculenet/{task}", "task.split": "scaffold", "seeds": (1, 2, 3), "aggregate": "mean"}
    for task, row in TABLE_8.items()
}

LARGE = {
    "optim.lr": (1e-5, 2e-5, 3e-5, 4e-5),
    "train.batch_sequences": (32,),
    "train.max_epochs": (2, 3, 5),
    "optim.warmup_ratio": (0.06,),
}
SMALL = {
    "optim.lr": (2e-5, 3e-5, 4e-5, 5e-5),
    "train.batch_sequences": (16, 32),
    "train.max_epochs": (2, 3, 5, 10),
    "optim.warmup_ratio": (0.06, 0.1),
}
TABLE_11 = (
    {f"glue-{name}": LARGE for name in ("mnli", "qqp", "qnli", "sst2")}
    | {f"glue-{name}": SMALL for name in ("rte", "mrpc", "cola", "stsb")}
    | {"squad-v2": SMALL | {"train.max_epochs": (2, 3)}}
)


def load(name: str) -> FinetuneRecipe:
    return load_recipe(name, kind=FinetuneRecipe)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_value_of_a_table_is_the_papers(name):
    recipe = load(name)
    assert {key: value_at(recipe, key) for key in EXPECTED[name]} == EXPECTED[name]


def test_every_task_of_a_suite_has_its_recipe():
    """`exlm finetune SUITE NAME` takes it."""
    for task in (task for section in SUITES.values() for task in section.tasks if "/" in task):
        assert load(task.replace("/", "-")).task.name == task


@pytest.mark.parametrize("name", TABLE_11)
def test_the_grid_and_the_seeds_are_those_of_the_table_and_the_recipe_is_a_point_of_it(name):
    recipe = load(name)
    searched = {key: values for key, values in TABLE_11[name].items() if len(values) > 1}
    assert {key: tuple(map(float, values)) for key, values in recipe.grid.items()} == searched
    assert len(grid_points(recipe, use_grid=True)) == math.prod(map(len, TABLE_11[name].values()))
    assert all(value_at(recipe, key) in accepted for key, accepted in TABLE_11[name].items())
    assert (len(set(recipe.seeds)), recipe.aggregate) == (5, "median")
    assert (recipe.task.name, recipe.task.max_rows) == (name.replace("-", "/", 1), None)
