"""Vectors equal a direct forward pass of each row by itself, whatever else is in the batch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch

from exlm_cli.api import Run
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.finetune.prediction.embed import SUFFIXES, RowEncoder, embed, finetuned_encoder, pretrained_encoder
from exlm_cli.progress import SilentProgress
from exlm_cli.train.pretrained import load_pretrained
from tests.unit.finetune.finetuned_runs import SMILES, glue_run, write_rows
from tests.unit.finetune.synthetic import make_pretrained


def by_hand(encoder: RowEncoder, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[CLS] text [SEP], each token as often as the model repeats it; the state at [CLS], the mean of all."""
    tokenizer = encoder.tokenizer
    inner = [i for i in tokenizer.encode(text) for _ in range(encoder.runner.num_repeats)]
    ids = torch.tensor([[tokenizer.cls_id, *inner, tokenizer.sep_id]])
    with torch.no_grad():
        hidden = encoder.runner.model.eval().encode(ids, torch.tensor([ids.shape[1]]))[0]
    return hidden[0], hidden.mean(0)


def vectors(encoder: RowEncoder, path: Path, suffix: str = ".npz") -> dict[str, np.ndarray]:
    out = path.parent / f"deep/er/out{suffix}"
    embed(encoder, path, out, column=None, progress=SilentProgress())
    if suffix == ".npz":
        return dict(np.load(out, allow_pickle=False))
    return {name: np.array(values) for name, values in pyarrow.parquet.read_table(out).to_pydict().items()}


def assert_equal_by_hand(encoder: RowEncoder, path: Path, texts: list[str]) -> None:
    found = vectors(encoder, path)
    for row, text in enumerate(texts):
        for name, wanted in zip(("cls", "mean"), by_hand(encoder, text), strict=True):
            np.testing.assert_allclose(found[name][row], wanted.numpy(), atol=2e-6)


def test_vectors_of_a_repeated_mlm(tmp_path):
    run = make_pretrained(
        tmp_path / "pre", objective="mlm", masking={"num_repeats": 2, "scheme": "bernoulli"},
        model={"rope": "1d", "max_length": 64}, train={"microbatch_tokens": 512},
    )  # fmt: skip
    encoder = pretrained_encoder(load_pretrained(run, device="cpu"))
    texts = ["amber birch", "cedar", "daisy elder fern"]
    assert_equal_by_hand(encoder, write_rows(tmp_path / "a.csv", ["text"], [[text] for text in texts]), texts)


def test_a_fine_tuned_run_embeds_with_its_best_seed_and_its_own_column(molecules, tmp_path):
    finetuned = load_finetuned(molecules, device="cpu")
    for seed in (2, 1):
        results = finetuned.results.model_copy(update={"best_seed": seed})
        encoder = finetuned_encoder(replace(finetuned, results=results))
        assert encoder.runner is finetuned.runners[seed]
        assert encoder.origin == f"{molecules}, seed {seed}, the best in validation"
    rows = [["not SMILES", smiles] for smiles in SMILES]
    assert_equal_by_hand(encoder, write_rows(tmp_path / "a.csv", ["smiles", "mol"], rows), SMILES)


def test_a_column_of_another_name_and_unreadable_rows_are_told(molecules, tmp_path):
    encoder = finetuned_encoder(load_finetuned(molecules, device="cpu"))
    path = write_rows(tmp_path / "a.csv", ["smiles"], [["CCO"], ["(("]])
    summary = embed(encoder, path, tmp_path / "out.npz", column=None, progress=SilentProgress())
    assert (summary.num_rows, summary.num_unreadable) == (2, 1)
    assert "read the column `smiles`: a.csv has no `mol`, which the run was trained on" in summary.notes


@pytest.mark.parametrize("is_canonical", [True, False])
def test_a_run_of_canonical_smiles_embeds_a_molecule_alike_however_it_is_written(molecules, tmp_path, is_canonical):
    finetuned = load_finetuned(molecules, device="cpu")
    task = finetuned.recipe.task.model_copy(update={"canonical_smiles": is_canonical})
    encoder = finetuned_encoder(replace(finetuned, recipe=finetuned.recipe.model_copy(update={"task": task})))
    cls = vectors(encoder, write_rows(tmp_path / "a.csv", ["mol"], [["CCO"], ["OCC"]]))["cls"]
    assert np.allclose(cls[0], cls[1], atol=2e-6) == is_canonical


