"""A table comes back row by row with what each seed's model says of it; scores are scikit-learn's of their mean."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import expit
from sklearn.metrics import accuracy_score, roc_auc_score

from exlm_cli.errors import DataError
from exlm_cli.finetune.model import Finetuned, load_finetuned
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.predict_table import TablePredictions, apply_to_table, predict_rows, prediction_csv
from tests.unit.finetune.finetuned_runs import SMILES, words_run, write_rows


def read_rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def predicted(finetuned: Finetuned, path: Path, column: str | None = None) -> TablePredictions:
    return predict_rows(finetuned, path, column=column, progress=SilentProgress())


@pytest.fixture(scope="module")
def finetuned(molecules: Path) -> Finetuned:
    return load_finetuned(molecules, device="cpu")


def test_every_row_comes_back_in_its_place_and_bad_ones_with_a_reason(finetuned: Finetuned, tmp_path: Path) -> None:
    rows = [["x1", "CCO", "1"], ["x2", "C1CC", "0"], ["x3", "", ""], ["x4", "nan", "0"], ["x5", "CCN", "0"]]
    table = write_rows(tmp_path / "new.csv", ["id", "mol", "active"], rows)
    applied = apply_to_table(finetuned, table, tmp_path / "out.csv", progress=SilentProgress())
    assert (applied.num_rows, applied.num_unreadable, applied.files) == (5, 3, (tmp_path / "out.csv",))
    assert applied.notes == ("scored without the labels that the table lacks: toxic",)
    found = read_rows((tmp_path / "out.csv").read_text())
    assert list(found[0]) == [
        "line", "id", "mol", "active", "active_probability", "toxic_probability", "active_std", "toxic_std", "problem",
    ]  # fmt: skip
    assert [[row["id"], row["mol"], row["active"]] for row in found] == rows
    assert [row["line"] for row in found] == ["2", "3", "4", "5", "6"]
    assert [bool(row["problem"]) for row in found] == [False, True, True, True, False]
    assert found[2]["problem"] == "is empty"
    assert all((row["active_probability"] == "") == bool(row["problem"]) for row in found)


def test_probabilities_are_the_mean_and_deviation_of_the_seeds_own(finetuned: Finetuned, tmp_path: Path) -> None:
    """Each seed's model is run by hand, one molecule at a time, without padding."""
    table = write_rows(tmp_path / "new.csv", ["mol"], [[smiles] for smiles in SMILES])
    predictions = predicted(finetuned, table)
    by_seed = []
    for runner in finetuned.runners.values():
        logits = []
        for smiles in SMILES:
            tokenizer = finetuned.tokenizer
            ids = torch.tensor([[tokenizer.cls_id, *tokenizer.encode(smiles), tokenizer.sep_id]])
            with torch.no_grad():
                logits.append(runner.model.eval()(ids, torch.tensor([ids.shape[1]]))[0].double().numpy())
        by_seed.append(expit(np.stack(logits)))
    np.testing.assert_allclose(predictions.mean, np.mean(by_seed, axis=0), atol=1e-6)
    assert predictions.std is not None
    np.testing.assert_allclose(predictions.std, np.std(by_seed, axis=0, ddof=1), atol=1e-6)
    assert predictions.metrics == {}


def test_scores_are_those_of_the_mean_over_the_rows_that_have_labels(finetuned: Finetuned, tmp_path: Path) -> None:
    active = ["1", "0", "true", "NO", "", "1", "0", "1", "0", "1", "0", "0"]
    toxic = ["", "1", "0", "1", "0", "1", "0", "nan", "0", "1", "0", "0"]
    rows = [list(row) for row in zip(SMILES, active, toxic, strict=True)]
    predictions = predicted(finetuned, write_rows(tmp_path / "new.csv", ["mol", "active", "toxic"], rows))
    values = {"1": 1, "true": 1, "0": 0, "NO": 0}
    areas, rights = [], []
    for column, cells in enumerate((active, toxic)):
        known = [row for row, cell in enumerate(cells) if cell in values]
        truth, scores = [values[cells[row]] for row in known], predictions.mean[known, column]
        areas.append(roc_auc_score(truth, scores))
        rights.append(accuracy_score(truth, scores >= 0.5))
    assert predictions.metrics["roc_auc"] == pytest.approx(np.mean(areas), abs=1e-12)
    assert predictions.metrics["accuracy"] == pytest.approx(np.mean(rights), abs=1e-12)


