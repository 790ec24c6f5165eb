"""Linear probes: closed forms, SciPy's paired interval, properties known of molecules and texts, and a whole study."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

import probe
import probing.scores
import probing.store
import probing.targets
from exlm_cli.data.molecules import parse_molecule
from exlm_cli.data.tokenizer import train_bpe
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from probing.scores import TEST_SHARE, join_parts, paired_difference, resampling, token_counts
from probing.targets import TEXT_NUMBERS, ProbeData, molecule_groups, molecule_numbers, read_glue
from tests.unit.finetune.finetuned_runs import read_rows
from tests.unit.finetune.synthetic import WORDS, make_pretrained
from tests.unit.tasks.glue_files import ROWS, write_glue

NUM_ROWS = 3000


def made_up(targets: Any, *metrics: Any) -> ProbeData:
    rows = tuple(map(str, range(len(targets))))
    return ProbeData("made-up", (rows,), targets, tuple(f"p{i}" for i in range(len(metrics))), metrics)


def score(features: Any, data: ProbeData, index: int = 0) -> list[float]:
    return probing.scores.probe_scores(features.astype(np.float32), data, *resampling(len(data), index))


def test_a_property_that_lies_in_the_vectors_is_read_without_error_and_one_that_does_not_is_not_read():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(NUM_ROWS, 8))
    inside = features @ rng.normal(size=8) + 3
    outside = rng.normal(size=NUM_ROWS)
    data = made_up(np.stack([inside, outside, inside > 3, outside > 0], axis=1), "r2", "r2", "roc_auc", "roc_auc")
    read, unread, told, untold = score(features, data)
    assert read == pytest.approx(1, abs=1e-5)
    assert told == pytest.approx(1, abs=1e-3)
    num_test = TEST_SHARE * NUM_ROWS
    assert abs(unread) < 5 * math.sqrt(2 * 8 / NUM_ROWS / num_test) + 8 / NUM_ROWS + 5 / num_test
    assert abs(untold - 0.5) < 5 / math.sqrt(12 * num_test / 4)  # the variance of Mann and Whitney's statistic


def test_half_of_the_variance_in_the_vectors_is_a_determination_of_one_half():
    """y = x + noise of equal variance; the estimate over 4,000 test rows has a deviation of 0.011."""
    rng = np.random.default_rng(1)
    features = rng.normal(size=(20_000, 1))
    data = made_up(features + rng.normal(size=(20_000, 1)), "r2")
    assert score(features, data)[0] == pytest.approx(0.5, abs=5 * 0.011)


def test_the_scale_of_the_vectors_does_not_matter_and_a_constant_one_does_no_harm():
    rng = np.random.default_rng(2)
    features = rng.normal(size=(400, 3))
    data = made_up(np.stack([features[:, 0], features[:, 1] > 0], axis=1), "r2", "roc_auc")
    scaled = np.concatenate([features * 1000 + 5, np.full((400, 1), 7.0)], axis=1)
    assert score(scaled, data) == pytest.approx(score(features, data), abs=1e-4)


def test_a_property_with_one_class_has_no_score():
    features = np.random.default_rng(3).normal(size=(50, 2))
    assert math.isnan(score(features, made_up(np.zeros((50, 1)), "roc_auc"))[0])


def test_a_resampling_cuts_all_rows_in_two_and_is_the_same_each_time():
    train, test = resampling(1000, 4)
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(1000))
    assert len(test) == 200
    assert np.array_equal(test, resampling(1000, 4)[1])
    assert not np.array_equal(test, resampling(1000, 5)[1])


def test_the_interval_over_seeds_is_that_of_scipy():
    rng = np.random.default_rng(0)
    a_SN, b_SN = rng.normal(size=(5, 10)), rng.normal(size=(5, 10))
    found = paired_difference(a_SN, b_SN)
    interval = ttest_rel(a_SN.mean(axis=1), b_SN.mean(axis=1)).confidence_interval(0.95)
    assert found.over_seeds == pytest.approx((interval.low, interval.high))
    assert found.mean == pytest.approx((a_SN - b_SN).mean())


@pytest.mark.parametrize("num_seeds", [1, 3])
def test_the_interval_over_resamplings_is_wider_than_scipys_because_they_share_rows(num_seeds):
    """The variance of the mean is s^2 (1 / N + test / train) in place of s^2 / N."""
    rng = np.random.default_rng(0)
    a_SN, b_SN = rng.normal(size=(num_seeds, 10)), rng.normal(size=(num_seeds, 10))
    found = paired_difference(a_SN, b_SN)
    interval = ttest_rel(a_SN.mean(axis=0), b_SN.mean(axis=0)).confidence_interval(0.95)
    wider = math.sqrt((1 / 10 + 0.2 / 0.8) / (1 / 10))
    low, high = found.over_resamplings
    assert high - low == pytest.approx(wider * (interval.high - interval.low))
    assert (low + high) / 2 == pytest.approx(found.mean)
    assert (found.over_seeds is None) == (num_seeds == 1)


def test_a_baseline_without_seeds_is_compared_with_each_seed():
    found = paired_difference(np.array([[1.0, 3.0]]), np.array([[1.0, 1.0], [2.0, 2.0]]))
    assert found.mean == 0.5
    assert found.over_seeds == pytest.approx((0.5 - 12.7062 / 2, 0.5 + 12.7062 / 2), abs=1e-3)  # t of one degree
    alone = paired_difference(np.array([[2.0]]), np.array([[1.0]]))
    assert (alone.mean, alone.over_seeds, np.isnan(alone.over_resamplings).all()) == (1.0, None, True)


def test_token_counts_are_those_of_the_most_frequent_tokens(monkeypatch):
    tokenizer = train_bpe([" " + " ".join(WORDS)] * 4, 400, 1, SilentProgress())
    texts = (" amber amber amber birch", " amber birch", " cedar")
    data = ProbeData("texts", (texts,), np.zeros((3, 1)), ("p",), ("r2",))
    monkeypatch.setattr(probing.scores, "NUM_COUNTED_TOKENS", 2)
    (counts,) = token_counts(data, tokenizer)
    assert np.expm1(counts) == pytest.approx(np.array([[3, 1], [1, 1], [0, 0]]), abs=1e-6)


def test_a_pair_has_both_vectors_their_distance_and_their_product():
    u, v = np.array([[1.0, -2.0]], dtype=np.float32), np.array([[3.0, 1.0]], dtype=np.float32)
    assert join_parts([u, v]).tolist() == [[1, -2, 3, 1, 2, 3, 3, -2]]
    assert join_parts([u]) is u


def test_properties_of_aspirin_and_of_a_spiro_compound_are_those_of_their_structure():
    aspirin, _ = parse_molecule("CC(=O)Oc1ccccc1C(=O)O")
    numbers = {name: number(aspirin) for name, number in molecule_numbers().items()}
    groups = {name for name, count in molecule_groups().items() if count(aspirin)}
    assert numbers["weight"] == pytest.approx(180.042, abs=1e-3)
    assert [numbers[name] for name in ("rings", "aromatic_rings", "h_donors")] == [1, 1, 1]
    assert numbers["tpsa"] == pytest.approx(63.6)
    assert groups == {"ester", "carboxylic_acid"}
    spiro, _ = parse_molecule("C1CC2(C1)CN[C@H](C)C2")
    assert {name for name, count in molecule_groups().items() if count(spiro)} == {"stereocentre", "spiro_or_bridge"}
    assert len(molecule_numbers()) + len(molecule_groups()) >= 12


@pytest.mark.parametrize(
    ("text", "properties"),
    [
        ("he said that it was 3 o'clock", {"digit", "past"}),
        ("they don't know, but Mary does", {"negation", "name"}),
        ('"give it to us", she says', {"quotation", "first_person"}),
        ("The Nothing is a knothole", {"name", "negation"}),
    ],
)
def test_properties_of_texts(text, properties):
    assert {name for name, pattern in probing.targets.TEXT_PATTERNS.items() if pattern.search(text)} == properties


def test_numbers_of_a_text():
    assert {name: number("one, two, three four") for name, number in TEXT_NUMBERS.items()} == {
        "words": 4, "letters_of_a_word": 17 / 4, "commas": 2
    }  # fmt: skip


def test_properties_of_molecules_are_worked_out_once(tmp_path, monkeypatch):
    file, kept = tmp_path / "a.smi", tmp_path / "rows" / "kept.npz"
    ends = ("", "O", "N", "F", "S", "Cl", "C=O", "C#N", "C(=O)O", "C(C)C")
    file.write_text("\n".join("C" * length + end for length in range(1, 60) for end in ends))

    def read() -> ProbeData:
        return probing.targets.read_molecules([file], 500, None, kept, SilentProgress())

    first = read()
    (smiles,) = first.parts
    assert max(sum(letter.isupper() for letter in text) for text in smiles) == 50, "of heavy atoms"
    weight = first.targets[:, first.properties.index("weight")]
    assert weight[smiles.index("C" * 7 + "O")] == pytest.approx(116.12012, abs=1e-4)
    assert "nitro" not in first.properties, "no molecule has one"
    monkeypatch.setattr(probing.targets, "molecule_numbers", lambda: dict.fromkeys(molecule_numbers()))
    again = read()
    assert np.array_equal(first.targets, again.targets)
    assert (first.parts, first.properties) == (again.parts, again.properties)


def test_glue_tasks_are_read_from_their_folders(tmp_path):
    for task in ("sst2", "rte"):
        write_glue(tmp_path, task, copies=20)
    sst2, rte = read_glue(tmp_path, 100, SilentProgress())
    assert (sst2.name, len(sst2.parts), len(sst2), sst2.properties) == ("sst2", 1, 100, ("positive",))
    assert (rte.name, len(rte.parts), len(rte)) == ("rte", 2, 80)
    targets = {text.strip(): target for text, _, _, target in ROWS["sst2"]}
    assert sst2.targets[:, 0].tolist() == [targets[text] for text in sst2.parts[0]]
    with pytest.raises(DataError, match="SST-2"):
        read_glue(tmp_path / "RTE", 100, SilentProgress())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of a text model, one of a SMILES model, and texts of which half have a digit, all different."""
    folder = tmp_path_factory.mktemp("probe")
    for number in (1, 2):
        make_pretrained(folder / f"run-{number}", model={"num_layers": number})
    make_pretrained(folder / "molecules", data={"kind": "smiles"})
    rng = np.random.default_rng(0)
    texts = [
        " ".join([*rng.choice(WORDS, 5), str(i) if i % 2 else "fern " * (i % 7), "x" * (i % 11)]) for i in range(600)
    ]
    (folder / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    return folder


def words_of_a_study(inputs: Path, out: Path) -> list[str]:
    runs = [f"mine={inputs / 'run-1'}", f"other={inputs / 'run-2'}"]
    return [*runs, "--files", str(inputs / "texts.txt"), "--out", str(out), "--resamplings", "3", "--rows", "500"]


def test_a_study_is_tabulated_and_continues_where_it_was_stopped(inputs, tmp_path, capsys, monkeypatch):
    words = words_of_a_study(inputs, tmp_path)
    assert probe.main(words) == 0
    printed = capsys.readouterr().out
    scores = tmp_path / "scores.csv"
    rows = read_rows(scores)
    assert {row["label"] for row in rows} == {"mine", "other", "untrained", "token counts"}
    assert len(rows) == 4 * 3 * len({row["property"] for row in rows})
    weights = {row["label"]: row["weights"] for row in rows}
    assert len(set(weights.values())) == 4
    summary = read_rows(tmp_path / "probe.csv")
    assert [row["model"] for row in summary[:4]] == ["mine", "other", "untrained", "token counts"]
    digit = [float(row["score"]) for row in rows if row["property"] == "digit" and row["label"] == "token counts"]
    assert min(digit) > 0.95, "digits are tokens"
    for row in summary:
        if row["model"] == "mine":
            assert row["less mine"] == ""
        else:
            low, high = map(float, re.findall(r"[+-]\d\.\d+", row["over resamplings"]))
            assert low <= float(row["less mine"]) <= high
            assert f"{float(row['mean']):.4f}" in printed
    assert (tmp_path / "probe-properties.md").read_text().count("texts: digit, ROC-AUC") == 4

    # stopped before its last rows were scored: neither embeddings nor finished scores are made again
    scores.write_text("\n".join(scores.read_text().splitlines()[:-9]) + "\n")
    monkeypatch.setattr(probing.store, "embed", lambda *_, **__: pytest.fail("embeddings are kept"))
    fitted: list[int] = []
    monkeypatch.setattr(probe, "probe_scores", lambda *given: fitted.append(1) or probing.scores.probe_scores(*given))
    assert probe.main(words) == 0
    kept = {(row["weights"], row["property"], row["resampling"]): row["score"] for row in rows}
    assert {(row["weights"], row["property"], row["resampling"]): row["score"] for row in read_rows(scores)} == kept
    assert 1 <= len(fitted) <= 3
    fitted.clear()
    assert probe.main(words) == 0
    assert not fitted


def test_what_cannot_be_probed_is_one_error(inputs, tmp_path, capsys):
    words = words_of_a_study(inputs, tmp_path / "out")
    (tmp_path / "out" / "rows").mkdir(parents=True)
    (tmp_path / "out" / "rows" / "texts-1.csv").write_text("text\nother rows\n")
    short = tmp_path / "short.txt"
    short.write_text("one two\n")
    run, molecules = str(inputs / "run-1"), str(inputs / "molecules")
    out = ["--out", str(tmp_path / "new")]
    cases = {
        "holds other rows": words,
        "some runs read SMILES": [run, molecules, *out],
        "different numbers of runs: run-1 2, run-2 1": [run, run, str(inputs / "run-2"), *out],
        "`--reference x`: the models are run-1": [run, "--reference", "x", *out],
        "no rows to probe": [run, *out],
        "has 4 to 60 words": [run, "--files", str(short), *out],
        "no row of the files is a molecule": [molecules, "--files", str(short), *out],
        "no.txt": [run, "--files", str(tmp_path / "no.txt"), *out],
        "not a run directory": [str(tmp_path), *out],
    }
    for said, given in cases.items():
        assert probe.main(given) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert said in captured.err
