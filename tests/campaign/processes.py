"""Processes of cases, with a disk of their own where a case asks for it."""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from exlm_cli.cli.app import main
from tests.campaign.trial import Outcome, Trial, read_streams, send_streams_to

PRELOADED = [
    "exlm_cli.cli.console", "exlm_cli.cli.runs", "exlm_cli.experiments.cell", "exlm_cli.ops.alignment.reference",
    "exlm_cli.report.curves", "exlm_cli.report.finetuning.page", "exlm_cli.tasks.user_table",
    "matplotlib.backends.backend_svg", "matplotlib.projections", "rdkit.Chem", "rich.progress", "sklearn.metrics",
    "tests.campaign.areas", "torch._dynamo",
]  # fmt: skip
"""Modules of the server whose forks are the processes of cases: importing them takes ten times a small training."""
_MOUNT, _UMOUNT = (str(shutil.which(name)) for name in ("mount", "umount"))
LONGEST_END_S = 60.0
"""How long a rank may take to notice that another one is gone, and a command to end."""

SMALL = (
    "device=cpu", "data.bundled_rows=300", "model.width=32", "model.ffn_width=16", "model.num_layers=1",
    "model.dropout=0.1", "optim.warmup_steps=1", "train.max_steps=24", "train.checkpoint_every_steps=4",
    "train.validate_every_steps=9", "train.log_every_steps=1", "train.batch_sequences=8", "train.num_threads=1",
    "train.validation_sequences=8", "train.alignment_backend=reference",
)  # fmt: skip
PRETRAIN = ["pretrain", "--recipe", "quickstart-text", *(word for value in SMALL for word in ("--set", value))]
FINETUNE = ["finetune", "csv", "rows.csv", "--smiles-column", "mol", "--label-columns", "active", "--checkpoint", "P",
            "--split", "random", "--seeds", "1,2", "--set", "train.max_epochs=4", "--set", "train.batch_sequences=8",
            "--set", "train.num_threads=1", "--no-baseline"]  # fmt: skip


def changed(words: list[str], setting: str) -> list[str]:
    """Return a command whose `--set` gives its key another value."""
    key = setting.partition("=")[0]
    return [setting if word.startswith(f"{key}=") else word for word in words]


def forking() -> ForkServerContext:
    """Return the context of processes that begin with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Started:
    """A process that runs a function, or a command with its streams in files, from a folder."""

    def __init__(self, folder: Path, work: Callable[[], Any] | Sequence[object], **variables: str) -> None:
        self._said = str(folder / f".said-{time.monotonic_ns()}")
        self.words = () if callable(work) else tuple(map(str, work))
        arguments = (folder, self.words or work, dict(os.environ) | variables, self._said)
        self.process = forking().Process(target=_run, args=arguments)
        self.began = time.monotonic()
        self.process.start()

    def kill_after(self, seconds: float) -> None:
        """Kill it then, as `kill -9` does, unless it has ended."""
        self.process.join(max(0.0, self.began + seconds - time.monotonic()))
        self.process.kill()
        self.process.join()

    def outcome(self, trial: Trial) -> Outcome:
        self.process.join(LONGEST_END_S)
        if self.process.exitcode is None:
            trial.faults.append(f"no end after {LONGEST_END_S:g} s: {' '.join(self.words)[:200]}")
            self.process.kill()
            self.process.join()
        trial.commands.append(self.words)
        return Outcome(self.words, self.process.exitcode, *read_streams(self._said))


def _run(folder: Path, work: Any, variables: dict[str, str], said: str) -> None:
    os.environ.clear()
    os.environ |= variables
    os.chdir(folder)
    send_streams_to(said)
    code = work() if callable(work) else main(work)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that makes the disk under `folder` "full", "read-only" or "large".

    Root gets a file system of that size of its own; another user a limit on the size of each file, and no writing.
    """
    folder.mkdir()
    if os.geteuid() != 0:
        limits = {"full": size, "large": resource.RLIM_INFINITY}

        def limit(state: str) -> None:
            folder.chmod(0o500 if state == "read-only" else 0o700)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits.get(state, size), resource.RLIM_INFINITY))

        try:
            yield limit
        finally:
            limit("large")
        return
    options = {"full": f"rw,size={size}", "read-only": "ro", "large": "rw,size=64m"}
    subprocess.run([_MOUNT, "-t", "tmpfs", "-o", options["full"], "exlm-campaign", folder], check=True)
    try:
        yield lambda state: subprocess.run([_MOUNT, "-o", f"remount,{options[state]}", folder], check=True) and None
    finally:
        os.chdir(folder.parent)
        subprocess.run([_UMOUNT, "--lazy", folder], check=True)


def own_mounts() -> None:
    """Keep what this process mounts to itself, so that it is gone when the process is."""
    if os.geteuid() == 0 and ctypes.CDLL(None).unshare(0x00020000) == 0:  # CLONE_NEWNS
        subprocess.run([_MOUNT, "--make-rprivate", "/"], check=True)
