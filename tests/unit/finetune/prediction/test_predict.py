"""Prediction of a file: each seed is run, and outputs that cannot be written are refused before any is."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rdkit import Chem, DataStructs
from rdkit.Chem import rdFingerprintGenerator
from scipy.special import expit

from exlm_cli.config.tasks import SquadTaskConfig
from exlm_cli.data.bundled.molecules import generate_molecules
from exlm_cli.data.molecules import fingerprints
from exlm_cli.errors import CheckpointError, ConfigError, DataError
from exlm_cli.files import write_json
from exlm_cli.finetune.baselines.arrays import write_arrays
from exlm_cli.finetune.cells.model import Finetuned, load_finetuned
from exlm_cli.finetune.evaluation.calibration import (
    CALIBRATION_FILE,
    Calibration,
    PlattCurve,
    read_calibration,
)
from exlm_cli.finetune.prediction.predict import predict
from exlm_cli.finetune.prediction.training_rows import (
    TRAINING_ROWS_FILE,
    TrainingRows,
    read_training_rows,
    write_training_rows,
)
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import PredictionSummary
from exlm_cli.tasks.rows.task import LabelledRows, RowTask
from tests.unit.finetune.finetuned_runs import SMILES, read_rows, write_rows
from tests.unit.tasks.squad.test_task import write


@pytest.fixture(scope="module")
def finetuned(molecules: Path) -> Finetuned:
    return load_finetuned(molecules, device="cpu")


@pytest.fixture(scope="module")
def lengths(lengths_run: Path) -> Finetuned:
    return load_finetuned(lengths_run, device="cpu")


def predicted(finetuned: Finetuned, path: Path, out: Path | None, **options: Any) -> PredictionSummary:
    return predict(finetuned, path, out, folder=path.parent / "report", progress=SilentProgress(), **options)


def test_probabilities_are_the_mean_over_the_seeds(finetuned, tmp_path):
    """Each seed's model is run by hand, one molecule at a time, without padding."""
    summary = predicted(finetuned, write_rows(tmp_path / "new.rows.csv", ["mol"], [[s] for s in SMILES]), None)
    (written,) = summary.files
    assert written == tmp_path / "report" / "predictions-new.rows.csv"
    found = [float(row["active_probability"]) for row in read_rows(written)]
    expected = []
    for smiles in SMILES:
        ids = [finetuned.tokenizer.cls_id, *finetuned.tokenizer.encode(smiles), finetuned.tokenizer.sep_id]
        with torch.no_grad():
            runs = [r.model.eval()(torch.tensor([ids]), torch.tensor([len(ids)])) for r in finetuned.runners.values()]
        expected.append(np.mean([expit(logits[0, 0].double().item()) for logits in runs]))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_files_of_one_name_have_predictions_of_their_own_and_a_file_the_same_again(finetuned, tmp_path, monkeypatch):
    """In other folders, in other formats, beside a table of somebody else, and by a path written in another way."""
    wanted = {"a/new.csv": "new", "b/new.csv": "new-2", "a/new.tsv": "new-3", "a/new.csv.gz": "new-5"}
    report = tmp_path / "report"

    def predicted_from(name: str) -> PredictionSummary:
        return predict(finetuned, Path(name), None, folder=report, progress=SilentProgress())

    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError):  # a file that is not there takes no name
        predicted_from("b/new.csv")
    assert not report.exists()
    report.mkdir()
    (report / "predictions-new-4.csv").write_text("mine")
    for length, name in enumerate(wanted, start=1):
        Path(name).parent.mkdir(exist_ok=True)
        content = f"mol\n{'C' * length}\n".encode()
        Path(name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    for _ in range(2):
        for name, own in wanted.items():
            summary = predicted_from(name)
            out = report / f"predictions-{own}.csv"
            assert summary.files == (out,)
            is_told = any("is of another file" in note and out.name in note for note in summary.notes)
            assert is_told == (own != "new")
    found = [read_rows(report / f"predictions-{own}.csv")[0]["mol"] for own in wanted.values()]
    assert found == ["C", "CC", "CCC", "CCCC"]
    assert (report / "predictions-new-4.csv").read_text() == "mine"
    monkeypatch.chdir(tmp_path / "b")
    assert predicted_from("../b/new.csv").files == (report / "predictions-new-2.csv",)


def test_a_file_that_is_all_wrong_still_has_its_rows(finetuned, tmp_path):
    (tmp_path / "bad.smi").write_text("((\n))\n")
    summary = predicted(finetuned, tmp_path / "bad.smi", tmp_path / "out.csv")
    assert (summary.num_rows, summary.num_unreadable, summary.metrics) == (2, 2, {})
    assert any("`problem`" in note for note in summary.notes)


def test_each_output_is_checked_before_the_models_run(finetuned, tmp_path):
    recipe = finetuned.recipe.model_copy(update={"task": SquadTaskConfig(name="squad/v2")})
    write(tmp_path, "new.json", "Moss")
    (tmp_path / "a-no-answer.json").mkdir()
    squad = replace(finetuned, recipe=recipe, runners={1: None})
    with pytest.raises(CheckpointError, match=r"a-no-answer\.json"):
        predicted(squad, tmp_path / "new.json", tmp_path / "a.json")
    with pytest.raises(ConfigError, match="finds its own columns"):
        predicted(squad, tmp_path / "new.json", None, columns=("text",))


def test_calibrated_columns_are_the_run_s_own_curve_over_the_written_probabilities(finetuned, tmp_path):
    """And known molecules are found however they are written; scores without them are those of the others alone."""
    new = [["OCC", "1"], ["C(CCC)CCC", "0"], ["CCCCCCCC", "0"], ["CCCCCCCN", "1"], ["((", ""]]
    path = write_rows(tmp_path / "new.csv", ["mol", "active"], new)
    run, parts = tmp_path / "run", {"train": ["CCO"], "valid": ["CCCCCCC", "CCO"]}
    run.mkdir()
    examples = {
        part: LabelledRows([(text,) for text in texts], np.zeros((len(texts), 1)), np.arange(len(texts)))
        for part, texts in parts.items()
    }
    known = RowTask("known", "binary", ("active",), examples)
    known.input_kind = "smiles"
    write_training_rows(run, [known])
    curve = PlattCurve(num_rows=99, least=0.0, most=1.0, slope=3.0, intercept=-1.0)
    write_json(run / CALIBRATION_FILE, Calibration(outputs=(curve, None)))
    finetuned = replace(finetuned, run=run)
    summary = predicted(finetuned, path, tmp_path / "out.csv")
    rows = read_rows(tmp_path / "out.csv")
    assert "toxic_calibrated" not in rows[0]
    for row in rows[:4]:
        wanted = curve.apply(np.array([float(row["active_probability"])]))[0]
        assert float(row["active_calibrated"]) == pytest.approx(wanted, rel=1e-4)
    assert [row["in_split"] for row in rows] == ["train", "valid", "none", "none", ""]
    assert [float(row["nearest_train_tanimoto"]) == 1 for row in rows[:4]] == [True, False, False, False]
    assert (summary.num_in_training, summary.num_in_validation) == (1, 1)
    others = write_rows(tmp_path / "others.csv", ["mol", "active"], new[2:])
    alone = predicted(finetuned, others, tmp_path / "alone.csv")
    assert {name: alone.metrics[name] for name in summary.metrics_of_new} == pytest.approx(summary.metrics_of_new)
    assert {"roc_auc", "brier_calibrated"} <= summary.metrics_of_new.keys() <= summary.metrics.keys()
    assert (alone.num_in_training, alone.num_in_validation, alone.metrics_of_new) == (0, 0, {})


def test_each_row_of_the_training_file_is_in_the_split_it_was_in(lengths, tmp_path):
    """The splits are those of split.json; test rows are new, as is a text that is in no split."""
    table = read_rows(lengths.run.parent / "words.csv")
    rows = [[row["text"], row["length"]] for row in table] + [["moss tea", "4"]]
    summary = predicted(lengths, write_rows(tmp_path / "all.csv", ["text", "length"], rows), tmp_path / "out.csv")
    indices = json.loads((lengths.run / "split.json").read_text())["indices"]
    wanted = ["none"] * len(rows)
    for split in ("train", "valid"):
        for row in indices[split]:
            wanted[row] = split
    assert [row["in_split"] for row in read_rows(tmp_path / "out.csv")] == wanted
    assert (summary.num_in_training, summary.num_in_validation) == (len(indices["train"]), len(indices["valid"]))


def test_intervals_of_values_are_as_wide_as_the_residuals_of_the_validation_rows(lengths, tmp_path):
    """The run has 36 rows, so few validation rows: a level that they allow has intervals, a higher one a note."""
    path = write_rows(tmp_path / "new.csv", ["text", "length"], [["amber birch", "5.5"], ["moss tea", "4"]])
    out, drawn = tmp_path / "out.csv", []
    summary = predicted(lengths, path, out, interval_level=0.5, draw=lambda rows, _: drawn.append(rows) or {})
    (residuals,) = read_calibration(lengths.run).outputs[0].residuals
    half = residuals[int(np.ceil((len(residuals) + 1) / 2)) - 1]
    for row in read_rows(out):
        value = float(row["length_predicted"])
        assert float(row["length_low_50"]) == pytest.approx(value - half, rel=1e-4)
        assert float(row["length_high_50"]) == pytest.approx(value + half, rel=1e-4)
    assert [len(rows.mean) for rows in drawn] == [2]
    assert summary.metrics["interval_coverage"] in (0, 0.5, 1)
    wide = predicted(lengths, path, tmp_path / "wide.csv", interval_level=0.999)
    assert any("too few validation rows" in note and "`length`" in note for note in wide.notes)


def test_training_rows_of_other_sizes_are_refused(tmp_path):
    known = {"hashes": np.zeros(0, np.uint64), "bits": np.zeros((0, 256), np.uint8)}
    known |= {"members": np.zeros((1, 0), bool), "validation_hashes": np.zeros(0, np.uint64)}
    for name, shape in (("hashes", 2), ("bits", (0, 255)), ("members", (0, 0))):
        write_arrays(tmp_path / TRAINING_ROWS_FILE, known | {name: np.zeros(shape, known[name].dtype)})
        with pytest.raises(CheckpointError, match=TRAINING_ROWS_FILE) as error:
            read_training_rows(tmp_path)
        assert "--resume" in error.value.hint


def test_similarities_are_those_of_rdkit():
    """Over blocks of any size; the training molecules of a run are found by hash and by bits."""
    train, new = SMILES, [*generate_molecules(30, 0), "C1CC1"]
    no_hashes = np.zeros(0, np.uint64)
    bits, members = np.packbits(fingerprints(train), axis=1), np.ones((1, len(train)), dtype=bool)
    rows = TrainingRows(np.zeros(len(train), np.uint64), bits, members, no_hashes)
    generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=2048)
    known, asked = ([generator.GetFingerprint(Chem.MolFromSmiles(s)) for s in each] for each in (train, new))
    expected = [max(DataStructs.BulkTanimotoSimilarity(bits, known)) for bits in asked]
    for block in (7, 2048):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("exlm_cli.finetune.prediction.training_rows._BLOCK", block)
            np.testing.assert_allclose(rows.nearest_tanimoto(new, SilentProgress())[0], expected, atol=1e-12)
    empty = TrainingRows(no_hashes, np.zeros((0, 256), np.uint8), np.ones((1, 0), dtype=bool), no_hashes)
    assert rows.nearest_tanimoto([], SilentProgress()).shape == (1, 0)
    assert empty.nearest_tanimoto(["CC"], SilentProgress()).tolist() == [[0]]
