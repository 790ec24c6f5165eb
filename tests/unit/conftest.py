"""Runs that several tests begin with, which nothing alters, and figures as they are before they become files."""

from pathlib import Path
from typing import Any

import pytest

from tests.shared import shared
from tests.unit.finetune.finetuned_runs import molecule_run, smiles_pretrained, words_run
from tests.unit.finetune.synthetic import make_pretrained


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory, "text", lambda folder: make_pretrained(folder / "pretrained")) / "pretrained"


@pytest.fixture(scope="session")
def smiles_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory, "smiles", smiles_pretrained) / "pretrained"


@pytest.fixture(scope="session")
def molecules(tmp_path_factory: pytest.TempPathFactory, smiles_model: Path) -> Path:
    return shared(tmp_path_factory, "molecules", lambda folder: molecule_run(folder, smiles_model)) / "run"


@pytest.fixture(scope="session")
def lengths_run(tmp_path_factory: pytest.TempPathFactory, text_model: Path) -> Path:
    """A regression on 36 texts, each in one row of `words.csv` beside the run."""
    return shared(tmp_path_factory, "lengths", lambda folder: words_run(folder, text_model, "length")) / "run"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the figures that the test draws, by the name of their files, which are not written."""
    kept: dict[str, Any] = {}

    def keep(figure: Any, folder: Path, stem: str) -> dict[Path, bytes]:
        kept[stem] = figure
        return {}

    monkeypatch.setattr("exlm_cli.report.style.figure_files", keep)
    return kept
