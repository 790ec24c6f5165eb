"""A series keeps the runs that are finished, and goes on after a task that diverges; most of it in this process."""

import errno
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from exlm_cli.cli.runs import runs_of_series
from exlm_cli.errors import CheckpointError, DataError, DivergedError, ExlmError, InterruptedRunError
from exlm_cli.experiments import series as series_module
from exlm_cli.experiments.series import begin_series, run_series
from exlm_cli.finetune.results import read_results
from exlm_cli.finetune.run import run_finetuning
from exlm_cli.progress import SilentProgress
from tests.killed import die_at_call, run_until_killed
from tests.recorder import Recorder
from tests.tiny_sweeps import work_in_this_process
from tests.unit.finetune.synthetic import ONE_EPOCH, finetune_recipe
from tests.unit.tasks.glue_files import write_glue


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    work_in_this_process(monkeypatch)


def run_and_die(folder: Path) -> None:
    """Run a series in the process at hand until it dies as the second task begins."""
    work_in_this_process(pytest.MonkeyPatch())
    die_at_call(series_module, "run_finetuning", 2)
    run_series(folder, checkpoint=None, workers=2, progress=SilentProgress())


def test_workers_give_what_each_run_gives_alone_also_after_a_kill(text_model, tmp_path, monkeypatch):
    recipes = []
    for name in ("rte", "cola"):
        write_glue(tmp_path, name, copies=2)
        task = {"name": f"glue/{name}", "data_dir": str(tmp_path), "sequence_length": 24}
        recipes.append(finetune_recipe(task=task, seeds=[1, 2], train={"max_epochs": 1, "num_threads": 1}))
    begin = {"suite": "glue", "checkpoint": text_model, "out": tmp_path / "all", "use_grid": False, "baseline": False}
    folder, progress = begin_series(recipes, **begin), Recorder()
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


def test_tasks_are_finished_one_by_one(text_model, tmp_path, monkeypatch):
    data = tmp_path / "data"
    names = ("rte", "cola", "mrpc")
    for name in names:
        write_glue(data, name, copies=2)
    task = {"data_dir": str(data), "sequence_length": 24}
    recipes = [finetune_recipe(task={"name": f"glue/{name}", **task}, **ONE_EPOCH) for name in names]
    out = tmp_path / "all"
    begin = {"suite": "glue", "checkpoint": text_model, "out": out, "use_grid": False, "baseline": False}
    assert begin_series(recipes, **begin) == out
    with pytest.raises(CheckpointError, match="not empty") as refused:
        begin_series(recipes, **begin)
    assert f"`exlm finetune --resume {out}`" in refused.value.hint
    with pytest.raises(CheckpointError, match="none of its runs is finished"):
        runs_of_series(out)
    train = series_module.run_finetuning
    errors: dict[str, Exception] = {
        "cola": DivergedError("the loss of step 1 is nan", "lower the learning rate"),
        "mrpc": InterruptedRunError("stopped at step 1", "continue", signal.SIGINT),
    }

    def failing(recipe: object, *, out: Path | None, **arguments: object) -> object:
        if out is not None and out.name in errors:
            raise errors[out.name]
        return train(recipe, out=out, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(series_module, "run_finetuning", failing)
    with pytest.raises(ExlmError, match=r"^task mrpc was interrupted$"):
        run_series(out, checkpoint=None, workers=1, progress=SilentProgress())
    first = (out / "rte/results.json").stat().st_mtime_ns
    del errors["mrpc"]
    finished, diverged = run_series(out, checkpoint=None, workers=1, progress=SilentProgress())
    assert [result.run_dir.name for result in finished] == ["rte", "mrpc"]
    assert runs_of_series(out) == [out / "mrpc", out / "rte"]
    assert [error.message for error in diverged] == ["the loss of step 1 is nan"]
    assert (out / "rte/results.json").stat().st_mtime_ns == first
    assert finished[0].results == read_results(out / "rte")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "cuda"}, "CUDA"),
        ({"task": {"sequence_length": 500}}, "`task.sequence_length` 500"),
        ({"train": {"microbatch_tokens": 16}}, "`train.microbatch_tokens` 16"),
        ({"train": {"report_to": ["wandb"]}}, "wandb"),
        ({"task": {"name": "moleculenet/bace"}}, "is a model of text"),
    ],
)
def test_a_recipe_that_no_task_can_run_with_leaves_no_folder(text_model, tmp_path, monkeypatch, changes, said):
    """A resumption keeps the recipes, so that a folder with such a recipe would be of no use."""
    absent: Any = None  # as Python marks a module that cannot be imported
    monkeypatch.setitem(sys.modules, "wandb", absent)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    write_glue(tmp_path / "data", "rte", copies=2)
    task = {"name": "glue/rte", "data_dir": str(tmp_path / "data"), "sequence_length": 24}
    recipe = finetune_recipe(**changes | {"task": task | changes.get("task", {})})
    suite = recipe.task.name.partition("/")[0]
    with pytest.raises(ExlmError, match=said):
        begin_series([recipe], suite=suite, checkpoint=text_model, out=tmp_path / "all", use_grid=False, baseline=False)
    assert not (tmp_path / "all").exists()


