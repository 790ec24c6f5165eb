"""`exlm finetune` on a small CSV: a table for people, JSON for programs, resumption, mistakes told in one line."""

import json
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
from exlm_cli.config.tasks import SUITES
from exlm_cli.finetune.results import read_results
from exlm_cli.run_dir import read_run_json
from tests.cli.asserts import printed_by, refusal_of, result_of
from tests.killed import act_at_call
from tests.unit.finetune.synthetic import WORDS, make_pretrained
from tests.unit.tasks.glue_files import write_glue

SETS = ["train.max_epochs=2", "train.batch_sequences=16", "train.num_threads=1"]
SPLIT_FILES = ("split.json", "splits/split-1.json")
WORDS_OF_SETS = [word for value in SETS for word in ("--set", value)]
TASK = ["finetune", "csv", "words.csv", "--text-column", "text", "--label-columns", "amber", *WORDS_OF_SETS]
TASK += ["--workers", "1"]


@pytest.fixture(autouse=True)
def _a_csv_and_a_checkpoint(folder: Path) -> None:
    """A run directory where commands look for one, and 60 sentences of two words."""
    make_pretrained(folder / "runs" / "pretrained")
    pairs = [(a, b) for a in WORDS for b in WORDS] * 2
    lines = [f"{a} {b},{int('amber' in (a, b))},{len(a)}" for a, b in pairs[:60]]
    (folder / "words.csv").write_text("text,amber,letters\n" + "\n".join(lines) + "\n")


def test_a_csv_is_fine_tuned_from_the_newest_fitting_run_for_people_and_scripts(folder, capsys):
    """A table is printed; a finished run that is resumed prints the same results as JSON."""
    captured = printed_by(capsys, [*TASK, "--seeds", "4,5", "--out", "run"])
    assert "checkpoint: runs/pretrained, the newest text run, trained on " in captured.err
    assert "single seeds are mean ± standard deviation of 2 seeds" in " ".join(captured.out.split())
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


def test_replicates_are_split_anew(capsys):
    result = result_of(capsys, *TASK, "--seed", "4", "--split", "random", "--num-replicates", "2", "--out", "run")
    assert result["split_seeds"] == [0, 1]
    assert {"low", "high", "num", "over"} == set(result["split_intervals"]["roc_auc"])
    splits = [json.loads(Path("run", name).read_text())["indices"]["test"] for name in SPLIT_FILES]
    assert splits[0] != splits[1]


def test_a_column_says_the_split_of_each_row(folder, capsys):
    parts = ["train"] * 40 + ["valid"] * 10 + ["test"] * 10
    header, *lines = (folder / "words.csv").read_text().splitlines()
    rows = [f"{header},part", *(f"{line},{part}" for line, part in zip(lines, parts, strict=True))]
    (folder / "words.csv").write_text("\n".join(rows) + "\n")
    result = result_of(capsys, *TASK, "--seed", "4", "--split-column", "part", "--out", "run")
    assert (result["split"], result["split_sizes"]) == ("column", {"train": 40, "valid": 10, "test": 10})
    said = refusal_of(capsys, *TASK, "--seed", "4", "--split-column", "zone", "--out", "other")
    assert "name the column that says train, valid or test with `--split-column NAME`" in said


