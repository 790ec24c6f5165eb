"""`exlm export` of a fine-tuned run: what it prints, and which seed it says; `tests/unit/export` compares outputs."""

import json

import pytest

from exlm_cli.export.folder import Comparison
from tests.cli.asserts import printed_by

pytest.importorskip("transformers")


def test_files_a_comparison_and_the_exported_seed_are_told_and_nothing_of_transformers(run_folder, monkeypatch, capsys):
    said = printed_by(capsys, ["export", "M", "--out", "hub/mine", "--json"])
    result = json.loads(said.out)
    assert {"hub/mine/README.md", "hub/mine/config.json", "hub/mine/model.safetensors"} <= {*result["files"]}
    assert result["largest_difference"] <= 1e-5 * result["largest_output"]
    assert sorted(path.name for path in (run_folder / "hub").iterdir()) == ["mine"]
    assert f"the exported model is seed {result['seed']}" in " ".join(said.err.split())
    assert "Loading weights" not in said.err
    assert "REPORT" not in said.err
    monkeypatch.setattr("exlm_cli.export.folder.compare_outputs", lambda *_: Comparison(1, 0.0, 1.0))
    assert "\nwrote other/config.json\n" in printed_by(capsys, ["export", "M", "--out", "other"]).out
    assert str(run_folder.parent) not in (run_folder / "hub/mine/README.md").read_text(encoding="utf-8")
