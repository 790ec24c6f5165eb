"""A sweep in child processes: the same results as its cells one by one, what is kept, and each way it ends early."""

import shutil
import sys

import filelock
import pytest

from exlm_cli.config.input_paths import with_absolute_paths
from exlm_cli.config.load import dump_recipe, load_recipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.errors import CheckpointError, DivergedError, ExlmError
from exlm_cli.experiments.cell import pretrain_and_measure
from exlm_cli.experiments.results import load_sweep_run
from exlm_cli.experiments.sweep import run_sweep
from exlm_cli.files import write_json
from exlm_cli.finetune.scores import write_scores
from exlm_cli.run_dir import read_run_json
from tests.recorder import Recorder
from tests.tiny_sweeps import run_cell, scores_of, tiny_grid, work_in_this_process
from tests.unit.finetune.finetuned_runs import read_rows
from tests.unit.report.results import scored
from tests.unit.tasks.glue_files import write_glue


@pytest.fixture(scope="module")
def recipe(cache):
    return tiny_grid(cache)


def _run(recipe, *, out=None, resume=None, workers=2):
    progress = Recorder()
    return run_sweep(recipe, out=out, resume=resume, workers=workers, progress=progress), progress.said


@pytest.mark.slow
def test_two_processes_give_what_the_cells_give_one_by_one(recipe, tmp_path):
    result, _ = _run(recipe, out=tmp_path / "run")
    assert scores_of(result.cells) == scores_of([run_cell(cell, tmp_path / cell.name) for cell in recipe.plan()])
    assert result.num_diverged == 0
    assert load_recipe(str(tmp_path / "run" / "recipe.yaml"), kind=SweepRecipe) == recipe
    assert read_run_json(tmp_path / "run").command == "repeat-mlm"
    rows = read_rows(tmp_path / "run" / "scores.csv")
    assert [row["variant"] for row in rows if row["metric"] == "loss"] == ["k1-p0.3", "k2-p0.5"]
    assert [float(row["value"]) for row in rows if row["metric"] == "loss"] == [c.value("loss") for c in result.cells]
    # a finished sweep starts no process
    (tmp_path / "run" / "workers" / "worker-0.log").unlink()
    assert _run(recipe, resume=tmp_path / "run")[0].cells == result.cells
    assert not (tmp_path / "run" / "workers" / "worker-0.log").exists()


def test_what_cannot_be_had_or_trained_on_leaves_no_run_directory_and_a_begun_one_as_it_is(
    recipe, run, tmp_path, monkeypatch
):
    absent = None  # as Python marks a module that cannot be imported
    monkeypatch.setitem(sys.modules, "wandb", absent)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    write_glue(tmp_path / "data", "rte", copies=2)
    rte = {"tasks": ("glue/rte",), "finetune.task.data_dir": str(tmp_path / "data")}
    for said, changes in (
        ("CUDA", {"device": "cuda"}),
        (r"none\.txt", {"pretrain.data.train": ["none.txt"]}),
        ("wandb", {"pretrain.train.report_to": ["wandb"]}),
        ("wandb", {"finetune.train.report_to": ["wandb"]}),
        ("^`task.sequence_length` 500", rte | {"finetune.task.sequence_length": 500}),
        # 16 tokens twice, with [CLS] and [SEP] once
        ("^`train.microbatch_tokens` 20", rte | {"finetune.train.microbatch_tokens": 20}),
        ("^cell k1-p0.3 is a model of text", {"tasks": ("moleculenet/bace",)}),
        ("no `train.tsv` ", {"tasks": ("glue/cola",), "finetune.task.data_dir": str(tmp_path)}),
    ):
        with pytest.raises(ExlmError, match=said):
            _run(recipe.changed(changes), out=tmp_path / "new")
        assert not (tmp_path / "new").exists()
    before = (run / "recipe.yaml").read_bytes()
    with pytest.raises(ExlmError, match=said):
        _run(recipe.changed(changes), resume=run)
    assert (run / "recipe.yaml").read_bytes() == before
    assert not (run / "workers").exists()


def _begun(recipe, folder):
    """Return a run directory with the first cell done and the others not begun."""
    cell = recipe.plan()[0]
    run_cell(cell, folder / "cells" / cell.name)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    return folder


@pytest.fixture(scope="module")
def begun(recipe, tmp_path_factory):
    return _begun(recipe, tmp_path_factory.mktemp("begun"))


@pytest.fixture
def run(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "run")


def test_a_refused_recipe_and_a_second_process_leave_the_sweep_as_it_is(recipe, run):
    before = (run / "recipe.yaml").read_bytes()
    with pytest.raises(
        CheckpointError, match=r"k1-p0.3/seed-1/pretrain: this run was .*: `optim.lr` was \S+ and is 0.00077$"
    ):
        _run(recipe.changed({"pretrain.optim.lr": 0.00077}), resume=run)
    with filelock.FileLock(run / ".lock"), pytest.raises(CheckpointError, match=r": another process is using this run"):
        _run(recipe.changed({"cells": ((1, 0.3),)}), resume=run)
    assert (run / "recipe.yaml").read_bytes() == before


def test_a_resumption_says_which_cells_it_leaves_out_and_keeps_their_files(recipe, run, monkeypatch):
    work_in_this_process(monkeypatch)
    result, said = _run(recipe.changed({"cells": ((2, 0.5),)}), resume=run, workers=1)
    assert "k1-p0.3/seed-1" in said[0]
    assert [cell.plan.label for cell in result.cells] == ["k2-p0.5"]
    assert (read_run_json(run).num_cells, len(load_sweep_run(run).cells)) == (1, 1)
    again, _ = _run(recipe, resume=run)
    assert [cell.plan.label for cell in again.cells] == ["k1-p0.3", "k2-p0.5"]


