"""`exlm finetune` on a small CSV: a table for people, JSON for programs, resumption, mistakes told in one line."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from exlm_cli.cli.app import main
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.run_dir import read_run_json
from tests.cli.asserts import printed_by, refusal_of, result_of
from tests.killed import act_at_call
from tests.unit.finetune.synthetic import WORDS, make_pretrained
from tests.unit.tasks.glue_files import write_glue

SETS = ["train.max_epochs=2", "train.batch_sequences=16", "train.num_threads=1"]
TASK = ["finetune", "csv", "words.csv", "--text-column", "text", "--label-columns", "amber", "--workers", "1"]
TASK += [word for value in SETS for word in ("--set", value)]


@pytest.fixture(autouse=True)
def _a_csv_and_a_checkpoint(folder: Path) -> None:
    """A run directory where commands look for one, and 60 sentences of two words."""
    make_pretrained(folder / "runs" / "pretrained")
    pairs = [(a, b) for a in WORDS for b in WORDS] * 2
    lines = [f"{a} {b},{int('amber' in (a, b))},{len(a)}" for a, b in pairs[:60]]
    (folder / "words.csv").write_text("text,amber,letters\n" + "\n".join(lines) + "\n")


def test_a_csv_is_fine_tuned_from_the_newest_fitting_run_also_where_a_signal_stops_it(folder, capsys, monkeypatch):
    """A table is printed; a finished run that is resumed prints the same results as JSON, as does a stopped one."""
    words = [*TASK, "--seeds", "4,5", "--out"]
    captured = printed_by(capsys, [*words, "run"])
    assert "checkpoint: runs/pretrained, " in captured.err
    assert "results: run/results.json\nscores: run/scores.csv\n" in captured.out
    assert all(name in captured.out for name in ("roc_auc", "accuracy", "valid", "test", "±"))
    recipe = load_recipe("run/recipe.yaml", kind=FinetuneRecipe)
    assert (recipe.seeds, recipe.task.label_columns, recipe.train.max_epochs) == ((4, 5), ("amber",), 2)
    assert read_run_json(folder / "run").checkpoint == str(folder / "runs/pretrained/checkpoints/step-3")
    result = result_of(capsys, "finetune", "--resume", "run")
    assert result["run_dir"] == "run"
    assert result["split_sizes"] == {"train": 48, "valid": 6, "test": 6}
    assert set(result["metrics"]) == {"valid", "test"}
    assert {"roc_auc", "accuracy", "loss"} <= set(result["metrics"]["test"])
    assert (result["seeds"], result["split"], result["init"]["objective"]) == ([4, 5], "random", "exlm")

    in_second_seed = 8

    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    act_at_call(torch.optim.AdamW, "step", in_second_seed, stop, set_to=monkeypatch.setattr)
    assert main([*words, "stopped", "--no-baseline"]) == 143
    error = capsys.readouterr().err
    assert "stopped/cells/single/split-0/seed-5/checkpoints/step-2" in error
    assert "hint: continue with `exlm finetune --resume stopped`" in error
    resumed = result_of(capsys, "finetune", "--resume", "stopped", "--workers", "1")
    assert resumed["metrics"] == result["metrics"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_recipe_for_a_cpu_is_named_where_the_papers_would_run_on_one(capsys, monkeypatch):
    monkeypatch.setattr("exlm_cli.finetune.run.run_finetuning", Mock(side_effect=KeyboardInterrupt))
    assert main(["finetune", "glue", "cola"]) == 130
    assert "`--recipe glue-small`" in capsys.readouterr().err


@pytest.mark.usefixtures("cells_in_this_process")
def test_tasks_of_glue_fill_a_row_of_table_3_and_a_finished_series_is_only_read(folder, capsys):
    """That `all` is every task is in golden/finetune.txt, that every task has its column in the tests of the report."""
    tasks = ["rte", "stsb"]
    for task in tasks:
        write_glue(folder / "data", task)
    words = ["finetune", "glue", ",".join(tasks), "--recipe", "glue-small", "--data-dir", "data", "--seeds", "1"]
    words += ["--out", "all", "--workers", "1", "--device", "cpu"]
    for value in ("train.max_epochs=1", "train.num_threads=1", "task.sequence_length=24"):
        words += ["--set", value]
    out = printed_by(capsys, words).out
    assert "ours    tiny (exlm)" in out
    for task in tasks:
        assert f"report: all/{task}/report.html\n" in out
        assert f"verdict of {task}: " in " ".join(out.split())
    assert out.endswith("wrote all/report/table-3.md\nwrote all/report/table-3.csv\n")
    again = result_of(capsys, "finetune", "--resume", "all")
    reports = [(run["task"], run["report"]) for run in again["runs"]]
    assert reports == [(f"glue/{task}", f"all/{task}/report.html") for task in tasks]
    shown = result_of(capsys, "eval", "all", "--no-figures")
    assert {run["task"] for run in shown["runs"]} == {f"glue/{task}" for task in tasks}
    assert "`--seeds`" in refusal_of(capsys, "finetune", "--resume", "all", "--seeds", "2")


def test_mistakes_in_a_table_are_found_before_torch_is_imported():
    """Its import and a checkpoint take longer than the table."""
    told = {
        ("word.csv", "--label-columns", "amber"): "did you mean words.csv?",
        ("words.csv", "--text-column", "text", "--label-columns", "ambre"): "did you mean `amber`?",
        ("words.csv", "--text-column", "text", "--label-columns", "amber", "--out", "runs"): "error: runs: ",
    }
    script = (
        "import sys; from exlm_cli.cli.app import main\n"
        f"print(*(main(['finetune', 'csv', *words]) for words in {[*told]}), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "2 2 2 False\n", done.stderr
    assert all(said in done.stderr for said in told.values())
