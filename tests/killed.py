"""Processes that kill themselves at a chosen call, so that no test of resuming depends on timing."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exlm_cli.run_dir import read_metrics

TIMED = frozenset({"elapsed_s", "tokens_per_s"})

# torch is imported once; each process that is to die is a fork of the one that has it
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["exlm_cli.experiments.cell"])


def die_at_call(owner: Any, name: str, count: int, *, before: Callable[..., None] = lambda *_: None) -> None:
    """Let the call of that number, counted from 1, kill this process after `before` has seen its arguments."""
    original, calls = getattr(owner, name), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            before(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, dying)


def run_until_killed(target: Callable[..., None], *arguments: Any) -> None:
    """Run a function of a test module in a process of its own, which must end by killing itself."""
    process = _CONTEXT.Process(target=target, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def untimed_rows(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run that a repetition must have too."""
    return [{k: v for k, v in row.items() if k not in TIMED} for row in read_metrics(run / "metrics.jsonl")]
