"""Workers train the cells of a run: the bits are those of one process, also after a kill."""

import contextlib
import dataclasses
import pickle
from collections.abc import Sequence
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

from exlm_cli.config.load import load_recipe
from exlm_cli.errors import CheckpointError, ConfigError, DivergedError
from exlm_cli.finetune import training
from exlm_cli.finetune.cells.trainer import encode_task
from exlm_cli.finetune.run import resume_finetuning, run_finetuning
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.registry import load_task
from exlm_cli.train.pretrained import load_pretrained_weights
from exlm_cli.train.task import Callback
from tests.killed import die_at_call, run_until_killed
from tests.recorder import Recorder
from tests.tiny_sweeps import work_in_this_process
from tests.unit.finetune.synthetic import WordTask, assert_same_run, finetune_recipe, run_tiny, words_table
from tests.unit.tasks.glue_files import write_glue
from tests.unit.tasks.squad.test_task import write

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


def test_an_encoder_without_a_checkpoint_is_drawn_alike_by_workers(tmp_path, monkeypatch):
    """The test above has workers in processes of their own."""
    work_in_this_process(monkeypatch)
    encoder = load_recipe("quickstart-text", ["model.width=32", "model.num_layers=1", "tokenizer.vocab_size=280"])
    recipe = finetune_recipe(task=words_table(tmp_path), init="scratch", train={"max_epochs": 1})
    for workers in (1, 2):
        run_finetuning(recipe, checkpoint=None, encoder=encoder, out=tmp_path / f"{workers}", workers=workers)
    assert_same_run(tmp_path / "2", tmp_path / "1")


def tasks_of_each_kind(folder: Path) -> dict[str, dict[str, object]]:
    for name in ("mnli", "stsb"):
        write_glue(folder, name, copies=2)
    write(folder, "train-v2.0.json", "Moss", "Tea")
    write(folder, "dev-v2.0.json", "Clocks")
    at = {"data_dir": str(folder)}
    squad = {"doc_stride": 12, "max_query_tokens": 24, "sequence_length": 48}
    return {
        "classes": {"name": "glue/mnli", "sequence_length": 24, **at},
        "value": {"name": "glue/stsb", "sequence_length": 24, **at},
        "spans": {"name": "squad/v2", **squad, **at},
        "labels": {**words_table(folder), "class_weights": "balanced"},
    }


def test_rows_of_every_kind_come_to_a_worker_as_they_are(text_model, tmp_path):
    """Tokens, targets and what scores the outputs: the same outputs get the same scores, notes and files."""
    tokenizer = load_pretrained_weights(text_model, SilentProgress()).tokenizer
    sections = tasks_of_each_kind(tmp_path)
    tasks = {kind: load_task(finetune_recipe(task=own).task, SilentProgress()) for kind, own in sections.items()}
    for kind, task in {**tasks, "of another package": WordTask()}.items():
        data = encode_task(task, tokenizer, 48, 1)
        read = pickle.loads(cloudpickle.dumps(data))
        assert read.tokenizer.encode("a [SEP] b") == tokenizer.encode("a [SEP] b")
        for field in dataclasses.fields(data):
            if field.name not in ("train", "scored", "tokenizer", "frozen_states"):
                np.testing.assert_equal(getattr(read, field.name), getattr(data, field.name), err_msg=kind)
        for part, rows in data.parts.items():
            for name in ("token_ids", "targets", "answerable"):
                np.testing.assert_equal(getattr(read.parts[part], name), getattr(rows, name), err_msg=kind)
        rng = np.random.default_rng(0)
        for part, rows in data.scored.items():
            width = 2 if data.loss == "span" else data.num_outputs
            outputs = [[rng.normal(size=(len(ids), 2) if data.loss == "span" else width) for ids in rows.token_ids]]
            assert read.scored[part].score(outputs) == rows.score(outputs)
            assert read.scored[part].prediction_columns(outputs) == rows.prediction_columns(outputs)


def test_callbacks_stay_in_this_process(text_model, tmp_path, monkeypatch):
    monkeypatch.setattr("exlm_cli.finetune.training.run_jobs", pytest.fail)
    progress, seen = Recorder(), []

    class Starts(Callback):
        def on_start(self, folder: Path, step: int) -> None:
            seen.append(folder.name)

    recipe = finetune_recipe(task=words_table(tmp_path), train={"max_epochs": 1})
    common = {"checkpoint": text_model, "workers": 2, "progress": progress}
    run_finetuning(recipe, out=tmp_path / "one", callbacks=[Starts()], **common)
    assert seen == ["seed-1", "seed-2"]
    assert "one training after the other: callbacks cannot leave this process" in progress.said


@pytest.mark.parametrize(
    ("cores", "num_threads", "workers", "seeds", "threads"),
    [(8, None, None, 3, ["2"] * 3), (8, 1, None, 3, ["1"] * 3), (8, None, 2, 5, ["4"] * 2), (2, None, None, 1, [])],
)
def test_workers_share_the_cores(text_model, tmp_path, monkeypatch, cores, num_threads, workers, seeds, threads):
    """There are no more of them than cells; a single one is this process."""
    given = []

    def note(*_: object, environments: Sequence[dict[str, str]], **others: object) -> None:
        given.extend(one["OMP_NUM_THREADS"] for one in environments)
        raise DivergedError("stop here", "go on")

    monkeypatch.setattr("loky.cpu_count", lambda: cores)
    monkeypatch.setattr("exlm_cli.finetune.training.run_jobs", note)
    train = {"max_epochs": 1, "num_threads": num_threads}
    recipe = finetune_recipe(task=words_table(tmp_path), seeds=list(range(seeds)), train=train)
    with contextlib.suppress(DivergedError):
        run_finetuning(recipe, checkpoint=text_model, out=tmp_path / "run", workers=workers)
    assert given == threads
    assert (tmp_path / "run/results.json").exists() == (threads == [])


def test_a_launch_of_several_ranks_is_refused(text_model, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="fine-tuning uses every GPU by itself") as caught:
        run_tiny(text_model, tmp_path / "run")
    assert caught.value.hint == "start the command once, without `torchrun`"
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_not_empty_is_refused_before_rows_are_read(text_model, tmp_path, monkeypatch):
    monkeypatch.setattr("exlm_cli.finetune.run.load_task", pytest.fail)
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(CheckpointError, match="the folder is not empty"):
        run_finetuning(finetune_recipe(task=words_table(tmp_path)), checkpoint=text_model, out=tmp_path)
