"""One case of the campaign: commands run in an empty folder, and what they must not do."""

import os
import stat
import sys
import traceback
from pathlib import Path
from random import Random
from typing import NamedTuple

LONGEST_LINE = 2_100
"""Characters of a line on stderr; values, names and library errors are cut long before."""

Tree = dict[str, tuple[int, int]]


class Outcome(NamedTuple):
    """What a command did; `code` is None where it raised."""

    words: tuple[str, ...]
    code: int | None
    out: str
    err: str


class Trial:
    """One case. Its random numbers come from the seed of the campaign, its area and its number alone.

    Attributes:
        folder: An empty folder, the current one.
        faults: What was wrong, one line each.
        commands: The words of every command.
    """

    def __init__(self, area: str, number: int, campaign_seed: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.rng = Random(f"{campaign_seed}/{area}/{number}")
        self.faults: list[str] = []
        self.commands: list[tuple[str, ...]] = []

    def write(self, name: str, content: bytes) -> None:
        """Write a file into the folder."""
        (self.folder / name).write_bytes(content)

    def exlm(self, *given: object, codes: tuple[int, ...] = (0, 2), may_change: tuple[str, ...] = ()) -> Outcome:
        """Run a command in this process and judge it; paths that begin with `may_change` may be made or altered."""
        words = tuple(map(str, given))
        self.commands.append(words)
        before = tree(self.folder)
        outcome, trouble = run_captured(words, f"{self.folder}-said")
        if trouble:
            self.faults.append(trouble)
        else:
            self.judge(outcome, codes)
        self.judge_files(before, outcome, may_change)
        return outcome

    def expect(self, is_right: bool, fault: str) -> None:
        """Note a fault unless something is right."""
        if not is_right:
            self.faults.append(fault)

    def judge(self, outcome: Outcome, codes: tuple[int, ...] = (0, 2)) -> None:
        """Note what is wrong with the exit code and the words of a command."""
        code, lines = outcome.code, outcome.err.splitlines()
        self.expect(code in codes, f"exit code {code}, expected one of {codes}: {outcome.err[-300:]!r}")
        for line in outcome.err.split("\n"):
            self.expect(line.isprintable(), f"stderr holds what no terminal should get: {line[:200]!r}")
            self.expect(len(line) <= LONGEST_LINE, f"a line of {len(line):,} characters: {line[:200]!r}")
        self.expect("Traceback" not in outcome.err, f"a traceback: {outcome.err[-300:]!r}")
        self.expect("Warning:" not in outcome.err, f"a warning of a library: {outcome.err[-300:]!r}")
        num_errors = sum(line.startswith("error: ") for line in lines)
        self.expect(num_errors == (code == 2), f"exit code {code} with {num_errors} error lines")
        if code == 2:
            hints = sum(line.startswith("hint: ") and len(line) > len("hint: x") for line in lines)
            self.expect(hints == 1, f"{hints} hints: {outcome.err[-300:]!r}")
            self.expect(not outcome.out, f"a refused command printed {outcome.out[:100]!r}")

    def judge_files(self, before: Tree, outcome: Outcome, may_change: tuple[str, ...] = ()) -> None:
        """Note inputs that were changed, temporary files that stay, and what a refused command left."""
        after = tree(self.folder)
        changed = [
            name for name, state in before.items()
            if after.get(name) != state and not name.startswith((*may_change, "cache/")) and not name.endswith(".lock")
        ]  # fmt: skip
        self.expect(not changed, f"changed {changed[:3]}")
        new = [name for name in after if name not in before]
        left = [name for name in new if is_temporary(name)]
        self.expect(not left, f"temporary files stay: {left[:3]}")
        if outcome.code == 2:
            # a run that can be continued may stay, and what the cache has is whole
            runs = {str(Path(name).parent) for name in after if name.endswith("recipe.yaml")}
            left = [
                name for name in new
                if not name.startswith((*may_change, "cache/")) and not name.endswith(".lock")
                and not any(name.startswith(f"{run}/") for run in runs)
            ]  # fmt: skip
            self.expect(not left, f"a refused command left {left[:3]}")


def tree(folder: Path) -> Tree:
    """Return size and time of change of every file below a folder."""
    found = {}
    for path in folder.rglob("*"):
        state = path.lstat()
        if not stat.S_ISDIR(state.st_mode):
            found[path.relative_to(folder).as_posix()] = (state.st_size, state.st_mtime_ns)
    return found


def is_temporary(name: str) -> bool:
    """Return whether a file has the name of one that is being written."""
    return any(mark in name for mark in (".writing", ".tmp", "/tmp", ".part", ".incomplete"))


def run_captured(words: tuple[str, ...], said: str) -> tuple[Outcome, str]:
    """Run a command in this process, its streams in files; return the outcome, and where it raised, the reason."""
    from exlm_cli.cli.app import main

    code: int | None = None
    trouble = ""
    send_streams_to(said)
    try:
        code = main(words)
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        trouble = f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {str(error)[:300]!r}"
    sys.stdout.flush()
    sys.stderr.flush()
    return Outcome(words, code, *read_streams(said)), trouble


def send_streams_to(said: str) -> None:
    """Send stdout and stderr of this process, also of its libraries, to two files."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{said}-{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
        os.close(file)
    # open until the process ends
    sys.stdout, sys.stderr = (
        open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )


def read_streams(said: str) -> list[str]:
    """Return what a process has said, and delete the files; nothing of one that was killed before it began."""
    texts = []
    for name in ("out", "err"):
        path = Path(f"{said}-{name}")
        texts.append(path.read_text(encoding="utf-8", errors="replace") if path.exists() else "")
        path.unlink(missing_ok=True)
    return texts


def resident_mib(name: str = "VmRSS") -> float:
    """Return the memory of this process, or with `VmHWM` the most that it had."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))
