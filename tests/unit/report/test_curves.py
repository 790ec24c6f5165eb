"""Training curves: which panels appear, what goes into a line, and that names are taken as they are."""

import io
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

from exlm_cli.errors import CheckpointError, DataError
from exlm_cli.report.curves import _mean_around, _series, plot_curves, render_curves

TITLES = {
    "loss": "Validation loss (nats per target)",
    "perplexity": "Perplexity",
    "mask_accuracy": "Mask accuracy",
    "entropy_bits": "Entropy of predictions (bits)",
    "effective_states": "Effective states per mask",
    "path_entropy_bits": "Path entropy (bits per target)",
    "masks_with_0_share": "Share of masks on the best path",
}
# what stands beside another figure in its panel
SECOND = ("entropy_posterior_bits", "masks_with_2plus_share")


def _run(num_rows: int = 50, *keys: str) -> list[dict]:
    rows = [{"kind": "train", "step": 10 * i, "loss": 8 / i} for i in range(1, num_rows + 1)]
    return rows + [
        {"kind": "valid", "step": 100 * i, **{key: 1 / (i + j) for j, key in enumerate(keys)}} for i in range(1, 6)
    ]


def _svg(rows_by_run: dict) -> str:
    svg = render_curves(rows_by_run, ["svg"])["svg"].decode()
    ET.fromstring(svg)
    return svg


@pytest.mark.parametrize("key", TITLES)
def test_a_panel_appears_where_its_figure_does(key: str) -> None:
    svg = _svg({"run": _run(50, key)})
    for other, title in TITLES.items():
        assert (f"<!-- {title} -->" in svg) == (other == key)
    assert "<!-- Training loss (nats per target) -->" in svg


def test_several_runs_with_different_figures_lie_over_each_other() -> None:
    runs = {f"k={k}": _run(50, *TITLES, *SECOND) for k in range(14)} | {"MLM": _run(50, "loss", "perplexity")}
    svg = _svg(runs)
    assert all(f"<!-- {name} -->" in svg for name in runs)
    assert all(f"<!-- {title} -->" in svg for title in TITLES.values())
    assert "<!-- posterior-weighted -->" in svg
    assert "<!-- yield 2 or more -->" in svg


def test_a_panel_with_one_figure_of_two_needs_no_words_for_it() -> None:
    svg = _svg({"k=1": _run(50, "entropy_bits"), "k=2": _run(50, "entropy_bits")})
    assert "<!-- posterior-weighted -->" not in svg
    assert "<!-- mean over states -->" not in svg


def test_styles_that_are_given_are_taken() -> None:
    runs = {"a": _run(50, "entropy_bits"), "b": _run(50, "entropy_bits")}
    svg = render_curves(runs, ["svg"], {"a": ("#123456", "-"), "b": ("#654321", ":")})["svg"].decode()
    assert svg.count("#123456") >= 3
    assert svg.count("#654321") >= 3
    assert "#0072b2" not in svg


def test_perplexity_is_drawn_in_decades_where_it_spans_them() -> None:
    def ticks(*values: float) -> list[str]:
        svg = _svg({"run": [{"kind": "valid", "step": 10 * i, "perplexity": v} for i, v in enumerate(values, start=1)]})
        return re.findall(r"<!-- ([\d.]+) -->", svg)

    assert {"5", "10", "20", "50"} <= set(ticks(60.0, 4.0))
    assert len(ticks(11.9, 11.2)) > 6, "a narrow range keeps enough numbers to be read"


def test_a_collapsed_dag_lies_on_the_floor_of_its_panel() -> None:
    rows = [{"kind": "valid", "step": 10 * i, "effective_states": 1.0 + 1e-6 * i} for i in range(1, 5)]
    labels = re.findall(r"<!-- ([\d.]+) -->", _svg({"run": rows}))
    assert {"1.0", "2.0"} <= set(labels)


def test_names_are_not_mathematics() -> None:
    assert "<!-- $x_1$ &amp; {y} -->" in _svg({"$x_1$ & {y}": _run()})


def test_files_are_written_and_the_same_every_time(tmp_path: Path) -> None:
    written = plot_curves({"run": _run(50, *TITLES)}, tmp_path / "curves")
    assert written == [tmp_path / "curves.png", tmp_path / "curves.svg"]
    assert Image.open(io.BytesIO(written[0].read_bytes())).format == "PNG"
    before = [path.read_bytes() for path in written]
    plot_curves({"run": _run(50, *TITLES)}, tmp_path / "curves")
    assert [path.read_bytes() for path in written] == before


def test_rows_without_a_finite_figure_are_left_out() -> None:
    rows = [
        {"kind": "valid", "step": 1, "loss": 2.0},
        {"kind": "valid", "step": 2, "loss": None},
        {"kind": "valid", "step": 3, "loss": math.inf},
        {"kind": "train", "step": 4, "loss": 9.0},
        {"kind": "valid", "step": 5},
        {"kind": "valid", "step": 6, "loss": 1},
    ]
    assert _series(rows, "valid", "loss") == ([1, 6], [2.0, 1.0])


def test_smoothing_keeps_straight_lines_straight() -> None:
    line = [3.0 + 2 * i for i in range(40)]
    assert _mean_around(line, 5) == pytest.approx(line)
    assert _mean_around([1.0, 4.0, 1.0], 1) == [1.0, 2.0, 1.0]
    assert _mean_around([], 3) == []


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(
        DataError, match=re.escape("nothing to draw: none of 1 runs has rows of training or validation")
    ):
        render_curves({"run": []}, ["png"])


def test_a_folder_that_is_not_there_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape("curves.png: the file could not be written: No such file")):
        plot_curves({"run": _run()}, tmp_path / "none" / "curves")
    assert list(tmp_path.iterdir()) == []
