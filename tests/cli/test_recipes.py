"""`exlm recipes`: the list, one recipe, and what scripts read."""

import json
from pathlib import Path

import pytest

from exlm_cli.cli.app import main
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import KINDS, list_recipes, load_recipe

Capture = pytest.CaptureFixture[str]
NAMES = [info.name for kind in KINDS for info in list_recipes(kind)]


def test_json_gives_every_recipe_with_what_scripts_rely_on(capsys: Capture) -> None:
    assert main(["recipes", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == NAMES
    assert {frozenset(entry) for entry in listed} == {
        frozenset({"name", "command", "objective", "parameters", "tokens_per_step", "purpose", "paper"})
    }
    text_base = next(entry for entry in listed if entry["name"] == "text-base")
    assert text_base["command"] == "pretrain"
    assert text_base["tokens_per_step"] == 2048 * 512
    assert text_base["parameters"] == pytest.approx(128e6, rel=0.03)


def test_the_names_that_scripts_rely_on_are_there() -> None:
    promised = {
        "text-base", "text-large", "smiles-base", "text-base-mlm", "text-large-mlm", "smiles-base-mlm", "text-small",
        "smiles-small", "text-small-mlm", "smiles-small-mlm", "quickstart-text", "quickstart-smiles", "repeat-mlm",
        "quickstart-repeat-mlm",
    }  # fmt: skip
    assert promised <= set(NAMES)


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_table_names_every_recipe_and_fits(columns: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    names = [line.split(maxsplit=1)[0] for line in lines[1:] if not line.startswith(" ")]
    assert names == NAMES


def test_one_recipe_is_printed_resolved_and_can_be_read_back(capsys: Capture, tmp_path: Path) -> None:
    assert main(["recipes", "smiles-base"]) == 0
    path = tmp_path / "recipe.yaml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_recipe(str(path)) == load_recipe("smiles-base")


def test_one_recipe_as_json(capsys: Capture) -> None:
    assert main(["recipes", "smiles-base", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == load_recipe("smiles-base").model_dump(mode="json")


def test_an_unknown_recipe_is_told_with_the_nearest(capsys: Capture) -> None:
    assert main(["recipes", "smile-base"]) == 2
    assert capsys.readouterr().err == (
        "error: unknown recipe `smile-base`\n\nhint: did you mean `smiles-base`? `exlm recipes` lists the recipes; a "
        "file is given by its path, like `./mine.yaml`\n"
    )


def test_a_fine_tuning_recipe_is_printed_and_has_no_size_of_its_own(capsys: Capture, tmp_path: Path) -> None:
    assert main(["recipes", "moleculenet-bace"]) == 0
    path = tmp_path / "recipe.yaml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    bace = load_recipe("moleculenet-bace", kind=FinetuneRecipe)
    assert load_recipe(str(path), kind=FinetuneRecipe) == bace
    assert main(["recipes", "--json"]) == 0
    entry = next(e for e in json.loads(capsys.readouterr().out) if e["name"] == "moleculenet-bace")
    assert (entry["command"], entry["parameters"], entry["purpose"]) == ("finetune", None, bace.purpose)
