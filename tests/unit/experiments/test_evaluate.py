"""Scores of a checkpoint equal the last validation of its own training."""

from pathlib import Path
from typing import Any

import pytest

from exlm_cli.experiments.evaluate import evaluate_pretrained
from exlm_cli.train.pretrain import run_pretraining
from tests.recorder import Recorder
from tests.tiny import tiny_recipe


@pytest.mark.parametrize("objective", ["exlm", "mlm"])
def test_a_checkpoint_scores_what_its_last_validation_said(tmp_path: Path, objective: str) -> None:
    data: dict[str, Any] = {"bundled_rows": 300, "cache_dir": str(tmp_path / "cache")}
    result = run_pretraining(tiny_recipe(objective=objective, data=data, train={"max_steps": 3}), out=tmp_path / "run")
    score = evaluate_pretrained(tmp_path / "run", "mine", device="cpu")
    for name, value in result.metrics.items():
        assert score.metrics[name] == pytest.approx(value, rel=1e-6), name
    assert (score.name, score.objective, score.step) == ("mine", objective, 3)
    assert ("effective_states" in score.metrics) == (objective == "exlm")
    assert score.tokens > 0
    text = tmp_path / "other.txt"
    text.write_text("to see\nI am\n")
    other = evaluate_pretrained(tmp_path / "run", "mine", valid=[str(text)], device="cpu")
    assert other.metrics["num_sequences"] == 2
    assert other.data == f"2 sequences of {text}"


def test_data_that_have_changed_are_told_and_given_ones_are_read_whole(tmp_path: Path) -> None:
    own, given = tmp_path / "own #1.txt", tmp_path / "given.txt"
    own.write_text("".join(f"I am {n}\n" for n in range(60)))
    given.write_text("".join(f"to see {n}\n" for n in range(30)))
    data = {"train": [str(own)], "cache_dir": str(tmp_path / "cache"), "max_rows": 20, "sample_break": "line"}
    run = run_pretraining(tiny_recipe(data=data, train={"max_steps": 3}), out=tmp_path / "run #1").run_dir
    progress = Recorder()
    evaluate_pretrained(run, "mine", device="cpu", progress=progress)
    assert progress.said == ["scoring mine on 1 sequences"]
    assert evaluate_pretrained(run, "mine", valid=[str(given)], device="cpu").metrics["num_sequences"] == 30
    own.write_text("We were here\n" * 60)
    evaluate_pretrained(run, "mine", device="cpu", progress=progress)
    assert progress.said[1].find("its data have changed") > 0
