"""The command shell: what is registered, how errors are told, and exit codes."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata

import pytest
import torch
import typer

from exlm_cli.cli import app as shell
from exlm_cli.cli.app import explain, main
from exlm_cli.cli.commands import recipes as cmd_recipes
from exlm_cli.errors import ConfigError, ExlmError, InterruptedRunError

Capture = pytest.CaptureFixture[str]
COMMANDS: list[str] = list(typer.main.get_command(shell.app).commands)  # type: ignore[attr-defined]
SIX = ["tokenize", "pretrain", "repeat-mlm", "finetune", "eval", "inspect-dag"]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Return a function that makes `exlm recipes` raise an error."""

    def fail(error: BaseException) -> None:
        def raise_it(*_: object) -> None:
            raise error

        monkeypatch.setattr("exlm_cli.config.load.list_recipes", raise_it)

    return fail


def run(*words: str | bytes, **environment: str) -> subprocess.CompletedProcess[str]:
    script = "import sys; from exlm_cli.cli.app import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_help_lists_the_commands_in_the_order_of_work(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.partition("Commands:")[2].splitlines() if line]
    assert listed == COMMANDS
    there = [name for name in SIX if name in listed]
    assert listed[: len(there)] == there
    assert {"tokenize", "pretrain", "inspect-dag", "recipes"} <= set(listed)


def test_without_words_the_help_is_shown(capsys: Capture) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("Usage: exlm [OPTIONS] COMMAND [ARGS]...")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_that_fits_eighty_columns(command: str, capsys: Capture) -> None:
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"Usage: exlm {command}")
    assert max(map(len, lines)) <= 80


