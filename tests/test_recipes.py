"""Every shipped recipe resolves, and those of `exlm pretrain` have the numbers of the paper's tables.

Tables 5, 7 and 10 of ExLM (arXiv 2501.13397v5); sections and appendices as cited beside each value.
"""

import shlex
from typing import Any

import pytest

from exlm_cli.config.base import Recipe
from exlm_cli.config.load import KINDS, list_recipes, load_recipe, recipes_folder
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import TransitionConfig
from exlm_cli.cost.counts import count_parameters, recipe_step_flops

SHIPPED = {path: (kind, name) for kind in KINDS for name, path in list_recipes(kind).items()}

# every line of a table, by the key that holds it; `Activation function: GELU` is the model's only one
IN_ALL_TABLES = {
    "optim.schedule": "polynomial",
    "optim.betas": (0.9, 0.98),
    "masking.mask_ratio": 0.15,
    "model.dropout": 0.1,
    "model.attention_dropout": 0.1,
    "model.activation_dropout": 0.0,
    "model.num_heads": 12,
    "model.width": 768,
}
TEXT_MODEL = IN_ALL_TABLES | {
    "model.num_layers": 12,
    "model.ffn_width": 3_072,
    "optim.weight_decay": 0.01,
    "optim.clip_norm": 0.0,
}
TABLE_5 = TEXT_MODEL | {
    "optim.lr": 2e-3,
    "optim.warmup_steps": 5_000,
    "train.max_steps": 50_000,
    "train.batch_sequences": 4_096,
}
TABLE_7 = IN_ALL_TABLES | {
    "optim.lr": 5e-4,
    "masking.num_states_per_mask": 2,
    "optim.warmup_steps": 10_000,
    "train.max_steps": 120_000,
    "train.batch_tokens": 64 * 1024,
    "model.num_layers": 9,
    "model.ffn_width": 2_048,
    "tokenizer.vocab_size": 369,
    "optim.weight_decay": 0.0,
    "optim.clip_norm": 1.0,
}
TABLE_10_BASE = TEXT_MODEL | {
    "optim.lr": 5e-4,
    "masking.num_states_per_mask": 4,
    "optim.warmup_steps": 10_000,
    "train.max_steps": 125_000,
    "train.batch_sequences": 2_048,
}
TABLE_10_LARGE = TABLE_10_BASE | {
    "model.num_layers": 24,
    "model.num_heads": 16,
    "model.width": 1_024,
    "model.ffn_width": 4_096,
}
MLM = {"objective": "mlm", "masking.num_states_per_mask": 1}
EXLM_K4 = {"objective": "exlm", "masking.num_states_per_mask": 4, "model.rope": "2d", "model.alignment": "dag"}

EXPECTED: dict[str, dict[str, Any]] = {
    "text-base": TABLE_10_BASE | EXLM_K4,
    "text-base-formula": TABLE_10_BASE | EXLM_K4,
    "text-base-gated": TABLE_10_BASE | EXLM_K4,
    "text-base-mlm": TABLE_10_BASE | MLM,
    "text-large": TABLE_10_LARGE | EXLM_K4,
    "text-large-mlm": TABLE_10_LARGE | MLM,
    "smiles-base": TABLE_7 | {"objective": "exlm", "data.kind": "smiles", "model.rope": "2d", "model.alignment": "dag"},
    "smiles-base-mlm": TABLE_7 | MLM | {"data.kind": "smiles"},
    # App. B.1: "we also used the same pre-training parameters in the ablation experiments"
    "ablation-exlm": TABLE_5 | EXLM_K4,
}


def value_at(recipe: Recipe, path: str) -> Any:
    value: Any = recipe
    for key in path.split("."):
        value = getattr(value, key)
    return value


def test_every_file_is_a_listed_recipe_of_its_own_name():
    assert sorted(SHIPPED) == sorted(recipes_folder().rglob("*.yaml"))
    assert len({name for _, name in SHIPPED.values()}) == len(SHIPPED)


