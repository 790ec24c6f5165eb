"""Run directories: how they are made and locked, their description `run.json`, their log `metrics.jsonl`.

A run directory also holds `recipe.yaml`, `tokenizer.json`, `checkpoints/step-N/` and `report/`. A file that cannot be
written is a `CheckpointError` everywhere.
"""

import contextlib
import functools
import itertools
import json
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import filelock
from pydantic import ConfigDict, Field, ValidationError

from exlm_cli.errors import CheckpointError
from exlm_cli.files import (
    ALTERED_HINT,
    JsonModel,
    absent_if_none,
    describe_json_error,
    finite_or_none,
    nearest_file,
    read_json,
    reason_of,
    refusing,
    write_atomically,
    write_json,
)

RUNS_ROOT = Path("runs")
"""Folder of run directories, under the current directory."""

MetricsRow = Mapping[str, Any]
"""A row of `metrics.jsonl`: `kind`, `step` and metrics."""

RUN_FILE = "run.json"
SERIES_FILE = "series.json"
"""File of a folder with several fine-tuning runs (`experiments.series`)."""
METRICS_FILE = "metrics.jsonl"
DIVERGED_FILE = "diverged.json"
"""Of a training that came to no end: the step and the sequences that it could not use."""
_FILES_OF_RUN = ("recipe.yaml", "encoder.yaml", "tokenizer.json")
_LARGEST_METRIC = 3.5e38
"""A little above the largest float32: no metric of a model reaches it, and sums of a few stay finite."""

_LOCK_FILE = ".lock"
"""Locked while a process works in the directory; the file itself stays."""

_BEGINNING_FILE = ".beginning"
"""A new run directory has it until all files that a resumption needs are there; a process killed earlier leaves it."""

SPLIT_FILE = "split.json"
"""Rows of a fine-tuning run for training, validation and testing; of several splits the first."""

SPLITS_FOLDER = "splits"
"""Folder with such a file of each further split."""

_BEGINNING_FILES = frozenset(
    {*_FILES_OF_RUN, RUN_FILE, SERIES_FILE, _LOCK_FILE, _BEGINNING_FILE, "rejected.csv", SPLIT_FILE}
    | {"training_rows.npz", SPLITS_FOLDER}
)
_WAS_THERE = b"the folder was there"


class Environment(JsonModel):
    """What a result depends on besides its recipe; None for a package that is not installed or an unknown commit."""

    exlm_version: str | None
    torch_version: str | None
    numpy_version: str | None
    python_version: str
    platform: str
    git_commit: str | None


class RunInfo(Environment):
    """`run.json`: which command made a run, with what, and what came of it.

    Attributes:
        command: Like `pretrain`; the fields after `started_unix_s` are of the commands named in the comments.
        earlier_environments: Environments of earlier processes of the run, where they differed, the oldest first.
        trained_on: The data in words; of models in the package.
        new_part: What an encoder of transformers came without, so that no training has seen it.
    """

    command: str
    earlier_environments: tuple[Environment, ...] | None = absent_if_none()
    device: str | None = absent_if_none()
    data_fingerprint: str | None = absent_if_none()
    parameters: int | None = absent_if_none()
    train_time_s: float | None = absent_if_none()
    num_ranks: int | None = absent_if_none()
    started_unix_s: float | None = absent_if_none()
    # pretrain
    seed: int | None = absent_if_none()
    precision: str | None = absent_if_none()
    alignment_backend: str | None = absent_if_none()
    own_mask_share: float | None = absent_if_none()
    unigram_loss: float | None = absent_if_none()
    unigram_accuracy: float | None = absent_if_none()
    num_rejected_rows: int | None = absent_if_none()
    train_sequences: int | None = absent_if_none()
    train_tokens: int | None = absent_if_none()
    valid_sequences: int | None = absent_if_none()
    steps: int | None = absent_if_none()
    trained_on: str | None = absent_if_none()
    new_part: str | None = absent_if_none()
    # finetune
    task: str | None = absent_if_none()
    seeds: tuple[int, ...] | None = absent_if_none()
    use_grid: bool | None = absent_if_none()
    baseline: bool | None = absent_if_none()
    checkpoint: str | None = absent_if_none()
    checkpoint_sha256: str | None = absent_if_none()
    # sweeps
    num_cells: int | None = absent_if_none()
    workers: int | None = absent_if_none()