def test_a_label_that_is_none_stops_before_anything_is_written(finetuned: Finetuned, tmp_path: Path) -> None:
    table = write_rows(tmp_path / "new.csv", ["mol", "active"], [["CCO", "1"], ["CCN", "active"]])
    with pytest.raises(DataError) as caught:
        apply_to_table(finetuned, table, tmp_path / "out.csv", progress=SilentProgress())
    assert caught.value.message == (
        f"{table}:3: `active` is `active`; accepted: 0/1, true/false, yes/no, t/f, y/n, or empty"
    )
    assert not (tmp_path / "out.csv").exists()


def test_a_list_of_smiles_without_a_header_and_one_that_is_all_wrong(finetuned: Finetuned, tmp_path: Path) -> None:
    (tmp_path / "new.smi").write_text("CCO ethanol\n\nCCN\n")
    rows = read_rows(prediction_csv(predicted(finetuned, tmp_path / "new.smi"))[0])
    assert [(row["line"], row["smiles"]) for row in rows] == [("1", "CCO"), ("3", "CCN")]
    (tmp_path / "bad.smi").write_text("((\n))\n")
    predictions = predicted(finetuned, tmp_path / "bad.smi")
    assert np.isnan(predictions.mean).all()
    assert len(read_rows(prediction_csv(predictions)[0])) == 2


def test_columns_of_a_file_of_predictions_make_room_when_it_comes_back(finetuned: Finetuned, tmp_path: Path) -> None:
    table = write_rows(tmp_path / "new.csv", ["problem", "mol", "active_std", "mine"], [["p", "CCO", "9", "kept"]])
    text, notes = prediction_csv(predicted(finetuned, table))
    (row,) = read_rows(text)
    assert (row["mine"], row["problem"], row["active_std"] != "9") == ("kept", "", True)
    assert notes == ("the table's own `problem`, `active_std` made room for what is predicted",)


@pytest.mark.parametrize(("label", "names"), [("colour", ("blue", "green", "red")), ("side", ("1", "2"))])
def test_classes_have_a_probability_each_and_the_likeliest_is_named(
    label: str, names: tuple[str, ...], text_model: Path, tmp_path: Path
) -> None:
    finetuned = load_finetuned(words_run(tmp_path, text_model, label), device="cpu")
    table = write_rows(tmp_path / "new.csv", ["text", label], [["amber fern", names[0]], ["birch", ""]])
    predictions = predicted(finetuned, table)
    np.testing.assert_allclose(predictions.mean.sum(axis=1), 1, atol=1e-6)
    for row, mean in zip(read_rows(prediction_csv(predictions)[0]), predictions.mean, strict=True):
        assert row["predicted_class"] == names[int(mean.argmax())]
        assert float(row[f"{names[1]}_probability"]) == pytest.approx(mean[1], rel=1e-5)
    assert predictions.metrics["accuracy"] == float(predictions.mean[0].argmax() == 0)


def test_values_are_told_in_their_own_unit_and_one_seed_has_no_spread(text_model: Path, tmp_path: Path) -> None:
    finetuned = load_finetuned(words_run(tmp_path, text_model, "length", (1,)), device="cpu")
    table = write_rows(tmp_path / "new.csv", ["words", "length"], [["amber fern", "5.5"], ["birch", "6"]])
    predictions = predicted(finetuned, table, "words")
    assert predictions.std is None
    rows = read_rows(prediction_csv(predictions)[0])
    assert list(rows[0]) == ["line", "words", "length", "length_predicted", "problem"]
    errors = predictions.mean[:, 0] - [5.5, 6]
    assert predictions.metrics["rmse"] == pytest.approx(float(np.sqrt(np.mean(errors**2))), abs=1e-12)
    with pytest.raises(DataError, match="which column holds the text\\? There are `words`, `length`"):
        predicted(finetuned, table)


def test_what_is_too_long_is_cut_and_told(text_model: Path, tmp_path: Path) -> None:
    finetuned = load_finetuned(words_run(tmp_path, text_model, "side", (1,)), device="cpu")
    table = write_rows(tmp_path / "new.csv", ["text"], [["amber " * 40], ["birch"]])
    assert predicted(finetuned, table).notes == ("cut 1 rows to 24 tokens",)
