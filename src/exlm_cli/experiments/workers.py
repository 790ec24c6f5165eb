"""Child processes that work on cells, one for each device or CPU thread; nothing is pickled, no thread is forked."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, final

from exlm_cli.config.cells import CellPlan

Event = dict[str, Any]
_WORKER = "exlm_cli.experiments.cell_worker"


@final
class Workers:
    """Processes by number, their events in one queue.

    Args:
        environments: Variables of each process beyond this one's, such as CUDA_VISIBLE_DEVICES.
        logs: Folder for what they write to stderr.
    """

    def __init__(self, environments: Sequence[Mapping[str, str]], logs: Path) -> None:
        self._environments, self._logs = environments, logs
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            for number, environment in enumerate(self._environments):
                child = self._start(number, environment)
                stack.callback(_stop, child)
                self._children.append(child)
                threading.Thread(target=self._listen, args=(number, child), daemon=True).start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def submit(self, number: int, plan: CellPlan, folder: Path) -> None:
        """Give a process a cell; a process that has died answers with `exit` instead."""
        child = self._children[number]
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps({"plan": plan.model_dump(mode="json"), "folder": str(folder)}) + "\n")
            child.stdin.flush()
        except BrokenPipeError:
            return

    def next_event(self, timeout_s: float) -> tuple[int, Event] | None:
        """Return the next event and whose it is; None where there is none for so long.

        Besides those of `cell_worker` there is `exit`, with the exit code, after which a process says no more.
        """
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def interrupt(self) -> None:
        """Ask every process to save a checkpoint and leave its cell."""
        for child in self._children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)

    def log(self, number: int) -> Path:
        """Return the file with what a process wrote to stderr."""
        return self._logs / f"worker-{number}.log"

    def _start(self, number: int, environment: Mapping[str, str]) -> "subprocess.Popen[str]":
        own = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | dict(environment)
        with self.log(number).open("a", encoding="utf-8") as log:
            return subprocess.Popen(
                # -P: a queue.py in the current directory is not Python's
                [sys.executable, "-P", "-m", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env=own,
                # Ctrl-C is the parent's, which passes it on once
                start_new_session=True,
            )

    def _listen(self, number: int, child: "subprocess.Popen[str]") -> None:
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                if line.endswith("\n"):
                    self._events.put((number, json.loads(line)))
        self._events.put((number, {"event": "exit", "code": child.wait()}))


def _stop(child: "subprocess.Popen[str]") -> None:
    child.kill()
    child.wait()
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        child.stdin.close()
