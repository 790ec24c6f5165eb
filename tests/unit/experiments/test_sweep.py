"""A sweep in child processes: the same results as its cells one by one, what is kept, and each way it ends early."""

import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import filelock
import pytest

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.input_paths import with_absolute_paths
from exlm_cli.config.load import dump_recipe, load_recipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.errors import CheckpointError, ConfigError, DivergedError, ExlmError, InterruptedRunError
from exlm_cli.experiments.cell import pretrain_and_measure
from exlm_cli.experiments.results import SweepRun, load_sweep_run
from exlm_cli.experiments.sweep import run_sweep
from exlm_cli.files import write_json
from exlm_cli.finetune.scores import write_scores
from exlm_cli.run_dir import read_run_json
from exlm_cli.train.process import StopSignal
from tests.recorder import Recorder
from tests.tiny_sweeps import run_cell, scores_of, tiny_grid, work_in_this_process
from tests.unit.finetune.finetuned_runs import read_rows
from tests.unit.report.results import scored
from tests.unit.tasks.glue_files import write_glue


@pytest.fixture(scope="module")
def recipe(cache: Path) -> SweepRecipe:
    return tiny_grid(cache)


@pytest.fixture(scope="module")
def one_by_one(recipe: SweepRecipe, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("alone")
    return scores_of([run_cell(cell, folder / cell.name) for cell in recipe.plan()])


def _run(
    recipe: SweepRecipe, *, out: Path | None = None, resume: Path | None = None, workers: int = 2
) -> tuple[SweepRun, list[str]]:
    progress = Recorder()
    return run_sweep(recipe, out=out, resume=resume, workers=workers, progress=progress), progress.said


@pytest.mark.slow
def test_two_processes_give_what_the_cells_give_one_by_one(recipe, one_by_one, tmp_path):
    result, _ = _run(recipe, out=tmp_path / "run")
    assert scores_of(result.cells) == one_by_one
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


def test_an_error_in_a_cell_stops_the_sweep_and_names_the_cell(recipe, tmp_path, monkeypatch):
    work_in_this_process(monkeypatch)
    damaged = tmp_path / "run" / "cells" / "k2-p0.5" / "seed-1"
    damaged.mkdir(parents=True)
    (damaged / "pretrain").mkdir()
    (damaged / "pretrain/recipe.yaml").write_text(dump_recipe(recipe.plan()[1].pretrain))
    (damaged / "scores.csv").write_text("{")
    with pytest.raises(ExlmError, match=r"k2-p0.5/seed-1/scores\.csv: "):
        _run(recipe, resume=tmp_path / "run", workers=1)


@pytest.mark.slow
def test_a_signal_stops_every_cell_and_the_rest_is_done_later(recipe, one_by_one, tmp_path, monkeypatch):
    class Stopped(StopSignal):
        """A signal that came before the first event."""

        def __enter__(self) -> "Stopped":
            super().__enter__()
            self._receive(signal.SIGTERM, None)
            return self

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("exlm_cli.train.workers.StopSignal", Stopped)
        with pytest.raises(InterruptedRunError, match=r"^stopped with 0 of 2 cells done; ") as caught:
            _run(recipe, out=run, workers=1)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert caught.value.hint == f"continue with `exlm repeat-mlm --resume {run}`"
    work_in_this_process(monkeypatch)
    assert scores_of(_run(recipe, resume=run, workers=1)[0].cells) == one_by_one


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "cuda"}, "CUDA"),
        ({"pretrain.data.train": ["none.txt"]}, r"none\.txt"),
        ({"pretrain.train.report_to": ["wandb"]}, "wandb"),
        ({"finetune.train.report_to": ["wandb"]}, "wandb"),
    ],
)
def test_what_is_not_there_leaves_no_run_directory(recipe, tmp_path, monkeypatch, changes, said):
    absent: Any = None  # as Python marks a module that cannot be imported
    monkeypatch.setitem(sys.modules, "wandb", absent)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ExlmError, match=said):
        _run(recipe.changed(changes), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"finetune.task.sequence_length": 500}, r"`task.sequence_length` 500"),
        # 16 tokens twice, with [CLS] and [SEP] once
        ({"finetune.train.microbatch_tokens": 20}, r"`train.microbatch_tokens` 20"),
    ],
)
def test_sequences_that_a_model_cannot_be_fine_tuned_on_are_found_before_it_is_trained(
    recipe, tmp_path, monkeypatch, changes, said
):
    work_in_this_process(monkeypatch)
    write_glue(tmp_path / "data", "rte", copies=2)
    task = {"tasks": ("glue/rte",), "finetune.task.data_dir": str(tmp_path / "data")}
    with pytest.raises(ConfigError, match=rf"^{said}"):
        _run(recipe.changed(task | changes), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _begun(recipe: SweepRecipe, folder: Path, *, num_done: int, written: SweepRecipe | None = None) -> Path:
    """Return a run directory with the first cells done and the others not begun."""
    for cell in recipe.plan()[:num_done]:
        run_cell(cell, folder / "cells" / cell.name)
    (folder / "recipe.yaml").write_text(dump_recipe(written or recipe))
    return folder


@pytest.fixture(scope="module")
def begun(recipe: SweepRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _begun(recipe, tmp_path_factory.mktemp("begun"), num_done=1)


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    return shutil.copytree(begun, tmp_path / "run")


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_refused_recipe_leaves_the_sweep_as_it_is(recipe, run, is_finished):
    if not is_finished:
        next(run.glob("cells/*/*/scores.csv")).unlink()
    before = (run / "recipe.yaml").read_bytes()
    with pytest.raises(
        CheckpointError, match=r"k1-p0.3/seed-1/pretrain: this run was .*: `optim.lr` was \S+ and is 0.00077$"
    ):
        _run(recipe.changed({"pretrain.optim.lr": 0.00077}), resume=run)
    assert (run / "recipe.yaml").read_bytes() == before


def test_a_second_process_leaves_the_sweep_as_it_is(recipe, run):
    before = (run / "recipe.yaml").read_bytes()
    with (
        filelock.FileLock(run / ".lock"),
        pytest.raises(CheckpointError, match=r": another process is using this run directory$"),
    ):
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


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (["moleculenet/bace"], r"^cell k1-p0.3 is a model of text"),
        (["glue/rte"], r"no `train.tsv` "),
    ],
)
def test_a_task_that_cannot_be_had_is_refused_before_anything_is_trained(recipe, run, tmp_path, tasks, said):
    task = recipe.finetune.task.model_copy(update={"data_dir": str(tmp_path)})
    finetune = recipe.finetune.model_copy(update={"task": task})
    wanted = recipe.model_copy(update={"finetune": finetune, "tasks": tuple(tasks)})
    with pytest.raises(ExlmError, match=said):
        _run(wanted, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    before = (run / "recipe.yaml").read_bytes()
    with pytest.raises(ExlmError, match=said):
        _run(wanted, resume=run)
    assert (run / "recipe.yaml").read_bytes() == before
    assert not (run / "workers").exists()


class Finetuning:
    """Stands in for fine-tuning: RTE diverges."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, Any, bool]] = []

    def __call__(
        self, recipe: FinetuneRecipe, *, checkpoint: str, out: Path | None, resume: Path | None, **_: object
    ) -> None:
        self.begun.append((recipe.task.name, checkpoint, resume is not None))
        folder = out or resume
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(dump_recipe(with_absolute_paths(recipe)))
        if recipe.task.name == "glue/rte":
            (folder / "diverged.json").write_text('{"step": 2, "epoch": 0, "value": "nan", "sample_index": [1]}')
            raise DivergedError("the loss of step 3 is nan", "lower the learning rate")
        run = scored("", "glue/qnli", {"accuracy": [0.5, None]})
        write_json(folder / "results.json", run.results)
        write_scores(folder, run.scores)


def test_tasks_come_after_the_pretraining_and_one_that_diverges_leaves_the_others(recipe, run, monkeypatch):
    work_in_this_process(monkeypatch)
    fake = Finetuning()
    monkeypatch.setattr("exlm_cli.experiments.series.run_finetuning", fake)
    monkeypatch.setattr("exlm_cli.tasks.registry.load_task", lambda *_: None)
    wanted = recipe.changed({"cells": ((1, 0.3),), "tasks": ("glue/rte", "glue/qnli")})
    result, said = _run(wanted, resume=run, workers=1)
    (cell,) = result.cells
    start = str(run / "cells/k1-p0.3/seed-1/pretrain")
    assert fake.begun == [("glue/rte", start, False), ("glue/qnli", start, False)]
    assert [line.partition(":")[0] for line in said[-2:]] == ["k1-p0.3/seed-1 glue/rte", "k1-p0.3/seed-1 glue/qnli"]
    assert (result.num_done, result.num_diverged, [*cell.diverged_tasks]) == (1, 1, ["glue/rte"])
    assert (cell.task_metrics, cell.value("glue/qnli accuracy")) == (["glue/qnli accuracy"], 0.5)
    rows = read_rows(run / "scores.csv")
    assert {row["task"] for row in rows} == {"", "glue/qnli"}
    # the same recipe would diverge again: it is not tried, also beside another task
    more = wanted.changed({"tasks": ("glue/rte", "glue/qnli", "glue/sst2")})
    assert _run(more, resume=run, workers=1)[0].num_done == 1
    assert [task for task, _, _ in fake.begun] == ["glue/rte", "glue/qnli", "glue/sst2"]
    # another one may not go on with the scores of the first
    with pytest.raises(CheckpointError, match=r"glue-rte: this run was begun with another recipe: `optim.lr` was"):
        _run(wanted.changed({"finetune.optim.lr": 0.5}), resume=run, workers=1)
    (run / "cells/k1-p0.3/seed-1/finetune/glue-rte/diverged.json").unlink()
    _run(wanted, resume=run, workers=1)
    assert fake.begun[3:] == [("glue/rte", start, True)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "my.txt"
    path.write_text("".join(f"The ferry number {number} leaves at dawn.\n" for number in range(200)))
    return path


def _on(recipe: SweepRecipe, corpus: Path) -> SweepRecipe:
    changes = {"cells": [[1, 0.3]], "measure_sequences": 2, "pretrain.data.train": [str(corpus)]}
    return recipe.changed(changes)


def _append(corpus: Path) -> None:
    with corpus.open("a") as file:
        file.write("The hall was full of music.\n" * 20)


_OTHER_DATA = r"cells/k1-p0.3/seed-1: the content of its inputs has changed since this cell was trained$"


def test_a_changed_corpus_is_refused_before_anything_is_trained(recipe, corpus, tmp_path):
    mine = _on(recipe, corpus)
    run = _begun(mine, tmp_path / "run", num_done=1)
    done = load_sweep_run(run).cells
    before, text = (run / "recipe.yaml").read_bytes(), corpus.read_bytes()
    _append(corpus)
    more = mine.model_copy(update={"seeds": (1, 2)})
    with pytest.raises(CheckpointError, match=_OTHER_DATA) as caught:
        _run(more, resume=run)
    assert caught.value.hint.startswith("restore the files, or start a new run with `--out DIR`; ")
    assert (run / "recipe.yaml").read_bytes() == before
    assert not (run / "cells" / "k1-p0.3" / "seed-2").exists()
    corpus.write_bytes(text)
    assert _run(mine, resume=run)[0].cells == done


def test_a_corpus_that_changes_meanwhile_is_found_at_the_end(recipe, corpus, tmp_path, monkeypatch):
    work_in_this_process(monkeypatch)

    def change_and_train(*arguments: Any) -> None:
        _append(corpus)
        pretrain_and_measure(*arguments)

    monkeypatch.setattr("exlm_cli.experiments.sweep.pretrain_and_measure", change_and_train)
    with pytest.raises(CheckpointError, match=_OTHER_DATA):
        _run(_on(recipe, corpus), out=tmp_path / "run")
    assert not (tmp_path / "run" / "scores.csv").exists()
