"""A run directory: where it is made, what describes it, how its files are written and read back.

Holds `recipe.yaml`, `run.json`, `tokenizer.json`, `metrics.jsonl`, `checkpoints/step-N/` and `report/`. Nothing here
knows what a recipe or a model is.
"""

import contextlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import filelock

from exlm_cli.errors import CheckpointError
from exlm_cli.files import advice_on, finite_or_none, reason_of, write_atomically

RUNS_ROOT = Path("runs")
"""Where run directories go and are looked for, under the current directory."""

RUN_FILE = "run.json"
LOCK_FILE = ".lock"
"""Held while a process works in the directory; the file stays, also of one that was killed."""


def create_run_dir(out: Path | None, name: str, *, root: Path = RUNS_ROOT) -> Path:
    """Make an empty run directory; the lock that a run killed before it began has left counts as nothing.

    Args:
        out: Its path; none: `<root>/<name>-<YYYYmmdd-HHMMSS>`, with a counter where two runs begin in one second.
        name: Of the recipe.
        root: Folder of all runs.

    Raises:
        CheckpointError: `out` is a file or holds something already, or the file system refuses.
    """
    try:
        if out is None:
            return _make_fresh(root / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        out.mkdir(parents=True, exist_ok=True)
        if any(path.name != LOCK_FILE for path in out.iterdir()):
            raise CheckpointError(
                f"{out}: the run directory is not empty",
                f"continue that run with `--resume {out}`, or choose another `--out`",
            )
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        where = root if out is None else out
        raise CheckpointError(
            f"{where}: no run directory can be made there: {reason_of(error)}", advice_on(error, "--out")
        ) from error
    return out


@contextlib.contextmanager
def sole_process(folder: Path) -> Iterator[None]:
    """Keep other processes from working in a run directory, as long as this one does; a killed one holds nothing.

    Raises:
        CheckpointError: Another process is at work there, or the file system refuses.
    """
    lock = filelock.FileLock(folder / LOCK_FILE, blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise CheckpointError(
            f"{folder}: another process is at work in this run directory", "wait for it, or stop it first"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the run directory cannot be locked: {reason_of(error)}", advice_on(error)
        ) from error
    try:
        yield
    finally:
        lock.release()


def _make_fresh(path: Path) -> Path:
    for number in range(1, 1000):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            continue
        return candidate
    raise FileExistsError(17, os.strerror(17))


def update_run_json(run: Path, fields: dict[str, Any]) -> None:
    """Set fields of `run.json`, keeping the others.

    Versions, commit and host are those of this process; where a run was begun or continued with others before, those
    are kept in `earlier_environments`, oldest first.
    """
    before, environment = read_run_json(run), describe_environment()
    content = {**before, **environment, **fields}
    earlier = {name: before[name] for name in environment if name in before}
    if earlier and earlier != environment:
        content["earlier_environments"] = [*before.get("earlier_environments", []), earlier]
    write_atomically(run / RUN_FILE, (json.dumps(finite_or_none(content), indent=1) + "\n").encode())


def read_run_json(run: Path) -> dict[str, Any]:
    """Read `run.json`; an empty mapping where there is none.

    Raises:
        CheckpointError: It is not a JSON object.
    """
    path = run / RUN_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}", _ALTERED_HINT) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, a JSON object is expected", _ALTERED_HINT)
    return content


_ALTERED_HINT = "exlm wrote this file whole, so something else altered it; restore it or start a new run"


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line, each with its `step`; numbers that are not finite are null."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: dict[str, Any]) -> None:
        """Add a row.

        Raises:
            CheckpointError: The file system refuses.
        """
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite_or_none(row)) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: a row could not be added: {reason_of(error)}", advice_on(error)
            ) from error

    def truncate_after(self, step: int) -> None:
        """Drop the rows beyond `step` and a half-written last line, as a killed run leaves them."""
        if self.path.exists():
            kept = [row for row in read_metrics(self.path) if row["step"] <= step]
            write_atomically(self.path, "".join(json.dumps(row) + "\n" for row in kept).encode())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a `metrics.jsonl`; a last line without its newline was cut by a kill and is left out.

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
            row = json.loads(line)
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{path}: line {number} is not a row of metrics", _ALTERED_HINT) from error
    return rows


def find_newest_run(root: Path, accept: Callable[[Path], bool]) -> Path | None:
    """Return the run directory under `root` whose run.json is newest among those that `accept`; None: there is none.

    Cells of a grid are no runs of their own.
    """
    found = sorted(root.rglob(RUN_FILE), key=lambda p: p.stat().st_mtime_ns, reverse=True)
    return next((path.parent for path in found if not _is_cell(path.parent) and accept(path.parent)), None)


def _is_cell(run: Path) -> bool:
    return any(folder.name == "cells" and (folder.parent / RUN_FILE).is_file() for folder in run.parents)


def run_directory(path: Path) -> Path:
    """Return the run directory of a run or of one of its `checkpoints/step-N`."""
    return path.parent.parent if is_checkpoint(path) else path


def is_checkpoint(path: Path) -> bool:
    """Return whether a path has the form `checkpoints/step-N`."""
    return path.name.startswith("step-") and path.parent.name == "checkpoints"


def describe_environment() -> dict[str, Any]:
    """Return what a result depends on besides its recipe: versions, commit, platform. Imports none of the packages."""
    return {
        "exlm_version": package_version("exlm-cli"),
        "torch_version": package_version("torch"),
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "git_commit": source_commit(),
    }


def package_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def source_commit() -> str | None:
    """Return the git commit this package runs from (`-dirty` where changed); None outside its repository."""
    git = shutil.which("git")
    here = Path(__file__)
    if git is None:
        return None
    # a wheel in a virtual environment inside somebody's repository is not that repository's code
    is_tracked = _git(git, here.parent, "ls-files", "--error-unmatch", here.name) is not None
    return (
        _git(git, here.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") if is_tracked else None
    )


def _git(git: str, folder: Path, *arguments: str) -> str | None:
    done = subprocess.run([git, "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
