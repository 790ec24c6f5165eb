"""Every way a value can be wrong, and the one line it becomes. Messages are matched whole."""

from typing import Any

import pytest

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.overrides import Layers, check_recipe, unknown_key
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import TransitionConfig
from exlm_cli.errors import ConfigError
from tests.tiny import tiny_recipe

FILE = Layers.read_from(tiny_recipe().model_dump(mode="json"), "mine.yaml")
TRANSITION_KEYS = ", ".join(TransitionConfig.model_fields)
ROPE_HINT = "change it in the recipe or with override `KEY=VALUE`; `exlm recipes NAME` shows every key of a recipe"


def check(key: str, value: Any) -> None:
    for part in reversed(key.split(".")):
        value = {part: value}
    check_recipe(Layers.read_from(value, "override `a`").over(FILE), "mine.yaml", PretrainRecipe)


@pytest.mark.parametrize(
    ("key", "value", "message", "hint"),
    [
        (
            "masking.mask_ratio", 1.5,
            "override `a`: `masking.mask_ratio` is 1.5; accepted: a number above 0 and below 1",
            "`masking.mask_ratio`: Share of real tokens masked, per sequence",
        ),
        (
            "masking.mask_ratio", "lots",
            "override `a`: `masking.mask_ratio` is lots; accepted: a number above 0 and below 1",
            "`masking.mask_ratio`: Share of real tokens masked, per sequence",
        ),
        (
            "train.max_steps", 1.5,
            "override `a`: `train.max_steps` is 1.5; accepted: a whole number at least 1, or null",
            "`train.max_steps`: Optimiser steps",
        ),
        (
            "train.max_steps", True,
            "override `a`: `train.max_steps` is true; accepted: a whole number at least 1, or null",
            "`train.max_steps`: Optimiser steps",
        ),
        (
            "train.compile", "maybe",
            "override `a`: `train.compile` is maybe; accepted: true or false",
            "`train.compile`: torch.compile the encoder",
        ),
        (
            "data.kind", "image",
            "override `a`: `data.kind` is image; accepted: one of `text`, `smiles`",
            "`data.kind`: What a row is: running text or one SMILES",
        ),
        (
            "data.train", [1, 2],
            "override `a`: `data.train` is [1, 2]; accepted: a list like [a, b], each a text",
            "`data.train`: Files, folders, globs, `hub:OWNER/NAME[/CONFIG][@SPLIT]`, "
            "`bundled:grammar|feelings|molecules`",
        ),
        (
            "optim.betas", [0.9],
            "override `a`: `optim.betas` is [0.9]; accepted: 2 values in brackets, each a number at least "
            "0 and below 1",
            "`optim.betas`: Adam's betas",
        ),
        (
            "model.transition", 3,
            "override `a`: `model.transition` is 3; accepted: a section of keys",
            f"`model.transition`: a section with the keys {TRANSITION_KEYS}",
        ),
        (
            "data.column", "x" * 200 + "\n",
            None,
            None,
        ),
        (
            "optim.lr", ["x" * 200],
            "override `a`: `optim.lr` is [" + "x" * 76 + "...; accepted: a number above 0 and at most 1",
            "`optim.lr`: Peak learning rate",
        ),
        (
            "masking.mask_porb", 0.3,
            "override `a`: unknown key `masking.mask_porb`",
            "did you mean `masking.mask_ratio`?",
        ),
        (
            "model.transition.zzz", 1,
            "override `a`: unknown key `model.transition.zzz`",
            f"`model.transition` has the keys {TRANSITION_KEYS}",
        ),
        (
            "model.width", 18,
            "mine.yaml with override `a`: head width `model.width / model.num_heads` is 9; `model.rope: 2d` needs a "
            "multiple of 4",
            ROPE_HINT,
        ),
    ],
)  # fmt: skip
def test_a_wrong_value_becomes_one_line_and_a_hint(key: str, value: Any, message: str | None, hint: str | None) -> None:
    if message is None:
        return check(key, value)
    with pytest.raises(ConfigError) as caught:
        check(key, value)
    assert caught.value.message == message
    assert caught.value.hint == hint


def test_a_missing_key_is_named_with_what_it_accepts() -> None:
    values = {**FILE.values, "optim": {}}
    with pytest.raises(ConfigError) as caught:
        check_recipe(Layers.read_from(values, "mine.yaml"), "mine.yaml", PretrainRecipe)
    assert caught.value.message == "mine.yaml: `optim.lr` is missing; accepted: a number above 0 and at most 1"
    assert caught.value.hint == "give it, or build on a recipe that has it with `extends: quickstart-text`"


def test_a_missing_section_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check_recipe(FILE.without(["model"]), "mine.yaml", PretrainRecipe)
    assert caught.value.message == "mine.yaml: `model` is missing; accepted: a section of keys"


def test_an_unknown_key_is_told_before_what_follows_from_it() -> None:
    values = {**FILE.values, "optim": {"lrr": 1e-3}}
    with pytest.raises(ConfigError, match=r"^mine.yaml: unknown key `optim.lrr`$"):
        check_recipe(Layers.read_from(values, "mine.yaml"), "mine.yaml", PretrainRecipe)


def test_an_unknown_top_level_key_with_nothing_near_lists_the_sections() -> None:
    assert unknown_key("f", "zzz.y", PretrainRecipe).hint == (
        "a recipe has the keys name, purpose, paper, objective, seed, device, data, tokenizer, masking, model, optim, "
        "train"
    )


def test_one_text_stands_for_a_list_of_one() -> None:
    layers = Layers.read_from({"data": {"train": "a.txt"}}, "x").over(FILE)
    assert check_recipe(layers, "x", PretrainRecipe).data.train == ("a.txt",)


@pytest.mark.parametrize(("given", "read"), [("no", False), ("on", True), (True, True)])
def test_words_for_true_and_false_are_read_where_they_are_wanted(given: Any, read: bool) -> None:
    layers = Layers.read_from({"train": {"compile": given}}, "x").over(FILE)
    assert check_recipe(layers, "x", PretrainRecipe).train.compile is read


def test_a_wrong_list_of_a_grid_is_told_by_the_whole_grid() -> None:
    layers = Layers.read_from({"grid": {"optim.lr": 1e-3}}, "override `a`").over(
        Layers.read_from({"name": "x", "task": {"name": "csv"}, "optim": {"lr": 1e-3}}, "mine.yaml")
    )
    with pytest.raises(ConfigError) as caught:
        check_recipe(layers, "mine.yaml", FinetuneRecipe)
    assert caught.value.message == (
        "override `a`: `grid` is {optim.lr: 0.001}; accepted: lists by key like {optim.lr: [1e-5, 2e-5]}"
    )
