"""Packages: what `src` imports is declared in pyproject.toml, and what is declared is imported."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import exlm_cli

PACKAGE = Path(exlm_cli.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

IMPORTED_BY_NAME = {"tensorboard", "wandb", "mlflow", "onnx", "onnxscript"}
"""Trackers of `train.report_to`, imported where a recipe names one, and what `torch.onnx` imports."""


def normal(name: str) -> str:
    """Return the name of a distribution as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distribution(requirement: str) -> str:
    return normal(re.split(r"[\s;<>=!~\[]", requirement, maxsplit=1)[0])


def imported_packages() -> Iterator[str]:
    """Yield the top-level packages that `src` imports, outside the standard library and itself."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            yield from (module.partition(".")[0] for module in modules)


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    ours = {*sys.stdlib_module_names, PACKAGE.name}
    owners = packages_distributions()
    imported = {normal(owners[name][0]) for name in set(imported_packages()) - ours}
    extras = PROJECT.get("optional-dependencies", {})
    of_users = {distribution(r) for name, group in extras.items() if name not in {"dev", "docs"} for r in group}
    required = {distribution(requirement) for requirement in PROJECT["dependencies"]}
    assert imported <= required | of_users
    assert (required | of_users) - IMPORTED_BY_NAME <= imported


def test_extras_that_name_parts_of_the_plain_install_ask_for_what_it_has() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {*extras["chem"], *extras["plot"], *extras["hub"]} <= set(PROJECT["dependencies"])
