"""A series keeps the runs that are finished, and goes on after a task that diverges; most of it in this process."""

import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from exlm_cli.cli.runs import runs_of_series
from exlm_cli.errors import CheckpointError, DivergedError, ExlmError, InterruptedRunError
from exlm_cli.experiments import series as series_module
from exlm_cli.experiments.series import begin_series, run_series
from exlm_cli.files import write_json
from exlm_cli.finetune.run import run_finetuning
from exlm_cli.finetune.scores import write_scores
from exlm_cli.progress import SilentProgress
from tests.killed import die_at_call, run_until_killed
from tests.recorder import Recorder
from tests.tiny_sweeps import work_in_this_process
from tests.unit.finetune.synthetic import ONE_EPOCH, finetune_recipe
from tests.unit.report.results import scored
from tests.unit.tasks.glue_files import write_glue


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    work_in_this_process(monkeypatch)


def run_and_die(folder):
    """Run a series in the process at hand until it dies as the second task begins."""
    work_in_this_process(pytest.MonkeyPatch())
    die_at_call(series_module, "run_finetuning", 2)
    run_series(folder, checkpoint=None, workers=2, progress=SilentProgress())


def recipes_of(folder, *names, **sections):
    """Return a recipe for each task of GLUE, whose files are in `data`."""
    for name in names:
        write_glue(folder / "data", name, copies=2)
    task = {"data_dir": str(folder / "data"), "sequence_length": 24}
    return [finetune_recipe(task={"name": f"glue/{name}", **task}, **sections) for name in names]


def begin_with(checkpoint, out):
    return {"suite": "glue", "checkpoint": checkpoint, "out": out, "use_grid": False, "baseline": False}


def test_workers_give_what_each_run_gives_alone_also_after_a_kill(text_model, tmp_path, monkeypatch):
    recipes = recipes_of(tmp_path, "rte", "cola", **ONE_EPOCH)
    folder, progress = begin_series(recipes, **begin_with(text_model, tmp_path / "all")), Recorder()
    run_until_killed(run_and_die, folder)
    done = {path: path.stat().st_mtime_ns for path in folder.glob("*/results.json")}
    assert len(done) == 1
    finished, diverged = run_series(folder, checkpoint=None, workers=1, progress=progress)
    assert diverged == []
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert progress.said[0].startswith("2 tasks, 1 of them done, ")
    assert progress.said[-1].endswith(" (2 of 2 tasks)")
    for recipe, result in zip(recipes, finished, strict=True):
        alone = run_finetuning(recipe, checkpoint=text_model, out=tmp_path / result.run_dir.name)
        assert result.scores.table.equals(alone.scores.table)
        assert result.run_dir == folder / result.run_dir.name
    # a finished series starts no worker
    monkeypatch.setattr("exlm_cli.train.workers.start_processes", pytest.fail)
    again, _ = run_series(folder, checkpoint=None, workers=2, progress=progress)
    assert [result.results for result in again] == [result.results for result in finished]


