"""Workers train the cells of a run: the bits are those of one process, also after a kill."""

from collections.abc import Sequence
from pathlib import Path

import filelock
import pytest

from exlm_cli.config.load import load_recipe
from exlm_cli.errors import CheckpointError, DivergedError
from exlm_cli.finetune import training
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.finetune.run import resume_finetuning, run_finetuning
from exlm_cli.train.task import Callback
from tests.killed import die_at_call, run_until_killed
from tests.recorder import Recorder
from tests.tiny_sweeps import work_in_this_process
from tests.unit.finetune.synthetic import ONE_EPOCH, WordTask, assert_same_run, finetune_recipe, words_table

GRID = {"optim.lr": [1e-5, 3e-3]}


def run_and_die(checkpoint: Path, folder: Path, out: Path) -> None:
    """Fine-tune with two workers until the process at hand dies with the second cell that is done."""
    die_at_call(training, "describe_result", 2)
    recipe = finetune_recipe(task=words_table(folder), grid=GRID, num_replicates=2, train={"max_epochs": 2})
    run_finetuning(recipe, checkpoint=checkpoint, out=out, use_grid=True, workers=2)


@pytest.mark.slow
def test_two_workers_give_the_bits_of_one_process_also_after_a_kill(text_model, tmp_path):
    """A grid on two splits, killed with its second cell, then continued by one."""
    out = tmp_path / "run"
    run_until_killed(run_and_die, text_model, tmp_path, out)
    done = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    assert 2 <= len(done) < 8
    resume_finetuning(out, workers=1)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    recipe = finetune_recipe(task=words_table(tmp_path), grid=GRID, num_replicates=2, train={"max_epochs": 2})
    run_finetuning(recipe, checkpoint=text_model, out=tmp_path / "alone", use_grid=True)
    assert_same_run(out, tmp_path / "alone")
    names = {path.name for path in out.iterdir()} - {path.name for path in (tmp_path / "alone").iterdir()}
    assert names == {"workers"}


def test_no_cell_is_trained_here_while_a_worker_of_a_killed_start_lives(text_model, tmp_path, monkeypatch):
    """It may still write into the folder of a cell."""
    monkeypatch.setattr("exlm_cli.train.workers._EARLIER_TIMEOUT_S", 0.0)
    recipe = finetune_recipe(task=words_table(tmp_path), **ONE_EPOCH)
    out = run_finetuning(recipe, checkpoint=text_model, out=tmp_path / "run").run_dir
    (out / "workers").mkdir()
    with (
        filelock.FileLock(out / "workers/worker-1.lock"),
        pytest.raises(CheckpointError, match=f"^{out}: a worker of an earlier start"),
    ):
        resume_finetuning(out, workers=1)


def test_an_encoder_without_a_checkpoint_makes_its_tokenizer_of_the_training_rows_also_for_workers(
    tmp_path, monkeypatch
):
    """The test above has workers in processes of their own."""
    work_in_this_process(monkeypatch)
    encoder = load_recipe("quickstart-text", ["model.width=32", "model.num_layers=1", "tokenizer.vocab_size=280"])
    recipe = finetune_recipe(task=words_table(tmp_path), init="scratch", train={"max_epochs": 1})
    for workers in (1, 2):
        out = tmp_path / f"{workers}"
        first = run_finetuning(recipe, checkpoint=None, encoder=encoder, out=out, workers=workers).results
    assert_same_run(tmp_path / "2", tmp_path / "1")
    assert (first.init.objective, first.init.checkpoint, first.init.recipe) == ("scratch", None, encoder.name)
    assert load_finetuned(out, device="cpu").tokenizer.vocab_size == 280
    (out / "results.json").unlink()
    assert resume_finetuning(out).results == first


def test_callbacks_stay_in_this_process(text_model, tmp_path, monkeypatch):
    monkeypatch.setattr("exlm_cli.finetune.training.run_jobs", pytest.fail)
    recipe, progress = finetune_recipe(train={"max_epochs": 1}), Recorder()
    common = {"checkpoint": text_model, "task": WordTask(), "workers": 2, "progress": progress}
    run_finetuning(recipe, out=tmp_path / "run", callbacks=[Callback()], **common)
    assert "one training after the other: callbacks cannot leave this process" in progress.said


@pytest.mark.parametrize(
    ("cores", "num_threads", "workers", "seeds", "threads"),
    [(8, None, None, 3, ["2"] * 3), (8, 1, None, 3, ["1"] * 3), (8, None, 2, 5, ["4"] * 2)],
)
def test_workers_share_the_cores_and_are_no_more_than_cells(
    text_model, tmp_path, monkeypatch, cores, num_threads, workers, seeds, threads
):
    given = []

    def note(*_: object, environments: Sequence[dict[str, str]], **others: object) -> None:
        given.extend(one["OMP_NUM_THREADS"] for one in environments)
        raise DivergedError("stop here", "go on")

    monkeypatch.setattr("loky.cpu_count", lambda: cores)
    monkeypatch.setattr("exlm_cli.finetune.training.run_jobs", note)
    recipe = finetune_recipe(seeds=list(range(seeds)), train={"num_threads": num_threads})
    with pytest.raises(DivergedError):
        run_finetuning(recipe, checkpoint=text_model, out=tmp_path / "run", task=WordTask(), workers=workers)
    assert given == threads
