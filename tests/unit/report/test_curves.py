"""Training curves and entropy over mask ratios: which panels there are, the points of each line, names as they are."""

import math
from pathlib import Path

import pytest

from exlm_cli.experiments.results import PredictionEntropy
from exlm_cli.report.curves import EntropyLine, entropy_lines, entropy_table, plot_curves, write_entropy_figure

TRAINING = "Training loss (nats per target)"
TITLES = {
    "loss": "Validation loss (nats per target)",
    "perplexity": "Perplexity",
    "mask_accuracy": "Mask accuracy",
    "entropy_bits": "Entropy of predictions (bits)",
    "effective_states": "States in use",
    "path_entropy_bits": "Path entropy (bits per target)",
    "masks_with_0_share": "Share of masks on the best path",
}


def run(*keys, num_rows=50):
    return [
        *({"kind": "train", "step": 10 * i, "loss": 8 / i} for i in range(1, num_rows + 1)),
        *valid(**{key: [1 / (i + j) for i in range(1, 6)] for j, key in enumerate(keys)}),
    ]


def valid(**values):
    rows = zip(*values.values(), strict=True)
    return [{"kind": "valid", "step": i, **dict(zip(values, row, strict=True))} for i, row in enumerate(rows)]


def panels(figures, rows):
    plot_curves(rows, Path("curves"))
    return {axes.get_title(loc="left"): axes for axes in figures["curves"].axes if axes.get_visible()}


def test_each_fixed_number_of_masks_has_a_panel_and_rows_without_a_finite_value_are_left_out(figures):
    rows = [
        {"kind": "valid_at", "step": step, "at": at, "loss": 9.0, "loss_given_length": at + step, "mask_accuracy": 0.5}
        for step in (3, 6)
        for at in (0.387, 5, 1, 0.15)
    ]
    losses = [*valid(loss=[2.0, None, math.inf, 1], perplexity=[60, 4, 4, 4]), {"kind": "valid", "step": 9}]
    drawn = panels(figures, {"run": losses + rows, "other": valid(loss=[1.0])})
    titles = [f"Loss given the number, {at}" for at in ("1 mask", "5 masks", "15 %", "38.7 %")]
    assert list(drawn) == [TITLES["loss"], "Perplexity", *titles]
    assert drawn["Perplexity"].get_yscale() == "log", "its values differ much"
    (line,) = drawn[titles[1]].lines
    assert [list(data) for data in line.get_data()] == [[3, 6], [8, 11]]
    assert [list(data) for data in drawn[TITLES["loss"]].lines[0].get_data()] == [[0, 3], [2.0, 1.0]]


def test_several_runs_lie_over_each_other_in_colours_that_differ(figures):
    runs = {f"k={k}": run(*TITLES, "entropy_posterior_bits", "loss_spellings") for k in range(9)} | {"MLM": run("loss")}
    drawn = panels(figures, runs)
    assert set(drawn) == {TRAINING, *TITLES.values()}
    (legend,) = figures["curves"].legends
    assert [text.get_text() for text in legend.get_texts()] == list(runs)
    lines = drawn[TITLES["mask_accuracy"]].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == 9
    for title, names in (("entropy_bits", ["mean over states", "posterior-weighted"]),
                         ("loss", ["canonical SMILES", "another spelling"])):  # fmt: skip
        of_panel = drawn[TITLES[title]].get_legend()
        assert [text.get_text() for text in of_panel.get_texts()] == names
        assert [line.get_linestyle() for line in of_panel.get_lines()] == ["-", "--"]
        assert [line.get_linestyle() for line in drawn[TITLES[title]].lines[:2]] == ["-", "--"]


def test_smoothing_keeps_straight_lines_straight(figures):
    rows = [{"kind": "train", "step": i, "loss": 3.0 + 2 * i} for i in range(100)]
    raw, smooth = panels(figures, {"run": rows})[TRAINING].lines
    assert list(smooth.get_ydata()) == pytest.approx(list(raw.get_ydata()))
    rows[50]["loss"] += 11.0
    raw, smooth = panels(figures, {"run": rows})[TRAINING].lines
    assert smooth.get_ydata()[50] == pytest.approx(103.0 + 1.0), "a mean of 11 rows"


def test_the_same_rows_give_the_same_files_and_names_are_no_formulas(tmp_path):
    runs = {"$x_1$ & {毒}": run("loss", num_rows=5)}
    written = plot_curves(runs, tmp_path / "curves")
    assert written == [tmp_path / "curves.png", tmp_path / "curves.svg"]
    assert "<!-- $x_1$ &amp; {毒} -->" in written[1].read_text()
    before = [path.read_bytes() for path in written]
    assert plot_curves(runs, tmp_path / "curves.SVG") == written
    assert [path.read_bytes() for path in written] == before


def entropy(objective, p, k, bits, posterior=None):
    metrics = {"loss": 2.5, "mask_accuracy": 0.25, "entropy_bits": bits}
    metrics |= {} if posterior is None else {"entropy_posterior_bits": posterior}
    repeats, states = (1, k) if objective == "exlm" else (k, 1)
    return PredictionEntropy(
        objective=objective, mask_ratio=p, num_repeats=repeats, num_states_per_mask=states, metrics=metrics
    )


ENTROPIES = [
    *(("mine", entropy("exlm", p, k, 3 + p, 2 + p)) for k in (2, 4) for p in (0.622, 0.15)),
    ("plain", entropy("mlm", 0.15, 1, 4.0)),
    ("repeated", entropy("mlm", 0.1, 8, None)),
    ("independent", entropy("exlm", 0.15, 4, 7.5)),
]


def test_the_table_has_a_row_for_each_masking_and_explains_each_number():
    table = entropy_table(ENTROPIES)
    assert table.columns[:5] == ("model", "k", "p", "mean over states", "weighted by the posterior")
    assert table.rows[0] == ("mine", "2", "62.2 %", "3.6220", "2.6220", "2.5000", "0.2500")
    assert table.rows[-3:-1] == (
        ("plain", "1", "15 %", "4.0000", "-", "2.5000", "0.2500"),
        ("repeated", "8", "10 %", "not defined", "-", "2.5000", "0.2500"),
    )


def test_there_is_a_line_for_each_model_and_k_over_p():
    """What is not defined is no point; both entropies of an MLM are one."""
    lines = entropy_lines(ENTROPIES)
    labels = ["mine, k = 2", "mine, k = 4", "plain, k = 1", "repeated, k = 8", "independent, k = 4"]
    assert [line.label for line in lines] == labels
    assert lines[0].points("entropy_bits") == [(0.15, 3.15, 0.0), (0.622, 3.622, 0.0)]
    assert lines[0].points("entropy_posterior_bits") == [(0.15, 2.15, 0.0), (0.622, 2.622, 0.0)]
    assert lines[2].points("entropy_posterior_bits") == [(0.15, 4.0, 0.0)]
    assert lines[3].points("entropy_bits") == lines[4].points("entropy_posterior_bits") == []


def test_bars_are_the_deviations_over_seeds(figures, tmp_path):
    """Of 1 and 3 the mean is 2 and the sample deviation the root of 2; one seed has none."""
    line = EntropyLine("a", True, {0.15: {"entropy_bits": [1.0, 3.0]}, 0.5: {"entropy_bits": [5.0]}})
    write_entropy_figure([line], tmp_path, "bars", title="a", captions=())
    (container,) = figures["bars"].axes[0].containers
    ends = [segment[:, 1].tolist() for segment in container[2][0].get_segments()]
    assert ends == [pytest.approx([2 - math.sqrt(2), 2 + math.sqrt(2)]), [5.0, 5.0]]
