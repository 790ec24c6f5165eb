"""Entropy over mask ratios: both definitions in their own column and panel, a line for each model and k."""

import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from exlm_cli.experiments.entropy import PredictionEntropy
from exlm_cli.report import entropy as report
from exlm_cli.report.entropy import entropy_lines, entropy_table, write_entropy_figure

METRICS = {"loss": 2.5, "mask_accuracy": 0.25}
ENTROPIES = [
    *(("mine", PredictionEntropy("exlm", p, 1, k, 3 + p, 2 + p, METRICS)) for k in (2, 4) for p in (0.622, 0.15)),
    ("plain", PredictionEntropy("mlm", 0.15, 1, 1, 4.0, None, METRICS)),
    ("repeated", PredictionEntropy("mlm", 0.15, 8, 1, 5.0, None, METRICS)),
]


def test_the_table_has_a_row_for_each_masking_and_explains_each_number() -> None:
    table = entropy_table(ENTROPIES)
    assert table.columns[:5] == ("model", "k", "p", "mean over states", "weighted by the posterior")
    assert table.rows[0] == ("mine", "2", "62.2 %", "3.6220", "2.6220", "2.5000", "0.2500")
    assert table.rows[-2:] == (
        ("plain", "1", "15 %", "4.0000", "-", "2.5000", "0.2500"),
        ("repeated", "8", "15 %", "5.0000", "-", "2.5000", "0.2500"),
    )
    assert "App. E" in table.notes[1]


def test_there_is_a_line_for_each_model_and_k_over_p() -> None:
    lines = entropy_lines(ENTROPIES)
    assert [line.label for line in lines] == ["mine, k = 2", "mine, k = 4", "plain, k = 1", "repeated, k = 8"]
    assert len({line.colour for line in lines}) == 4
    assert lines[0].points("entropy_bits") == [(0.15, 3.15, 0.0), (0.622, 3.622, 0.0)]
    assert lines[0].points("entropy_posterior_bits") == [(0.15, 2.15, 0.0), (0.622, 2.622, 0.0)]
    assert lines[2].points("entropy_posterior_bits") == [(0.15, 4.0, 0.0)]


def test_an_entropy_that_is_not_defined_is_no_point() -> None:
    without_transitions = PredictionEntropy("exlm", 0.15, 1, 4, 7.5, None, METRICS)
    undefined = PredictionEntropy("mlm", 0.1, 8, 1, math.nan, None, METRICS)
    assert entropy_table([("repeated", undefined)]).rows[0][3] == "not defined"
    (line,) = entropy_lines([("independent", without_transitions)])
    assert line.points("entropy_posterior_bits") == []
    (line,) = entropy_lines([ENTROPIES[-1], ("repeated", undefined)])
    assert line.points("entropy_bits") == [(0.15, 5.0, 0.0)]


def test_each_definition_has_a_panel_and_an_mlm_alone_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(report, "write_figure", lambda figure, *_: figures.append(figure) or [])
    for entropies in (ENTROPIES, ENTROPIES[-2:]):
        write_entropy_figure(entropy_lines(entropies), tmp_path, "entropy", title="a", captions=())
    assert [len(figure.axes) for figure in figures] == [2, 1]
    assert [len(axes.containers) for axes in figures[0].axes] == [4, 4]


def test_the_same_entropies_give_the_same_files(tmp_path: Path) -> None:
    lines = entropy_lines(ENTROPIES)
    files = {}
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        files[folder] = write_entropy_figure(lines, folder, "entropy", title="a", captions=("b",))
    first, second = files.values()
    assert [path.name for path in first] == ["entropy.png", "entropy.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    undefined = PredictionEntropy("mlm", 0.1, 8, 1, math.nan, None, METRICS)
    assert write_entropy_figure(entropy_lines([("m", undefined)]), tmp_path, "none", title="", captions=()) == []
