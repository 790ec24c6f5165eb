"""Entropy over mask ratios: both definitions in their own column and panel, a line for each model and k."""

from exlm_cli.experiments.results import PredictionEntropy
from exlm_cli.report.curves import entropy_lines, entropy_table, write_entropy_figure


def exlm(p: float, k: int, bits: float, posterior: float | None) -> PredictionEntropy:
    return _entropy("exlm", p, 1, k, bits, posterior)


def mlm(p: float, k: int, bits: float | None) -> PredictionEntropy:
    return _entropy("mlm", p, k, 1, bits, None)


def _entropy(*values: object) -> PredictionEntropy:
    names = ("objective", "mask_ratio", "num_repeats", "num_states_per_mask", "entropy_bits", "entropy_posterior_bits")
    metrics = {"loss": 2.5, "mask_accuracy": 0.25}
    return PredictionEntropy.model_validate(dict(zip(names, values, strict=True)) | {"metrics": metrics})


ENTROPIES = [
    *(("mine", exlm(p, k, 3 + p, 2 + p)) for k in (2, 4) for p in (0.622, 0.15)),
    ("plain", mlm(0.15, 1, 4.0)),
    ("repeated", mlm(0.15, 8, 5.0)),
]
UNDEFINED = ("repeated", mlm(0.1, 8, None))


def test_the_table_has_a_row_for_each_masking_and_explains_each_number():
    table = entropy_table([*ENTROPIES, UNDEFINED])
    assert table.columns[:5] == ("model", "k", "p", "mean over states", "weighted by the posterior")
    assert table.rows[0] == ("mine", "2", "62.2 %", "3.6220", "2.6220", "2.5000", "0.2500")
    assert table.rows[-3:] == (
        ("plain", "1", "15 %", "4.0000", "-", "2.5000", "0.2500"),
        ("repeated", "8", "15 %", "5.0000", "-", "2.5000", "0.2500"),
        ("repeated", "8", "10 %", "not defined", "-", "2.5000", "0.2500"),
    )
    assert "App. E" in table.notes[1]


def test_there_is_a_line_for_each_model_and_k_over_p():
    lines = entropy_lines([*ENTROPIES, UNDEFINED, ("independent", exlm(0.15, 4, 7.5, None))])
    labels = ["mine, k = 2", "mine, k = 4", "plain, k = 1", "repeated, k = 8", "independent, k = 4"]
    assert [line.label for line in lines] == labels
    assert len({line.colour for line in lines}) == 5
    assert lines[0].points("entropy_bits") == [(0.15, 3.15, 0.0), (0.622, 3.622, 0.0)]
    assert lines[0].points("entropy_posterior_bits") == [(0.15, 2.15, 0.0), (0.622, 2.622, 0.0)]
    assert lines[2].points("entropy_posterior_bits") == [(0.15, 4.0, 0.0)]
    # what is not defined is no point
    assert lines[3].points("entropy_bits") == [(0.15, 5.0, 0.0)]
    assert lines[4].points("entropy_posterior_bits") == []


def test_each_definition_has_a_panel_and_an_mlm_alone_has_one(figures, tmp_path):
    for stem, entropies in {"all": ENTROPIES, "mlms": ENTROPIES[-2:], "none": [UNDEFINED]}.items():
        write_entropy_figure(entropy_lines(entropies), tmp_path, stem, title="a", captions=())
    assert {stem: [len(axes.containers) for axes in figure.axes] for stem, figure in figures.items()} == {
        "all": [4, 4], "mlms": [2],
    }  # fmt: skip


def test_the_same_entropies_give_the_same_files(tmp_path):
    first, second = (
        write_entropy_figure(entropy_lines(ENTROPIES), tmp_path, stem, title="a", captions=("b",)) for stem in "ab"
    )
    assert [path.name for path in first] == ["a.png", "a.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
