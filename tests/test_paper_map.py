"""`docs/paper_map.md` names code, recipes and keys that exist, and every section, table and figure of the paper."""

import ast
import re
from pathlib import Path

import pytest

from exlm_cli.config.load import KINDS, list_recipes, load_recipe
from exlm_cli.config.overrides import find_field
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.cost.counts import count_parameters

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "paper_map.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([\w/]+\.(?:py|h))(?::(\w+))?`", TEXT)
RECIPES = sorted(set(re.findall(r"`((?:text|smiles|repeat|ablation|table|figure)-[\w.-]+)`", TEXT)))
KEYS = sorted(set(re.findall(r"`((?:data|masking|model|optim|train)\.[\w.]+)(?:: \w+)?`", TEXT)))


def test_a_named_file_has_what_is_named():
    for file, name in sorted(set(CODE)):
        folder = ROOT if file.startswith(("benchmarks/", "cuda_ext/", "tests/")) else ROOT / "src" / "exlm_cli"
        nodes = ast.walk(ast.parse((folder / file).read_text())) if name else ()
        defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert not name or name in defined, f"{file}:{name}"
        assert (folder / file).is_file(), file


def test_named_recipes_and_keys_are_there():
    assert set(RECIPES) <= {name for kind in KINDS for name in list_recipes(kind)}
    assert not [key for key in KEYS if find_field(PretrainRecipe, key) is None]


@pytest.mark.parametrize(("millions", "name"), re.findall(r"([\d.]+) M \(`([\w-]+)`\)", TEXT))
def test_a_parameter_count_is_what_the_closed_form_gives(millions, name):
    recipe = load_recipe(name, kind=SweepRecipe).pretrain if name == "repeat-mlm" else load_recipe(name)
    assert f"{count_parameters(recipe) / 1e6:.1f}" == millions


def test_every_section_appendix_table_and_figure_of_the_paper_has_its_place():
    sections = ["§2", "§3.1", "§3.2", "§3.3", "§4.2", "§4.3", "§5.1", "§5.2", "§5.3"]
    appendices = [f"App. {letter}" for letter in "BCEFGHIJKLMNOPQ"] + ["Appendices A and D", "App. Q.1", "App. Q.3"]
    assert [place for place in [*sections, *appendices] if place not in TEXT] == []
    for kind, count in (("Tables?", 13), ("Fig(?:ure)?s?", 12)):
        for number in range(1, count + 1):
            assert re.search(rf"{kind}\b[^|\n]*\b{number}\b", TEXT), f"{kind} {number}"
