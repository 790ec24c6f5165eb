"""Model cards: what they say about the training, and code that runs as it is."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from exlm_cli import bundled_models
from exlm_cli.api.run import load
from exlm_cli.data.molecules import read_molecules
from exlm_cli.export.card import model_card
from exlm_cli.export.folder import export_folder, write_model
from exlm_cli.export.source import finetuned_source, pretrained_source
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.finetune.scores import read_scores
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import MetricsLog, read_run_json
from exlm_cli.tasks.squad.files import questions_of_pairs
from exlm_cli.tasks.squad.task import new_questions
from exlm_cli.train.evaluation import summarise
from exlm_cli.train.pretrained import load_pretrained
from tests.tiny import CHAIN
from tests.unit.finetune.finetuned_runs import SMILES, finetune, smiles_pretrained, squad_run, write_rows
from tests.unit.finetune.synthetic import make_pretrained


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a model of a value of molecules in canonical SMILES, one seed."""
    folder = tmp_path_factory.mktemp("card")
    table = write_rows(folder / "assay.csv", ["smiles", "size"], [[s, str(len(s) + 0.5)] for s in SMILES * 4])
    task = {"files": {"train": str(table)}, "smiles_column": "smiles", "label_columns": ["size"], "split": "random"}
    run = finetune(folder, smiles_pretrained(folder), (1,), name="csv", **task)
    return finetuned_source(load_finetuned(run, device="cpu"))


def code_of(card):
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return str(code)


def test_the_code_of_a_card_gives_the_values_of_the_run(source, tmp_path, capsys):
    """For a molecule that is not written as RDKit writes it, and has atom-map numbers, so that the code has to."""
    pytest.importorskip("transformers")
    write_model(source, tmp_path)
    code = code_of(model_card(source, 0.0))
    assert "canonical('CC(=O)Oc1ccccc1C(=O)O')" in code
    given = "[CH2:1](C)[OH:12]"
    written = code.replace("FOLDER", str(tmp_path)).replace("CC(=O)Oc1ccccc1C(=O)O", given)
    exec(written, {})
    value = float(re.findall(r"-?\d+\.\d+", capsys.readouterr().out)[0])
    assert value == pytest.approx(load(source.run, device="cpu").predict([given])["size_predicted"][0], abs=1e-3)


def test_the_code_of_a_card_of_parents_writes_the_parent_that_a_run_reads(source):
    names = {}
    exec(code_of(model_card(replace(source, reads_parents=True), 0.0)).partition("tokenizer = ")[0], names)
    given = ["CC[NH3+].[Cl-]", "[O-:1]C(=O)C.[Na+]", "OCC.O.O", "CCN", "C[N+](C)(C)C.[Br-]"]
    read = read_molecules(given, SilentProgress(), reads_parents=True)
    assert [names["canonical"](smiles) for smiles in given] == [molecule.canonical for molecule in read]


@pytest.mark.parametrize(
    ("model", "printed", "tag"), [(CHAIN, "[{'score': ", "fill-mask"), ({}, "tensor([[[", "feature-extraction")]
)
def test_the_card_of_a_pretrained_model_has_its_tag_and_code_that_fills_masks_or_gives_states(
    tmp_path, capsys, model, printed, tag
):
    pytest.importorskip("transformers")
    source = pretrained_source(load_pretrained(make_pretrained(tmp_path / "run", model=model), device="cpu"))
    (tmp_path / "out").mkdir()
    write_model(source, tmp_path / "out")
    card = model_card(source, 0.0)
    exec(code_of(card).replace("FOLDER", str(tmp_path / "out")), {})
    assert capsys.readouterr().out.startswith(printed)
    data = ModelCard(card).data
    assert (data.pipeline_tag, data.library_name, data.tags) == (tag, "transformers", ["exlm", "esm", "text"])


