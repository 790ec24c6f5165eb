"""A place for the code of exported folders, which transformers copies and imports."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let transformers copy the code of folders to a folder of this test, and forget it afterwards."""
    copied = str(tmp_path / "modules")
    monkeypatch.setattr(pytest.importorskip("transformers.dynamic_module_utils"), "HF_MODULES_CACHE", copied)
    monkeypatch.syspath_prepend(copied)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]
