"""The kind of a run, names that tell runs apart, and the checkpoint that is taken."""

import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from exlm_cli.cli.runs import choose_checkpoint, given_runs, name_runs
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import run_kind, update_run_json
from tests.unit.finetune.synthetic import make_pretrained


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


def test_a_run_is_given_once_however_its_path_is_written():
    with pytest.raises(ConfigError, match=r"^runs/a is given twice$"):
        name_runs([Path("runs/a"), Path("runs/../runs/a")])


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


def chosen(given: Path | None = None) -> tuple[Path, list[str]]:
    """Return the checkpoint that is taken, and the messages about it."""
    progress = Mock(SilentProgress())
    kinds = {"text run of an ExLM": lambda recipe: recipe.objective == "exlm", "text run": lambda _: True}
    found = choose_checkpoint(given, kinds, "text-small", progress)
    return found, [call.args[0] for call in progress.message.call_args_list]


def test_a_finished_run_is_taken_before_newer_ones_and_an_unfinished_one_is_told(folder):
    """`exlm pretrain` writes `steps` into run.json at its end."""
    for name in ("old", "new", "mlm"):
        make_pretrained(folder / "runs" / name, objective="mlm" if name == "mlm" else "exlm", train={"max_steps": 1200})
    update_run_json(folder / "runs/mlm", {"steps": 1200})
    os.utime("runs/old/run.json", (1, 1))
    # an MLM has no DAG, so that it does not go before any ExLM
    found, (said, note) = chosen()
    assert (found, said.partition(",")[0]) == (Path("runs/new"), "checkpoint: runs/new")
    assert "step 3 of 1,200" in note
    assert "`exlm pretrain --resume runs/new`" in note
    assert chosen(Path("runs/new")) == (Path("runs/new"), [note])
    step = Path("runs/new/checkpoints/step-3")
    assert chosen(step) == (step, [note.replace("runs/new is", f"{step} is")])
    (folder / "runs/begun").mkdir()  # newer, and without a checkpoint yet
    shutil.copy("runs/new/recipe.yaml", "runs/begun")
    update_run_json(folder / "runs/begun", {"command": "pretrain"})
    assert chosen()[0] == Path("runs/new")
    update_run_json(folder / "runs/old", {"steps": 1200})
    os.utime("runs/old/run.json", (1, 1))
    assert chosen()[0] == Path("runs/old")
    (folder / "tuned").mkdir()
    update_run_json(folder / "tuned", {"command": "finetune"})
    for other in ("runs/old/checkpoints/step-3", "tuned", "none"):
        assert chosen(Path(other)) == (Path(other), [])
