"""How this process was launched: alone, or as one of several ranks by torchrun's environment variables. No torch."""

import os
from typing import NamedTuple

from exlm_cli.errors import ConfigError


class Launch(NamedTuple):
    """Place of a process among those that train one model together: of all nodes, and of its own; alone by default."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


ONE_PROCESS = Launch()


def read_launch() -> Launch:
    """Return the launch of this process, from the environment variables that torchrun sets.

    Raises:
        ConfigError: WORLD_SIZE is above 1 and another variable is missing.
    """
    if num_ranks() == 1:
        return ONE_PROCESS
    return Launch(*map(_read_number, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))


def num_ranks() -> int:
    """Return WORLD_SIZE; 1 where it is not set."""
    return max(1, int(os.environ.get("WORLD_SIZE") or 1))


def is_quiet() -> bool:
    """Return whether this is one of several ranks and another one, rank 0, prints."""
    return not prints_error(0)


def prints_error(reporter: int | None) -> bool:
    """Return whether this process prints an error: rank `reporter`, or for None the first rank of each node."""
    if num_ranks() == 1:
        return True
    name = "LOCAL_RANK" if reporter is None else "RANK"
    return os.environ.get(name, "0") == str(reporter or 0)


def _read_number(name: str) -> int:
    if name not in os.environ:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, so this is one of several ranks, but {name} is not set",
            "launch ranks with `torchrun --nproc-per-node=N -m exlm_cli ...`, which sets every variable; unset "
            "WORLD_SIZE for one process",
        )
    return int(os.environ[name])
