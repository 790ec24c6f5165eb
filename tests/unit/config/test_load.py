"""Recipes by name, file and run directory, `extends`, and overrides; `tests/test_recipes.py` reads dumped ones back."""

import re
from pathlib import Path
from typing import Any

import pytest

from exlm_cli.config.load import dump_recipe, load_recipe, resumed_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.files import ALTERED_HINT
from exlm_cli.run_dir import create_run_dir, update_run_json


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def error_of(name: Any, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(name), overrides)
    assert "\n" not in caught.value.message
    return caught.value


def test_extends_goes_through_files_beside_each_other(tmp_path, monkeypatch):
    write(tmp_path / "base.yaml", "extends: quickstart-text\noptim: {lr: 1e-4, warmup_steps: 7}\nname: called\n")
    write(tmp_path / "child.yaml", "extends: base.yaml\noptim: {lr: 2e-4}\n")
    monkeypatch.chdir("/")
    recipe = load_recipe(str(tmp_path / "child.yaml"))
    assert (recipe.name, recipe.purpose, recipe.optim.lr, recipe.optim.warmup_steps) == ("child", "", 2e-4, 7)


def test_a_circle_of_extends_is_refused_with_its_chain(tmp_path):
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    write(a, "extends: ./b.yaml")
    write(b, "extends: a.yaml")
    assert f"{a} -> {b} -> {a}" in error_of(a).message


@pytest.mark.parametrize("extends", ["[a]", "quickstart-txt", "no.yaml"])
def test_an_extends_that_leads_nowhere_is_told_with_its_file(tmp_path, extends):
    path = write(tmp_path / "mine.yaml", f"extends: {extends}\n")
    assert error_of(path).message.startswith(f"{path}: `extends`")
    write(path, f"extends: quickstart-ablations\npretrain: {{extends: {extends}}}\n")
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: `(pretrain.)?extends`"):
        load_recipe(path, kind=SweepRecipe)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"seed: 1\nseed: 2\n", "line 2, column 1: key `seed` is given a second time"),
        (b"\x7fELF\xff\x00", "not a text file: byte 4"),
    ],
)
def test_a_file_that_is_no_recipe_is_told_in_one_line(tmp_path, content, said):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    assert error_of(path).message.startswith(f"{path}: {said}")


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optim.betas=[0.8, 0.9]", "optim", "betas", (0.8, 0.9)),
        ("train.max_steps=1e3", "train", "max_steps", 1000),
        ("train.compile=on", "train", "compile", True),
        ("masking.mask_ratio=[0, .6]", "masking", "mask_ratio", (0.0, 0.6)),
        ("train.validate_at=[1, 05, 0.387]", "train", "validate_at", (1, 5, 0.387)),
        ("data.train=[01, 2.50, true]", "data", "train", ("01", "2.50", "true")),
        ("data.column=", "data", "column", None),
        ("masking={mask_ratio: 0.3}", "masking", "mask_ratio", 0.3),
        (" optim.lr =1e-4", "optim", "lr", 1e-4),
        ("data.train=#2.txt", "data", "train", ("#2.txt",)),
    ],
)
def test_a_value_is_typed_by_its_key_in_an_override_and_in_a_file(tmp_path, override, section, key, value):
    path, _, text = override.partition("=")
    quoted = repr(text) if text.startswith("#") else text
    content = f"extends: quickstart-text\n{path.strip().replace('.', ': {')}: {quoted}{'}' * path.count('.')}\n"
    of_file = load_recipe(str(write(tmp_path / "mine.yaml", content)))
    for recipe in (load_recipe("quickstart-text", [override]), of_file):
        read = getattr(getattr(recipe, section), key)
        assert read == value
        assert type(read) is type(value)


def test_a_path_in_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "mine.yaml", "extends: quickstart-text\nseed: 7\n")
    assert load_recipe("~/mine.yaml").seed == 7
    assert load_recipe(str(write(tmp_path / "child.yaml", "extends: ~/mine.yaml\n"))).seed == 7


def test_a_run_that_was_stopped_too_early_to_be_continued_says_what_to_do(tmp_path):
    create_run_dir(tmp_path, "a")
    with pytest.raises(CheckpointError, match="stopped before it had anything to continue") as error:
        resumed_recipe(tmp_path, PretrainRecipe)
    assert "which takes this folder" in error.value.hint


def test_damage_in_the_recipe_of_a_run_is_told_apart_from_a_mistake_of_the_user(tmp_path):
    update_run_json(tmp_path, {"command": "pretrain"})
    content = dump_recipe(load_recipe("text-small"))
    for text, hint in ((content.partition("optim:")[0], ALTERED_HINT), (content, "did you mean `seed`?")):
        (tmp_path / "recipe.yaml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            resumed_recipe(tmp_path, PretrainRecipe, ["sead=2"])
        assert caught.value.hint == hint
