"""What the documents tell people to type is there: commands parse, recipes resolve, make targets and paths exist."""

import re
import shlex
import tomllib
from pathlib import Path

import typer

from exlm_cli.cli.app import app
from exlm_cli.config.load import KINDS, load_recipe
from exlm_cli.config.pretrain import PretrainRecipe

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "recipes/README.md",
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
NAMED_FILE = re.compile(r"`((?:\w+/)*\w+\.(?:py|md)|(?:\w+/)+\w+)`")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def blocks(language: str) -> list[tuple[str, str]]:
    """Return the (document, text) of every fenced block in a language."""
    found = []
    for document in DOCUMENTS:
        for kind, text in FENCE.findall(document.read_text(encoding="utf-8")):
            if kind == language:
                found.append((document.name, text))
    return found


def shell_lines() -> list[str]:
    lines = []
    for _, text in blocks("sh"):
        lines += [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return lines


EXLM_LINES = [line for line in shell_lines() if line.startswith("exlm ")]
MAKE_TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_table_of_commands_has_every_command_and_no_other():
    table = re.findall(r"^\| `exlm ([a-z-]+)` \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert table == list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_an_exlm_line_parses_and_its_recipe_resolves():
    command = typer.main.get_command(app)
    for line in EXLM_LINES:
        _, name, *words = shlex.split(line)
        try:
            group = command.make_context("exlm", [name, *words])
            found = command.commands[name]  # type: ignore[attr-defined]
            context = found.make_context(name, words, parent=group)
            if context.params.get("recipe"):
                command_of_kind = {"repeat-mlm": "sweep"}.get(name, name)
                kind = next((kind for kind in KINDS if kind.command == command_of_kind), PretrainRecipe)
                load_recipe(context.params["recipe"], context.params.get("sets") or [], kind=kind)
        except Exception as error:
            raise AssertionError(line) from error


def test_make_targets_that_the_documents_name_exist():
    named = [line.split("#")[0].removeprefix("make ") for line in shell_lines() if line.startswith("make ")]
    for document in DOCUMENTS:
        named += re.findall(r"`make ([a-z -]+)`", document.read_text(encoding="utf-8"))
    assert {word for words in named for word in words.split()} <= set(MAKE_TARGETS)


def test_links_lead_to_files():
    for document in DOCUMENTS:
        for target in LINK.findall(document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_files_that_contributing_names_exist():
    """They are named from the package or from the top, `.py` or not."""
    named = NAMED_FILE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) > 80
    places = [(ROOT / name, *((ROOT / "src/exlm_cli" / (name + end)) for end in ("", ".py"))) for name in named]
    assert [name for name, some in zip(named, places, strict=True) if not any(place.exists() for place in some)] == []


def test_the_readme_is_short_and_its_links_work_on_a_package_index():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    project = re.compile(re.escape(PROJECT["urls"]["Repository"]) + "/(?:blob|raw|tree)/main/(.+)")
    for target in LINK.findall(text):
        assert target.startswith("https://")
        if inside := project.fullmatch(target):
            assert (ROOT / inside[1]).exists(), target
        else:
            assert target == PROJECT["urls"]["Paper"]


def test_yaml_in_the_documents_is_a_recipe(tmp_path):
    found = blocks("yaml")
    assert found
    for index, (_, text) in enumerate(found):
        path = tmp_path / f"recipe-{index}.yaml"
        path.write_text(text, encoding="utf-8")
        load_recipe(str(path))


def test_python_in_the_documents_compiles():
    found = blocks("python")
    assert found
    for document, text in found:
        compile(text, document, "exec")
