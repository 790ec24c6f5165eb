"""The benchmark of whole programs: its arithmetic by hand, a small program watched, and what its table says."""

import csv
import json
import lzma
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import bench_against_transformers as bench
import process_tree as tree
import whole_programs as programs
from exlm_cli.cli.app import app

MARKED = tree.StepLog(Path("/nowhere"), b"done\n")


def _row(**columns):
    left = {f"{name}_{what}": "" for name in ("sigint", "sigkill", "saved") for what in ("left", "differs")}
    others = {f"{name}_{what}": "7" for name in ("sigint", "sigkill", "saved") for what in ("at", "says_how")}
    return {
        "program": "a",
        "parameters": "1354000",
        "tokens_per_cpu_s": "9736",
        "p20": "9000",
        "p80": "10000",
        "peak_mib": "1024",
        "cache_mb": "9.9",
        "cache_mb_of_three": "12.0",
        "run_mb": "20.1",
        "lines": "1",
        "statements": "1",
        "saves_every": "500",
        "again_differs": "0.0",
        **left,
        **others,
        **columns,
    }


def test_rates_are_of_the_steps_after_the_first_ones():
    """A step that ended between two looks is in the next one's time, so both count."""
    moments = [tree.Moment(*one) for one in ((1, 9.0, 90.0), (4, 10.0, 100.0), (5, 10.5, 101.0), (7, 11.5, 105.0))]
    assert tree.rates(moments, 1000, 4) == ([2000.0, 2000.0], [1000.0, 500.0])


def test_lines_are_counted_without_blanks_comments_and_docstrings():
    source = (
        '"""Text.\n\nMore.\n"""\n# note\n\nimport a  # why\n\n'
        'def f(x):\n    """Do."""\n    return [\n        x,\n    ]\n'
    )
    assert bench.count_lines(source) == (5, 3)
    lines, statements = bench.count_lines(programs.SCRIPT.read_text())
    assert statements < lines < len(programs.SCRIPT.read_text().splitlines())


def test_weights_differ_by_their_largest_difference():
    a = {"x": torch.tensor([1.0, 2.0]), "y": torch.ones(2)}
    assert bench.difference(a, {name: tensor.clone() for name, tensor in a.items()}) == 0
    assert bench.difference(a, {**a, "x": torch.tensor([1.5, 2.25])}) == 0.5
    with pytest.raises(AssertionError, match="different models"):
        bench.difference(a, {"x": a["x"]})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_program_gets_its_signal_after_the_step(number, tmp_path):
    code = "import signal; print('done\\ndone\\ndone', flush=True); signal.pause()"
    output = tmp_path / "out.log"
    watched = tree.watch([sys.executable, "-c", code], {}, output, tree.StepLog(output, b"done\n"), (3, number))
    assert watched.code == -number
    assert watched.moments[-1].step == 3
    assert watched.peak_mib > 1
    assert ("KeyboardInterrupt" in watched.output) == (number == signal.SIGINT)


def test_a_program_that_takes_too_long_is_killed(tmp_path):
    code = "import signal; signal.pause()"
    watched = tree.watch([sys.executable, "-c", code], {}, tmp_path / "out.log", MARKED, timeout_s=0.0)
    assert (watched.code, watched.moments) == (-signal.SIGKILL, [])


def test_children_count():
    """Their processor time stays when they have ended, as that of a finished tokeniser does."""
    busy = "sum(range(3_000_000)); input()"
    with subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE) as child:
        assert child.pid in tree.processes(os.getpid())
        with_child, alone = tree.memory_mib(os.getpid()), tree.memory_mib(child.pid)
        assert with_child > alone > 1
        before = tree.cpu_s(os.getpid())
        child.communicate(b"\n")
    assert tree.cpu_s(os.getpid()) >= before
    assert child.pid not in tree.processes(os.getpid())
    assert tree.cpu_s(child.pid) == tree.memory_mib(child.pid) == 0


def test_fields_of_proc():
    text = "Name:\tpython\nRssAnon:\t   100 kB\nRssFile:\t    20 kB\n"
    assert (tree.kib_of(text, "RssFile"), tree.kib_of(text, "RssAnon"), tree.kib_of(text, "Rss")) == (20, 100, 0)


def test_the_command_of_exlm_is_one_that_it_takes(tmp_path):
    (tmp_path / "text.txt").write_text("amber birch cedar daisy\n" * 20)
    program = programs.ExlmProgram("x", tmp_path / "text.txt", tmp_path / "cache", "text-small-mlm")
    command = program.start(tmp_path / "run", programs.Plan(12, 8, seed=3, save_every=4))
    assert program.go_on(tmp_path / "run", command)[1:] == ["-m", "exlm_cli", "pretrain", "--resume", f"{tmp_path}/run"]
    result = CliRunner().invoke(app, [*command[3:], "--dry-run"])
    assert result.exit_code == 0, result.output
    for line in ("seed: 3", "max_steps: 12", "batch_sequences: 8", "checkpoint_every_steps: 4", "num_threads: 1"):
        assert line in result.output


