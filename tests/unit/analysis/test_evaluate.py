"""Scores of a checkpoint equal the last validation of its own training."""

from pathlib import Path
from typing import Any

import pytest

from exlm_cli.analysis.evaluate import evaluate_pretrained
from exlm_cli.train.pretrain import run_pretraining
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
