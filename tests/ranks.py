"""Several ranks on this machine: processes that meet through a store in the test's own process, as under torchrun."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from exlm_cli.errors import ExlmError
from tests.killed import FORKS


def launch_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment of one rank, as torchrun sets it; the store is that of another process."""
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    strings = {name: str(value) for name, value in variables.items()}
    return strings | {
        "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def run_ranks(size: int, target: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Run a function of a test module on so many ranks at once, and return how each process ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        FORKS.Process(target=_run_rank, args=(launch_variables(rank, size, store.port), target, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def own_rank() -> int:
    return int(os.environ["RANK"])


def in_turn(work: Callable[..., None], calls: list[tuple[Any, ...]]) -> None:
    """Work with one list of arguments after the other, on whichever rank this is."""
    for arguments in calls:
        work(*arguments)


def note_error(folder: Path, work: Callable[[], object]) -> None:
    """Do work that must fail, and leave its error in the folder for `noted_errors`."""
    try:
        work()
    except ExlmError as error:
        content = {"type": type(error).__name__, "message": error.message, "hint": error.hint, "by": error.reporter}
        (folder / f"error-{own_rank()}.json").write_text(json.dumps(content), encoding="utf-8")


def noted_errors(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the errors of all ranks that left one."""
    return {
        int(path.stem.partition("-")[2]): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("error-*.json"))
    }


def _run_rank(variables: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    target(*arguments)
