"""Figures as they are before they become files."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from exlm_cli.report import style


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Return the figures that the test draws, by the name of their files, which are not written."""
    kept: dict[str, Figure] = {}

    def keep(figure: Figure, folder: Path, stem: str) -> list[Path]:
        kept[stem] = figure
        return []

    monkeypatch.setattr(style, "write_figure", keep)
    return kept
