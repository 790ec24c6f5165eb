"""Model cards: what they say about the training, and code that runs as it is."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from exlm_cli.api import load
from exlm_cli.export.card import model_card
from exlm_cli.export.folder import write_model
from exlm_cli.export.source import Source, finetuned_source, pretrained_source
from exlm_cli.finetune.model import load_finetuned
from exlm_cli.run_dir import MetricsLog
from exlm_cli.train.evaluation import EvaluationSums, summarise
from exlm_cli.train.pretrained import load_pretrained
from tests.unit.finetune.finetuned_runs import SMILES, finetune, smiles_pretrained, write_rows


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Return a model of a value of molecules in canonical SMILES, one seed."""
    folder = tmp_path_factory.mktemp("card")
    table = write_rows(folder / "assay.csv", ["smiles", "size"], [[s, str(len(s) + 0.5)] for s in SMILES * 4])
    task = {"files": {"train": str(table)}, "smiles_column": "smiles", "label_columns": ["size"], "split": "random"}
    run = finetune(folder, smiles_pretrained(folder), (1,), name="csv", canonical_smiles=True, **task)
    return finetuned_source(load_finetuned(run, device="cpu"))


def test_the_code_of_a_card_gives_the_values_of_the_run(source, tmp_path, capsys):
    """For a molecule that is not written as RDKit writes it, so that the code has to."""
    pytest.importorskip("transformers")
    write_model(source, tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", model_card(source, 0.0), re.DOTALL)
    assert "CanonSmiles('CC(=O)Oc1ccccc1C(=O)O')" in code
    written = code.replace("FOLDER", str(tmp_path)).replace("CC(=O)Oc1ccccc1C(=O)O", "C(C)O")
    exec(written, {})
    value = float(re.findall(r"-?\d+\.\d+", capsys.readouterr().out)[0])
    assert value == pytest.approx(load(source.run, device="cpu").predict(["C(C)O"]).mean[0, 0], abs=1e-3)


def test_a_card_names_the_table_and_says_what_was_not_pre_trained(source):
    card = model_card(source, 0.0)
    assert "fine-tuned on `assay.csv`" in card
    assert "data of pre-training" in card
    assert str(Path(source.run).parent) not in card
    assert source.results is not None
    init = source.results.init.model_copy(update={"objective": "scratch"})
    card = model_card(replace(source, results=source.results.model_copy(update={"init": init})), 0.0)
    assert "trained from random weights on `assay.csv`" in card
    assert "| pre-training | none |" in card
    assert "data of pre-training" not in card


def test_the_card_of_a_pretrained_run_has_its_last_validation(tmp_path):
    """Under the names that `train.evaluation.summarise` gives: the accuracy is that of masks."""
    run = smiles_pretrained(tmp_path)
    sums = EvaluationSums(3.0, 2, 0, 3.0, num_correct=1, num_targets=4, entropy_nats=1.0, num_entropy_nodes=1)
    figures = summarise([sums], has_dag=False)
    log = MetricsLog(run / "metrics.jsonl")
    log.append({"kind": "valid", "step": 0, **figures})
    log.append({"kind": "train", "step": 0, "loss": 2.0})
    card = model_card(pretrained_source(load_pretrained(run, device="cpu")), 0.0)
    for name in ("loss", "mask_accuracy", "perplexity"):
        assert f"| {name} | {figures[name]:.4g} |" in card
