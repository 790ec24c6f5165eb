"""Packages: what `src` imports is declared in pyproject.toml, and what is declared is imported."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import exlm_cli

PACKAGE = Path(exlm_cli.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

IMPORTED_BY_NAME = {"tensorboard", "wandb", "onnx", "onnxscript"}
"""Trackers of `train.report_to`, imported where a recipe names one, and what `torch.onnx` imports."""


def normal(name: str) -> str:
    """Return the name of a distribution as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distribution(requirement: str) -> str:
    return normal(re.split(r"[\s;<>=!~\[]", requirement, maxsplit=1)[0])


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Return those of a file, in functions too."""
    return tuple(node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Import | ast.ImportFrom))


def imported_modules(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the dotted names that the import statements among some nodes name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_packages() -> Iterator[str]:
    """Yield the top-level packages that `src` imports, outside the standard library and itself."""
    for path in PACKAGE.rglob("*.py"):
        for module in imported_modules(import_statements(path)):
            yield module.partition(".")[0]


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    ours = {*sys.stdlib_module_names, PACKAGE.name}
    owners = packages_distributions()
    imported = {normal(owners[name][0]) for name in set(imported_packages()) - ours}
    extras = PROJECT.get("optional-dependencies", {})
    of_users = {distribution(r) for name, group in extras.items() if name not in {"dev", "docs"} for r in group}
    required = {distribution(requirement) for requirement in PROJECT["dependencies"]}
    assert imported <= required | of_users
    assert (required | of_users) - IMPORTED_BY_NAME <= imported


def test_no_module_needs_a_package_of_an_extra_to_be_imported():
    """They are imported where they are used, so that a plain install runs all that does not use them."""
    extras = PROJECT["optional-dependencies"]
    optional = {distribution(r) for group in extras.values() for r in group}
    optional -= {distribution(requirement) for requirement in PROJECT["dependencies"]}
    for path in PACKAGE.rglob("*.py"):
        modules = set(imported_modules(tree_of(path).body))
        assert not {normal(module.partition(".")[0]) for module in modules} & optional, path


def test_extras_that_name_parts_of_the_plain_install_ask_for_what_it_has():
    extras = PROJECT["optional-dependencies"]
    assert {*extras["chem"], *extras["plot"], *extras["hub"]} <= set(PROJECT["dependencies"])
