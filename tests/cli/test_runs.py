"""The kind of a run, names that tell runs apart, and the checkpoint that is taken."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from exlm_cli import bundled_models
from exlm_cli.cli.runs import choose_checkpoint, given_runs, name_runs
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import update_run_json
from tests.unit.finetune.synthetic import make_pretrained


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a"], ["a"]),
        (["one/a", "two/a", "two/b"], ["one/a", "two/a", "b"]),
        (["a/checkpoints/step-3", "b/checkpoints/step-3", "a"], ["a/step-3", "b/step-3", "a"]),
        (["x/a/checkpoints/step-3", "y/a/checkpoints/step-3"], ["x/a/step-3", "y/a/step-3"]),
    ],
)
def test_names_are_as_short_as_tells_them_apart_and_no_run_is_given_twice(paths, names):
    assert name_runs([Path(path) for path in paths]) == names
    with pytest.raises(ConfigError, match=rf"^{paths[0]} is given twice$"):
        name_runs([Path(paths[0]), Path("x/..") / paths[0]])


def test_the_kind_of_a_run_is_the_command_that_made_it(tmp_path):
    for command in ("pretrain", "finetune", "sweep"):
        (tmp_path / command).mkdir()
        update_run_json(tmp_path / command, {"command": command})
    step, finetuned = given_runs([tmp_path / "pretrain/checkpoints/step-3", tmp_path / "finetune"], SilentProgress())
    assert (step.kind, step.name, step.report) == ("pretrain", "pretrain/step-3", tmp_path / "pretrain/report")
    assert (finetuned.kind, finetuned.name, finetuned.report) == ("finetune", "finetune", tmp_path / "finetune/report")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/sweep: a run of `exlm sweep`"):
        given_runs([tmp_path / "sweep"], SilentProgress())


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
    (folder / "runs/damaged").mkdir()
    (folder / "runs/damaged/run.json").write_text("{")
    assert chosen()[0] == Path("runs/new")
    update_run_json(folder / "runs/old", {"steps": 1200})
    os.utime("runs/old/run.json", (1, 1))
    assert chosen()[0] == Path("runs/old")
    (folder / "tuned").mkdir()
    update_run_json(folder / "tuned", {"command": "finetune"})
    for other in ("runs/old/checkpoints/step-3", "tuned", "none"):
        assert chosen(Path(other)) == (Path(other), [])


TOYS = {
    "quickstart-mlm": ({"name": "quickstart-text-mlm"}, 3.0, "is a quickstart, of the recipe quickstart-text-mlm"),
    "at-frequencies": ({}, 6.94, "its loss is 6.940 nats a masked token, and word frequencies alone reach 7.000"),
    "diverged-late": ({}, 7.1, "has learned nothing of contexts: its loss is 7.100"),
}


def finished_run(path: Path, loss: float | None, **recipe: Any) -> Path:
    """Write a run with a validation before its last one, which was better; none: it has no validation."""
    make_pretrained(path, train={"max_steps": 3}, **recipe)
    update_run_json(path, {"steps": 3, "unigram_loss": 7.0, "unigram_accuracy": 0.1})
    if loss is not None:
        rows = (f'{{"kind": "valid", "step": {step}, "loss_given_length": {value}, "mask_accuracy": 0.1}}\n'
                for step, value in ((1, 2.0), (3, loss)))  # fmt: skip
        (path / "metrics.jsonl").write_text("".join(rows))
    return path


@pytest.mark.parametrize("toy", TOYS)
def test_a_toy_is_passed_over_for_an_older_run_or_the_package_and_taken_when_it_is_given(folder, monkeypatch, toy):
    recipe, loss, why = TOYS[toy]
    run = finished_run(folder / "runs" / toy, loss, **recipe).relative_to(folder)
    found, said = chosen()
    assert (found, said[1:]) == (run, [said[1]])  # where the package brings none
    assert f"note: {run} " in said[1]
    assert why in said[1]
    monkeypatch.setattr(bundled_models, "FOLDER", folder / "package")
    finished_run(folder / "package/text", None)
    found, said = chosen()
    assert found == folder / "package/text"
    assert said[0].startswith("checkpoint: bundled:text, which the package brings")
    assert said[1].startswith(f"note: {run} is passed over: it ")
    assert why in said[1]
    assert said[1].endswith(f"`--checkpoint {run}` takes it")
    finished_run(folder / "runs/mine", 3.0)
    os.utime("runs/mine/run.json", (1, 1))
    found, said = chosen()
    assert (found, len(said)) == (Path("runs/mine"), 2)
    assert f"{run} is passed over" in said[1]
    assert chosen(run) == (run, [])


@pytest.mark.parametrize("loss", [6.9, None, "damaged"])
def test_a_run_that_learned_little_or_has_no_validation_is_taken_as_ever(folder, monkeypatch, loss):
    monkeypatch.setattr(bundled_models, "FOLDER", folder / "package")
    finished_run(folder / "package/text", None)
    finished_run(folder / "runs/toy", 3.0, name="quickstart-text")
    os.utime("runs/toy/run.json", (1, 1))  # an older toy is of no interest
    finished_run(folder / "runs/mine", 3.0 if loss == "damaged" else loss, name="my-quickstart-copy")
    if loss == "damaged":
        (folder / "runs/mine/metrics.jsonl").write_text("no row\n")
    found, said = chosen()
    assert (found, len(said)) == (Path("runs/mine"), 1)
