"""Figure 12: which lines it has, that bars are there over seeds, and that the same rows give the same bytes."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from exlm_cli.report.sweep_figures import entropy_lines, render_entropy, write_entropy_figure
from exlm_cli.report.sweep_rows import sweep_rows
from tests.unit.report.sweeps import sweep_results


def _texts(svg: bytes) -> list[str]:
    ET.fromstring(svg)
    return re.findall(r"<!-- (.*?) -->", svg.decode())


def test_there_is_a_line_for_the_mlm_and_one_for_each_k() -> None:
    texts = _texts(render_entropy(sweep_rows(sweep_results("figure-12")), ["svg"])["svg"])
    for words in ("MLM", "ExLM, k = 2", "ExLM, k = 4", "ExLM, k = 8", "78.9%", "Mean over states"):
        assert words in texts
    assert "States weighted by the posterior" in texts


def _measured(name: str) -> list:
    results = sweep_results(name)
    for result in results:
        entropy = dict(result["entropy"][0])
        result["entropy"] = [entropy, entropy | {"mask_ratio": 0.5}]
    return sweep_rows(results)


def test_variants_that_differ_otherwise_are_no_lines() -> None:
    assert [row.label for row in entropy_lines(_measured("ablations"))] == [
        "mlm", "mlm-p38.7", "exlm-k2", "exlm-k2-p38.7", "exlm", "exlm-k4-p38.7", "exlm-k8", "exlm-k8-p38.7",
    ]  # fmt: skip


def test_lines_trained_at_several_ratios_say_which() -> None:
    texts = _texts(render_entropy(_measured("table-4"), ["svg"])["svg"])
    assert "MLM, trained at p = 38.7%" in texts


def test_one_ratio_alone_is_no_figure(tmp_path: Path) -> None:
    assert write_entropy_figure(sweep_rows(sweep_results("table-4")), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_mlms_alone_have_one_panel() -> None:
    rows = [row for row in sweep_rows(sweep_results("figure-12")) if row.label == "mlm"]
    assert "States weighted by the posterior" not in _texts(render_entropy(rows, ["svg"])["svg"])


def test_the_same_rows_give_the_same_files(tmp_path: Path) -> None:
    rows = sweep_rows(sweep_results("figure-12", seeds=(1, 2)))
    written = write_entropy_figure(rows, tmp_path)
    assert [path.name for path in written] == ["figure-12.png", "figure-12.svg"]
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in write_entropy_figure(rows, tmp_path)] == before
