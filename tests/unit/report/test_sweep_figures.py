"""Figure 12: which lines it has, that bars are there over seeds, and that the same rows give the same bytes."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from PIL import Image

from exlm_cli.report.sweep_figures import entropy_lines, write_entropy_figures
from exlm_cli.report.sweep_rows import SweepRow, sweep_rows
from tests.unit.report.sweeps import sweep_results


def _texts(rows: list[SweepRow], folder: Path) -> list[str]:
    png, svg = write_entropy_figures(rows, folder)
    with Image.open(png) as image:
        assert image.width > image.height > 300
    text = svg.read_text(encoding="utf-8")
    ET.fromstring(text)
    return re.findall(r"<!-- (.*?) -->", text)


def test_there_is_a_line_for_the_mlm_and_one_for_each_k(tmp_path: Path) -> None:
    texts = _texts(sweep_rows(sweep_results("figure-12")), tmp_path)
    for words in ("MLM", "ExLM, k = 2", "ExLM, k = 4", "ExLM, k = 8", "78.9%", "mean over states"):
        assert words in texts
    assert "states weighted by the posterior" in texts
    assert any(text.endswith("one seed") for text in texts)


def test_several_seeds_are_told(tmp_path: Path) -> None:
    texts = _texts(sweep_rows(sweep_results("figure-12", seeds=(1, 2, 3))), tmp_path)
    assert any("standard deviation of 3 seeds" in text for text in texts)


def _measured(name: str) -> list[SweepRow]:
    results = sweep_results(name)
    for result in results:
        entropy = dict(result["entropy"][0])
        result["entropy"] = [entropy, entropy | {"mask_ratio": 0.5}]
    return sweep_rows(results)


def test_variants_that_differ_otherwise_are_no_lines() -> None:
    lines = entropy_lines(_measured("ablations"))
    assert list(lines) == [None]
    assert [row.label for row in lines[None]] == [
        "mlm", "mlm-p38.7", "exlm-k2", "exlm-k2-p38.7", "exlm", "exlm-k4-p38.7", "exlm-k8", "exlm-k8-p38.7",
    ]  # fmt: skip


def test_variants_that_share_what_else_they_change_have_a_figure_of_their_own(tmp_path: Path) -> None:
    rows = _measured("ablations-small-smiles")
    lines = entropy_lines(rows)
    assert list(lines) == [None, "exlm-lanes"]
    assert [row.label for row in lines["exlm-lanes"]] == [
        "mlm", "mlm-p38.7", "exlm-lanes-k2", "exlm-lanes", "exlm-lanes-k8"
    ]  # fmt: skip
    written = write_entropy_figures(rows, tmp_path)
    assert [path.name for path in written] == [
        "figure-12.png", "figure-12.svg", "figure-12-exlm-lanes.png", "figure-12-exlm-lanes.svg",
    ]  # fmt: skip
    assert "ExLM is exlm-lanes at each k" in written[-1].read_text(encoding="utf-8")


def test_lines_trained_at_several_ratios_say_which(tmp_path: Path) -> None:
    texts = _texts(_measured("table-4"), tmp_path)
    assert "MLM, trained at p = 38.7%" in texts


def test_one_ratio_alone_is_no_figure(tmp_path: Path) -> None:
    assert write_entropy_figures(sweep_rows(sweep_results("table-4")), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_mlms_alone_have_one_panel(tmp_path: Path) -> None:
    rows = [row for row in sweep_rows(sweep_results("figure-12")) if row.label == "mlm"]
    assert "states weighted by the posterior" not in _texts(rows, tmp_path)


def test_the_same_rows_give_the_same_files(tmp_path: Path) -> None:
    rows = sweep_rows(sweep_results("figure-12", seeds=(1, 2)))
    written = write_entropy_figures(rows, tmp_path)
    assert [path.name for path in written] == ["figure-12.png", "figure-12.svg"]
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in write_entropy_figures(rows, tmp_path)] == before