def test_each_run_gets_what_the_series_was_begun_with_from_any_directory(text_model, tmp_path, monkeypatch):
    """Paths were relative to the directory in which it was begun; a pre-training run that has moved is named again."""
    for name in ("rte", "cola"):
        write_glue(tmp_path / "data", name, copies=2)
    (tmp_path / "pretrained").symlink_to(text_model)
    (tmp_path / "elsewhere").mkdir()
    task = {"data_dir": "data", "sequence_length": 24}
    recipes = [
        finetune_recipe(task={"name": f"glue/{name}", **task}, grid={"optim.lr": [1e-3, 2e-3]})
        for name in ("rte", "cola")
    ]
    monkeypatch.chdir(tmp_path)
    begin_series(recipes, suite="glue", checkpoint=Path("pretrained"), out=Path("all"), use_grid=True, baseline=False)
    monkeypatch.chdir("elsewhere")
    diverged = DivergedError("the loss is nan", "lower the learning rate")
    run = Mock(side_effect=diverged)
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


def test_a_run_that_ends_early_is_continued_with_the_others_of_its_series(text_model, tmp_path, monkeypatch):
    write_glue(tmp_path, "rte", copies=2)
    recipe = finetune_recipe(task={"name": "glue/rte", "data_dir": str(tmp_path), "sequence_length": 24})
    out = tmp_path / "all of them"
    begin_series([recipe], suite="glue", checkpoint=text_model, out=out, use_grid=False, baseline=False)
    hint = f"continue with `exlm finetune --resume '{out}'`"
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr("exlm_cli.train.checkpoint.save_file", Mock(side_effect=full))
        with pytest.raises(CheckpointError, match="could not be written") as refused:
            run_series(out, checkpoint=None, workers=1, progress=SilentProgress())
    assert f"{hint};" in refused.value.hint
    assert (out / "rte" / "recipe.yaml").is_file()


def test_every_task_whose_files_are_missing_is_named_before_anything_is_made(text_model, tmp_path):
    write_glue(tmp_path, "mrpc", copies=2)
    task = {"data_dir": str(tmp_path), "sequence_length": 24}
    recipes = [finetune_recipe(task={"name": f"glue/{name}", **task}) for name in ("rte", "mrpc", "cola", "sst2")]
    begin = {"suite": "glue", "checkpoint": text_model, "out": tmp_path / "all", "use_grid": False, "baseline": False}
    with pytest.raises(DataError, match=r"^rte: .*cola, sst2") as missing:
        begin_series(recipes, **begin)
    assert "`exlm finetune glue mrpc`" in missing.value.hint
    assert not (tmp_path / "all").exists()