@pytest.mark.parametrize(("path", "kind", "name"), [(path, *SHIPPED[path]) for path in SHIPPED])
def test_a_recipe_resolves_and_has_a_purpose(path, kind, name):
    recipe = load_recipe(name, kind=kind)
    assert recipe.name == path.stem
    assert recipe.purpose
    assert recipe.paper


@pytest.mark.parametrize("name", EXPECTED)
def test_every_value_of_a_table_is_the_papers(name):
    recipe = load_recipe(name)
    assert {key: value_at(recipe, key) for key in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "paper_millions", "tolerance"),
    [
        ("text-base", 128, 0.03),
        ("text-base-mlm", 128, 0.03),
        ("text-base-gated", 128, 0.003),
        ("text-large", 361, 0.03),
        ("text-large-mlm", 361, 0.03),
        ("smiles-base", 50.5, 0.03),
        ("smiles-base-mlm", 50.5, 0.003),
        ("ablation-exlm", 128, 0.03),
    ],
)
def test_parameters_come_out_as_the_paper_gives_them(name, paper_millions, tolerance):
    assert count_parameters(load_recipe(name)) == pytest.approx(paper_millions * 1e6, rel=tolerance)


OF_EQUAL_COST = ["smiles-medium-mlm", "text-medium-mlm"]


@pytest.mark.parametrize("name", [name for name in list_recipes(PretrainRecipe) if name.endswith("-mlm")])
def test_a_twin_differs_in_the_objective_and_in_nothing_else_or_in_steps_for_equal_cost(name):
    twin, exlm = load_recipe(name), load_recipe(name.removesuffix("-mlm"))
    assert (twin.objective, exlm.objective) == ("mlm", "exlm")
    for section in ("data", "tokenizer", "optim"):
        assert getattr(twin, section) == getattr(exlm, section), section
    steps = {"max_steps": twin.train.max_steps} if name in OF_EQUAL_COST else {}
    assert twin.train == exlm.train.model_copy(update=steps)
    assert twin.model == exlm.model.model_copy(update={"rope": "1d"})
    assert twin.masking == exlm.masking.model_copy(update={"num_states_per_mask": 1})
    if name in OF_EQUAL_COST:
        flops = [(recipe.train.max_steps or 0) * recipe_step_flops(recipe).total for recipe in (twin, exlm)]
        assert flops[0] == pytest.approx(flops[1], rel=0.01)


def literal_settings(name: str) -> list[str]:
    """Return the overrides of recipes/README.md that make a recipe the literal formula."""
    text = (recipes_folder() / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith(f"exlm pretrain --recipe {name} ")]
    return [word for word in shlex.split(line)[4:] if word != "--set"]


def test_the_recipe_of_the_literal_formula_differs_in_that_alone():
    literal, ours = load_recipe("text-base-formula"), load_recipe("text-base")
    content = {"name", "purpose", "paper"}
    own = ours.model.model_copy(update={"transition": TransitionConfig()})
    assert literal.model_dump(exclude=content) == ours.model_copy(update={"model": own}).model_dump(exclude=content)


@pytest.mark.parametrize("name", ["smiles-base", "text-small", "smiles-small"])
def test_a_documented_line_makes_a_recipe_the_literal_formula(name):
    """Small ones also take what the paper gives for masks, since ours expand elsewhere."""
    literal, ours = load_recipe(name, literal_settings(name)), load_recipe(name)
    assert literal.model.transition == TransitionConfig()
    assert (literal.model.alignment, literal.model.rope) == ("dag", "2d")
    assert literal.masking == load_recipe(name.replace("small", "base")).masking
    own = {"transition"} | ({"alignment", "rope", "max_length"} if "small" in name else set())
    assert literal.model.model_copy(update={key: getattr(ours.model, key) for key in own}) == ours.model
    assert literal.model_dump(exclude={"masking", "model"}) == ours.model_dump(exclude={"masking", "model"})