def require_unused(out: Path) -> None:
    """Refuse a folder that `create_run_dir` does not take, before work whose results it is for.

    Raises:
        CheckpointError: It is not empty, or cannot be read.
    """
    with refusing(f"{out}: no run directory can be made there", is_chosen=True):
        if out.is_dir() and {path.name for path in out.iterdir()} - {_LOCK_FILE} and not is_beginning(out):
            raise _not_empty(out)


def create_run_dir(out: str | Path | None, name: str) -> Path:
    """Make a run directory, or take one that is empty or in which a process was killed before `mark_resumable`.

    Args:
        out: Its path; None: `runs/<name>-<YYYYmmdd-HHMMSS>`, with a counter where two runs begin in one second.

    Raises:
        CheckpointError: `out` is a file or not empty, or a file cannot be written.
    """
    with refusing(f"{RUNS_ROOT if out is None else out}: no run directory can be made there", is_chosen=True):
        if out is None:
            folder = _make_fresh(f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        else:
            folder = Path(out)
            require_unused(folder)
        was_there = out is not None and folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        beginning = folder / _BEGINNING_FILE
        if not beginning.exists():  # one that was killed keeps what it says
            beginning.write_bytes(_WAS_THERE if was_there else b"")
    return folder


def _make_fresh(name: str) -> Path:
    RUNS_ROOT.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = RUNS_ROOT / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


class OutOrResume(TypedDict):
    """Arguments of an engine: where it begins a run, or which run it continues."""

    out: Path | None
    resume: Path | None


def out_or_resume(run: Path) -> OutOrResume:
    """Return the arguments that begin a run in a folder, or continue the one that is there."""
    is_begun = (run / "recipe.yaml").is_file()
    return {"out": None if is_begun else run, "resume": run if is_begun else None}


def resume_command(command: str, run: Path) -> str:
    """Return the command line that continues a run, ready to paste."""
    return f"exlm {command} --resume {shlex.quote(str(run))}"


def mark_resumable(run: Path) -> None:
    """Mark a run directory as one that can be resumed: call it after the last file that a resumption needs."""
    (run / _BEGINNING_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def sole_process(folder: Path, *, is_new: bool) -> Iterator[None]:
    """Lock a run directory against other processes, and delete what a killed process left half-written.

    Work that fails before `mark_resumable` leaves nothing but a folder that was there before the run. The system
    releases the lock of a killed process.

    Args:
        folder: The run directory.
        is_new: `create_run_dir` has just made it: delete what a killed process left of its beginning.

    Raises:
        CheckpointError: Another process has the lock, or had it since `create_run_dir`, or a file cannot be written.
    """
    lock = filelock.FileLock(folder / _LOCK_FILE, blocking=False)
    with refusing(f"{folder}: the run directory cannot be locked"):
        try:
            lock.acquire()
        except filelock.Timeout:
            taken = f"{folder}: another process is using this run directory"
            raise CheckpointError(taken, "wait for it, or stop it first") from None
    try:
        with refusing(f"{folder}: what a killed process left there cannot be deleted"):
            _remove_leftovers(folder, is_new=is_new)
        try:
            yield
        except BaseException:
            if (folder / _BEGINNING_FILE).exists():
                with contextlib.suppress(OSError):
                    _discard_beginning(folder)
            raise
    finally:
        lock.release()


def _discard_beginning(folder: Path) -> None:
    was_there = (folder / _BEGINNING_FILE).read_bytes() == _WAS_THERE
    for path in list(folder.iterdir()):
        _delete(path)
    if not was_there:
        folder.rmdir()


def _remove_leftovers(folder: Path, *, is_new: bool) -> None:
    if is_new and not is_beginning(folder):
        raise _not_empty(folder)  # another process began here, and ended, since `create_run_dir`
    kept = {folder / _LOCK_FILE, folder / _BEGINNING_FILE}
    half_written = (path for place in (folder, folder / "report") for path in place.glob(".*.writing-*"))
    for path in list(folder.iterdir() if is_new else half_written):
        if path not in kept:
            _delete(path)
    if not is_new:
        mark_resumable(folder)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def is_beginning(folder: Path) -> bool:
    """Return whether a folder is marked as a beginning, and has only what a run writes before it can be resumed."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    is_own = (name in _BEGINNING_FILES or (name.startswith(".") and ".writing-" in name) for name in names)
    return _BEGINNING_FILE in names and all(is_own)


def _not_empty(folder: Path) -> CheckpointError:
    hint = "choose another folder with `--out DIR`"
    if not any((folder / name).is_file() for name in (RUN_FILE, SERIES_FILE)):
        return CheckpointError(f"{folder}: the folder is not empty, and is no run", f"{hint}, or empty this one")
    with contextlib.suppress(CheckpointError):  # a damaged run cannot be continued
        command = "finetune" if (folder / SERIES_FILE).is_file() else read_run_json(folder).command
        hint = f"continue that run with `{resume_command(command, folder)}`, or {hint}"
    return CheckpointError(f"{folder}: the run directory is not empty", hint)


def update_run_json(run: Path, fields: Mapping[str, object]) -> None:
    """Set fields of `run.json` (keys of `RunInfo`) and those of this process's environment; keep the others.

    Raises:
        CheckpointError: The file is damaged or of another version, or a file cannot be written.
    """
    environment = describe_environment().as_json()
    content = {**environment, **fields}
    if (run / RUN_FILE).is_file():
        before = read_run_json(run).as_json()
        content = {**before, **content}
        earlier = {name: before[name] for name in environment}
        if earlier != environment:
            content["earlier_environments"] = [*before.get("earlier_environments", []), earlier]
    write_json(run / RUN_FILE, RunInfo.model_validate_json(json.dumps(finite_or_none(content))))


def read_run_json(run: Path) -> RunInfo:
    """Return the content of `run.json`.

    Raises:
        CheckpointError: There is none, or it is damaged or of another version.
    """
    return read_json(run / RUN_FILE, RunInfo)


Metric = Annotated[float, Field(ge=-_LARGEST_METRIC, le=_LARGEST_METRIC)]


class _MetricsRow(JsonModel):
    """One line of `metrics.jsonl`: metrics by name; None where one is not finite."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Metric | list[Metric | None] | None]

    kind: Literal["train", "valid", "valid_at"] | None = None
    step: int = Field(ge=0, lt=2**63)


class MetricsLog:
    """Writer of `metrics.jsonl`: one JSON object a line with its `step`; numbers that are not finite become null."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: dict[str, Any]) -> None:
        """Add a row."""
        with refusing(f"{self.path}: a row could not be added"), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite_or_none(row)) + "\n")

    def truncate_after(self, step: int) -> None:
        """Drop the rows beyond `step`, and the half-written last line of a killed run.

        Raises:
            CheckpointError: A whole line is damaged, or the file cannot be written.
        """
        if self.path.exists():
            kept = [row for row in read_metrics(self.path) if row["step"] <= step]
            write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in kept).encode())


def read_metrics(path: Path) -> list[MetricsRow]:
    """Return the rows of a `metrics.jsonl`; leave out a last line without its newline, which a killed run leaves.

    Raises:
        CheckpointError: There is no such file, or a whole line is not a JSON object with a `step`.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise CheckpointError(f"{path}: not readable: {reason_of(error)}", "give a run directory of exlm") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            _MetricsRow.model_validate_json(line)
        except ValidationError as error:
            finding = describe_json_error(error)
            raise CheckpointError(f"{path}: line {number} is not a row of metrics: {finding}", ALTERED_HINT) from None
        rows.append(json.loads(line))
    return rows


def read_first_validation(run: Path) -> MetricsRow | None:
    """Return the row of a pre-training's validation before its first step; None where there was none."""
    path = run / METRICS_FILE
    rows = read_metrics(path) if path.is_file() else []
    return next((row for row in rows if row["kind"] == "valid" and row["step"] == 0), None)


def find_newest_run(root: Path, accept: Callable[[Path], bool]) -> Path | None:
    """Return the run directory under `root` with the newest `run.json` that `accept` takes; None where there is none.

    Cells of a sweep do not count.
    """
    files = [*root.rglob(RUN_FILE), *root.glob(f"*/{RUN_FILE}")]  # `rglob` does not follow links
    found = sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return next((path.parent for path in found if not _is_cell(path.parent) and accept(path.parent)), None)


def _is_cell(run: Path) -> bool:
    return any(folder.name == "cells" and (folder.parent / RUN_FILE).is_file() for folder in run.parents)


def run_directory(path: Path) -> Path:
    """Return the run directory of a run or of one of its `checkpoints/step-N`."""
    return path.parent.parent if is_checkpoint(path) else path


def require_run(run: Path, *names: str, hint: str, shown: Path | None = None) -> None:
    """Refuse a path that is no run directory.

    Args:
        run: The run directory.
        names: Files that it must have.
        hint: What to give.
        shown: The path as it was given, where that is a checkpoint of the run.

    Raises:
        CheckpointError: There is no such folder, or it lacks a file.
    """
    for name in names:
        if not (run / name).is_file():
            if run.exists():
                raise CheckpointError(f"{run}: not a run directory: it has no {name}", hint)
            raise CheckpointError(f"{shown or run}: no such run directory", nearest_file(run, *names) or hint)


def run_kind(path: Path) -> str:
    """Return which command made a run or checkpoint: `pretrain` or `finetune`.

    Raises:
        CheckpointError: It is not a run directory, is one of another command, or its `run.json` is damaged.
    """
    run = run_directory(path)
    require_run(run, RUN_FILE, hint="give a run directory of `exlm pretrain` or `exlm finetune`", shown=path)
    command = read_run_json(run).command
    if command not in ("pretrain", "finetune"):
        raise CheckpointError(
            f"{path}: a run of `exlm {command}`, not of `exlm pretrain` or `exlm finetune`",
            "of a sweep, give one of the runs under its cells/",
        )
    return command


def require_pretraining(path: Path) -> None:
    """Refuse what training cannot begin with.

    Raises:
        CheckpointError: It is no run or checkpoint, or one of fine-tuning.
    """
    if (command := run_kind(path)) != "pretrain":
        raise CheckpointError(
            f"{path}: a run of `exlm {command}`; training begins with one of `exlm pretrain`",
            "give a pre-training run as `--checkpoint RUN`; `exlm eval` scores a fine-tuned one",
        )


def damage_hint(path: Path) -> str:
    """Return the hint for a file of a run that cannot be used; empty for any other file."""
    if path.name not in _FILES_OF_RUN or not (path.parent / RUN_FILE).is_file():
        return ""
    return ALTERED_HINT


def is_checkpoint(path: Path) -> bool:
    """Return whether a path has the form `checkpoints/step-N`."""
    name, _, step = path.name.partition("-")
    return name == "step" and step.isdecimal() and path.parent.name == "checkpoints"


@functools.cache  # the commit of the code that runs, not of a later checkout
def describe_environment() -> Environment:
    """Return the versions, commit and platform of this process; imports none of the packages."""
    return Environment(
        exlm_version=package_version("exlm-cli"),
        torch_version=package_version("torch"),
        numpy_version=package_version("numpy"),
        python_version=platform.python_version(),
        platform=platform.platform(),
        git_commit=source_commit(),
    )


def package_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def source_commit() -> str | None:
    """Return the git commit this package runs from (`-dirty` where changed); None outside its repository."""
    here = Path(__file__)
    # a wheel in a virtual environment inside somebody's repository is not that repository's code
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run([git, "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
