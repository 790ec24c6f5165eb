"""The `exlm` command: its subcommands, and errors as one line with an exit code."""

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import typer

from exlm_cli.cli.commands.curves import curves
from exlm_cli.cli.commands.doctor import doctor
from exlm_cli.cli.commands.eval import evaluate
from exlm_cli.cli.commands.export import export, push
from exlm_cli.cli.commands.fill import fill
from exlm_cli.cli.commands.finetune import finetune
from exlm_cli.cli.commands.inspect_dag import inspect_dag
from exlm_cli.cli.commands.predict import embed, predict
from exlm_cli.cli.commands.pretrain import pretrain
from exlm_cli.cli.commands.recipes import recipes
from exlm_cli.cli.commands.sweep import repeat_mlm, sweep
from exlm_cli.cli.commands.tokenize import tokenize
from exlm_cli.distributed.launch import num_ranks, prints_error
from exlm_cli.errors import ConfigError, ExlmError, InterruptedRunError
from exlm_cli.files import READ_HINT

EXIT_CODES = (
    "Exit codes: 0 finished; 1 finished, but the result is negative (a run diverged, a check failed); 2 could not run; "
    "128 + n stopped by signal n."
)

app = typer.Typer(
    name="exlm",
    help="Pre-train, fine-tune and inspect ExLM: masked language models whose [MASK] tokens expand into states.",
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command()(tokenize)
app.command()(pretrain)
app.command()(sweep)
app.command("repeat-mlm")(repeat_mlm)
app.command()(finetune)
app.command("eval")(evaluate)
app.command()(predict)
app.command()(embed)
app.command()(export)
app.command()(push)
app.command()(fill)
app.command("inspect-dag")(inspect_dag)
app.command()(recipes)
app.command()(curves)
app.command()(doctor)

# newer typer bundles its own click; this is the usage error of whichever click it uses
_UsageError: type[BaseException] = typer.BadParameter.__mro__[1]

_MEMORY_HINT = (
    "train with a lower `--set train.microbatch_tokens=N`, which keeps the batch size (a pre-training can resume with "
    "it, a fine-tuning must start again); predict shorter texts, or with `--device cpu` if the GPU ran out of memory"
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from exlm_cli.cli import console

        console.emit_text(f"exlm {metadata.version('exlm-cli')}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    _debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        from exlm_cli.cli import console

        console.emit_text(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Those after `exlm`; none: those of the process.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    is_debug = "--debug" in given
    if os.environ.get("COLUMNS") == "0":  # rich would print nothing
        del os.environ["COLUMNS"]
    # None where the shell has closed it
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # characters that the terminal cannot encode become escapes such as \xe9 and do not end the run
            stream.reconfigure(errors="backslashreplace")
    try:
        _refuse_other_encodings(given)
        command: Any = typer.main.get_command(app)
        name = next((argument for argument in given if argument in command.commands), None)
        if name not in (None, "pretrain"):
            _refuse_ranks(name)
        code = command(
            [argument for argument in given if argument != "--debug"], prog_name="exlm", standalone_mode=False
        )
        sys.stdout.flush()
        if code == 128 + signal.SIGINT:  # typer's, for a KeyboardInterrupt
            from exlm_cli.cli import console

            console.emit_error("stopped", is_stop=True)
        return code or 0
    except (BrokenPipeError, SystemExit) as stop:
        if isinstance(stop, SystemExit) and stop.code == 0:
            return 0  # typer has answered the shell's completion
        # the reader of stdout is gone; typer turns that into SystemExit. Nothing may be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ExlmError, OSError, MemoryError, RuntimeError, _UsageError) as error:
        explained = explain(error)
        if explained is None or is_debug:
            raise
        from exlm_cli.cli import console

        if prints_error(explained.reporter):
            try:
                console.emit_error(explained.message, explained.hint, is_stop=isinstance(error, InterruptedRunError))
            except (OSError, SystemExit):  # rich exits where the reader of stderr is gone
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        return explained.exit_code


def _refuse_ranks(name: str) -> None:
    """Refuse a command that torchrun started several times."""
    if num_ranks() > 1:
        raise ConfigError(
            f"`exlm {name}` works in one process, but WORLD_SIZE is {num_ranks()}",
            "start it once, without `torchrun`, which is for `exlm pretrain`; or unset WORLD_SIZE",
        )


def _refuse_other_encodings(arguments: Sequence[str]) -> None:
    """Refuse arguments that are not UTF-8; Python reads them as lone surrogates."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(argument).decode(errors="backslashreplace")
            raise ConfigError(f"`{shown}` is not text in UTF-8", "write it in UTF-8") from None


def explain(error: BaseException) -> ExlmError | None:
    """Return an error as the user sees it; None for a fault of this program, which keeps its traceback."""
    if isinstance(error, ExlmError):
        return error
    if isinstance(error, _UsageError):
        return _explain_usage(error)
    if isinstance(error, MemoryError) or _is_torch_out_of_memory(error):
        return ExlmError("memory ran out", _MEMORY_HINT)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return ExlmError(f"{where}{error.strerror or error}", _OS_HINTS.get(error.errno or 0, READ_HINT))
    return None


_OS_HINTS = {
    errno.ENOSPC: "the disk is full; free some space, or write to another one",
    errno.EDQUOT: "your disk quota is used up; free some space, or write to another one",
    errno.EACCES: "you may not read or write there; check the permissions, or use another folder",
    errno.EPERM: "you may not read or write there; check the permissions, or use another folder",
    errno.EROFS: "that file system is read-only; write to another one",
    errno.EMFILE: "too many files are open; raise the limit with `ulimit -n`",
}


def _explain_usage(error: BaseException) -> ExlmError:
    context: Any = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "exlm"
    message = " ".join(str(error.format_message()).split())  # type: ignore[attr-defined]
    message = message.replace("Value error, ", "").replace(": Input should", ": it should").rstrip(".")
    hint = f"see `{command} --help`"
    if type(error).__name__ == "NoSuchOption" and context.parent is not None:
        # what is an option of one command may be an argument of another
        hint = f"its form is `{context.command.get_usage(context).removeprefix('Usage: ')}`; {hint}"
    return ExlmError(message[0].lower() + message[1:], hint)


def _is_torch_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
