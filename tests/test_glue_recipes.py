"""The recipes of GLUE and SQuAD 2.0 hold the numbers of the paper's Table 11 (App. O)."""

import math
from pathlib import Path

import pytest

from exlm_cli.config.finetune import FinetuneRecipe, grid_points
from exlm_cli.config.load import load_recipe, recipes_folder
from exlm_cli.tasks.glue import GLUE_TASKS

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
TEXT_FOLDERS = ("glue", "squad")


def load(name: str) -> FinetuneRecipe:
    return load_recipe(name, kind=FinetuneRecipe)


def test_every_task_has_its_recipe() -> None:
    files = {path.stem for folder in TEXT_FOLDERS for path in (recipes_folder() / "finetune" / folder).glob("*.yaml")}
    assert files == {*TABLE_11, "glue-small", "squad-small"}
    assert {f"glue-{name}" for name in GLUE_TASKS} < set(TABLE_11)


@pytest.mark.parametrize("name", TABLE_11)
def test_the_grid_is_that_of_the_table(name: str) -> None:
    recipe = load(name)
    searched = {key: values for key, values in TABLE_11[name].items() if len(values) > 1}
    assert {key: tuple(map(float, values)) for key, values in recipe.grid.items()} == searched
    assert len(grid_points(recipe, use_grid=True)) == math.prod(map(len, TABLE_11[name].values()))


@pytest.mark.parametrize("name", TABLE_11)
def test_the_recipe_itself_is_a_point_of_the_table(name: str) -> None:
    recipe = load(name)
    values = recipe.model_dump()
    for key, accepted in TABLE_11[name].items():
        section, _, leaf = key.partition(".")
        assert values[section][leaf] in accepted, key


@pytest.mark.parametrize("name", TABLE_11)
def test_medians_of_five_seeds_are_reported(name: str) -> None:
    recipe = load(name)
    assert (len(set(recipe.seeds)), recipe.aggregate) == (5, "median")
    assert recipe.task.name == name.replace("-", "/", 1)
    assert recipe.task.max_rows is None


@pytest.mark.parametrize("path", sorted((recipes_folder() / "finetune").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_a_line_of_a_grid_names_its_table(path: Path) -> None:
    if path.stem not in TABLE_11:
        return
    _, _, grid = path.read_text(encoding="utf-8").partition("grid:\n")
    for line in grid.splitlines():
        assert "# Table 11, " in line, f"{path.name}: `{line.strip()}` names no table"


@pytest.mark.parametrize("name", ["glue-small", "squad-small"])
def test_small_recipes_are_no_rows_of_the_paper(name: str) -> None:
    assert load(name).paper.startswith("Not in the paper")