def test_what_runs_leave(tmp_path):
    run = tmp_path / "run"
    ours = programs.ExlmProgram("x", tmp_path, tmp_path, "text-small")
    theirs = programs.TrainerProgram("y", tmp_path, tmp_path, "bert")
    assert ours.last(run) is theirs.last(run) is None
    assert ours.step_log(run).steps() == ours.step_log(run).size() == 0
    for step in (4, 12):
        for folder, file in ((run / f"checkpoints/step-{step}", "manifest.json"), (run / f"checkpoint-{step}", "x")):
            folder.mkdir(parents=True)
            (folder / file).touch()
    (run / "checkpoint-4/trainer_state.json").write_text(json.dumps({"save_steps": 500}))
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 12}\n{"kind": "valid", "step": 12}\n')
    (run / "recipe.yaml").write_text("train: {checkpoint_every_steps: 250}\n")
    save_file({"x": torch.ones(1)}, run / "checkpoints/step-12/model.safetensors")
    save_file({"x": torch.zeros(1)}, run / "model.safetensors")
    assert ours.last(run) == (12, run / "checkpoints/step-12")
    assert theirs.last(run) == (4, run / "checkpoint-4")  # the other was being written
    assert theirs.go_on(run, ["python", "x.py"])[2:] == ["--resume_from_checkpoint", str(run / "checkpoint-4")]
    assert (ours.usual_interval(run), theirs.usual_interval(run)) == (250, 500)
    assert (ours.weights(run)["x"], theirs.weights(run)["x"]) == (1, 0)
    assert ours.step_log(run).steps() == 1
    programs.log_of(run).write_text("{'loss': '8.4'}\n{'eval_loss': '8.3'}\n{'loss': '8.2'}\n{'train_loss': '8.3'}\n")
    assert theirs.step_log(run).steps() == 2


def test_text_is_whole_lines(tmp_path):
    with lzma.open(tmp_path / "a.xz", "wb") as file:
        file.write(b"one\ntwo\nthree\n")
    bench.write_text(tmp_path / "a.xz", 10e-6, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"one\ntwo\n"
    bench.write_text(None, 0.01, tmp_path / "c")
    assert (tmp_path / "c").read_bytes().endswith(b"\n")
    assert bench.megabytes(tmp_path) == sum(path.stat().st_size for path in tmp_path.iterdir()) / 1e6


def test_the_table_says_what_signals_left():
    rows = [
        _row(sigint_left="12", sigint_at="12", sigint_says_how="True", sigint_differs="0.0"),
        _row(lines="60", statements="32", again_differs="nan", saved_left="8", saved_at="13", saved_differs="0.0123"),
    ]
    table = bench.table_of(rows).splitlines()
    assert len({line.count("|") for line in table}) == 1
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in table}
    assert cells["parameters, millions"] == ["1.35"] * 2
    assert cells["tokens per CPU second (p20 to p80)"] == ["**9,736** (9,000 to 10,000)"] * 2
    assert cells["the user writes"] == ["one command", "60 lines (32 statements)"]
    assert cells["the same command twice"] == ["the same bits", "weights differ by up to nan"]
    nothing = "nothing (the first checkpoint comes at step 500)"
    assert cells["left by SIGINT half-way, usual settings"] == [
        "step 12 of 12 and the command to go on; then the same bits",
        nothing,
    ]
    assert cells["left by SIGKILL, usual settings"] == [nothing] * 2
    assert cells["left by SIGKILL, frequent checkpoints"][1] == "step 8 of 13; then weights differ by up to 0.01"


def test_the_script_prints_the_rows_that_are_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.harness, "RESULTS_DIR", tmp_path)
    rows = [_row(program=f"program {index}") for index in range(6)]
    with (tmp_path / "against_transformers.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setattr("sys.argv", ["x", "--table"])
    bench.main()
    assert capsys.readouterr().out.splitlines()[0] == "| | program 2 | program 3 | program 4 | program 5 |"


def test_the_script_says_what_the_trainer_needs(monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["x"])
    with pytest.raises(SystemExit, match="pip install accelerate"):
        bench.main()


def test_programs_that_fail_are_not_measured():
    program = programs.ExlmProgram("x", Path("a"), Path("b"), "text-small")
    with pytest.raises(RuntimeError, match="x ended with 2:\nno such file"):
        bench.ended(program, tree.Watched(output="no such file", code=2))
