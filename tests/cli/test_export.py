"""`exlm export` on a small run: the files, the comparison in a fresh process, the model card."""

import pytest

from tests.cli.asserts import result_of

pytest.importorskip("transformers")


def test_a_run_is_exported_and_compared(run_folder, capsys):
    """An ExLM: without masks by ESM's class, with masks by the code of the folder."""
    result = result_of(capsys, "export", "T", "--out", "hub/mine")
    names = ["README.md", "config.json", "configuration_exlm.py", "model.safetensors", "modeling_exlm.py"]
    assert result["files"] == [f"hub/mine/{name}" for name in [*names, "tokenizer.json", "tokenizer_config.json"]]
    assert result["loaded_with"] == ["EsmForMaskedLM", "AutoModelForMaskedLM"]
    assert result["sequences_compared"] == 8
    assert result["largest_difference"] <= 1e-5 * result["largest_output"]
    assert sorted(path.name for path in (run_folder / "hub").iterdir()) == ["mine"]
    card = (run_folder / "hub/mine/README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: fill-mask" in card
    assert str(run_folder.parent) not in card
