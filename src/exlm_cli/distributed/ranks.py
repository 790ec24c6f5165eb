"""Communication between ranks: they meet, gather objects, add up tensors, and end together.

Everything goes through torch.distributed: objects and flags through gloo between CPUs, sums over tensors through gloo
or, between CUDA devices, NCCL. A rank that ends closes its connections, so the others' next message fails at once. One
key of the store that all share says why: the first rank to fail or to notice leaves its error there.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from exlm_cli.data import IntArray
from exlm_cli.distributed.launch import Launch
from exlm_cli.errors import ExlmError, RankError

MEET_LIMIT_S = 5 * 60.0
"""Longest wait for every rank to start."""
_STEP_LIMIT = timedelta(minutes=30)
"""Longest wait within a step."""
_WORK_LIMIT = timedelta(days=1)
"""Longest wait while another rank works: rank 0 prepares data and writes checkpoints."""
_RELEASE_S = 0.1
"""Wait after an error: gloo frees what a failed collective held within milliseconds."""
_FAILURE = "failure"

_joins = itertools.count()

ResultT = TypeVar("ResultT")


class Ranks:
    """The ranks of a run, seen from one of them. With a single rank, every method returns at once.

    Args:
        launch: Place of this process.
        device: Device of this process, which decides between gloo and NCCL.
        store: Store that all ranks share; None for one process.

    Attributes:
        hint: What to do when a rank is lost; the run that is under way sets it.
    """

    def __init__(self, launch: Launch, device: torch.device, store: Store | None = None) -> None:
        self.rank, self.size, self.device = launch.rank, launch.size, device
        self.hint = "start the run again"
        self._store = store
        self._objects: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone prepares data, prints and writes."""
        return self.rank == 0

    def connect(self) -> None:
        """Make the process groups: one for steps, and one with longer waits for objects."""
        assert self._store is not None
        is_cuda = self.device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=_STEP_LIMIT,
            device_id=self.device if is_cuda else None,
        )
        self._objects = dist.new_group(backend="gloo", timeout=_WORK_LIMIT)

    def all_gather_object(self, value: ResultT) -> list[ResultT]:
        """Gather an object from every rank, in rank order; torch pickles it, between processes of one launch alone."""
        if self._store is None:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._objects)
        return gathered

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place, and return it; does not wait for its device."""
        if self._store is not None:
            dist.all_reduce(values)
        return values

    def all_reduce_max(self, value: int) -> int:
        """Return the largest of a number over all ranks; waits for the ranks, not for a device."""
        largest = torch.tensor(value)
        if self._store is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def on_all_ranks(self, work: Callable[[], ResultT]) -> ResultT:
        """Do the same work on every rank; an error on one is raised on all.

        Raises:
            ExlmError: That of the lowest rank that raised one.
        """
        error: ExlmError | None = None
        try:
            result = work()
        except ExlmError as raised:
            error = raised
        for rank, failure in enumerate(self.all_gather_object(error and self._of_another_rank(error))):
            if failure is not None:
                raise error if error is not None and rank == self.rank else failure
        return result

    def on_rank_0(self, work: Callable[[], ResultT]) -> ResultT:
        """Do work on rank 0 while the others wait, and return its result on every rank.

        Raises:
            ExlmError: The work raised it.
        """
        done: Any = self.on_all_ranks(lambda: work() if self.is_first else None)
        result: ResultT = self.all_gather_object(done)[0]
        return result

    def rank_0_first(self, work: Callable[[], ResultT]) -> ResultT:
        """Do work on rank 0, then on all others in parallel, which find its results in a cache.

        Raises:
            ExlmError: That of the lowest rank that raised one.
        """
        done: Any = self.on_all_ranks(lambda: work() if self.is_first else None)
        return self.on_all_ranks(lambda: done if self.is_first else work())

    def shares_of(self, items: IntArray) -> list[IntArray]:
        """Return the items of each rank: items of similar length, which are neighbours, go to different ranks."""
        return [items[rank :: self.size] for rank in range(self.size)]

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Turn a failed message into the error that the first rank to fail or to notice has left.

        Raises:
            RankError: Another rank failed, was lost, or did not answer in time.
        """
        try:
            yield
        except RuntimeError as error:
            # gloo has no error class of its own; its messages begin with a path of its source
            if self._store is None or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            lost = "another rank does not answer: it was killed, ran out of memory, or its node is gone"
            raise self.report(RankError(lost, self.hint, self.rank)) from error

    def report(self, error: BaseException) -> RankError:
        """Leave an error in the store for the other ranks, unless one is there; return the one that is there."""
        assert self._store is not None
        own = json.dumps(vars(self._of_another_rank(error)))
        try:
            return RankError(**json.loads(self._store.compare_set(_FAILURE, "", own)))
        except dist.DistError:  # the rank that kept the store has ended
            return RankError(**json.loads(own))

    def _of_another_rank(self, error: BaseException) -> RankError:
        """Return an error as the other ranks raise it."""
        if isinstance(error, RankError):
            return error
        if isinstance(error, ExlmError):
            return RankError(f"rank {self.rank}: {error.message}", error.hint, 0, error.exit_code)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        message = f"rank {self.rank}: {type(error).__name__}: {reason}"
        return RankError(message, "the traceback is in the output of that rank", 0)


ALONE = Ranks(Launch(), torch.device("cpu"))
"""One process, where the device does not matter."""


@contextmanager
def join(launch: Launch, device: torch.device) -> Iterator[Ranks]:
    """Meet the other ranks of a launch; for one process there are none.

    Args:
        launch: Place of this process.
        device: Its device.

    Raises:
        RankError: Not all ranks joined; later, another rank failed or was lost.
    """
    if launch.size == 1:
        yield Ranks(launch, device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels of our own start on the current device
    ranks = Ranks(launch, device, _meet(launch))
    try:
        with ranks.translate_errors():
            ranks.connect()
            yield ranks
            ranks.all_gather_object(None)  # a barrier: one that fails at the end is not left alone with its error
    except BaseException as error:
        ranks.report(error)
        if isinstance(error, ExlmError) and error.reporter is None:
            error.reporter = 0
        # gloo's thread may still free what the failed collective held, for which it needs the interpreter. Whoever
        # drops the error, and with it DDP and the group, has the interpreter and waits for that thread: for ever
        time.sleep(_RELEASE_S)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(launch: Launch) -> Store:
    """Return the store that all ranks share, hosted by torchrun or rank 0."""
    number = next(_joins)
    try:
        store = next(rendezvous("env://", timeout=timedelta(seconds=MEET_LIMIT_S)))[0]
    except (dist.DistError, OSError, ValueError) as error:
        host, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise RankError(
            f"rank {launch.rank} of {launch.size} cannot meet the other ranks at {host}:{port}: "
            f"{str(error).strip().splitlines()[0]}",
            "start all ranks with the same WORLD_SIZE and MASTER_ADDR, the node of rank 0, and a MASTER_PORT that is "
            "free there and open to the other nodes",
            launch.rank,
        ) from error
    # a process may train several runs one after the other: each has keys of its own
    return PrefixStore(f"join-{number}", store)