def test_a_task_that_diverges_or_is_interrupted_leaves_the_finished_ones(text_model, tmp_path, monkeypatch):
    recipes, out = recipes_of(tmp_path, "rte", "cola", "mrpc"), tmp_path / "all"
    begin = begin_with(text_model, out)
    assert begin_series(recipes, **begin) == out
    with pytest.raises(CheckpointError, match="not empty") as refused:
        begin_series(recipes, **begin)
    assert f"`exlm finetune --resume {out}`" in refused.value.hint
    with pytest.raises(CheckpointError, match="none of its runs is finished"):
        runs_of_series(out)
    errors = {
        "cola": DivergedError("the loss of step 1 is nan", "lower the learning rate"),
        "mrpc": InterruptedRunError("stopped at step 1", "continue", signal.SIGINT),
    }

    def finish(recipe, *, out, **_):
        if out.name in errors:
            raise errors[out.name]
        run = scored("", f"glue/{out.name}", {"accuracy": [0.5]})
        out.mkdir()
        write_json(out / "results.json", run.results)
        write_scores(out, run.scores)

    monkeypatch.setattr(series_module, "run_finetuning", finish)
    with pytest.raises(ExlmError, match=r"^task mrpc was interrupted$"):
        run_series(out, checkpoint=None, workers=1, progress=SilentProgress())
    first = (out / "rte/results.json").stat().st_mtime_ns
    del errors["mrpc"]
    finished, diverged = run_series(out, checkpoint=None, workers=1, progress=SilentProgress())
    assert [(result.run_dir.name, result.results.task) for result in finished] == [
        ("rte", "glue/rte"), ("mrpc", "glue/mrpc"),
    ]  # fmt: skip
    assert runs_of_series(out) == [out / "mrpc", out / "rte"]
    assert [error.message for error in diverged] == ["the loss of step 1 is nan"]
    assert (out / "rte/results.json").stat().st_mtime_ns == first


def test_a_recipe_that_no_task_can_run_with_leaves_no_folder(text_model, tmp_path, monkeypatch):
    """A resumption keeps the recipes, so that a folder with such a recipe would be of no use."""
    absent = None  # as Python marks a module that cannot be imported
    monkeypatch.setitem(sys.modules, "wandb", absent)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (recipe,) = recipes_of(tmp_path, "rte")
    for said, changes in (
        ("CUDA", {"device": "cuda"}),
        ("`train.microbatch_tokens` 16", {"train.microbatch_tokens": 16}),
        ("wandb", {"train.report_to": ["wandb"]}),
    ):
        with pytest.raises(ExlmError, match=said):
            begin_series([recipe.changed(changes)], **begin_with(text_model, tmp_path / "all"))
        assert not (tmp_path / "all").exists()


def test_each_run_gets_what_the_series_was_begun_with_from_any_directory(text_model, tmp_path, monkeypatch):
    """Paths were relative to the directory in which it was begun; a pre-training run that has moved is named again."""
    (tmp_path / "pretrained").symlink_to(text_model)
    (tmp_path / "elsewhere").mkdir()
    recipes = [
        recipe.changed({"task.data_dir": "data", "grid": {"optim.lr": [1e-3, 2e-3]}})
        for recipe in recipes_of(tmp_path, "rte", "cola")
    ]
    monkeypatch.chdir(tmp_path)
    begin_series(recipes, **begin_with(Path("pretrained"), Path("all")) | {"use_grid": True})
    monkeypatch.chdir("elsewhere")
    run = Mock(side_effect=DivergedError("the loss is nan", "lower the learning rate"))
    monkeypatch.setattr(series_module, "run_finetuning", run)
    out, progress = tmp_path / "all", Recorder()
    finished, errors = run_series(out, checkpoint=None, workers=1, progress=progress)
    assert (finished, [error.message for error in errors]) == ([], ["the loss is nan"] * 2)
    for name, call in zip(("rte", "cola"), run.call_args_list, strict=True):
        (recipe,), given = call
        assert (recipe.task.name, recipe.task.data_dir) == (f"glue/{name}", str(tmp_path / "data"))
        assert given["checkpoint"] == str(text_model.resolve())
        assert (given["out"], given["use_grid"], given["baseline"]) == (out / name, True, False)
    (out / "cola").mkdir()
    (out / "cola" / "recipe.yaml").touch()  # as of a run that has begun
    moved = tmp_path / "moved"
    run_series(out, checkpoint=moved, workers=1, progress=progress)
    begun, continued = run.call_args_list[2:]
    assert (begun.kwargs["out"], begun.kwargs["resume"]) == (out / "rte", None)
    assert (continued.kwargs["out"], continued.kwargs["resume"]) == (None, out / "cola")
    assert begun.kwargs["checkpoint"] == continued.kwargs["checkpoint"] == str(moved)
