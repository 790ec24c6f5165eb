"""Draws from a DAG follow the probabilities of an enumeration; molecules are masked alike and measured whole."""

import sys
from collections import Counter

import numpy as np
import pytest

import valid_fillings as study
from exlm_cli.train.pretrained import load_pretrained
from tests.tiny import word_level
from tests.unit.dag.dags import enumerate_fillings, enumerate_paths, random_dag
from tests.unit.finetune.synthetic import make_pretrained

NUM_DRAWS = 4000


def test_paths_and_tokens_are_drawn_by_their_probability_given_the_number_of_tokens():
    dag = random_dag(3, 2, 3, seed=1)
    rng = np.random.default_rng(0)
    by_path = dict(enumerate_paths(dag, [3]))
    by_filling = {tuple(token for (token,) in filling): p for filling, p in enumerate_fillings(dag, "exact").items()}
    for draw, truth in ((study.draw_path, by_path), (study.draw_tokens, by_filling)):
        counts = Counter(tuple(draw(dag, rng)) for _ in range(NUM_DRAWS))
        total = sum(truth.values())
        for event, probability in truth.items():
            p = probability / total
            assert counts.pop(event, 0) / NUM_DRAWS == pytest.approx(p, abs=5 * np.sqrt(p / NUM_DRAWS))
        assert not counts


def test_molecules_that_the_model_takes_are_masked_and_sometimes_recovered(tmp_path):
    """The vocabulary has one atom, and the model has not been trained, so some draws are right, and those are valid."""
    tokenizer = word_level(["C"])
    masking = {"mask_ratio": 0.3}
    run = make_pretrained(tmp_path / "run", tokenizer, data={"kind": "smiles", "sequence_length": 8}, masking=masking)
    pretrained = load_pretrained(run, device="cpu")
    molecules = ["CCCC", "CCCCCCCCC", "CNC", "CCC"]  # one too long, one with an atom that the vocabulary lacks
    kept = list(study.masked_molecules(pretrained, molecules, 0.3))
    assert [smiles for smiles, _ in kept] == ["CCCC", "CCC"]
    assert all((ids == tokenizer.mask_id).sum() >= 1 for _, ids in kept)
    scores = study.score(pretrained, molecules, 0.3, num_draws=200)
    assert scores.shape == (2, 3)
    assert (scores[:, 2] > 0).all()
    assert (scores[:, 0] >= scores[:, 2]).all()


def test_runs_that_take_different_molecules_are_refused_before_any_is_scored(tmp_path, monkeypatch, capsys):
    tokenizer = word_level(["C"])
    runs = []
    for length in (8, 16):
        data = {"kind": "smiles", "sequence_length": length}
        runs.append(f"{length}={make_pretrained(tmp_path / str(length), tokenizer, data=data)}")
    (tmp_path / "a.smi").write_text("CCCC\n")
    options = ["--file", str(tmp_path / "a.smi"), "--reference", "8", "--mask-ratio", "0.3"]
    monkeypatch.setattr(sys, "argv", ["valid_fillings.py", *runs, *options])
    with pytest.raises(SystemExit, match="2"):
        study.main()
    assert "the runs differ in `data.sequence_length` or tokenizer" in capsys.readouterr().err
