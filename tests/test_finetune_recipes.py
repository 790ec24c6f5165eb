"""Every shipped fine-tuning recipe resolves and holds the numbers of the paper's Tables 6 and 8.

ExLM (arXiv 2501.13397v5), Appendices B.2 and K.
"""

from pathlib import Path
from typing import Any

import pytest

from exlm_cli.config.finetune import FinetuneRecipe, grid_points
from exlm_cli.config.load import dump_recipe, list_recipes, load_recipe, recipes_folder

FILES = sorted((recipes_folder() / "finetune").rglob("*.yaml"))

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
EXPECTED = {f"moleculenet-{task}": dict(zip(TABLE_8_COLUMNS, row, strict=True)) for task, row in TABLE_8.items()} | {
    "repeat-mlm-finetune": TABLE_6
}


def value_at(recipe: FinetuneRecipe, path: str) -> Any:
    value: Any = recipe
    for key in path.split("."):
        value = getattr(value, key)
    return value


def test_every_file_is_a_listed_recipe() -> None:
    assert len(FILES) >= 10
    assert sorted(info.path for info in list_recipes(FinetuneRecipe)) == FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_resolves_says_what_it_is_for_and_round_trips(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path.stem, kind=FinetuneRecipe)
    assert recipe.name == path.stem
    assert recipe.purpose
    assert recipe.paper
    resolved = tmp_path / "recipe.yaml"
    resolved.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(str(resolved), kind=FinetuneRecipe) == recipe
    if recipe.grid:
        assert grid_points(recipe, use_grid=True)


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, table in EXPECTED.items() for key in table])
def test_a_value_is_the_papers(name: str, key: str) -> None:
    assert value_at(load_recipe(name, kind=FinetuneRecipe), key) == EXPECTED[name][key]


@pytest.mark.parametrize("task", TABLE_8)
def test_a_moleculenet_recipe_names_its_task_three_seeds_and_the_table_beside_each_value(task: str) -> None:
    recipe = load_recipe(f"moleculenet-{task}", kind=FinetuneRecipe)
    assert (recipe.task.name, recipe.task.split) == (f"moleculenet/{task}", "scaffold")
    assert (len(recipe.seeds), recipe.aggregate) == (3, "mean")
    path = next(path for path in FILES if path.stem == f"moleculenet-{task}")
    lines = path.read_text(encoding="utf-8").splitlines()
    for key in TABLE_8_COLUMNS:
        (line,) = [line for line in lines if line.strip().startswith(key.partition(".")[2] + ":")]
        assert "Table 8" in line, f"{path.name}: `{line.strip()}` names no table"
