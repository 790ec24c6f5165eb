"""`exlm export` on a small run: the files, the comparison in a fresh process, the model card."""

from pathlib import Path

import pytest

from tests.cli.asserts import result_of

pytest.importorskip("transformers")


def test_a_run_is_exported_and_compared(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of(capsys, "export", "M", "--out", "hub/mine")
    names = ["README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert result["files"] == [f"hub/mine/{name}" for name in names]
    assert result["class"] == "EsmForSequenceClassification"
    assert result["sequences_compared"] == 5
    assert result["largest_difference"] <= 1e-5 * result["largest_output"]
    assert sorted(path.name for path in (run_folder / "hub").iterdir()) == ["mine"]
    card = (run_folder / "hub/mine/README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: text-classification" in card
    assert "fine-tuned on csv" in card
    assert str(run_folder.parent) not in card
