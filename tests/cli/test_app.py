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
from exlm_cli.cli.app import main
from exlm_cli.errors import ConfigError, DivergedError, InterruptedRunError
from tests.cli.asserts import printed_by, refusal_of

COMMANDS: list[str] = list(typer.main.get_command(shell.app).commands)  # type: ignore[attr-defined]
MAIN = "import sys; from exlm_cli.cli.app import main; sys.exit(main())"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Return a function that makes `exlm recipes` raise an error."""
    return lambda error: monkeypatch.setattr("exlm_cli.config.load.list_recipes", Mock(side_effect=error))


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | environment
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environment)


def test_every_command_has_help_that_fits_eighty_columns(capsys):
    for command in COMMANDS:
        lines = printed_by(capsys, [command, "--help"]).out.splitlines()
        assert lines[0].startswith(f"Usage: exlm {command}")
        assert max(map(len, lines)) <= 80, command


def test_the_version_is_that_of_the_package():
    done = python("-m", "exlm_cli", "--version")
    assert (done.returncode, done.stdout) == (0, f"exlm {metadata.version('exlm-cli')}\n")


def test_debug_shows_the_traceback_wherever_it_is_put(failing):
    failing(ConfigError("wrong", "mend it"))
    for words in (["--debug", "recipes"], ["recipes", "--debug"]):
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


@pytest.mark.parametrize(
    ("error", "begins", "names"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), "runs/x: No space left on device", "the disk"),
        (OSError(errno.EIO, "Input/output error", "runs/x"), "runs/x: Input/output error", "the disk"),
        (MemoryError(), "memory ran out", "train.microbatch_tokens"),
        (torch.OutOfMemoryError("CUDA out of memory"), "memory ran out", "--device cpu"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory ran out", "train.microbatch_tokens"),
    ],
)
def test_what_the_machine_refuses_is_one_line_with_a_remedy(failing, error, begins, names, capsys):
    failing(error)
    assert main(["recipes"]) == 2
    said, _, hint = capsys.readouterr().err.partition("\n\nhint: ")
    assert said == f"error: {begins}"
    assert names in hint


def test_a_fault_of_the_program_keeps_its_traceback(failing):
    failing(RuntimeError("ours"))
    with pytest.raises(RuntimeError, match="ours"):
        main(["recipes"])


def test_a_reader_that_goes_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-c", MAIN, "recipes", "moleculenet-bace"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_words_that_are_not_text_are_refused(capsys):
    word = os.fsdecode(b"x [MASK] \xff")
    assert refusal_of(capsys, "inspect-dag", word).startswith("error: `x [MASK] \\xff` is not text in UTF-8\nhint: ")


def test_the_shell_completes_recipes_without_torch():
    script = MAIN.replace("sys.exit(main())", "code = main(); assert 'torch' not in sys.modules; sys.exit(code)")
    typed = "exlm pretrain --recipe text-base-"
    done = python("-c", script, _EXLM_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD="3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["text-base-formula", "text-base-gated", "text-base-mlm"]
