"""Runs that several tests begin with, which nothing alters, and figures as they are before they become files."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.finetune.finetuned_runs import molecule_run, smiles_pretrained
from tests.unit.finetune.synthetic import make_pretrained


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pretrained(tmp_path_factory.mktemp("text") / "pretrained")


@pytest.fixture(scope="session")
def smiles_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smiles_pretrained(tmp_path_factory.mktemp("smiles"))


@pytest.fixture(scope="session")
def molecules(tmp_path_factory: pytest.TempPathFactory, smiles_model: Path) -> Path:
    return molecule_run(tmp_path_factory.mktemp("molecules"), smiles_model)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the figures that the test draws, by the name of their files, which are not written."""
    kept: dict[str, Any] = {}

    def keep(figure: Any, folder: Path, stem: str) -> dict[Path, bytes]:
        kept[stem] = figure
        return {}

    monkeypatch.setattr("exlm_cli.report.style.figure_files", keep)
    return kept
