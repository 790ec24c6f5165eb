"""Layers of values and key paths by hand, and each way an override can be wrong: key and origin of the error."""

from collections.abc import Sequence
from typing import Any

import pytest

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import KINDS, load_recipe
from exlm_cli.config.overrides import (
    Layer,
    changed_keys,
    check_recipe,
    child_keys,
    describe_changes,
    find_field,
    key_paths,
    merge,
    nearest_key,
    parse_override,
    unknown_key,
)
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.errors import ConfigError
from tests.tiny import tiny_recipe

FILE = Layer("mine.yaml", tiny_recipe().model_dump(mode="json"))
FINETUNE = Layer("mine.yaml", {"name": "x", "task": {"name": "csv"}, "optim": {"lr": 1e-3}})


def checked(*layers: Layer, overrides: Sequence[str] = (), kind: type[Any] = PretrainRecipe) -> Any:
    return check_recipe([*layers, *(parse_override(override, kind) for override in overrides)], "mine.yaml", kind)


def error_of(*overrides: str, file: Sequence[Layer] = (FILE,), kind: type[Any] = PretrainRecipe) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        checked(*file, overrides=overrides, kind=kind)
    assert "\n" not in caught.value.message
    return caught.value


def test_sections_are_merged_key_by_key_and_lists_are_replaced():
    base, over = {"model": {"width": 8, "rope": "2d"}, "train": [1, 2]}, {"model": {"width": 16}, "train": [3]}
    both = {"model": {"width": 16, "rope": "2d"}, "train": [3]}
    assert merge([Layer("a", base), Layer("b", over)]) == both
    assert merge([Layer("a", base), Layer("b", {"model": 3})])["model"] == 3
    assert merge([Layer("a", {"model": 3}), Layer("b", base)]) == base
    assert base == {"model": {"width": 8, "rope": "2d"}, "train": [1, 2]}


def test_the_origin_of_a_value_is_the_last_one_that_gave_its_key_or_the_section_around_it():
    base, child = Layer("base.yaml", {"optim": {"lr": 7, "eps": 8}}), Layer("child.yaml", {"optim": {"eps": 9}})
    assert error_of(file=(FILE, base)).message.startswith("base.yaml: `optim.lr` is 7; ")
    assert error_of("optim.lr=0.1", file=(FILE, base, child)).message.startswith("child.yaml: `optim.eps` is 9; ")
    assert error_of("optim=[]", file=(FILE, base)).message.startswith("`--set optim=[]`: `optim` is []; ")


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("masking.mask_ratio=[0, 1]", "`1` should be less than 1"),
        ("masking.mask_ratio=[0.5, 0.2]", "a range should be [low, high]"),
        ("train.validate_at=[1.5]", "`1.5` should be a valid integer"),
        ("masking.mask_ratio=many", "it should be a valid number"),
        ("train.max_steps=true", "it should be a valid integer"),
        ("masking.num_states_per_mask=1e3", "it should be less than or equal to 64"),
        ("train.compile=maybe", "it should be a valid boolean"),
        ("data.kind=image", "it should be 'text' or 'smiles'"),
        ("data.train=[null]", "`null` should be a valid string"),
        ("data.train={a: 1}", "it should be a list"),
        ("optim.betas=[0.9]", "a value is missing"),
        ("model.transition=3", "it should be a section of keys"),
    ],
)
def test_a_wrong_value_is_named_with_its_origin_and_what_its_key_accepts(override, found):
    key, _, value = override.partition("=")
    error = error_of(override)
    assert error.message.startswith(f"`--set {override}`: `{key}` is {value}; {found}")
    assert error.hint.startswith(f"`{key}`: ")


def test_the_values_of_a_grid_are_typed_by_their_keys():
    overrides = ["grid.optim.lr=[1e-3, 1]", "grid.train.max_epochs=[1e1, null, x]", "grid.optim.betas=[[.8, .9]]"]
    grid = checked(FINETUNE, overrides=overrides, kind=FinetuneRecipe).grid
    assert grid == {"optim.lr": (1e-3, 1.0), "train.max_epochs": (10, None, "x"), "optim.betas": ([0.8, 0.9],)}
    assert [type(value) for values in grid.values() for value in values[:2]] == [float, float, int, type(None), list]


def test_a_warm_up_that_is_too_long_has_the_setting_of_a_shorter_one_in_the_hint():
    error = error_of("train.max_steps=1")
    assert "`optim.warmup_steps` 2 is more than `train.max_steps` 1" in error.message
    assert "`--set optim.warmup_ratio=0.06`" in error.hint
    assert _warmup_steps("train.max_steps=1", "optim.warmup_ratio=0.06") == 1


