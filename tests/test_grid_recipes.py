"""Every shipped grid resolves; the paper's holds Tables 5 and 6 and the cells of Figure 3 (arXiv 2501.13397v5)."""

from pathlib import Path

import pytest

from exlm_cli.config.describe import count_parameters
from exlm_cli.config.load import dump_recipe, list_recipes, load_recipe, recipes_folder
from exlm_cli.config.sweep import SweepRecipe
from tests.test_recipes import MLM, TABLE_5, value_at

FILES = sorted((recipes_folder() / "sweep" / "repeat_mlm").glob("*.yaml"))
CELLS = {
    *((1, p) for p in (0.0225, 0.15, 0.387, 0.622, 0.789)),
    *((2, p) for p in (0.15, 0.387, 0.622, 0.789)),
    *((4, p) for p in (0.387, 0.622, 0.789)),
    *((8, p) for p in (0.622, 0.789)),
}


def _load(name: str) -> SweepRecipe:
    return load_recipe(name, kind=SweepRecipe)


def test_every_file_is_a_listed_recipe() -> None:
    assert len(FILES) == 4
    listed = [info for info in list_recipes(SweepRecipe) if info.recipe.run_by == "repeat-mlm"]
    assert sorted(info.path for info in listed) == FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_grid_resolves_says_what_it_is_for_and_round_trips(path: Path, tmp_path: Path) -> None:
    recipe = _load(path.stem)
    assert recipe.name == path.stem
    assert recipe.purpose
    assert recipe.paper
    resolved = tmp_path / "recipe.yaml"
    resolved.write_text(dump_recipe(recipe), encoding="utf-8")
    assert _load(str(resolved)) == recipe


@pytest.mark.parametrize("key", [*(TABLE_5 | MLM), "masking.scheme"])
def test_every_cell_has_the_values_of_table_5(key: str) -> None:
    # App. C: every copy is masked on its own
    expected = (TABLE_5 | MLM | {"masking.scheme": "bernoulli"})[key]
    recipe = _load("repeat-mlm")
    assert value_at(recipe.pretrain, key) == expected
    if key != "masking.mask_ratio":
        assert {value_at(plan.pretrain, key) for plan in recipe.plan()} == {expected}


@pytest.mark.parametrize("name", ["repeat-mlm", "repeat-mlm-small-text", "repeat-mlm-small-smiles"])
def test_the_cells_are_those_of_figure_3(name: str) -> None:
    plans = _load(name).plan()
    assert len(plans) == 14
    assert {(p.pretrain.masking.num_repeats, p.pretrain.masking.mask_ratio) for p in plans} == CELLS


def test_positions_grow_with_k_as_table_5_says() -> None:
    for plan in _load("repeat-mlm").plan():
        assert plan.pretrain.model.max_length == 512 * plan.pretrain.masking.num_repeats
        assert plan.pretrain.longest_expanded_length <= plan.pretrain.model.max_length


def test_the_tasks_are_those_of_figure_8_with_the_values_of_table_6() -> None:
    plan = _load("repeat-mlm").plan()[0]
    assert [recipe.task.name for recipe in plan.finetune] == ["glue/mnli", "glue/qnli", "glue/qqp", "glue/rte"]
    for recipe in plan.finetune:
        assert (recipe.optim.lr, recipe.train.batch_sequences, recipe.train.max_epochs) == (5e-5, 32, 3)
        assert (recipe.optim.warmup_ratio, recipe.seeds) == (0.06, (1, 2, 3))


def test_the_model_has_the_papers_parameters() -> None:
    assert count_parameters(_load("repeat-mlm").pretrain) == pytest.approx(128e6, rel=0.03)


def test_every_value_of_table_5_stands_beside_a_comment_that_names_it() -> None:
    path = recipes_folder() / "sweep" / "repeat_mlm" / "repeat-mlm.yaml"
    keys = {key.rpartition(".")[2] for key in TABLE_5} | {"max_length"}
    lines = path.read_text(encoding="utf-8").splitlines()
    given = [line for line in lines if line.strip().partition(":")[0] in keys]
    assert len(given) >= 6
    assert all("Table 5" in line for line in given)


@pytest.mark.parametrize("name", ["quickstart-repeat-mlm", "repeat-mlm-small-text", "repeat-mlm-small-smiles"])
def test_small_grids_take_nothing_from_the_papers_sections(name: str) -> None:
    """A section that extends a recipe replaces the one it inherits."""
    pretrain = _load(name).pretrain
    assert not any(source.startswith("hub:") for source in (*pretrain.data.train, *pretrain.data.valid))
    assert (pretrain.model.width, pretrain.model.dropout) in {(64, 0.0), (128, 0.0)}
