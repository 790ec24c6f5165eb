"""The command shell: what is registered, how errors become one line, and exit codes. Sentences are in `golden/`."""

import errno
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import typer
from typer.models import OptionInfo

import exlm_cli.__main__
from exlm_cli.cli import app as shell
from exlm_cli.cli.app import explain, main
from exlm_cli.errors import ConfigError, DivergedError, InterruptedRunError
from exlm_cli.paths import expand_path
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
    if command in ("eval", "predict", "embed", "inspect-dag"):  # whose default device is not the recipe's
        shown = " ".join(" ".join(lines).lower().split())
        assert "the recipe" not in shown
        assert "default: auto" in shown


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
    failing(InterruptedRunError("stopped at step 3", "continue with ...", 15))
    assert main(["recipes"]) == 143
    assert capsys.readouterr().err == "stopped at step 3\n\nhint: continue with ...\n"
    failing(KeyboardInterrupt())
    assert main(["recipes"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_ctrl_c_while_modules_are_imported_is_a_stop_too(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "exlm_cli.cli.app", Interrupting("exlm_cli.cli.app"))
    assert exlm_cli.__main__.main() == 130
    assert capsys.readouterr().err == "stopped\n"


class Interrupting(ModuleType):
    """A module whose import is interrupted."""

    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt


def test_a_run_that_diverged_has_the_exit_code_of_a_job_that_failed(failing, capsys):
    """1, as for a collapse; 2 is a mistake in the command, which scripts need not try with other numbers."""
    failing(DivergedError("the loss of step 3 is nan", "lower it"))
    assert main(["recipes"]) == 1
    assert capsys.readouterr().err == "error: the loss of step 3 is nan\n\nhint: lower it\n"


def test_a_terminal_of_no_columns_shows_results_and_errors(failing, monkeypatch, capsys):
    """As some consoles and CI systems set it; rich takes the 0 at its word."""
    results = printed_by(capsys, ["recipes"]).out
    monkeypatch.setenv("COLUMNS", "0")
    assert printed_by(capsys, ["recipes"]).out == results != ""
    monkeypatch.setenv("COLUMNS", "0")
    failing(ConfigError("wrong", "mend it"))
    assert main(["recipes"]) == 2
    assert capsys.readouterr().err == "error: wrong\n\nhint: mend it\n"


def test_a_stdout_that_the_shell_has_closed_is_no_error():
    words = ["sh", "-c", '"$0" -m exlm_cli --version >&-', sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_of_the_file_system_names_the_file_and_has_no_traceback(failing, number, capsys):
    failing(OSError(number, os.strerror(number), "runs/x"))
    assert main(["recipes"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: runs/x: {os.strerror(number)}\n")
    assert "\nhint: " in said


def test_every_option_that_takes_a_path_knows_the_home_folder():
    """Shells leave the `~` of `--out=~/x` alone."""
    options = [
        (name, option)
        for command in shell.app.registered_commands
        if command.callback is not None
        for name, parameter in inspect.signature(command.callback).parameters.items()
        for option in getattr(parameter.annotation, "__metadata__", ())
        if isinstance(option, OptionInfo) and "Path" in str(parameter.annotation.__origin__)
    ]
    assert len(options) > 10
    assert not [name for name, option in options if option.parser is not expand_path]


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


@pytest.mark.parametrize("place", ["/dev/full", "pipe"])
def test_an_error_that_nobody_can_read_keeps_its_exit_code(place):
    """`tee` dies of the same Ctrl-C as the command whose errors it shows."""
    reader, writer = os.pipe()
    os.close(reader)
    stderr = writer if place == "pipe" else os.open(place, os.O_WRONLY)
    done = subprocess.run([sys.executable, "-c", MAIN, "recipes", "none"], stderr=stderr, check=False)
    assert done.returncode == 2


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


def test_what_a_terminal_cannot_show_is_shown_with_backslashes():
    script = (
        "from rich.table import Table; from exlm_cli.cli import app, console\n"
        "def show():\n"
        "    console.emit_text('text \\xe9'); console.emit_pairs({'pair': '\\u03b1'})\n"
        "    table = Table('head'); table.add_row('\\xb1'); console.emit_renderable(table)\n"
        "    console.open_progress().message('said \\xe9')\n"
        "app.app.command('show')(show); raise SystemExit(app.main(['show']))"
    )
    done = python("-c", script, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "said \\xe9\n")
    assert done.stdout.startswith("text \\xe9\npair  \\u03b1\n")
    assert "| \\xb1" in done.stdout


def test_the_shell_completes_commands_and_recipes_without_torch():
    words = {"exlm finet": ["finetune"], "exlm pretrain --recipe text-base-": ["text-base-formula", "text-base-gated"]}
    script = MAIN.replace("sys.exit(main())", "code = main(); assert 'torch' not in sys.modules; sys.exit(code)")
    for typed, begin in words.items():
        completing = {"_EXLM_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        done = python("-c", script, **completing)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.split()[: len(begin)] == begin
