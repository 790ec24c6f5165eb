"""The kind of a run, and names that tell runs apart."""

from pathlib import Path

import pytest

from exlm_cli.cli.runs import given_runs, name_runs
from exlm_cli.errors import CheckpointError
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import run_kind, update_run_json


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a"], ["a"]),
        (["runs/a", "runs/b"], ["a", "b"]),
        (["one/a", "two/a", "two/b"], ["one/a", "two/a", "b"]),
        (["a/checkpoints/step-3"], ["a/step-3"]),
        (["a/checkpoints/step-3", "b/checkpoints/step-3", "a"], ["a/step-3", "b/step-3", "a"]),
        (["x/a/checkpoints/step-3", "y/a/checkpoints/step-3"], ["x/a/step-3", "y/a/step-3"]),
    ],
)
def test_names_are_as_short_as_tells_them_apart(paths, names):
    assert name_runs([Path(path) for path in paths]) == names


def test_the_kind_of_a_run_is_the_command_that_made_it(tmp_path):
    for command in ("pretrain", "finetune", "sweep"):
        (tmp_path / command).mkdir()
        update_run_json(tmp_path / command, {"command": command})
    step, finetuned = given_runs([tmp_path / "pretrain/checkpoints/step-3", tmp_path / "finetune"], SilentProgress())
    assert (step.kind, step.name, step.report) == ("pretrain", "pretrain/step-3", tmp_path / "pretrain/report")
    assert (finetuned.kind, finetuned.name, finetuned.report) == ("finetune", "finetune", tmp_path / "finetune/report")
    for path in (tmp_path / "none", tmp_path, tmp_path / "sweep"):
        with pytest.raises(CheckpointError, match=str(path)):
            run_kind(path)


def test_a_link_to_itself_is_no_run(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match="loop"):
        given_runs([tmp_path / "loop"], SilentProgress())
