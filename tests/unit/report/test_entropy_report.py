"""Entropy over mask ratios: both definitions named and in their own column and panel, a line for each model and k."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from exlm_cli.experiments.scores import PredictionEntropy
from exlm_cli.report import entropy_report
from exlm_cli.report.entropy_report import NamedEntropy, entropy_table, write_entropy_figure

METRICS = {"loss": 2.5, "mask_accuracy": 0.25}
ENTROPIES: list[NamedEntropy] = [
    *(("mine", PredictionEntropy("exlm", p, 1, k, 3 + p, 2 + p, METRICS)) for k in (2, 4) for p in (0.622, 0.15)),
    ("plain", PredictionEntropy("mlm", 0.15, 1, 1, 4.0, None, METRICS)),
    ("repeated", PredictionEntropy("mlm", 0.15, 8, 1, 5.0, None, METRICS)),
]


def test_the_table_has_a_row_for_each_masking_and_says_what_each_number_is() -> None:
    table = entropy_table(ENTROPIES)
    assert table.columns[:5] == ("model", "k", "p", "mean over states", "posterior-weighted")
    assert table.rows[0] == ("mine", "2", "62.2 %", "3.6220", "2.6220", "2.5000", "0.2500")
    assert table.rows[-2:] == (
        ("plain", "1", "15 %", "4.0000", "-", "2.5000", "0.2500"),
        ("repeated", "8", "15 %", "5.0000", "-", "2.5000", "0.2500"),
    )
    assert "App. E" in table.notes[1]
    assert table.notes[2].startswith("posterior-weighted: of ExLM")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    figures: list[Figure] = []
    monkeypatch.setattr(entropy_report, "write_figure", lambda figure, *_: figures.append(figure) or [])

    def draw(entropies: list[NamedEntropy]) -> Figure:
        write_entropy_figure(entropies, tmp_path)
        return figures[-1]

    return draw


def test_each_definition_has_a_panel_with_a_line_for_each_model_and_k_over_p(drawn: Any) -> None:
    left, right = drawn(ENTROPIES).axes
    labels = ["mine, k = 2", "mine, k = 4", "plain, k = 1", "repeated, k = 8"]
    for axes, first in ((left, 3.0), (right, 2.0)):
        assert [line.get_label() for line in axes.lines] == labels
        x, y = axes.lines[0].get_data()
        np.testing.assert_allclose(x, [15, 62.2])
        np.testing.assert_allclose(y, [first + 0.15, first + 0.622])
        assert axes.lines[2].get_data()[1] == (4.0,)
        assert axes.get_ylim()[0] == 0


def test_exlm_without_transitions_has_no_weighted_line(drawn: Any) -> None:
    without = ("independent", PredictionEntropy("exlm", 0.15, 1, 4, 7.5, None, METRICS))
    left, right = drawn([ENTROPIES[0], without]).axes
    assert left.lines[1].get_data()[1] == (7.5,)
    assert np.isnan(right.lines[1].get_data()[1]).all()


def test_plain_mlms_alone_have_one_panel(drawn: Any) -> None:
    assert len(drawn(ENTROPIES[-2:]).axes) == 1


def test_files_are_the_same_for_the_same_data(tmp_path: Path) -> None:
    first = write_entropy_figure(ENTROPIES, tmp_path / "new" / "a")
    assert [path.name for path in first] == ["entropy.png", "entropy.svg"]
    second = write_entropy_figure(ENTROPIES, tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_an_entropy_that_is_not_defined_is_told_and_not_drawn(drawn: Any, tmp_path: Path) -> None:
    undefined = ("repeated", PredictionEntropy("mlm", 0.1, 8, 1, math.nan, None, METRICS))
    assert entropy_table([undefined]).rows[0][3] == "not defined"
    assert drawn([ENTROPIES[-1], undefined]).axes[0].lines[0].get_data()[1] == (5.0,)
    assert write_entropy_figure([undefined], tmp_path / "none") == []
    assert not (tmp_path / "none").exists()
