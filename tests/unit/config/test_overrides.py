"""Layers of values and key paths by hand, and each way an override can be wrong: key and origin of the error."""

from collections.abc import Sequence
from typing import Any

import pytest

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import KINDS
from exlm_cli.config.overrides import (
    Layer,
    check_recipe,
    child_keys,
    describe_changes,
    find_field,
    key_paths,
    merge,
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


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["optim.warmup_ratio=null"], 2),
        (["train.max_steps=1", "optim.warmup_ratio=0.06"], 1),
        (["optim.warmup_ratio=0.5", "optim.warmup_steps=1"], 1),
        (["optim.warmup_steps=1", "optim.warmup_ratio=0.5"], 3),
        (["optim={lr: 0.1, warmup_ratio: 0.5}"], 3),
    ],
)
def test_of_steps_and_ratio_of_the_warm_up_the_one_given_later_counts(overrides, steps):
    """The file gives 2 steps of 6."""
    recipe = checked(FILE, overrides=overrides)
    assert recipe.optim.resolve_warmup_steps(recipe.train.max_steps) == steps


def test_an_error_of_several_keys_of_the_file_names_all_overrides():
    wrong = [FILE, Layer("mine.yaml", {"train": {"batch_tokens": 500}})]
    both = "mine.yaml with `--set seed=2`, `--set optim.lr=0.1`: give"
    assert error_of("seed=2", "optim.lr=0.1", file=wrong).message.startswith(both)


def test_an_unknown_key_comes_before_what_follows_from_it_and_has_the_nearest_key_in_the_hint():
    error = error_of(file=[Layer("mine.yaml", {**FILE.values, "optim": {"lrr": 1e-3}})])
    assert (error.message, error.hint) == ("mine.yaml: unknown key `optim.lrr`", "did you mean `optim.lr`?")
    assert error_of(file=[Layer("mine.yaml", {"extend": "text-small"})]).hint == "did you mean `extends`?"
    hints = {
        "mask_ratio": "did you mean `masking.mask_ratio`?",
        "model.num_layer": "did you mean `model.num_layers`?",
        "model.transition.zzz": "`model.transition` has the keys heads",
        "zzz.y": "a recipe has the keys name",
    }
    for given, hint in hints.items():
        assert unknown_key("f", given, PretrainRecipe).hint.startswith(hint), given


def test_errors_of_a_task_name_its_key_without_the_suite():
    wrong, unknown = (
        error_of(override, file=[FINETUNE], kind=FinetuneRecipe)
        for override in ("task.max_rows=0", "task.files.trian=a.csv")
    )
    assert "`: `task.max_rows` is 0; it should be" in wrong.message
    assert unknown.hint == "did you mean `task.files.train`?"


def test_changes_are_told_by_their_dotted_keys():
    before = {"optim": {"lr": 1e-3, "betas": [0.9, 0.98]}, "seed": 1}
    after = {"optim": {"lr": 0.5, "betas": [0.8, 0.9]}, "seed": 1}
    assert describe_changes(before, before) == ""
    told = ": `optim.lr` was 0.001 and is 0.5, `optim.betas` was [0.9, 0.98] and is [0.8, 0.9]"
    assert describe_changes(before, after) == told
    assert describe_changes(dict.fromkeys("abcde", 1), dict.fromkeys("abcde", 2)).endswith("2 more")


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_a_recipe_is_described(kind):
    for path in key_paths(kind):
        field = find_field(kind, path)
        assert field is not None
        assert field.description or child_keys(kind, path), f"`{path}` has no description"