def _warmup_steps(*overrides: str) -> int:
    """Return the steps of warm-up of `FILE`, which gives 2 of 6, with overrides."""
    recipe = checked(FILE, overrides=overrides)
    return recipe.optim.resolve_warmup_steps(recipe.train.max_steps)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["optim.warmup_ratio=0"], 0),
        (["optim.warmup_ratio=null"], 2),
        (["optim.warmup_ratio=0.5", "optim.warmup_steps=1"], 1),
        (["optim.warmup_steps=1", "optim.warmup_ratio=0.5"], 3),
        (["optim={lr: 0.1, warmup_ratio: 0.5}"], 3),
    ],
)
def test_of_steps_and_ratio_of_the_warm_up_the_one_given_later_counts(overrides, steps):
    assert _warmup_steps(*overrides) == steps


def test_an_error_of_several_keys_names_the_overrides_at_fault():
    assert error_of("model.width=18").message.startswith("mine.yaml with `--set model.width=18`: head width")
    wrong = [FILE, Layer("mine.yaml", {"train": {"batch_tokens": 500}})]
    assert error_of(file=wrong).message.startswith("mine.yaml: give")
    both = "mine.yaml with `--set seed=2`, `--set optim.lr=0.1`: give"
    assert error_of("seed=2", "optim.lr=0.1", file=wrong).message.startswith(both)


def test_an_unknown_key_comes_before_what_follows_from_it_and_has_the_nearest_key_in_the_hint():
    error = error_of(file=[Layer("mine.yaml", {**FILE.values, "optim": {"lrr": 1e-3}})])
    assert (error.message, error.hint) == ("mine.yaml: unknown key `optim.lrr`", "did you mean `optim.lr`?")
    assert "heads" in unknown_key("f", "model.transition.zzz", PretrainRecipe).hint
    assert "masking" in unknown_key("f", "zzz.y", PretrainRecipe).hint
    assert error_of(file=[Layer("mine.yaml", {"extend": "text-small"})]).hint == "did you mean `extends`?"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("task.label_colums=[a]", "task.label_columns"),
        ("task.max_rows=0", "task.max_rows"),
        ("task.doc_stride=4", "task.doc_stride"),
        ("grid.optim.lr=1e-3", "grid"),
        ("task.name=glue/rtee", "task.name"),
        ("task.files.trian=a.csv", "task.files.train"),
    ],
)
def test_errors_of_a_task_name_its_key_without_the_suite(override, key):
    error = error_of(override, file=[FINETUNE], kind=FinetuneRecipe)
    assert f"`{key}" in error.message + error.hint
    assert "task.csv" not in error.message


def test_one_text_or_number_stands_for_a_list_of_one_and_words_for_true_and_false_are_read():
    recipe = checked(FILE, Layer("x", {"data": {"train": "a.txt"}, "train": {"compile": "on"}}))
    assert (recipe.data.train, recipe.train.compile) == (("a.txt",), True)
    assert checked(FINETUNE, Layer("x", {"seeds": 1}), kind=FinetuneRecipe).seeds == (1,)


def test_changes_are_told_by_their_dotted_keys():
    before, after = (
        load_recipe("text-base", overrides).model_dump(mode="json")
        for overrides in ([], ["optim.lr=0.5", "optim.betas=[0.8, 0.9]", "train.max_epochs=null"])
    )
    lr, betas = before["optim"]["lr"], before["optim"]["betas"]
    assert changed_keys(before, after) == {"optim.lr": (lr, 0.5), "optim.betas": (betas, [0.8, 0.9])}
    assert describe_changes(before, before) == ""
    assert describe_changes(dict.fromkeys("abcde", 1), dict.fromkeys("abcde", 2)).endswith("2 more")
    assert describe_changes(before, after) == (
        f": `optim.lr` was {lr} and is 0.5, `optim.betas` was [{betas[0]}, {betas[1]}] and is [0.8, 0.9]"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_a_recipe_is_described(kind):
    for path in key_paths(kind):
        field = find_field(kind, path)
        assert field is not None
        assert field.description or child_keys(kind, path), f"`{path}` has no description"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("masking.mask_porb", "masking.mask_ratio"),
        ("mask_ratio", "masking.mask_ratio"),
        ("model.num_layer", "model.num_layers"),
        ("model.transition.headz", "model.transition.heads"),
        ("zzz", None),
    ],
)
def test_the_nearest_key_is_what_was_meant(given, meant):
    assert nearest_key(PretrainRecipe, given) == meant
