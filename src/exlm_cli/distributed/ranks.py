"""Communication between ranks: they meet, exchange objects, add up tensors, and end together.

Everything goes through torch.distributed: objects and flags through gloo between CPUs, sums over tensors through gloo
or, between CUDA devices, NCCL. A rank that ends closes its connections, so the others' next message fails at once. One
key of the store that all share says why: the first rank to fail or to notice leaves its error there.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from exlm_cli.errors import ExlmError, RankError
from exlm_cli.launch import Launch

MEET_LIMIT_S = 5 * 60.0
"""Longest wait for every rank to start."""
_STEP_LIMIT = timedelta(minutes=30)
"""Longest wait within a step or a validation."""
_WORK_LIMIT = timedelta(days=1)
"""Longest wait while another rank works: rank 0 prepares data and writes checkpoints."""
_FAILURE = "failure"

_num_joins = 0

ResultT = TypeVar("ResultT")
BatchT = TypeVar("BatchT")


class Ranks:
    """The ranks of a run, seen from one of them. With a single rank, every method returns at once.

    Args:
        launch: Place of this process.
        device: Device of this process.
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

    def describe(self) -> str:
        """Return a clause on the number of ranks; empty for one process."""
        return "" if self.size == 1 else f", {self.size} ranks"

    def connect(self) -> None:
        """Make the process groups: gloo and on CUDA also NCCL for steps, gloo with longer waits for objects."""
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

    def exchange(self, value: ResultT) -> list[ResultT]:
        """Gather an object from every rank, in rank order; torch pickles it, between processes of one launch alone."""
        if self._store is None:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._objects)
        return gathered

    def together(self, work: Callable[[], ResultT]) -> ResultT:
        """Do the same work on every rank; an error on one is raised on all.

        Raises:
            ExlmError: That of the lowest rank that raised one.
        """
        error: ExlmError | None = None
        try:
            result = work()
        except ExlmError as raised:
            error = raised
        for rank, failure in enumerate(self.exchange(None if error is None else self._describe(error))):
            if failure is not None:
                raise error if error is not None and rank == self.rank else RankError(**failure)
        return result

    def first(self, work: Callable[[], ResultT]) -> ResultT:
        """Do work on rank 0 while the others wait, and return its result on every rank.

        Raises:
            ExlmError: The work raised it.
        """
        done: Any = self.together(lambda: work() if self.is_first else None)
        result: ResultT = self.exchange(done)[0]
        return result

    def in_turn(self, work: Callable[[], ResultT]) -> ResultT:
        """Do work on rank 0, then on all others in parallel, which find its results in a cache.

        Raises:
            ExlmError: That of the lowest rank that raised one.
        """
        done: list[ResultT] = []
        self.together(lambda: done.append(work()) if self.is_first else None)
        return self.together(lambda: done[0] if done else work())

    def total(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place, and return it; does not wait for its device."""
        if self._store is not None:
            dist.all_reduce(values)
        return values

    def share_of(self, items: NDArray[Any]) -> NDArray[Any]:
        """Return `items[rank::size]`, so that items of similar length, which are neighbours, go to different ranks."""
        return items[self.rank :: self.size]

    def in_step(
        self, batches: Iterator[BatchT], spare: Callable[[], BatchT], flag: Callable[[], int] = lambda: 0
    ) -> Iterator[tuple[BatchT, bool, int | None]]:
        """Yield this rank's batches, then a spare one while other ranks have more: all ranks run equally many passes.

        Args:
            batches: Batches of this rank.
            spare: Returns the spare batch.
            flag: Returns a number whose maximum over ranks all ranks get.

        Yields:
            A batch; whether it is this rank's own; the maximum flag at the last batch if there are several ranks, else
            None.
        """
        if self._store is None:
            yield from ((batch, True, None) for batch in batches)
            return
        own, going_along = next(batches, None), None
        goes_on = True
        while goes_on:
            following = None if own is None else next(batches, None)
            largest = torch.tensor([int(following is not None), flag()])
            dist.all_reduce(largest, dist.ReduceOp.MAX)  # between CPUs: it waits for the ranks, not for a device
            num_following, flagged = largest.tolist()
            goes_on = num_following > 0
            if own is None and going_along is None:
                going_along = spare()
            batch = going_along if own is None else own
            assert batch is not None, "there is an own batch or a spare one"
            yield batch, own is not None, None if goes_on else flagged
            own = following

    @contextmanager
    def explaining(self) -> Iterator[None]:
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
            raise self._leave(RankError(lost, self.hint, self.rank)) from error

    def report(self, error: BaseException) -> None:
        """Leave an error for the other ranks, unless one is there already."""
        if self._store is not None:
            self._leave(error)

    def _leave(self, error: BaseException) -> RankError:
        """Leave an error in the store, unless one is there already; return the one that is there."""
        assert self._store is not None
        own = json.dumps(self._describe(error))
        try:
            return RankError(**json.loads(self._store.compare_set(_FAILURE, "", own)))
        except dist.DistError:  # the rank that kept the store has ended
            return RankError(**json.loads(own))

    def _describe(self, error: BaseException) -> dict[str, Any]:
        """Return an error as other ranks raise it: the arguments of a `RankError`."""
        if not isinstance(error, ExlmError):  # a fault, whose traceback its own rank prints
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            error = ExlmError(f"{type(error).__name__}: {reason}", "the traceback is in the output of that rank")
        is_shared = isinstance(error, RankError)
        return {
            "message": error.message if is_shared else f"rank {self.rank}: {error.message}",
            "hint": error.hint,
            "reporter": error.reporter if is_shared else 0,
            "exit_code": error.exit_code,
        }


ALONE = Ranks(Launch(), torch.device("cpu"))
"""One process, where the device does not matter."""


@contextmanager
def join(launch: Launch, device: torch.device) -> Iterator[Ranks]:
    """Meet the other ranks of a launch; for one process there are none.

    Args:
        launch: Place of this process.
        device: Its device, which decides between gloo and NCCL.

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
        with ranks.explaining():
            ranks.connect()
            yield ranks
            ranks.exchange(None)  # a barrier: one that fails at the end is not left alone with its error
    except BaseException as error:
        ranks.report(error)
        if isinstance(error, ExlmError) and error.reporter is None:
            error.reporter = 0
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(launch: Launch) -> Store:
    """Return the store that all ranks share, hosted by torchrun or rank 0."""
    global _num_joins
    _num_joins += 1
    host, port = launch.master
    try:
        store = next(rendezvous("env://", timeout=timedelta(seconds=MEET_LIMIT_S)))[0]
    except (dist.DistError, OSError, ValueError) as error:
        raise RankError(
            f"rank {launch.rank} of {launch.size} cannot meet the other ranks at {host}:{port}: "
            f"{str(error).strip().splitlines()[0]}",
            "start all ranks with the same WORLD_SIZE and MASTER_ADDR, the node of rank 0, and a MASTER_PORT that is "
            "free there and open to the other nodes",
            launch.rank,
        ) from error
    # a process may train several runs one after the other: each has keys of its own
    return PrefixStore(f"join-{_num_joins}", store)