def test_the_version_is_that_of_the_package(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"exlm {metadata.version('exlm-cli')}\n"


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["pretrai"], "no such command 'pretrai'. Did you mean 'pretrain'?", "see `exlm --help`"),
        (["pretrain", "--recip", "x"], "no such option: --recip (Possible options: --help, --recipe)",
         "see `exlm pretrain --help`"),
        (["pretrain", "--device", "gpu"], "invalid value for '--device': 'gpu' is not one of 'auto', 'cpu', 'cuda'",
         "see `exlm pretrain --help`"),
        (["pretrain", "--recipe", "text-base", "--seed", "-1"],
         "`--seed -1`: `seed` is -1; accepted: a whole number at least 0 and below 9223372036854775808",
         "`seed`: Of initial weights, data order, masks and dropout"),
        (["recipes", "a", "b"], "got unexpected extra argument(s) (b)", "see `exlm recipes --help`"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_one_error_line_and_a_hint(words: list[str], error: str, hint: str, capsys: Capture) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: {error}\n\nhint: {hint}\n"


def test_an_error_of_the_user_is_one_line_on_stderr(failing: Callable[..., None], capsys: Capture) -> None:
    failing(ConfigError("x" * 200 + " [bold]not markup[/bold]", "mend it"))
    assert main(["recipes"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: " + "x" * 200 + " [bold]not markup[/bold]\n\nhint: mend it\n"


def test_an_error_without_a_hint_is_the_line_alone(failing: Callable[..., None], capsys: Capture) -> None:
    failing(ExlmError("so it is"))
    assert main(["recipes"]) == 2
    assert capsys.readouterr().err == "error: so it is\n"


@pytest.mark.parametrize("words", [["--debug", "recipes"], ["recipes", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_is_put(failing: Callable[..., None], words: list[str]) -> None:
    failing(ConfigError("wrong"))
    with pytest.raises(ConfigError, match=r"^wrong$"):
        main(words)


def test_an_interrupted_run_leaves_with_the_signals_code(failing: Callable[..., None], capsys: Capture) -> None:
    failing(InterruptedRunError("stopped at step 3", "continue with ...", 15))
    assert main(["recipes"]) == 143
    assert capsys.readouterr().err == "error: stopped at step 3\n\nhint: continue with ...\n"


def test_ctrl_c_leaves_with_130(failing: Callable[..., None], capsys: Capture) -> None:
    failing(KeyboardInterrupt())
    assert main(["recipes"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("number", "error", "hint"),
    [
        (errno.ENOSPC, "runs/x: No space left on device", "the disk is full; free some space or choose another folder "
         "with `out=DIR`"),
        (errno.EDQUOT, "runs/x: Disk quota exceeded", "your disk quota is used up; free some space or choose another "
         "folder with `out=DIR`"),
        (errno.EACCES, "runs/x: Permission denied", "you may not read or write there; check the permissions or choose "
         "another folder with `out=DIR`"),
        (errno.EPERM, "runs/x: Operation not permitted", "you may not read or write there; check the permissions or "
         "choose another folder with `out=DIR`"),
        (errno.EROFS, "runs/x: Read-only file system", "that file system is read-only; choose another folder with "
         "`out=DIR`"),
        (errno.EMFILE, "runs/x: Too many open files", "too many files are open; raise the limit with `ulimit -n`"),
        (errno.EIO, "runs/x: Input/output error", ""),
    ],
)  # fmt: skip
def test_trouble_with_files_is_told_without_a_traceback(
    failing: Callable[..., None], number: int, error: str, hint: str, capsys: Capture
) -> None:
    failing(OSError(number, os.strerror(number), "runs/x"))
    assert main(["recipes"]) == 2
    assert capsys.readouterr().err == f"error: {error}\n" + (f"\nhint: {hint}\n" if hint else "")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
        ),
    ],
)
def test_running_out_of_memory_says_what_to_lower(
    failing: Callable[..., None], error: Exception, capsys: Capture
) -> None:
    failing(error)
    assert main(["recipes"]) == 2
    assert capsys.readouterr().err == (
        "error: memory ran out\n\n"
        "hint: lower `train.microbatch_tokens` (the batch stays as it is, also in a resumed run), or take a smaller "
        "model\n"
    )


@pytest.mark.parametrize("error", [RuntimeError("ours"), ValueError("ours"), AssertionError("ours")])
def test_a_fault_of_ours_keeps_its_traceback(failing: Callable[..., None], error: Exception) -> None:
    failing(error)
    with pytest.raises(type(error), match=r"^ours$"):
        main(["recipes"])


def test_an_error_that_is_nobodys_mistake_is_not_explained() -> None:
    assert explain(RuntimeError("x")) is None
    assert explain(KeyError("x")) is None


def test_a_reader_that_goes_away_is_no_error() -> None:
    script = "import sys; from exlm_cli.cli.app import main; sys.exit(main())"
    words = [sys.executable, "-c", script, "recipes", "text-base"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_no_color_and_a_pipe_give_plain_text() -> None:
    done = run("recipes", "no-such")
    assert done.returncode == 2
    assert "\x1b" not in done.stdout + done.stderr


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A shell that says nothing of UTF-8, and a Python that believes it."""


@pytest.mark.parametrize(
    ("word", "environment", "error", "hint"),
    [
        (b"x [MASK] \xff", {"PYTHONUTF8": "1"}, "`x [MASK] \\xff` is not text in UTF-8", "write it in UTF-8"),
        ("x [MASK] é".encode(), ASCII, r"`x [MASK] \xe9` is not text in ASCII",
         "declare it as UTF-8 with `PYTHONUTF8=1 exlm ...`"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["inspect-dag", "recipes", "curves"])
def test_words_that_are_no_text_are_refused_by_every_command(
    command: str, word: bytes, environment: dict[str, str], error: str, hint: str
) -> None:
    done = run(command, word, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {error}\n\nhint: {hint}\n"


def test_what_a_terminal_cannot_show_is_shown_with_backslashes() -> None:
    script = (
        "from rich.table import Table; from exlm_cli.cli import app, console\n"
        "def show():\n"
        "    console.emit_text('text \\xe9'); console.emit_pairs({'pair': '\\u03b1'})\n"
        "    table = Table('head'); table.add_row('\\xb1'); console.emit_renderable(table)\n"
        "    console.open_progress().message('said \\xe9')\n"
        "app.app.command('show')(show); raise SystemExit(app.main(['show']))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "said \\xe9\n")
    assert done.stdout.startswith("text \\xe9\npair  \\u03b1\n")
    assert "| \\xb1" in done.stdout


def test_commands_are_thin() -> None:
    assert shell.recipes is cmd_recipes.recipes