@pytest.mark.parametrize("form", ["hf", "onnx"])
def test_the_code_of_a_card_finds_the_answers_of_the_run(tmp_path, capsys, form):
    """Also where the paragraph has blank tokens, or a longer answer would score higher."""
    pytest.importorskip("transformers" if form == "hf" else "onnxruntime")
    finetuned = load_finetuned(squad_run(tmp_path, make_pretrained(tmp_path / "pretrained")), device="cpu")
    source = replace(finetuned_source(finetuned), max_answer_tokens=3)
    out = tmp_path / "out"
    if form == "onnx":
        export_folder(source, out, SilentProgress(), form="onnx")
    else:
        out.mkdir()
        write_model(source, out)
    code = code_of(model_card(source, 0.0, form=form))
    asked, read = re.findall("(?:question|paragraph) = (.*)", code)
    config = finetuned.recipe.task.model_copy(update={"max_answer_tokens": 3})
    for question, paragraph in [
        ("amber", "\n  fern»  amber \n fern"),
        ("fern amber", "  daisy fern fern  » »\n"),
        ("fern", "  \n\n  » \namber"),
        ("elder birch", " fern fernamberxxdaisyx ferndaisy"),
        ("birch", "     »»»cedar ferndaisy"),
        ("elder", "  xamberdaisy\ndaisy»amberamber"),
    ]:
        rows = new_questions(config, questions_of_pairs([(question, paragraph)])[0])
        encoded = rows.encode(source.tokenizer, source.sequence_length)
        runner = finetuned.runners[finetuned.results.best_seed]
        (ours,) = encoded.answer([runner.predict(encoded, SilentProgress(), "")]).values()
        written = code.replace("FOLDER", str(out)).replace(asked, repr(question)).replace(read, repr(paragraph))
        names = {}
        exec(written, names)
        assert names["answer"] == ours.text
        assert names["no_answer_score"] == pytest.approx(ours.no_answer_score, abs=1e-4)
        assert names["threshold"] == pytest.approx(source.scores["f1_threshold"], rel=1e-5)
        has_answer = names["no_answer_score"] <= names["threshold"]
        assert capsys.readouterr().out == f"{ours.text if has_answer else 'no answer'}\n"


def test_scores_are_those_of_the_seed_that_is_best_in_validation(molecules):
    finetuned = load_finetuned(molecules, device="cpu")
    scores = read_scores(molecules)
    for seed in (1, 2):
        results = finetuned.results.model_copy(update={"best_seed": seed})
        source = finetuned_source(replace(finetuned, results=results))
        assert source.seed == seed
        assert source.scores["roc_auc"] == scores.by_seed("test", "roc_auc").value.tolist()[seed - 1]
        assert source.model is finetuned.runners[seed].model


def test_the_card_of_a_pretrained_run_has_the_last_validation_before_its_checkpoint(tmp_path):
    """Under the names that `train.evaluation.summarise` gives: the accuracy is that of masks."""
    run = smiles_pretrained(tmp_path)
    sums = {"loss": (3.0, 2), "loss_given_length": (3.0, 2), "mask_accuracy": (1, 4), "entropy_bits": (1.0, 1)}
    figures = summarise([sums])
    log = MetricsLog(run / "metrics.jsonl")
    other = {name: 2 * value for name, value in figures.items()}
    log.append({"kind": "valid", "step": 0, **other})
    log.append({"kind": "valid", "step": 0, **figures})
    log.append({"kind": "valid", "step": 99, **other})  # the run went on
    log.append({"kind": "train", "step": 0, "loss": 2.0})
    card = model_card(pretrained_source(load_pretrained(run, device="cpu")), 0.0)
    for name in ("loss", "mask_accuracy", "perplexity"):
        assert f"| {name} | {figures[name]:.4g} |" in card


@pytest.mark.parametrize(("name", "step", "loss"), [("text", "600", "3.203"), ("smiles", "1,100", "0.2212")])
def test_the_card_of_a_bundled_model_says_what_the_package_says(name, step, loss, monkeypatch):
    """Step, loss and data of the shipped weights, as their own card has them, and the licence of the package."""
    monkeypatch.setattr(bundled_models, "FOLDER", Path(bundled_models.__file__).parent / "pretrained")
    loaded = load_pretrained(Path(f"bundled:{name}"), device="cpu")
    card = model_card(pretrained_source(loaded), 0.0)
    assert f"on validation sequences, step {step}" in card
    assert f"| loss | {loss} |" in card
    assert f"{loaded.step:,} steps" in card
    shipped = (loaded.checkpoint.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"| steps | {step} |" in shipped
    (rounded,) = re.findall(r"loss, nats a target \| \S+ \| (\S+) \|", shipped)
    assert float(rounded) == pytest.approx(float(loss), abs=5e-4)
    assert ModelCard(card).data.license == "apache-2.0"
    assert read_run_json(loaded.checkpoint.parents[1]).trained_on in card
    assert ModelCard(model_card(pretrained_source(loaded), 0.0, licence="mit")).data.license == "mit"
