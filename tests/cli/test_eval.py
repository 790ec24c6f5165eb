"""`exlm eval` on small runs: tables for people, JSON for programs, files for both, mistakes in one line."""

import numpy as np
import pytest

from tests.cli.asserts import printed_by, refusal_of, result_of
from tests.unit.finetune.finetuned_runs import read_rows
from tests.unit.finetune.synthetic import make_pretrained


def test_fine_tuned_runs_are_printed_in_tables_that_fit_and_drawn(folder, made, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed_by(capsys, ["eval", f"{made}/molecules/run", f"{made}/rte/run", "--out", "out"]).out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert all(name in text for name in ("roc_auc", "accuracy", "±", "Table 3: GLUE", "RoBERTa"))
    kinds = [f"{kind}.{suffix}" for kind in ("curves", "confusion", "calibration") for suffix in ("png", "svg")]
    names = [f"{run}-run-{split}-{kind}" for run, split in (("molecules", "test"), ("rte", "valid")) for kind in kinds]
    names += [f"{table}.csv" for table in ("scores-csv", "scores-glue-rte", "table-3")]
    assert lines[-len(names) :] == [f"wrote out/{name}" for name in names]
    assert sorted(path.name for path in (folder / "out").iterdir()) == sorted(names)


def test_json_has_results_as_they_are_and_those_of_one_run_on_top(run_folder, capsys):
    result = result_of(capsys, "eval", "M", "--no-figures")
    assert sum(result["split_sizes"].values()) == 72
    assert {"roc_auc", "average_precision", "accuracy"} <= set(result["metrics"]["test"])
    assert (result["runs"][0]["name"], result["files"]) == ("run", [])
    assert {key: result[key] for key in result["runs"][0]} == result["runs"][0]
    both = result_of(capsys, "eval", "M", "Q", "--no-figures")
    assert "metrics" not in both
    assert [entry["name"] for entry in both["runs"]] == ["molecules/run", "squad/run"]


def test_tables_are_written_in_the_formats_asked_for(run_folder, capsys):
    result = result_of(capsys, "eval", "R", "--no-figures", "--format", "markdown,csv", "--out", "out")
    suffixes = (".md", ".csv")
    assert result["files"] == [f"out/{name}{suffix}" for name in ("scores-glue-rte", "table-3") for suffix in suffixes]
    (ours,) = [row for row in read_rows(run_folder / "out/table-3.csv") if row["source"] == "ours"]
    scored = result["metrics"]["valid"]["accuracy"]
    assert float(ours["RTE"]) == pytest.approx(100 * scored["mean"], rel=1e-9)
    assert float(ours["RTE_std"]) == pytest.approx(100 * scored["std"], rel=1e-9)


def test_pretrained_runs_are_scored_side_by_side_on_given_data(run_folder, capsys):
    (run_folder / "valid.txt").write_text("amber birch\ncedar fern elder\n")
    result = result_of(capsys, "eval", "T", "T/checkpoints/step-3", "--data", "valid.txt")
    assert [entry["name"] for entry in result["runs"]] == ["text", "text/step-3"]
    first, second = (entry["metrics"] for entry in result["runs"])
    assert first == second
    assert first["perplexity"] == pytest.approx(np.exp(first["loss"]), rel=1e-9)
    assert {"mask_accuracy", "entropy_bits", "entropy_posterior_bits", "effective_states"} <= set(first)
    words = ["eval", "T", "--data", "valid.txt", "--max-sequences", "1", "--validate-at", "1,0.387"]
    out, said = printed_by(capsys, words)
    assert "scoring text on 1 sequence" in said
    assert "effective states per mask" in out
    assert [line.split()[:2] for line in out.splitlines() if "accuracy" in line][1:] == [["1", "mask"], ["38.7", "%"]]
    result = result_of(capsys, *words, "--format", "csv", "--out", "out")
    assert [row["at"] for row in result["validated_at"]] == [1, 0.387]
    assert len(read_rows(run_folder / "out/masks.csv")) == 8
    assert "--entropy" in refusal_of(capsys, *words, "--entropy")
    assert "pre-trained" in refusal_of(capsys, "eval", "M", "--validate-at", "1")
    (run_folder / "mine.csv").write_text("id,words\n1,amber birch\n2,cedar fern elder\n")
    assert "`--text-column NAME`" in refusal_of(capsys, "eval", "T", "--data", "mine.csv")
    scored = result_of(capsys, "eval", "T", "--data", "mine.csv", "--text-column", "words")["runs"][0]["metrics"]
    assert scored["num_sequences"] == 2


def test_without_a_run_the_newest_finished_one_is_taken(folder, capsys):
    """Of fine-tuned runs a finished one; damaged ones are left out."""
    make_pretrained(folder / "runs/one", train={"alignment_backend": "reference"})
    (folder / "valid.txt").write_text("amber birch\n")
    for name, described in (("unfinished", '{"command": "finetune"}'), ("damaged", "{")):
        (folder / "runs" / name).mkdir()
        (folder / "runs" / name / "run.json").write_text(described)
    said = printed_by(capsys, ["eval", "--data", "valid.txt", "--no-figures"]).err
    assert "run: runs/one, the newest one\n" in said


def test_entropy_over_mask_ratios_is_printed_written_and_drawn(run_folder, made, capsys):
    (run_folder / "valid.txt").write_text("amber birch cedar\ncedar fern elder\n")
    mlm = make_pretrained(run_folder / "mlm", objective="mlm", model={"rope": "1d"})
    words = ["eval", "--entropy", "T", mlm, "--data", "valid.txt", "--out", "out"]
    result = result_of(capsys, *words, "--mask-ratios", "0.2,0.6", "--num-states", "2,3", "--format", "csv")
    found = [(e["name"], e["num_states_per_mask"], e["num_repeats"], e["mask_ratio"]) for e in result["entropies"]]
    assert found == [*(("text", k, 1, p) for k in (2, 3) for p in (0.2, 0.6)), ("mlm", 1, 1, 0.2), ("mlm", 1, 1, 0.6)]
    assert ["entropy_posterior_bits" in e["metrics"] for e in result["entropies"]] == [True] * 4 + [False] * 2
    assert result["files"] == ["out/entropy.png", "out/entropy.svg", "out/entropy.csv"]
    assert all((run_folder / file).is_file() for file in result["files"])
    out = printed_by(capsys, [*map(str, words[:-2]), "--no-figures"]).out
    assert not (made / "text/report").exists()
    assert all(text in out for text in ("mean over states", "weighted by the posterior", "15 %", "38.7 %", "78.9 %"))
    assert "`--num-states 2,3`" in refusal_of(capsys, "eval", "--entropy", str(mlm), "--num-states", "2,3")
