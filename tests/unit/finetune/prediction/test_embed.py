"""Vectors equal a direct forward pass of each row by itself, whatever else is in the batch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch

from exlm_cli.api.run import Run
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.finetune.prediction.embed import SUFFIXES, RowEncoder, embed, finetuned_encoder, pretrained_encoder
from exlm_cli.progress import SilentProgress
from exlm_cli.train.pretrained import load_pretrained
from tests.unit.finetune.finetuned_runs import SMILES, write_rows
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
    embed(encoder, path, out, columns=(), progress=SilentProgress())
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


@pytest.mark.parametrize(
    ("rules", "rows", "is_one"),
    [
        ({"canonical_smiles": True}, ["CCO", "OCC"], True),
        ({"canonical_smiles": False}, ["CCO", "OCC"], False),
        ({"standardise": "parent"}, ["CCN", "NCC.Cl"], True),
        ({"standardise": "none"}, ["CCN", "NCC.Cl"], False),
    ],
)
def test_a_molecule_has_one_vector_and_one_prediction_as_the_run_reads_it(molecules, tmp_path, rules, rows, is_one):
    """From Python as from the command."""
    finetuned = load_finetuned(molecules, device="cpu")
    task = finetuned.recipe.task.model_copy(update=rules)
    finetuned = replace(finetuned, recipe=finetuned.recipe.model_copy(update={"task": task}))
    table = write_rows(tmp_path / "a.csv", ["mol"], [[row] for row in rows])
    run = Run(finetuned.run, finetuned, SilentProgress())
    predicted = run.predict(rows).filter(like="_probability").to_numpy()
    found = vectors(finetuned_encoder(finetuned), table)["cls"], run.embed(rows).cls, predicted
    assert all(np.allclose(one, other, atol=2e-6) for one, other in found) == is_one


def test_a_pre_trained_run_embeds_the_column_it_was_trained_on_with_its_own_weights(tmp_path):
    run = make_pretrained(tmp_path / "pre", data={"column": "words"})
    pretrained = load_pretrained(run, device="cpu")
    encoder = pretrained_encoder(pretrained)
    assert_equal_by_hand(encoder, write_rows(tmp_path / "a.csv", ["text", "words"], [["amber", "birch"]]), ["birch"])
    ours, theirs = (one.encoder.state_dict() for one in (encoder.runner.model, pretrained.model))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("suffix", SUFFIXES)
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
