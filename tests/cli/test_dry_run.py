"""`--dry-run` of each command that trains: the whole recipe, if its inputs exist, and nothing is made."""

import shlex

import pytest
import torch
import yaml

from exlm_cli.config.load import load_recipe, recipe_kind
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.run_dir import update_run_json
from tests.cli.asserts import printed_by, refusal_of, result_of
from tests.test_recipes import value_at

GRID = load_recipe("quickstart-repeat-mlm", kind=SweepRecipe).cells
LARGE = {"name": "text-large", "seed": 9, "model": load_recipe("text-large").model}
BASE = {"data.train": ("my file.txt",), "data.on_invalid": "skip", "model": load_recipe("text-base").model}
CASES = [
    ("pretrain --recipe text-large --set seed=1 --seed 9", LARGE),
    ("pretrain --resume run --seed 9", LARGE),
    ("tokenize some.txt --kind text", {"data.kind": "text", "data.train": ("some.txt",)}),
    ("tokenize 'my file.txt' --recipe text-base --on-invalid skip --vocab-size 300",
     BASE | {"tokenizer.vocab_size": 300}),
    ("tokenize some.txt --kind text --tokenizer t", {"tokenizer.path": "t"}),
    ("finetune moleculenet bbbp --split random --data-dir 'no: where'",
     {"name": "moleculenet-bbbp", "task.name": "moleculenet/bbbp", "task.split": "random",
      "task.data_dir": "no: where", "train.max_epochs": 40}),
    ("finetune csv some.csv --encoder smiles-small", {"init": "scratch"}),
    ("finetune --recipe mine.yaml", {"task.name": "moleculenet/sider"}),
    ("finetune moleculenet muv --recipe mine.yaml", {"task.name": "moleculenet/muv"}),
    ("sweep quickstart-ablations --variants 'mlm, exlm' --seeds 4,5 --task glue/rte --on-invalid skip --device cpu "
     "--set pretrain.train.max_steps=4",
     {"seeds": (4, 5), "tasks": ("glue/rte",), "device": "cpu", "only": ("mlm", "exlm"),
      "pretrain.train.max_steps": 4, "pretrain.data.on_invalid": "skip"}),
    ("repeat-mlm", {"name": "repeat-mlm"}),
    ("repeat-mlm quickstart-repeat-mlm --num-repeats 2 --task none",
     {"tasks": (), "cells": tuple(cell for cell in GRID if cell[0] == 2)}),
]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused(folder, capsys):
    words = ["pretrain", "--recipe", "quickstart-text", "--device", "cuda", "--dry-run"]
    assert "torch sees no CUDA device" in refusal_of(capsys, *words)


@pytest.mark.parametrize(("words", "values"), CASES, ids=[words for words, _ in CASES])
def test_the_recipe_is_printed_for_people_and_for_programs(words, values, folder, capsys):
    (folder / "mine.yaml").write_text("extends: moleculenet-small\ntask: {name: moleculenet/sider}\n")
    (folder / "no: where").mkdir()
    for name in ("my file.txt", "some.txt", "some.csv", "no: where/bbbp.csv"):
        (folder / name).write_text("a\n")
    (folder / "run").mkdir()
    (folder / "run" / "recipe.yaml").write_text("extends: text-large\nname: text-large\n")
    update_run_json(folder / "run", {"command": "pretrain"})
    before = sorted(folder.rglob("*"))
    printed = printed_by(capsys, [*shlex.split(words), "--dry-run"]).out
    assert result_of(capsys, *shlex.split(words), "--dry-run") == yaml.safe_load(printed)
    assert sorted(folder.rglob("*")) == before
    (folder / "printed.yaml").write_text(printed)
    recipe = load_recipe("printed.yaml", kind=recipe_kind("printed.yaml"))
    assert {key: value_at(recipe, key) for key in values} == values
