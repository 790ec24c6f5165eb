"""Pre-trained runs that several tests begin with; nothing alters them."""

from pathlib import Path

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
