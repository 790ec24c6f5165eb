"""`exlm predict` and `exlm embed` on small runs: each layout of files, and defaults."""

import json

import numpy as np

from tests.cli.asserts import printed_by, refusal_of, result_of
from tests.cli.conftest import own_copy
from tests.unit.finetune.finetuned_runs import read_rows, write_rows
from tests.unit.tasks.glue_files import content
from tests.unit.tasks.squad.test_task import document

FILES_OF_EXPLANATIONS = ("index.html", "atoms.csv", "line-2.svg", "line-4.svg")


def test_new_molecules_get_probabilities_or_the_reason_why_not(run_folder, capsys):
    write_rows(run_folder / "new.csv", ["id", "mol", "active"], [["=a", "CCO", "1"], ["b", "((", ""], ["c", "CS", "0"]])
    result = result_of(capsys, "predict", "M", "new.csv", "--out", "deep/out.csv")
    assert (result["rows"], result["unreadable_rows"], result["files"]) == (
        3, 1, ["deep/out.csv", "deep/out-calibration.png", "deep/out-calibration.svg"],
    )  # fmt: skip
    assert result["metrics"]["roc_auc"] in (0.0, 1.0)
    rows = read_rows(run_folder / "deep/out.csv")
    assert [(row["id"], bool(row["problem"])) for row in rows] == [("=a", False), ("b", True), ("c", False)]
    assert list(rows[0])[4:] == [
        "active_probability", "toxic_probability", "active_seed_spread", "toxic_seed_spread", "in_split",
        "nearest_train_tanimoto", "problem",
    ]  # fmt: skip
    assert [row["in_split"] for row in rows] == ["train", "", "none"]
    assert result["rows_in_training_split"] == 1
    assert "rows_in_validation_split" not in result
    assert result["metrics_without_known_rows"]["accuracy"] in (0, 1)
    words = ["predict", "M", "new.csv", "--out", "here.csv", "--smiles-column", "mol", "--no-figures"]
    out = printed_by(capsys, words).out
    assert "unreadable rows" in out
    assert "Each label alone" in out
    assert out.endswith("wrote here.csv\n")
    assert (run_folder / "here.csv").read_text() == (run_folder / "deep/out.csv").read_text()


def test_molecules_are_explained_beside_their_predictions_and_texts_are_not(run_folder, capsys):
    write_rows(run_folder / "new.csv", ["mol"], [["CCO"], ["(("], ["OC"]])
    words = ["predict", "M", "new.csv", "--out", "why/out.csv", "--explain"]
    files = [f"why/{name}" for name in ("out.csv", *(f"out-atoms/{n}" for n in FILES_OF_EXPLANATIONS))]
    assert result_of(capsys, *words)["files"] == files
    assert [row["line"] for row in read_rows(run_folder / "why/out-atoms/atoms.csv")] == ["2"] * 3 + ["4"] * 2
    assert "Q reads text" in refusal_of(capsys, "predict", "Q", "a.json", "--explain")


def test_glue_and_squad_files_are_answered_in_the_official_layouts(run_folder, capsys):
    (run_folder / "dev.tsv").write_text(content("rte"), encoding="utf-8")
    result = result_of(capsys, "predict", "R", "dev.tsv", "--out", "rte.tsv")
    assert set(result["metrics"]) >= {"accuracy", "brier", "calibration_error"}
    wanted = {"sentence1", "sentence2", "label", "entailment_seed_spread", "predicted_class", "in_split"}
    assert wanted <= set(read_rows(run_folder / "rte-details.csv")[0])
    assert (run_folder / "rte.tsv").read_text().splitlines()[0] == "index\tprediction"
    (run_folder / "dev-v2.0.json").write_text(json.dumps(document("Clocks")))
    own_copy(run_folder, "Q")
    result = result_of(capsys, "predict", "Q", "dev-v2.0.json")
    ends = (".json", "-no-answer.json", "-details.csv")
    assert result["files"] == [f"Q/report/predictions-dev-v2.0{end}" for end in ends]
    assert {"exact_match", "f1", "has_answer_f1"} <= set(result["metrics"])
    answers, odds = (json.loads((run_folder / file).read_text()) for file in result["files"][:2])
    assert list(answers) == list(odds) == [f"Clocks-{number}" for number in range(len(answers))]
    assert result["rows_in_validation_split"] == result["rows"]
    assert "rows_in_training_split" not in result


def test_vectors_are_written(run_folder, capsys):
    write_rows(run_folder / "new.csv", ["smiles"], [["C[Se]C"], ["(("]])
    result = result_of(capsys, "embed", "P", "new.csv", "--out", "a/v.npz")
    assert (result["rows"], result["unreadable_rows"], result["files"]) == (2, 1, ["a/v.npz"])
    assert any("outside the vocabulary" in note and note.endswith("`[Se]` (line 2)") for note in result["notes"])
    with np.load(run_folder / "a/v.npz") as vectors:
        assert vectors["cls"].shape == vectors["mean"].shape == (2, 16)
