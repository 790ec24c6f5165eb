"""Communication between ranks: rendezvous, exchange of values, collectives, and detection of lost ranks.

Ranks exchange JSON values through a key-value store, where a wait may last a day, and tensors through the process
group: gloo between CPUs, NCCL between CUDA devices. Each live rank raises a counter in the store, so that an
error can name the rank that died.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from exlm_cli.errors import ExlmError, RankError
from exlm_cli.files import JsonModelT
from exlm_cli.launch import Launch

LIMIT_S = 30 * 60.0
"""Longest wait for another rank in training; rank 0 may be writing a checkpoint meanwhile."""
PREPARE_LIMIT_S = 24 * 3600.0
"""Longest wait while rank 0 prepares the data."""
MEET_LIMIT_S = 5 * 60.0
"""Longest wait for every rank to start."""
_BEAT_S = 0.5
_LOST_AFTER_S = 4.0
"""Time without a heartbeat after which a rank is lost. A thread of each rank raises its counter twice a second."""
_LONGEST_PAUSE_S = 1.0
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
        self._num_exchanges = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone prepares data, prints and writes."""
        return self.rank == 0

    def describe(self) -> str:
        """Return a clause on the number of ranks; empty for one process."""
        return "" if self.size == 1 else f", {self.size} ranks"

    def wait_to_start(self) -> None:
        """Wait until every rank has a heartbeat in the store.

        Raises:
            RankError: One did not start in time.
        """
        assert self._store is not None
        begun_s, started = time.monotonic(), 0
        try:
            while started < self.size:
                if self._store.check([f"beat/{started}"]):
                    started += 1
                elif time.monotonic() - begun_s > MEET_LIMIT_S:
                    break
                else:
                    time.sleep(_BEAT_S / 10)
        except dist.DistError:
            started = 0  # rank 0 keeps the store
        if started < self.size:
            raise RankError(
                f"rank {started} of {self.size} did not start within {MEET_LIMIT_S:.0f} s, or has ended",
                "start all ranks with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
                self.rank if started == 0 else 0,
            )

    def exchange(self, value: Any, *, limit_s: float = LIMIT_S) -> list[Any]:
        """Gather a JSON value from every rank, in rank order. It goes through the store, so a wait may be long.

        Raises:
            RankError: A rank failed, was lost, or did not answer within the limit.
        """
        if self._store is None:
            return [value]
        self._num_exchanges += 1
        key = f"exchange/{self._num_exchanges}"
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        if self.is_first:
            given = [json.loads(self._wait_for(f"{key}/{rank}", rank, limit_s)) for rank in range(self.size)]
            self._store.set(key, json.dumps(given))
            # all ranks have read the values before these, or they would not have given theirs
            before = f"exchange/{self._num_exchanges - 1}"
            for old in (before, *(f"{before}/{rank}" for rank in range(self.size))):
                self._store.delete_key(old)
            return given
        gathered: list[Any] = json.loads(self._wait_for(key, 0, limit_s))
        return gathered

    def together(self, work: Callable[[], ResultT], *, limit_s: float = LIMIT_S) -> ResultT:
        """Do the same work on every rank; an error on one is raised on all.

        Raises:
            ExlmError: That of the lowest rank that raised one.
        """
        error: ExlmError | None = None
        try:
            result = work()
        except ExlmError as raised:
            if self._store is None:
                raise
            error = raised
        outcomes = self.exchange(None if error is None else _described(error), limit_s=limit_s)
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                raise error if error is not None and rank == self.rank else _error_of(rank, outcome)
        return result

    def first(self, work: Callable[[], ResultT], *, limit_s: float = LIMIT_S) -> ResultT:
        """Do work on rank 0 while the others wait, and return its JSON result on every rank.

        Raises:
            ExlmError: The work raised it.
        """
        done: list[ResultT] = []
        self.together(lambda: done.append(work()) if self.is_first else None, limit_s=limit_s)
        if self._store is None:
            return done[0]
        result: ResultT = self.exchange(done[0] if done else None)[0]
        return result

    def first_json(self, kind: type[JsonModelT], work: Callable[[], JsonModelT]) -> JsonModelT:
        """Do work on rank 0 and return its result, a `JsonModel` of type `kind`, on every rank; like `first`."""
        made: list[JsonModelT] = []

        def make() -> dict[str, Any]:
            made.append(work())
            return made[0].as_json()

        content = self.first(make, limit_s=PREPARE_LIMIT_S)
        return made[0] if made else kind.model_validate_json(json.dumps(content))

    def in_turn(self, work: Callable[[], ResultT], *, limit_s: float = LIMIT_S) -> ResultT:
        """Do work on rank 0, then on all others in parallel, which find its results in a cache.

        Raises:
            ExlmError: That of the lowest rank that raised one.
        """
        done: list[ResultT] = []
        self.together(lambda: done.append(work()) if self.is_first else None, limit_s=limit_s)
        return self.together(lambda: done[0] if done else work(), limit_s=limit_s)

    def total(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place, and return it; does not wait for its device."""
        if self._store is not None:
            dist.all_reduce(values)
        return values

    def gather(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the rows of all ranks, by rank; arrays may differ in their first axis alone."""
        if self._store is None:
            return rows
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(rows)
        dist.all_reduce(sizes)
        padded = np.zeros((int(sizes.max()), *rows.shape[1:]), dtype=rows.dtype)
        padded[: len(rows)] = rows
        gathered = [torch.empty(padded.shape, dtype=torch.from_numpy(padded).dtype) for _ in range(self.size)]
        dist.all_gather(gathered, torch.from_numpy(padded))
        return np.concatenate([each.numpy()[:size] for each, size in zip(gathered, sizes.tolist(), strict=True)])

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
        """Turn a failed communication into the error of the rank that caused it.

        Raises:
            RankError: Another rank failed or was lost.
        """
        try:
            yield
        except RuntimeError as error:
            cause = self._find_failure() if self._store is not None else None
            if cause is None:
                raise
            raise cause from error

    def report_failure(self, error: BaseException) -> None:
        """Leave an error for the other ranks, unless one has left its own."""
        if self._store is not None and not isinstance(error, RankError):
            # the rank that keeps the store may be gone, and with it whoever would read this
            with contextlib.suppress(dist.DistError):
                self._store.compare_set(_FAILURE, "", json.dumps([self.rank, _described(error)]))

    def _wait_for(self, key: str, awaited: int, limit_s: float) -> bytes:
        """Return the value of a key that rank `awaited` sets."""
        assert self._store is not None
        begun_s, pause_s, seen = time.monotonic(), 0.01, _Beats(self._store, [awaited])
        with self.explaining():
            while not self._store.check([key]):
                failure = self._read_failure()
                if failure is not None:
                    raise failure
                if seen.lost():
                    raise self._lost([awaited])
                if time.monotonic() - begun_s > limit_s:
                    raise RankError(
                        f"rank {awaited} of {self.size} did not answer within {limit_s:.0f} s", self.hint, self.rank
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            value: bytes = self._store.get(key)
        return value

    def _find_failure(self) -> RankError | None:
        """Return why communication failed: an error left by another rank, or ranks without heartbeat; None: neither."""
        assert self._store is not None
        others = [rank for rank in range(self.size) if rank != self.rank]
        seen = _Beats(self._store, others)
        try:
            while True:
                failure = self._read_failure()
                if failure is not None:
                    return failure
                lost = seen.lost()
                if lost:
                    return self._lost(lost)
                if seen.have_all_counted:
                    return None
                time.sleep(_BEAT_S)
        except dist.DistError:
            return self._lost([0])  # rank 0 keeps the store

    def _read_failure(self) -> RankError | None:
        assert self._store is not None
        if not self._store.check([_FAILURE]):
            return None
        rank, described = json.loads(self._store.get(_FAILURE))
        return None if rank == self.rank else _error_of(rank, described)

    def _lost(self, lost: list[int]) -> RankError:
        names = ", ".join(map(str, lost))
        which = (
            f"rank {names} of {self.size} has ended" if len(lost) == 1 else f"ranks {names} of {self.size} have ended"
        )
        first_left = min(set(range(self.size)) - set(lost))
        reason = "without reporting an error: killed, out of memory, or its node is gone"
        return RankError(f"{which} {reason}", self.hint, first_left)


ALONE = Ranks(Launch(), torch.device("cpu"))
"""One process, where the device does not matter."""


class _Beats:
    """Heartbeat counters of ranks, watched from construction on."""

    def __init__(self, store: Store, ranks: Sequence[int]) -> None:
        self._store, self._begun_s = store, time.monotonic()
        self._first = {rank: self._read(rank) for rank in ranks}
        self._waiting = dict.fromkeys(ranks, self._begun_s)

    def lost(self) -> list[int]:
        """Return the ranks whose counter has not changed for too long."""
        now_s = time.monotonic()
        for rank, count in self._first.items():
            latest = self._read(rank)
            if latest != count:
                self._first[rank], self._waiting[rank] = latest, now_s
        return [rank for rank, since_s in self._waiting.items() if now_s - since_s > _LOST_AFTER_S]

    @property
    def have_all_counted(self) -> bool:
        """Whether every counter has changed since construction."""
        return all(since_s > self._begun_s for since_s in self._waiting.values())

    def _read(self, rank: int) -> bytes:
        value: bytes = self._store.get(f"beat/{rank}")
        return value


class _Heart(threading.Thread):
    """Heartbeat of this rank: a thread that raises a counter in the store until `stop`."""

    def __init__(self, store: Store, rank: int) -> None:
        super().__init__(name="exlm-heart", daemon=True)
        self._store, self._key, self._ends = store, f"beat/{rank}", threading.Event()
        self._count = 0
        self._beat()

    def run(self) -> None:
        """Raise the counter until `stop`."""
        while not self._ends.wait(_BEAT_S):
            try:
                self._beat()
            except dist.DistError:
                return  # the store is gone, which the next message notices

    def stop(self) -> None:
        """End the heartbeat."""
        self._ends.set()
        self.join()

    def _beat(self) -> None:
        self._count += 1
        self._store.set(self._key, str(self._count))


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
    global _num_joins
    _num_joins += 1
    # a process may train several runs one after the other: each has keys of its own
    store, own = (PrefixStore(f"join-{_num_joins}", _meet(launch)) for _ in range(2))
    heart = _Heart(own, launch.rank)  # with its own connection: a wait of the main thread would block a shared one
    heart.start()
    ranks = Ranks(launch, device, store)
    try:
        ranks.wait_to_start()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("group", store),
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=LIMIT_S),
            device_id=device if device.type == "cuda" else None,
        )
        with ranks.explaining():
            yield ranks
            ranks.exchange(None)  # a barrier: the rank that keeps the store must not leave while others read it
    except BaseException as error:
        ranks.report_failure(error)
        if isinstance(error, ExlmError) and error.reporter is None:
            error.reporter = 0
        raise
    finally:
        heart.stop()
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(launch: Launch) -> Store:
    """Return the store that all ranks share; torchrun or rank 0 hosts it."""
    try:
        store: Store = next(rendezvous("env://", timeout=timedelta(seconds=MEET_LIMIT_S)))[0]
    except (dist.DistError, OSError, ValueError) as error:
        host, port = launch.master
        raise RankError(
            f"rank {launch.rank} of {launch.size} cannot connect to the other ranks at {host}:{port}: "
            f"{str(error).strip().splitlines()[0]}",
            "MASTER_ADDR is the node of rank 0, and MASTER_PORT a port that is free there and open to the other nodes",
            launch.rank,
        ) from error
    return store


def _described(error: BaseException) -> dict[str, Any]:
    """Return an error as other ranks report it; a fault is one line, as its own rank prints the traceback."""
    if isinstance(error, ExlmError):
        return {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    hint = "the traceback is in the output of that rank"
    return {"message": f"{type(error).__name__}: {reason}", "hint": hint, "exit_code": 2}


def _error_of(rank: int, described: dict[str, Any]) -> RankError:
    error = RankError(f"rank {rank}: {described['message']}", described["hint"], 0)
    error.exit_code = described["exit_code"]
    return error
