"""Inputs named from the root: the same ones, wherever the recipe is read."""

import glob
from pathlib import Path

import pytest

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.input_paths import with_absolute_paths
from exlm_cli.config.load import load_recipe
from exlm_cli.config.sweep import SweepRecipe


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_relative_inputs_of_pre_training_start_in_the_current_directory(folder):
    given = 'data.train=[a.txt, ../b.txt, /c.txt, ~/d.txt, "hub:o/n@train", "bundled:grammar", "data/*.txt"]'
    recipe = load_recipe("text-small", [given, "tokenizer.path=t.json", "data.cache_dir=cache"])
    absolute = with_absolute_paths(recipe)
    assert absolute.data.train == (
        f"{folder}/a.txt", f"{folder}/../b.txt", "/c.txt", "~/d.txt", "hub:o/n@train", "bundled:grammar",
        f"{folder}/data/*.txt",
    )  # fmt: skip
    assert (absolute.data.valid, absolute.tokenizer.path, absolute.data.cache_dir) == (
        (), f"{folder}/t.json", f"{folder}/cache",
    )  # fmt: skip
    assert absolute.model_dump(exclude={"data", "tokenizer"}) == recipe.model_dump(exclude={"data", "tokenizer"})


def test_a_pattern_finds_its_files_from_a_folder_that_looks_like_one(tmp_path, monkeypatch):
    folder = tmp_path / "run [1]"
    folder.mkdir()
    for name in ("a.txt", "b[2].txt"):
        (folder / name).write_text("x")
    monkeypatch.chdir(folder)
    recipe = with_absolute_paths(load_recipe("text-small", ["data.train=*.txt", "data.valid=['b[2].txt']"]))
    monkeypatch.chdir("/")
    # Path.glob takes no pattern that begins at the root
    assert sorted(glob.glob(recipe.data.train[0])) == [f"{folder}/a.txt", f"{folder}/b[2].txt"]  # noqa: PTH207
    assert Path(recipe.data.valid[0]).read_text() == "x"


def test_files_of_a_task_start_in_its_folder_where_it_has_one(folder):
    overrides = ["task.name=csv", "task.files.train=a.csv", "task.split=file", "task.split_file=s.json"]
    task = with_absolute_paths(load_recipe("csv", overrides, kind=FinetuneRecipe)).task
    assert (task.data_dir, task.files.train, task.files.valid, task.split_file) == (
        None, f"{folder}/a.csv", None, f"{folder}/s.json",
    )  # fmt: skip
    task = with_absolute_paths(load_recipe("csv", [*overrides, "task.data_dir=d"], kind=FinetuneRecipe)).task
    assert (task.data_dir, task.files.train) == (f"{folder}/d", "a.csv")


def test_a_sweep_has_its_parts_and_variants_told_from_the_root(folder):
    overrides = ["pretrain.data.train=a.txt", "finetune.task.data_dir=d"]
    recipe = with_absolute_paths(load_recipe("quickstart-ablations", overrides, kind=SweepRecipe))
    assert (recipe.pretrain.data.train, recipe.finetune.task.data_dir) == ((f"{folder}/a.txt",), f"{folder}/d")
    varied = load_recipe("quickstart-ablations", ["variants.other={data.train: [b.txt]}"], kind=SweepRecipe)
    assert with_absolute_paths(varied).variants["other"] == {"data.train": [f"{folder}/b.txt"]}
