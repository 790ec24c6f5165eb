"""Work that is killed or interrupted at a chosen call, so that no test of resuming depends on timing."""

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from exlm_cli.run_dir import read_metrics

TIMED = frozenset({"elapsed_s", "tokens_per_s", "data_wait_s", "peak_memory_bytes"})

# torch, and its compiler, which every optimiser imports, are imported once: each process is a fork of one that has them
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["exlm_cli.cli.app", "exlm_cli.experiments.cell", "pytest", "torch._dynamo"])


def act_at_call(owner: Any, name: str, count: int, act: Callable[..., None], *, set_to: Any = setattr) -> None:
    """Let `act` see the arguments of the call of that number, counted from 1, before the call is made."""
    original, calls = getattr(owner, name), itertools.count(1)

    def acting(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            act(*args)
        return original(*args, **kwargs)

    set_to(owner, name, acting)


def die_at_call(owner: Any, name: str, count: int, *, before: Callable[..., None] = lambda *_: None) -> None:
    """Let the call of that number kill this process after `before` has seen its arguments."""

    def die(*args: Any) -> None:
        before(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    act_at_call(owner, name, count, die)


@contextmanager
def interrupted_at_call(owner: Any, name: str, count: int) -> Iterator[None]:
    """Run what must be interrupted by the call of that number."""
    with pytest.MonkeyPatch.context() as patch:
        act_at_call(owner, name, count, Mock(side_effect=KeyboardInterrupt), set_to=patch.setattr)
        with pytest.raises(KeyboardInterrupt):
            yield


def run_until_killed(target: Callable[..., None], *arguments: Any) -> None:
    """Run a function of a test module in a process of its own, which must end by killing itself."""
    process = FORKS.Process(target=target, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def untimed_rows(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run that a repetition must have too."""
    return [{k: v for k, v in row.items() if k not in TIMED} for row in read_metrics(run / "metrics.jsonl")]
