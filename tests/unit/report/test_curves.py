"""Training curves: which panels there are, the points of each line, and names taken as they are."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from exlm_cli.errors import CheckpointError, DataError
from exlm_cli.report import curves
from exlm_cli.report.curves import LineStyle, plot_curves

TITLES = {
    "loss": "Validation loss (nats per target)",
    "perplexity": "Perplexity",
    "mask_accuracy": "Mask accuracy",
    "entropy_bits": "Entropy of predictions (bits)",
    "effective_states": "Effective states per mask",
    "path_entropy_bits": "Path entropy (bits per target)",
    "masks_with_0_share": "Share of masks on the best path",
}
Rows = list[dict[str, Any]]
Draw = Callable[..., dict[str, Axes]]


def run(*keys: str, num_rows: int = 50) -> Rows:
    rows: Rows = [{"kind": "train", "step": 10 * i, "loss": 8 / i} for i in range(1, num_rows + 1)]
    return rows + [
        {"kind": "valid", "step": 100 * i, **{key: 1 / (i + j) for j, key in enumerate(keys)}} for i in range(1, 6)
    ]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Return a function that draws runs and returns the visible axes by title, without writing files."""
    figures: list[Figure] = []
    monkeypatch.setattr(curves, "write_figure", lambda figure, *_: figures.append(figure) or [])

    def draw_runs(rows: Mapping[str, Sequence[Any]], styles: Mapping[str, LineStyle] | None = None) -> dict[str, Axes]:
        plot_curves(rows, Path("curves"), styles)
        return {axes.get_title(loc="left"): axes for axes in figures[-1].axes if axes.get_visible()}

    return draw_runs


def legend_of(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


@pytest.mark.parametrize("key", TITLES)
def test_a_panel_appears_where_its_values_do(draw: Draw, key: str) -> None:
    assert set(draw({"run": run(key)})) == {"Training loss (nats per target)", TITLES[key]}


def test_several_runs_lie_over_each_other_in_colours_that_differ(draw: Draw) -> None:
    runs = {f"k={k}": run(*TITLES, "entropy_posterior_bits") for k in range(9)} | {"MLM": run("loss")}
    panels = draw(runs)
    assert set(panels) == {"Training loss (nats per target)", *TITLES.values()}
    (legend,) = panels[TITLES["loss"]].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(runs)
    lines = panels[TITLES["loss"]].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == 10
    assert legend_of(panels[TITLES["entropy_bits"]]) == ["mean over states", "posterior-weighted"]
    assert legend_of(draw({"a": run("entropy_bits")})[TITLES["entropy_bits"]]) == []


def test_given_styles_are_used(draw: Draw) -> None:
    styles = {"a": ("#123456", "-"), "b": ("#654321", ":")}
    lines = draw({"a": run("loss"), "b": run("loss")}, styles)[TITLES["loss"]].lines
    assert [(line.get_color(), line.get_linestyle()) for line in lines] == list(styles.values())


def test_perplexity_has_a_logarithmic_axis_where_its_values_differ_much(draw: Draw) -> None:
    def scale(*values: float) -> str:
        rows = [{"kind": "valid", "step": i, "perplexity": value} for i, value in enumerate(values)]
        return draw({"run": rows})["Perplexity"].get_yscale()

    assert (scale(60.0, 4.0), scale(11.9, 11.2)) == ("log", "linear")


def test_a_collapsed_dag_lies_on_the_floor_of_its_panel(draw: Draw) -> None:
    rows = [{"kind": "valid", "step": i, "effective_states": 1.0 + 1e-6 * i} for i in range(1, 5)]
    low, high = draw({"run": rows})[TITLES["effective_states"]].get_ylim()
    assert 0.9 < low < 1.0
    assert high == pytest.approx(2.0)


def test_rows_without_a_finite_value_are_left_out(draw: Draw) -> None:
    values = [2.0, None, math.inf, 1]
    rows = [{"kind": "valid", "step": i, "loss": value} for i, value in enumerate(values)]
    (line,) = draw({"run": [*rows, {"kind": "valid", "step": 9}]})[TITLES["loss"]].lines
    assert [list(data) for data in line.get_data()] == [[0, 3], [2.0, 1.0]]


def test_smoothing_keeps_straight_lines_straight(draw: Draw) -> None:
    rows = [{"kind": "train", "step": i, "loss": 3.0 + 2 * i} for i in range(100)]
    raw, smooth = draw({"run": rows})["Training loss (nats per target)"].lines
    assert list(smooth.get_ydata()) == pytest.approx(list(raw.get_ydata()))
    rows[50]["loss"] += 11.0
    raw, smooth = draw({"run": rows})["Training loss (nats per target)"].lines
    assert smooth.get_ydata()[50] == pytest.approx(103.0 + 1.0), "a mean of 11 rows"


def test_the_same_rows_give_the_same_files_and_names_are_no_formulas(tmp_path: Path) -> None:
    runs = {"$x_1$ & {y}": run("loss", num_rows=5)}
    written = plot_curves(runs, tmp_path / "curves")
    assert written == [tmp_path / "curves.png", tmp_path / "curves.svg"]
    assert "<!-- $x_1$ &amp; {y} -->" in written[1].read_text()
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in plot_curves(runs, tmp_path / "curves.SVG")] == before


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(DataError, match="nothing to draw"):
        plot_curves({"run": []}, Path("curves"))


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"curves\.png"):
        plot_curves({"run": run("loss", num_rows=5)}, tmp_path / "none" / "curves")
    assert list(tmp_path.iterdir()) == []
