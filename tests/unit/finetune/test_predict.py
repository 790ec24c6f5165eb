"""Prediction of a file: each seed is run, and outputs that cannot be written are refused before any is."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import expit

from exlm_cli.config.tasks import SquadTaskConfig
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.finetune.model import Finetuned, load_finetuned
from exlm_cli.finetune.predict import predict
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import PredictionSummary
from tests.unit.finetune.finetuned_runs import SMILES, write_rows
from tests.unit.tasks.squad.test_task import write


@pytest.fixture(scope="module")
def finetuned(molecules: Path) -> Finetuned:
    return load_finetuned(molecules, device="cpu")


def predicted(finetuned: Finetuned, path: Path, out: Path | None, column: str | None = None) -> PredictionSummary:
    return predict(finetuned, path, out, folder=path.parent / "report", column=column, progress=SilentProgress())


def test_probabilities_are_the_mean_over_the_seeds(finetuned: Finetuned, tmp_path: Path) -> None:
    """Each seed's model is run by hand, one molecule at a time, without padding."""
    summary = predicted(finetuned, write_rows(tmp_path / "new.rows.csv", ["mol"], [[s] for s in SMILES]), None)
    (written,) = summary.files
    assert written == tmp_path / "report" / "predictions-new.rows.csv"
    found = [float(row["active_probability"]) for row in csv.DictReader(written.read_text().splitlines())]
    expected = []
    for smiles in SMILES:
        ids = [finetuned.tokenizer.cls_id, *finetuned.tokenizer.encode(smiles), finetuned.tokenizer.sep_id]
        with torch.no_grad():
            runs = [r.model.eval()(torch.tensor([ids]), torch.tensor([len(ids)])) for r in finetuned.runners.values()]
        expected.append(np.mean([expit(logits[0, 0].double().item()) for logits in runs]))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_file_that_is_all_wrong_still_has_its_rows(finetuned: Finetuned, tmp_path: Path) -> None:
    (tmp_path / "bad.smi").write_text("((\n))\n")
    summary = predicted(finetuned, tmp_path / "bad.smi", tmp_path / "out.csv")
    assert (summary.num_rows, summary.num_unreadable, summary.metrics) == (2, 2, {})


def test_an_output_that_cannot_be_written_is_refused_before_the_models_run(
    finetuned: Finetuned, tmp_path: Path
) -> None:
    idle = replace(finetuned, runners={1: None})
    table = write_rows(tmp_path / "new.csv", ["mol"], [["CCO"]])
    (tmp_path / "out.csv").mkdir()
    (tmp_path / "file").write_text("")
    for out, error, message in (
        ("out.tsv", ConfigError, r"`out=.*out\.tsv`: .* \.csv file"),
        ("new.csv", ConfigError, "would overwrite the input file"),
        ("out.csv", CheckpointError, "could not be written"),
        ("file/sub/out.csv", CheckpointError, "no such folder"),
    ):
        with pytest.raises(error, match=message):
            predicted(idle, table, tmp_path / out)


def test_the_second_file_of_answers_is_checked_too(finetuned: Finetuned, tmp_path: Path) -> None:
    recipe = finetuned.recipe.model_copy(update={"task": SquadTaskConfig(name="squad/v2")})
    write(tmp_path, "new.json", "Moss")
    (tmp_path / "a-no-answer.json").mkdir()
    squad = replace(finetuned, recipe=recipe)
    with pytest.raises(CheckpointError, match=r"a-no-answer\.json"):
        predicted(squad, tmp_path / "new.json", tmp_path / "a.json")
    with pytest.raises(ConfigError, match="finds its own columns"):
        predicted(squad, tmp_path / "new.json", None, column="text")
