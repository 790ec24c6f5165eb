"""A tiny model learns small GLUE and SQuAD files by heart, from the files on disk to `results.json`."""

import json

import pytest

from exlm_cli.finetune.run import run_finetuning
from exlm_cli.tasks.glue import GLUE_TASKS
from tests.unit.finetune.synthetic import finetune_recipe, make_pretrained
from tests.unit.tasks.glue_files import ROWS, write_glue
from tests.unit.tasks.squad.test_task import write


def finetune(folder, task, **train):
    checkpoint = make_pretrained(folder / "pretrained")
    recipe = finetune_recipe(
        seeds=[1],
        task={"sequence_length": 48, **task},
        model={"dropout": 0.0, "attention_dropout": 0.0, "pooler_dropout": 0.0},
        optim={"lr": 1e-2, "schedule": "constant"},
        train={"microbatch_tokens": 4096, **train},
    )
    result = run_finetuning(recipe, checkpoint=checkpoint, out=folder / "run")
    assert json.loads((folder / "run" / "results.json").read_text(encoding="utf-8")) == result.results.as_json()
    return result


def test_a_glue_task_is_learned_by_heart(tmp_path):
    write_glue(tmp_path / "data", "stsb", copies=4)
    task = {"name": "glue/stsb", "data_dir": str(tmp_path / "data")}
    result = finetune(tmp_path, task, max_epochs=30, validate_every_steps=25, batch_sequences=8)
    results, scores = result.results, result.scores
    assert set(GLUE_TASKS["stsb"].metrics) <= set(scores.names("valid"))
    assert scores.seeds("valid", GLUE_TASKS["stsb"].metrics[0]).median > 0.99
    assert results.split_sizes == {"train": len(ROWS["stsb"]) * 4, "valid": len(ROWS["stsb"]) * 4}
    assert any("no public test labels" in note for note in results.notes)


def test_answers_are_learned_by_heart(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write(data, "train-v2.0.json", "Moss", "Clocks", "Tea")
    write(data, "dev-v2.0.json", "Moss", "Clocks", "Tea")
    task = {"name": "squad/v2", "data_dir": str(data), "doc_stride": 12, "max_query_tokens": 24}
    result = finetune(tmp_path, task, max_epochs=40, validate_every_steps=80, batch_sequences=4)
    results, scores = result.results, result.scores
    assert scores.seeds("valid", "f1").median > 0.9
    assert scores.seeds("valid", "has_answer_f1").median > 0.9
    assert scores.average("valid", "f1").mean == pytest.approx(scores.seeds("valid", "f1").mean)  # of one seed
    assert results.split_sizes == {"train": 7, "valid": 7}
    cell = tmp_path / "run" / "cells" / "single" / "split-0" / "seed-1"
    answers = json.loads((cell / "predictions-valid.json").read_text(encoding="utf-8"))
    odds = json.loads((cell / "no-answer-valid.json").read_text(encoding="utf-8"))
    assert len(answers) == 7
    assert answers["Clocks-0"] == "1424"
    assert odds.keys() == answers.keys()