@pytest.mark.parametrize("standardise", ["none", "parent"])
def test_a_run_of_parents_embeds_a_salt_as_its_parent(molecules, tmp_path, standardise):
    """From Python as from the command."""
    finetuned = load_finetuned(molecules, device="cpu")
    task = finetuned.recipe.task.model_copy(update={"standardise": standardise})
    finetuned = replace(finetuned, recipe=finetuned.recipe.model_copy(update={"task": task}))
    table = write_rows(tmp_path / "a.csv", ["mol"], [["CCN"], ["[H:1]NCC.Cl"]])
    cls = vectors(finetuned_encoder(finetuned), table)["cls"]
    assert np.allclose(cls[0], cls[1], atol=2e-6) == (standardise == "parent")
    run = Run(finetuned.run, finetuned, SilentProgress())
    predicted = run.predict(["CCN", "NCC.Cl"]).filter(like="_probability").to_numpy()
    found = predicted, run.embed(["CCN", "NCC.Cl"]).cls
    assert [np.allclose(rows[0], rows[1], atol=2e-6) for rows in found] == [standardise == "parent"] * 2


def test_a_pre_trained_run_embeds_the_column_it_was_trained_on(tmp_path):
    run = make_pretrained(tmp_path / "pre", data={"column": "words"})
    encoder = pretrained_encoder(load_pretrained(run, device="cpu"))
    assert_equal_by_hand(encoder, write_rows(tmp_path / "a.csv", ["text", "words"], [["amber", "birch"]]), ["birch"])


def test_a_run_of_glue_embeds_files_of_glue_whose_quotes_are_part_of_the_text(tmp_path):
    encoder = finetuned_encoder(load_finetuned(glue_run(tmp_path, make_pretrained(tmp_path / "pretrained"), "rte")))
    texts = ['" so it was', 'He said "no" .']
    path = tmp_path / "dev.tsv"
    path.write_text("index\ttext\n" + "".join(f"{index}\t{text}\n" for index, text in enumerate(texts)))
    assert_equal_by_hand(encoder, path, texts)


def test_rows_with_tokens_that_the_vocabulary_lacks_are_named(smiles_model, tmp_path):
    """[UNK] stands for both, so their vectors are equal."""
    path = write_rows(tmp_path / "a.csv", ["smiles"], [["C[Se]C"], ["CCO"], ["C[Te]C"]])
    encoder = pretrained_encoder(load_pretrained(smiles_model, device="cpu"))
    notes = embed(encoder, path, tmp_path / "out.npz", column=None, progress=SilentProgress()).notes
    what = "rows with tokens outside the vocabulary, which the model reads as [UNK]"
    assert f"{what}: 2 of 3; the first: `[Se]` (line 2); `[Te]` (line 4)" in notes
    mean = np.load(tmp_path / "out.npz")["mean"]
    np.testing.assert_allclose(mean[0], mean[2], atol=2e-6)


def test_one_long_text_does_not_make_every_row_of_npz_as_long(text_model, tmp_path):
    """NumPy pads texts to the longest one, so `.npz` has their beginnings; `.parquet` has all of them."""
    encoder = pretrained_encoder(load_pretrained(text_model, device="cpu"))
    texts = ["amber", "birch " * 500 + "cedar"]
    path = write_rows(tmp_path / "a.csv", ["text"], [[text] for text in texts])
    found = vectors(encoder, path)
    assert found["input"].tolist() == ["amber", texts[1][:1000]]
    assert found["line"].tolist() == [2, 3]
    assert vectors(encoder, path, ".parquet")["input"].tolist() == texts


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".PARQUET"])
def test_files_hold_every_row_and_bad_ones_are_nan_with_a_reason(smiles_model, tmp_path, suffix):
    encoder = pretrained_encoder(load_pretrained(smiles_model, device="cpu"))
    found = vectors(encoder, write_rows(tmp_path / "a.csv", ["smiles"], [["CCO"], ["C1CC"], ["CCN"]]), suffix)
    assert list(found) == ["line", "input", "problem", "cls", "mean"]
    assert found["line"].tolist() == [2, 3, 4]
    assert found["input"].tolist() == ["CCO", "C1CC", "CCN"]
    assert [bool(problem) for problem in found["problem"]] == [False, True, False]
    for name in ("cls", "mean"):
        np.testing.assert_array_equal(np.isnan(found[name]).all(axis=1), [False, True, False])
    bad = vectors(encoder, write_rows(tmp_path / "a.csv", ["smiles"], [["(("]]), suffix)
    assert bad["cls"].shape == (1, 16)
    assert np.isnan(bad["mean"]).all()


def test_vectors_after_a_prediction_are_those_before_it(molecules, tmp_path):
    """A prediction leaves the model as training needs it, with dropout; vectors are without."""
    encoder = finetuned_encoder(load_finetuned(molecules, device="cpu"))
    path = write_rows(tmp_path / "a.csv", ["mol"], [[smiles] for smiles in SMILES])
    before = vectors(encoder, path)
    encoder.runner.model.train()
    np.testing.assert_array_equal(vectors(encoder, path)["mean"], before["mean"])


def test_a_pre_trained_run_embeds_with_its_own_weights(text_model):
    """Loading copies the token embedding and the encoder; a model that is only drawn has other numbers."""
    pretrained = load_pretrained(text_model, device="cpu")
    model = pretrained_encoder(pretrained).runner.model
    ours, theirs = (one.encoder.state_dict() for one in (model, pretrained.model))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
