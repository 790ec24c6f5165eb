"""Benchmarks are scripts: they find each other beside themselves."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _beside_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
