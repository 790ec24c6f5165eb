"""`exlm eval` on small runs: tables for people, JSON for programs, files for both, mistakes in one line."""

import numpy as np
import pytest

from tests.cli.asserts import printed_by, refusal_of, result_of
from tests.unit.finetune.finetuned_runs import read_rows
from tests.unit.finetune.synthetic import make_pretrained


def test_fine_tuned_runs_are_printed_in_tables_that_fit_and_drawn(run_folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed_by(capsys, ["eval", "M", "R", "--out", "out"]).out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert all(name in text for name in ("roc_auc", "accuracy", "±", "Table 3: GLUE", "RoBERTa"))
    kinds = [f"{kind}.{suffix}" for kind in ("curves", "confusion", "calibration") for suffix in ("png", "svg")]
    names = [f"{run}-run-{split}-{kind}" for run, split in (("molecules", "test"), ("rte", "valid")) for kind in kinds]
    names += [f"{table}.csv" for table in ("scores-csv", "scores-glue-rte", "table-3")]
    assert lines[-len(names) :] == [f"wrote out/{name}" for name in names]
    assert sorted(path.name for path in (run_folder / "out").iterdir()) == sorted(names)


def test_json_has_results_as_they_are_and_those_of_one_run_on_top(run_folder, capsys):
    result = result_of(capsys, "eval", "M", "--no-figures", "--format", "markdown,csv", "--out", "out")
    assert sum(result["split_sizes"].values()) == 72
    assert {"roc_auc", "average_precision", "accuracy"} <= set(result["metrics"]["test"])
    assert (result["runs"][0]["name"], result["files"]) == ("run", ["out/scores-csv.md", "out/scores-csv.csv"])
    assert {key: result[key] for key in result["runs"][0]} == result["runs"][0]
    both = result_of(capsys, "eval", "M", "Q", "--no-figures")
    assert "metrics" not in both
    assert [entry["name"] for entry in both["runs"]] == ["molecules/run", "squad/run"]


def test_pretrained_runs_are_scored_side_by_side_on_given_data(run_folder, capsys):
    (run_folder / "mine.csv").write_text("id,words\n1,amber birch\n2,cedar fern elder\n")
    assert "`--text-column NAME`" in refusal_of(capsys, "eval", "T", "--data", "mine.csv")
    of_data = ["--data", "mine.csv", "--text-column", "words"]
    result = result_of(capsys, "eval", "T", "T/checkpoints/step-3", *of_data)
    assert [entry["name"] for entry in result["runs"]] == ["text", "text/step-3"]
    first, second = (entry["metrics"] for entry in result["runs"])
    assert first == second
    assert first["num_sequences"] == 2
    assert first["perplexity"] == pytest.approx(np.exp(first["loss"]), rel=1e-9)
    words = ["eval", "T", *of_data, "--max-sequences", "1", "--validate-at", "1,0.387"]
    out, said = printed_by(capsys, words)
    assert "scoring text on 1 sequence" in said
    assert [line.split()[:2] for line in out.splitlines() if "accuracy" in line][1:] == [["1", "mask"], ["38.7", "%"]]
    result = result_of(capsys, *words, "--format", "csv", "--out", "out")
    assert [row["at"] for row in result["validated_at"]] == [1, 0.387]
    assert len(read_rows(run_folder / "out/masks.csv")) == 8


def test_without_a_run_the_newest_finished_one_is_taken(folder, capsys):
    """Of fine-tuned runs a finished one; damaged ones are left out."""
    make_pretrained(folder / "runs/one", train={"alignment_backend": "reference"})
    (folder / "valid.txt").write_text("amber birch\n")
    for name, described in (("unfinished", '{"command": "finetune"}'), ("damaged", "{")):
        (folder / "runs" / name).mkdir()
        (folder / "runs" / name / "run.json").write_text(described)
    said = printed_by(capsys, ["eval", "--data", "valid.txt", "--no-figures"]).err
    assert "run: runs/one, the newest one\n" in said


def test_entropy_over_mask_ratios_is_printed_written_and_drawn(run_folder, capsys):
    (run_folder / "valid.txt").write_text("amber birch cedar\ncedar fern elder\n")
    make_pretrained(run_folder / "mlm", objective="mlm", model={"rope": "1d"})
    words = ["eval", "--entropy", "T", "mlm", "--data", "valid.txt", "--out", "out"]
    result = result_of(capsys, *words, "--mask-ratios", "0.2,0.6", "--num-states", "2,3", "--format", "csv")
    found = [(e["name"], e["num_states_per_mask"], e["num_repeats"], e["mask_ratio"]) for e in result["entropies"]]
    assert found == [*(("text", k, 1, p) for k in (2, 3) for p in (0.2, 0.6)), ("mlm", 1, 1, 0.2), ("mlm", 1, 1, 0.6)]
    assert result["files"] == ["out/entropy.png", "out/entropy.svg", "out/entropy.csv"]
    assert all((run_folder / file).is_file() for file in result["files"])
    out = printed_by(capsys, ["eval", "--entropy", "T", "--max-sequences", "1", "--no-figures"]).out
    assert all(ratio in out for ratio in ("15 %", "38.7 %", "62.2 %", "78.9 %"))
    assert "`--num-states 2,3`" in refusal_of(capsys, "eval", "--entropy", "mlm", "--num-states", "2,3")