def test_another_number_of_sequences_is_measured_again_in_every_cell(recipe, run, monkeypatch):
    work_in_this_process(monkeypatch)
    one = recipe.changed({"cells": ((1, 0.3),)})
    (before,) = _run(one, resume=run, workers=1)[0].cells
    metrics = (before.pretrain / "metrics.jsonl").read_bytes()
    result, said = _run(one.changed({"measure_sequences": 2}), resume=run, workers=1)
    assert any("1 cells, 0 of them done" in line for line in said)
    (after,) = result.cells
    assert after.value("num_sequences") == 2 < before.value("num_sequences")
    assert (after.pretrain / "metrics.jsonl").read_bytes() == metrics


def test_tasks_come_after_the_pretraining_and_one_that_diverges_leaves_the_others(recipe, run, monkeypatch):
    begun = []

    def finetune(recipe, *, checkpoint, out, resume, **_):
        """Stand in for fine-tuning: RTE diverges."""
        begun.append((recipe.task.name, checkpoint, resume is not None))
        folder = out or resume
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(dump_recipe(with_absolute_paths(recipe)))
        if recipe.task.name == "glue/rte":
            (folder / "diverged.json").write_text('{"step": 2, "epoch": 0, "value": "nan", "sample_index": [1]}')
            raise DivergedError("the loss of step 3 is nan", "lower the learning rate")
        tuned = scored("", "glue/qnli", {"accuracy": [0.5, None]})
        write_json(folder / "results.json", tuned.results)
        write_scores(folder, tuned.scores)

    work_in_this_process(monkeypatch)
    monkeypatch.setattr("exlm_cli.experiments.series.run_finetuning", finetune)
    monkeypatch.setattr("exlm_cli.tasks.registry.load_task", lambda *_: None)
    wanted = recipe.changed({"cells": ((1, 0.3),), "tasks": ("glue/rte", "glue/qnli")})
    result, said = _run(wanted, resume=run, workers=1)
    (cell,) = result.cells
    start = str(run / "cells/k1-p0.3/seed-1/pretrain")
    assert begun == [("glue/rte", start, False), ("glue/qnli", start, False)]
    assert [line.partition(":")[0] for line in said[-2:]] == ["k1-p0.3/seed-1 glue/rte", "k1-p0.3/seed-1 glue/qnli"]
    assert (result.num_done, result.num_diverged, [*cell.diverged_tasks]) == (1, 1, ["glue/rte"])
    assert (cell.task_metrics, cell.value("glue/qnli accuracy")) == (["glue/qnli accuracy"], 0.5)
    rows = read_rows(run / "scores.csv")
    assert {row["task"] for row in rows} == {"", "glue/qnli"}
    # the same recipe would diverge again: it is not tried, also beside another task
    more = wanted.changed({"tasks": ("glue/rte", "glue/qnli", "glue/sst2")})
    assert _run(more, resume=run, workers=1)[0].num_done == 1
    assert [task for task, _, _ in begun] == ["glue/rte", "glue/qnli", "glue/sst2"]
    # another one may not go on with the scores of the first
    with pytest.raises(CheckpointError, match=r"glue-rte: this run was begun with another recipe: `optim.lr` was"):
        _run(wanted.changed({"finetune.optim.lr": 0.5}), resume=run, workers=1)
    (run / "cells/k1-p0.3/seed-1/finetune/glue-rte/diverged.json").unlink()
    _run(wanted, resume=run, workers=1)
    assert begun[3:] == [("glue/rte", start, True)]


_OTHER_DATA = r"cells/k1-p0.3/seed-1: the content of its inputs has changed since this cell was trained$"


def test_a_changed_corpus_is_refused_before_anything_is_trained_and_after_it_changed_meanwhile(
    recipe, tmp_path, monkeypatch
):
    corpus = tmp_path / "my.txt"
    corpus.write_text("".join(f"The ferry number {number} leaves at dawn.\n" for number in range(200)))
    changes = {"cells": [[1, 0.3]], "measure_sequences": 2, "pretrain.data.train": [str(corpus)]}
    mine = recipe.changed(changes)
    run, text = _begun(mine, tmp_path / "run"), corpus.read_bytes()
    done, before = load_sweep_run(run).cells, (run / "recipe.yaml").read_bytes()
    corpus.write_bytes(text + b"The hall was full of music.\n")
    with pytest.raises(CheckpointError, match=_OTHER_DATA) as caught:
        _run(mine.model_copy(update={"seeds": (1, 2)}), resume=run)
    assert caught.value.hint.startswith("restore the files, or start a new run with `--out DIR`; ")
    assert (run / "recipe.yaml").read_bytes() == before
    assert not (run / "cells" / "k1-p0.3" / "seed-2").exists()
    corpus.write_bytes(text)
    assert _run(mine, resume=run)[0].cells == done

    def change_and_train(*arguments):
        corpus.write_bytes(text + b"The hall was full of music.\n")
        pretrain_and_measure(*arguments)

    work_in_this_process(monkeypatch)
    monkeypatch.setattr("exlm_cli.experiments.sweep.pretrain_and_measure", change_and_train)
    with pytest.raises(CheckpointError, match=_OTHER_DATA):
        _run(mine, out=tmp_path / "other")
    assert not (tmp_path / "other" / "scores.csv").exists()
