"""`exlm export` on small runs: the files, the comparison, the model card, and the line about the seed."""

import pytest

from tests.cli.asserts import printed_by, result_of

pytest.importorskip("transformers")


def test_a_run_is_exported_and_compared(run_folder, capsys):
    result = result_of(capsys, "export", "T", "--out", "hub/mine")
    assert {"hub/mine/README.md", "hub/mine/config.json", "hub/mine/model.safetensors"} <= {*result["files"]}
    assert result["loaded_with"] == "EsmModel"
    assert result["sequences_compared"] == 4
    assert result["largest_difference"] <= 1e-5 * result["largest_output"]
    assert sorted(path.name for path in (run_folder / "hub").iterdir()) == ["mine"]
    card = (run_folder / "hub/mine/README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: feature-extraction" in card
    assert str(run_folder.parent) not in card


def test_the_terminal_says_which_seed_was_exported_and_nothing_of_transformers(run_folder, capsys):
    said = printed_by(capsys, ["export", "M", "--out", "mine"])
    seed = (run_folder / "mine/README.md").read_text(encoding="utf-8").partition("exported model is seed ")[2][0]
    assert f"the exported model is seed {seed}" in " ".join(said.err.split())
    assert "Loading weights" not in said.err
    assert "REPORT" not in said.err