def test_several_ranks_are_told_to_start_the_command_once(capsys, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for words in (TASK, ["finetune", "glue", "rte,cola", "--data-dir", "data"]):
        said = refusal_of(capsys, *words, "--checkpoint", "runs/pretrained")
        assert "fine-tuning uses every GPU by itself\nhint: start the command once" in said


def test_a_split_without_rows_is_named_before_training(run_folder, capsys):
    """40 molecules: 20, 10 and 4 of one scaffold each, and 6 of others. Balanced splits of the seeds 5 and 6 have
    validation rows; that of 7 has none, as each of the two larger groups is too large for them.
    """
    groups = {"c1ccccc1": 20, "C1CCCCC1": 10, "C1CC1": 4}
    smiles = ["C" * length + ring for ring, num in groups.items() for length in range(1, num + 1)]
    smiles += ["C1CCC1", "C1CCCC1", "c1ccncc1", "c1ccoc1", "c1ccsc1", "C1CCNCC1"]
    (run_folder / "rings.csv").write_text("smiles,y\n" + "".join(f"{s},{i % 2}\n" for i, s in enumerate(smiles)))
    words = [
        "finetune",
        "csv",
        "rings.csv",
        "--label-columns",
        "y",
        "--checkpoint",
        "P",
        "--split",
        "scaffold-balanced",
    ]
    words += [
        "--seed",
        "1",
        "--no-baseline",
        "--workers",
        "1",
        "--set",
        "task.split_seed=5",
        "--set",
        "train.max_epochs=1",
        "--out",
        "run",
    ]
    said = refusal_of(capsys, *words, "--num-replicates", "3")
    assert said == (
        "error: split 3 of 3, `task.split_seed` 7: csv: the split leaves no rows in `valid`\n"
        "hint: `--num-replicates 2` ends before it; a new run can begin with another `task.split_seed` or "
        "`task.split`"
    )
    assert not Path("run").exists()
    result = result_of(capsys, *words, "--num-replicates", "2")
    assert result["split_seeds"] == [5, 6]
    assert refusal_of(capsys, "finetune", "--resume", "run", "--num-replicates", "3") == said
    assert load_recipe("run/recipe.yaml", kind=FinetuneRecipe).num_replicates == 2
    shown = printed_by(capsys, ["finetune", "--resume", "run"]).out
    assert "note: found a 0/1 label" in shown
    assert f"best epochs by validation {result['selection_metric']}: 1, 1\n" in shown


def test_from_scratch_and_regression(capsys):
    words = ["finetune", "csv", "words.csv", "--text-column", "text", "--label-columns", "letters", *WORDS_OF_SETS]
    words += ["--set", "task.label_kind=regression"]
    result = result_of(capsys, *words, "--seed", "4", "--out", "run", "--from-scratch")
    assert (result["init"]["objective"], result["init"]["checkpoint"]) == ("scratch", None)
    assert (result["loss"], result["selection_metric"], result["is_greater_better"]) == ("regression", "rmse", False)


def test_a_grid_is_searched_and_its_best_point_named(capsys):
    words = [
        *TASK,
        "--seed",
        "4",
        "--grid",
        "--set",
        "grid.optim.lr=[1e-6, 1e-2]",
        "--set",
        "grid.train.freeze_encoder=[false]",
    ]
    result = result_of(capsys, *words, "--out", "run")
    assert [point["values"]["optim.lr"] for point in result["grid"]] == [1e-6, 1e-2]
    assert result["grid_best"]["values"]["optim.lr"] in (1e-6, 1e-2)
    assert "best of 2 grid points: " in printed_by(capsys, ["finetune", "--resume", "run"]).out


def test_a_signal_saves_and_the_resumed_run_gives_the_same_scores(folder, capsys, monkeypatch):
    words = [*TASK, "--seeds", "4,5"]
    whole = result_of(capsys, *words, "--out", "whole")
    in_second_seed = 8

    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    act_at_call(torch.optim.AdamW, "step", in_second_seed, stop, set_to=monkeypatch.setattr)
    assert main([*words, "--out", "run"]) == 143
    error = capsys.readouterr().err
    assert "\nstopped at step 2 of 6; the checkpoint is run/cells/single/split-0/seed-5/checkpoints/step-2" in error
    assert "hint: continue with `exlm finetune --resume run`" in error
    resumed = result_of(capsys, "finetune", "--resume", "run", "--workers", "1")
    assert resumed["metrics"] == whole["metrics"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(("suite", "name", "run"), [("glue", "cola", "T"), ("moleculenet", "bace", "P")])
def test_the_recipe_for_a_cpu_is_named_where_the_papers_would_run_on_one(
    run_folder, capsys, monkeypatch, suite, name, run
):
    monkeypatch.setattr("exlm_cli.finetune.run.run_finetuning", Mock(side_effect=KeyboardInterrupt))
    assert main(["finetune", suite, name, "--checkpoint", run]) == 130
    assert f"on a CPU `--recipe {suite}-small` takes minutes\n" in capsys.readouterr().err


def test_a_checkpoint_of_another_kind_is_refused_before_rows_are_read(run_folder, capsys):
    (run_folder / "bad.csv").write_text("smiles,y\nC1CC,1\nC1CC,0\n")
    words = ["finetune", "csv", "bad.csv", "--label-columns", "y"]
    assert "bad.csv:2: not a molecule" in refusal_of(capsys, *words, "--checkpoint", "P")
    said = refusal_of(capsys, *words, "--checkpoint", "T/checkpoints/step-3")
    assert said.startswith("error: T/checkpoints/step-3 is a model of text; csv needs one of SMILES\n")
    assert said.endswith("; `--text-column NAME` names a column of text")


@pytest.mark.usefixtures("cells_in_this_process")
def test_all_tasks_of_glue_fill_table_3_and_a_finished_series_is_only_read(folder, capsys):
    tasks = [task.removeprefix("glue/") for task in SUITES["glue"].tasks]
    for task in tasks:
        write_glue(folder / "data", task)
    words = ["finetune", "glue", "all", "--recipe", "glue-small", "--data-dir", "data", "--seeds", "1", "--out", "all"]
    words += ["--workers", "1"]
    sets = ["train.max_epochs=1", "train.num_threads=1", "task.sequence_length=24"]
    out = printed_by(capsys, [*words, "--device", "cpu", *(word for value in sets for word in ("--set", value))]).out
    assert "ours    tiny (exlm)" in out
    assert "not the benchmark's number of rows: mnli (train 3 instead of 392,702" in " ".join(out.split())
    for task in tasks:
        assert f"report: all/{task}/report.html\n" in out
        verdict = [one.replace(" RUN ", f" all/{task} ") for one in read_results(folder / "all" / task).verdict]
        assert f"verdict of {task}: {' '.join(verdict)}" in " ".join(out.split())
        page = (folder / "all" / task / "report.html").read_text()
        assert f"glue/{task}" in page
    assert out.endswith("wrote all/report/table-3.md\nwrote all/report/table-3.csv\n")
    again = result_of(capsys, "finetune", "--resume", "all")
    assert [run["task"] for run in again["runs"]] == [f"glue/{task}" for task in tasks]
    assert [run["report"] for run in again["runs"]] == [f"all/{task}/report.html" for task in tasks]
    shown = result_of(capsys, "eval", "all", "--no-figures")
    assert {run["task"] for run in shown["runs"]} == {f"glue/{task}" for task in tasks}
    said = refusal_of(capsys, "finetune", "--resume", "all", "--seeds", "2")
    assert "which take no `--set`, `--seeds`, `--num-replicates` or `--device`" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["word.csv", "--label-columns", "amber"], "error: word.csv: no such file\n\nhint: did you mean words.csv?\n"),
        (["words.csv", "--text-column", "text", "--label-columns", "ambre"], "hint: did you mean `amber`?\n"),
        (
            ["words.csv", "--text-column", "text", "--label-columns", "amber", "--out", "runs"],
            "error: runs: the folder is not empty",
        ),
    ],
)
def test_mistakes_in_a_table_are_found_before_torch_is_imported(words, told):
    """Its import and a checkpoint take longer than the table."""
    script = (
        "import sys; from exlm_cli.cli.app import main\n"
        f"code = main(['finetune', 'csv', *{words!r}]); print('torch' in sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    assert told in done.stderr
