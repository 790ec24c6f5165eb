"""The command shell: what is registered, how errors become one line, and exit codes. Sentences are in `golden/`."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from unittest.mock import Mock

import pytest
import torch
import typer

from exlm_cli.cli import app as shell
from exlm_cli.cli.app import explain, main
from exlm_cli.errors import ConfigError, DivergedError, InterruptedRunError
from tests.cli.asserts import printed_by

COMMANDS: list[str] = list(typer.main.get_command(shell.app).commands)  # type: ignore[attr-defined]
IN_ORDER_OF_WORK = ["tokenize", "pretrain", "finetune", "eval", "inspect-dag"]
MAIN = "import sys; from exlm_cli.cli.app import main; sys.exit(main())"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Return a function that makes `exlm recipes` raise an error."""
    return lambda error: monkeypatch.setattr("exlm_cli.config.load.list_recipes", Mock(side_effect=error))


def python(*words: str | bytes, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | environment
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environment)


def test_help_lists_the_commands_in_the_order_of_work_on_one_line_each(capsys):
    said = printed_by(capsys, ["--help"]).out.partition("Commands:\n")[2].partition("\n\n")[0]
    listed = [line.split()[0] for line in said.splitlines()]
    assert listed == COMMANDS
    assert [name for name in listed if name in IN_ORDER_OF_WORK] == IN_ORDER_OF_WORK


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_that_fits_eighty_columns(command, capsys):
    lines = printed_by(capsys, [command, "--help"]).out.splitlines()
    assert lines[0].startswith(f"Usage: exlm {command}")
    assert max(map(len, lines)) <= 80


def test_the_version_is_that_of_the_package(capsys):
    assert printed_by(capsys, ["--version"]).out == f"exlm {metadata.version('exlm-cli')}\n"
    done = python("-m", "exlm_cli", "--version")
    assert (done.returncode, done.stdout) == (0, f"exlm {metadata.version('exlm-cli')}\n")


def test_an_error_is_one_line_on_stderr_with_a_hint(failing, capsys):
    failing(ConfigError("x" * 200 + " [bold]not markup[/bold]", "mend it"))
    assert main(["recipes"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: " + "x" * 200 + " [bold]not markup[/bold]\n\nhint: mend it\n"


@pytest.mark.parametrize("words", [["--debug", "recipes"], ["recipes", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_is_put(failing, words):
    failing(ConfigError("wrong", "mend it"))
    with pytest.raises(ConfigError, match=r"^wrong$"):
        main(words)


def test_a_stop_by_the_user_is_no_error_and_has_the_signals_exit_code(failing, capsys):
    """A run that diverged ends with 1, as for a collapse; 2 is a mistake in the command."""
    failing(DivergedError("the loss of step 3 is nan", "lower it"))
    assert main(["recipes"]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    failing(InterruptedRunError("stopped at step 3", "continue with ...", 15))
    assert main(["recipes"]) == 143
    assert capsys.readouterr().err == "stopped at step 3\n\nhint: continue with ...\n"
    failing(KeyboardInterrupt())
    assert main(["recipes"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_a_terminal_of_no_columns_shows_results(monkeypatch, capsys):
    """As some consoles and CI systems set it; rich takes the 0 at its word."""
    words = ["recipes", "moleculenet-bace"]
    results = printed_by(capsys, words).out
    monkeypatch.setenv("COLUMNS", "0")
    assert printed_by(capsys, words).out == results != ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_file_system_names_the_file_and_has_no_traceback(failing, number, capsys):
    failing(OSError(number, os.strerror(number), "runs/x"))
    assert main(["recipes"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: runs/x: {os.strerror(number)}\n")
    assert "\nhint: " in said


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_running_out_of_memory_names_the_key_to_lower_and_the_other_device(failing, error, capsys):
    failing(error)
    assert main(["recipes"]) == 2
    said = capsys.readouterr().err
    assert "train.microbatch_tokens" in said
    assert "--device cpu" in said


@pytest.mark.parametrize("error", [RuntimeError("ours"), KeyError("ours")])
def test_a_fault_of_the_program_keeps_its_traceback(failing, error):
    assert explain(error) is None
    failing(error)
    with pytest.raises(type(error), match="ours"):
        main(["recipes"])


def test_a_reader_that_goes_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-c", MAIN, "recipes", "moleculenet-bace"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A shell without a UTF-8 locale, and a Python that follows it."""


@pytest.mark.parametrize(
    ("word", "environment", "error"),
    [
        (b"x [MASK] \xff", {"PYTHONUTF8": "1"}, "`x [MASK] \\xff` is not text in UTF-8"),
        ("x [MASK] é".encode(), ASCII, r"`x [MASK] \xe9` is not text in ASCII"),
    ],
)
def test_words_that_are_not_text_are_refused(word, environment, error):
    done = python("-c", MAIN, "inspect-dag", word, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {error}\n\nhint: ")


def test_the_shell_completes_commands_and_recipes_without_torch():
    words = {"exlm finet": ["finetune"], "exlm pretrain --recipe text-base-": ["text-base-formula", "text-base-gated"]}
    script = MAIN.replace("sys.exit(main())", "code = main(); assert 'torch' not in sys.modules; sys.exit(code)")
    for typed, begin in words.items():
        completing = {"_EXLM_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        done = python("-c", script, **completing)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.split()[: len(begin)] == begin
