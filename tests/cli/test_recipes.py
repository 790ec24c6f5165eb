"""`exlm recipes`: the list, one recipe with its cost, and what scripts read."""

import pytest

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import KINDS, list_recipes, load_recipe, recipe_kind
from exlm_cli.cost.estimate import recipe_size
from tests.cli.asserts import printed_by, result_of

NAMES = [name for kind in KINDS for name in list_recipes(kind)]


def test_json_gives_every_recipe_with_what_scripts_rely_on(capsys):
    listed = result_of(capsys, "recipes")
    assert [entry["name"] for entry in listed] == NAMES
    keys = {"name", "command", "objective", "parameters", "tokens_per_step", "purpose", "paper"}
    assert all(keys <= entry.keys() for entry in listed)
    text_base = next(entry for entry in listed if entry["name"] == "text-base")
    assert (text_base["command"], text_base["tokens_per_step"]) == ("pretrain", 2048 * 512)
    assert text_base["parameters"] == pytest.approx(128e6, rel=0.03)
    assert text_base["flops"] == text_base["flops_per_step"] * load_recipe("text-base").train.max_steps
    bace = next(entry for entry in listed if entry["name"] == "moleculenet-bace")
    assert (bace["command"], bace["parameters"], bace["flops"]) == ("finetune", None, None)
    assert {"quickstart-text", "csv"} <= {entry["name"] for entry in listed if entry["is_start"]}


def test_the_list_fits_and_can_be_narrowed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    table, _, _ = printed_by(capsys, ["recipes", "--for", "finetune"]).out.partition("\n\n")
    lines = table.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[1:] if not line.startswith(" ")] == list(list_recipes(FinetuneRecipe))
    assert "csv *" in table


@pytest.mark.parametrize("name", ["smiles-base", "moleculenet-bace", "quickstart-repeat-mlm"])
def test_a_recipe_is_printed_so_that_it_can_be_read_back(name, capsys, tmp_path):
    recipe = load_recipe(name, kind=recipe_kind(name))
    printed = printed_by(capsys, ["recipes", name, "--describe"]).out
    path = tmp_path / "recipe.yaml"
    path.write_text(printed, encoding="utf-8")
    assert load_recipe(str(path), kind=type(recipe)) == recipe
    assert max(map(len, printed.splitlines())) <= 80
    assert ("FLOPs" in printed) == (recipe_size(recipe).flops is not None)
    assert result_of(capsys, "recipes", name) == recipe.as_written()
    assert "\n  # " in printed
    assert "\n  # " not in printed_by(capsys, ["recipes", name]).out


def test_the_cost_is_readable_and_json_carries_it(capsys):
    words = ["recipes", "text-base", "--gpu", "h100", "--gpus", "8", "--utilisation", "0.4"]
    printed = printed_by(capsys, words).out
    assert printed.startswith("text-base on 8 x H100 SXM, 80 GB\n")
    assert ", by 40 % of 989 TFLOP/s\n" in printed
    estimate = result_of(capsys, *words)
    assert (estimate["gpu"], estimate["gpus"], estimate["utilisation"]) == ("h100", 8, 0.4)
    assert f"{estimate['hours']:,.3g} ({8 * estimate['hours']:,.3g} GPU-hours)" in printed
    assert estimate["memory_bytes"] > 18 * estimate["parameters"]
    assert result_of(capsys, *words, "--set", "masking.num_states_per_mask=2")["hours"] < estimate["hours"]
    assert "lr: 0.0001" in printed_by(capsys, ["recipes", "text-base", "--set", "optim.lr=1e-4"]).out
