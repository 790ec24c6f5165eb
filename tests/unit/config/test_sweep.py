"""Sweeps: variants as changes of a common recipe, what `extends` stands for, and each mistake in one line."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from exlm_cli.config.load import dump_recipe, load_recipe, recipe_kind
from exlm_cli.config.sweep import SweepRecipe, changed_values
from exlm_cli.errors import ConfigError

NAME = "quickstart-ablations"


def _load(name: str, *overrides: str) -> SweepRecipe:
    return load_recipe(name, overrides, kind=SweepRecipe)


def _error(name: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        _load(name, *overrides)
    assert "\n" not in caught.value.message
    return caught.value


def _write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_a_variant_is_the_common_recipe_with_its_changes() -> None:
    recipe = _load(NAME, "variants={exlm: {}, slow: {optim.lr: 1e-4, masking.num_states_per_mask: 2}}", "seeds=[3, 9]")
    recipe = recipe.replaced(only=("exlm", "slow"))
    plans = recipe.plan()
    assert [(plan.label, plan.row, plan.column, plan.seed) for plan in plans] == [
        ("exlm", "exlm", "seed 3", 3), ("slow", "slow", "seed 3", 3), ("exlm", "exlm", "seed 9", 9),
        ("slow", "slow", "seed 9", 9),
    ]  # fmt: skip
    expected = recipe.pretrain.model_dump() | {"name": f"{NAME}-slow", "purpose": f"Variant slow of {NAME}", "seed": 9}
    expected["paper"] = recipe.paper
    expected["optim"]["lr"] = 1e-4
    expected["masking"]["num_states_per_mask"] = 2
    expected["train"]["num_threads"] = 1
    assert plans[3].pretrain.model_dump() == expected
    assert plans[3].about["changes"] == {"optim.lr": 1e-4, "masking.num_states_per_mask": 2}
    assert plans[3].about["num_states_per_mask"] == 2
    assert {plan.folder for plan in plans} == {"exlm/seed-3", "slow/seed-3", "exlm/seed-9", "slow/seed-9"}


def test_steps_are_told_against_the_common_ones() -> None:
    by_label = {plan.label: plan for plan in _load("table-2").plan()}
    assert by_label["mlm-plus-plus"].about["relative_steps"] == 2.0
    assert by_label["mlm"].about["relative_steps"] == 1.0
    in_epochs = "{train.max_steps: null, train.max_epochs: 2}"
    recipe = _load(NAME, f"variants.long={in_epochs}", "only=[long]")
    assert recipe.plan()[0].about["relative_steps"] is None


def test_only_says_which_and_in_which_order() -> None:
    assert [plan.label for plan in _load(NAME, "only=[mlm, exlm]").plan()] == ["mlm", "exlm"]
    assert [plan.label for plan in _load(NAME, "only=[]").plan()] == list(_load("ablations").variants)


def test_a_variant_that_is_set_is_run_whatever_only_says() -> None:
    usual = _load(NAME).only
    assert _load(NAME, "variants.my-own={optim.lr: 1e-4}").only == (*usual, "my-own")
    assert _load(NAME, "variants.my-own={optim.lr: 1e-4}", "variants={mlm: {}, late: {}}").only == (
        *usual, "my-own", "late",
    )  # fmt: skip
    assert _load(NAME, "variants.my-own={optim.lr: 1e-4}", "only=[mlm]").only == ("mlm",)
    assert _load(NAME, "variants.my-own={}", "only=[]").only == ()
    assert (
        "cell my-own: `pretrain.masking.mask_ratio`: "
        in _error(NAME, "variants.my-own={masking.mask_ratio: 7}").message
    )


def test_what_extends_stands_for_is_what_its_recipe_changes(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        "variants:\n  twin: {extends: text-small-mlm, optim.lr: 0.25}\n  same: {extends: text-small}\n"
        "pretrain: {extends: text-small}\nfinetune: {extends: glue-small}\n",
    )
    recipe = _load(path, "pretrain.data.train=my.txt")
    assert recipe.variants["same"] == {}
    twin = recipe.plan()[0].pretrain
    wanted = load_recipe("text-small-mlm", ["data.train=my.txt", "optim.lr=0.25", "train.num_threads=1"])
    assert changed_values(wanted, twin) == {}
    assert recipe_kind(path) is SweepRecipe


def test_a_file_beside_the_sweep_can_be_extended(tmp_path: Path) -> None:
    (tmp_path / "wide.yaml").write_text("extends: text-small\nmodel: {width: 256}\n")
    text = "variants: {wide: {extends: wide.yaml}}\npretrain: {extends: text-small}\nfinetune: {extends: glue-small}\n"
    assert _load(_write(tmp_path, text)).variants == {"wide": {"model.width": 256}}


def test_changed_values_leave_out_what_only_names_a_recipe() -> None:
    common = load_recipe("ablation-exlm")
    assert changed_values(common, load_recipe("ablation-exlm", ["seed=7", "device=cpu", "purpose=x"])) == {}
    assert changed_values(common, load_recipe("ablation-exlm", ["optim.betas=[0.8, 0.9]"])) == {
        "optim.betas": [0.8, 0.9]
    }


def test_a_child_adds_to_a_variant_and_to_the_sweep(tmp_path: Path) -> None:
    path = _write(tmp_path, f"extends: {NAME}\nvariants:\n  mlm: {{optim.lr: 0.5}}\n  new: {{model.rope: 1d}}\n")
    variants = _load(path).variants
    assert variants["mlm"] == _load(NAME).variants["mlm"] | {"optim.lr": 0.5}
    assert variants["new"] == {"model.rope": "1d"}


def test_order_and_values_survive_the_file_that_a_run_keeps(tmp_path: Path) -> None:
    recipe = _load(NAME)
    again = _load(_write(tmp_path, dump_recipe(recipe)))
    assert again == recipe
    assert list(again.variants) == list(recipe.variants)
    assert again.plan() == recipe.plan()


def test_the_command_that_goes_on_is_that_of_pre_training() -> None:
    assert _load(NAME).resume_command(Path("runs/x")) == "exlm pretrain --resume runs/x"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("variants.x={model.rpe: 1d}", "`variants.x` has the unknown key `model.rpe`; did you mean `model.rope`?"),
        ("variants.x={qqqq: 1}", "`variants.x` has the unknown key `qqqq`"),
        (
            "variants.x={model: {rope: 1d}}",
            "`variants.x` replaces all of `model`; give single keys, like `model.num_layers`",
        ),
        ("variants.x={seed: 3}", "`variants.x` changes `seed`, which the sweep's `seeds` decides"),
        ("variants.x={device: cpu}", "`variants.x` changes `device`, which the sweep's `device` decides"),
        ("variants.x={name: y}", "`variants.x` changes `name`, which the label decides"),
        (
            "variants={A b: {}}",
            "`variants`: 'A b' names no folder; accepted: lower-case letters, digits, `.`, `_`, `-`",
        ),
        ("only=[exml]", "no variant is called `exml`; did you mean `exlm`?"),
        ("only=[mlm, mlm]", "`only` names a variant twice: mlm, mlm"),
        ("seeds=[1, 1]", "`seeds` [1, 1] names one of them twice"),
    ],
)  # fmt: skip
def test_a_sweep_that_makes_no_sense_is_refused(override: str, said: str) -> None:
    assert _error(NAME, override).message == f"recipes/sweep/{NAME}.yaml with `--set {override}`: {said}"


def test_an_unknown_variant_without_a_neighbour_is_told_with_all_there_are() -> None:
    message = _error(NAME, "only=[zzzz]").message
    assert message.endswith("no variant is called `zzzz`; there are " + ", ".join(_load(NAME).variants))


def test_a_variant_that_its_recipe_cannot_take_is_named() -> None:
    message = _error(NAME, "variants.x={masking.num_states_per_mask: 64}", "only=[x]").message
    assert ": cell x: `model.max_length` is 256, but " in message
    assert _error(NAME, "variants.x={optim.lr: fast}", "only=[x]").message.endswith(
        "cell x: `pretrain.optim.lr`: Input should be a valid number, unable to parse string as a number"
    )


@pytest.mark.parametrize("value", ["3", "{x: 3}"])
def test_variants_that_are_none_are_told(value: str) -> None:
    error = _error(NAME, f"variants={value}")
    assert error.message.startswith(f"`--set variants={value}`: `variants` is ")
    assert error.message.endswith("; accepted: changes by name like {wide: {model.width: 256}}, not empty")


def test_a_sweep_without_variants_is_refused() -> None:
    with pytest.raises(ValidationError, match="at least 1 item"):
        SweepRecipe.model_validate(_load(NAME).model_dump() | {"variants": {}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "variants: {x: {extends: text-small}}\n",
            ": `variants.x.extends` needs `pretrain.extends` in the same file",
        ),
        (
            "pretrain: {extends: text-small}\nvariants: {x: {extends: text-smal}}\n",
            ": `extends`: unknown recipe `text-smal`",
        ),
        (
            "pretrain: {extends: text-small}\nvariants: {x: {extends: 3}}\n",
            ": `variants.x.extends` is 3; accepted: the name of a recipe, or a file beside this one",
        ),
        (
            "pretrain: {extends: text-small}\nvariants: {x: {extends: glue-rte}}\n",
            ": `extends`: `glue-rte` is a recipe of `exlm finetune`, not of `exlm pretrain`",
        ),
    ],
)
def test_a_variant_that_extends_what_is_not_there_is_told(tmp_path: Path, text: str, said: str) -> None:
    path = _write(tmp_path, f"extends: {NAME}\n{text}")
    assert _error(path).message == f"{path}{said}"


def test_a_sweep_is_no_recipe_of_a_single_run() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("table-2")
    assert caught.value.message == "`table-2` is a recipe of `exlm pretrain --sweep`, not of `exlm pretrain`"
    assert _error("text-base").message == "`text-base` is a recipe of `exlm pretrain`, not of `exlm pretrain --sweep`"
    assert _error("tabel-13").hint.startswith("did you mean `table-13`?")


@pytest.mark.parametrize(
    ("earlier", "later", "both"),
    [
        ("[mlm, exlm]", "[exlm-no-2d-rope, mlm]", ("mlm", "exlm", "exlm-no-2d-rope")),
        ("[]", "[mlm]", ()),
        ("[mlm]", "[]", ()),
        ("[mlm]", "[mlm]", ("mlm",)),
    ],
)
def test_a_sweep_together_with_an_earlier_one_has_the_variants_of_both(
    earlier: str, later: str, both: tuple[str, ...]
) -> None:
    joined = _load(NAME, f"only={later}", "seeds=[2]").together_with(_load(NAME, f"only={earlier}", "seeds=[1]"))
    assert (joined.only, joined.seeds) == (both, (1, 2))
