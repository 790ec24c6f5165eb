"""`exlm export` of a fine-tuned run: what it prints, and which seed it says; `tests/unit/export` compares outputs."""

import json

import pytest

from tests.cli.asserts import printed_by

pytest.importorskip("transformers")


def test_files_a_comparison_and_the_exported_seed_are_told_and_nothing_of_transformers(run_folder, capsys):
    said = printed_by(capsys, ["export", "M", "--out", "hub/mine", "--json"])
    result = json.loads(said.out)
    assert {"hub/mine/README.md", "hub/mine/config.json", "hub/mine/model.safetensors"} <= {*result["files"]}
    assert result["largest_difference"] <= 1e-5 * result["largest_output"]
    assert sorted(path.name for path in (run_folder / "hub").iterdir()) == ["mine"]
    assert f"the exported model is seed {result['seed']}" in " ".join(said.err.split())
    assert "Loading weights" not in said.err
    assert "REPORT" not in said.err
    assert str(run_folder.parent) not in (run_folder / "hub/mine/README.md").read_text(encoding="utf-8")
