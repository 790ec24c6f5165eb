"""The paper's sweeps train the rows of its tables; its Repeated-MLM grid has Tables 5 and 6, and Figure 3's cells."""

from typing import Any

import pytest

from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.cost.counts import count_parameters
from tests.test_recipes import MLM, TABLE_5, literal_settings, value_at
from tests.unit.report.results import PAIRS

SMALL = ["quickstart-ablations", "ablations-small-text", "ablations-small-smiles"]
FORMULA = {"exlm-formula", "exlm-formula-k2", "exlm-formula-k8"}


_MLM = {"objective": "mlm", "masking.num_states_per_mask": 1, "model.rope": "1d"}
# what each row of a table changes of `ablation-exlm`, which `tests/test_recipes.py` compares with Table 5
CHANGES: dict[str, dict[str, Any]] = {
    "mlm": _MLM,
    # App. Q.2: "we increase the training steps of MLM from 50,000 to 100,000"
    "mlm-plus-plus": _MLM | {"train.max_steps": 100_000},
    "mlm-p38.7": _MLM | {"masking.mask_ratio": 0.387},
    "exlm": {},
    "exlm-no-2d-rope": {"model.rope": "1d"},
    "exlm-no-transitions": {"model.alignment": "independent"},
    "exlm-sparse-dag": {"model.alignment": "sparse_dag"},
    "exlm-k2": {"masking.num_states_per_mask": 2},
    "exlm-k8": {"masking.num_states_per_mask": 8},
    **{f"exlm-k{k}-p38.7": {"masking.num_states_per_mask": k, "masking.mask_ratio": 0.387} for k in (2, 4, 8)},
}
PAPER = {
    "table-2": {"exlm-no-2d-rope", "exlm-no-transitions", "mlm", "mlm-plus-plus", "exlm"},
    "table-4": {"exlm-k2", "exlm", "exlm-k8", "mlm", "mlm-p38.7", "exlm-k2-p38.7", "exlm-k4-p38.7", "exlm-k8-p38.7"},
    "table-13": {"exlm-no-transitions", "exlm-sparse-dag", "mlm", "exlm"},
    "figure-12": {"mlm", "exlm-k2", "exlm", "exlm-k8"},
    "ablations": set(CHANGES),
}


def _load(name: str) -> SweepRecipe:
    return load_recipe(name, kind=SweepRecipe)


def _content(recipe: PretrainRecipe) -> dict[str, Any]:
    """Return what decides the weights, but for the seed, and where they are trained."""
    content = recipe.model_dump(exclude={"name", "purpose", "paper", "seed", "device"})
    del content["train"]["num_threads"]
    return content


@pytest.mark.parametrize("name", PAPER)
def test_a_sweep_of_the_paper_trains_the_rows_of_its_tables(name):
    plans = _load(name).plan()
    assert sorted(plan.label for plan in plans) == sorted(PAPER[name])
    common = load_recipe("ablation-exlm")
    for plan in plans:
        assert _content(plan.pretrain) == _content(common.changed(CHANGES[plan.label])), plan.label


@pytest.mark.parametrize("name", ["table-2", "table-4", "table-13", "repeat-mlm"])
def test_every_variant_is_fine_tuned_on_the_four_tasks_as_table_6_says(name):
    for plan in _load(name).plan():
        assert [recipe.task.name for recipe in plan.finetune] == ["glue/mnli", "glue/qnli", "glue/qqp", "glue/rte"]
        for recipe in plan.finetune:
            assert (recipe.optim.lr, recipe.train.batch_sequences, recipe.train.max_epochs) == (5e-5, 32, 3)
            assert (recipe.optim.warmup_ratio, recipe.seeds, recipe.aggregate) == (0.06, (1, 2, 3), "mean")


@pytest.mark.parametrize("name", SMALL)
def test_small_sweeps_take_variants_and_no_data_from_the_papers(name):
    recipe = _load(name)
    assert not any(source.startswith("hub:") for source in (*recipe.pretrain.data.train, *recipe.pretrain.data.valid))
    by_label = {plan.label: plan.pretrain for plan in recipe.plan()}
    assert all(plan.model.rope == "1d" for plan in by_label.values() if plan.objective == "mlm")
    assert by_label["mlm-plus-plus"].train.max_steps == 2 * (recipe.pretrain.train.max_steps or 0)
    if name in SMALL[1:]:
        assert by_label.keys() == {*PAPER["ablations"], *FORMULA}
        assert (recipe.pretrain.masking.num_states_per_mask, recipe.pretrain.masking.mask_ratio) == (4, 0.15)


@pytest.mark.parametrize("name", SMALL[1:])
def test_the_literal_formula_is_that_of_the_small_recipes(name):
    small = name.removeprefix("ablations-small-") + "-small"
    literal = load_recipe(small, literal_settings(small))
    of_head = ("model.transition.rope", "model.transition.start", "model.transition.balance")
    names = ("model.rope", "model.max_length", "masking.mask_ratio", *of_head)
    expected = {name: value_at(literal, name) for name in names}
    plans = {plan.label: plan.pretrain for plan in _load(name).plan()}
    for label, k in (("exlm-formula", 4), ("exlm-formula-k2", 2), ("exlm-formula-k8", 8)):
        recipe = plans[label]
        assert {name: value_at(recipe, name) for name in names} == expected
        assert recipe.masking == plans["exlm"].masking.model_copy(update={"num_states_per_mask": k})


def test_every_cell_has_the_values_of_table_5_and_positions_that_grow_with_k():
    expected = TABLE_5 | MLM | {"masking.scheme": "bernoulli"}  # App. C: every copy is masked independently
    recipe = _load("repeat-mlm")
    assert {key: value_at(recipe.pretrain, key) for key in expected} == expected
    assert count_parameters(recipe.pretrain) == pytest.approx(128e6, rel=0.03)
    del expected["masking.mask_ratio"]
    for plan in recipe.plan():
        assert {key: value_at(plan.pretrain, key) for key in expected} == expected
        assert plan.pretrain.model.max_length == 512 * plan.pretrain.masking.num_repeats
        assert plan.pretrain.longest_input <= plan.pretrain.model.max_length


@pytest.mark.parametrize("name", ["repeat-mlm", "repeat-mlm-small-text", "repeat-mlm-small-smiles"])
def test_the_cells_are_those_of_figure_3(name):
    plans = _load(name).plan()
    assert sorted((p.pretrain.masking.num_repeats, p.pretrain.masking.mask_ratio) for p in plans) == sorted(PAIRS)
