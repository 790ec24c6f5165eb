"""Preparation of the next batch while the model works on the current one."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

ItemT = TypeVar("ItemT")
BatchT = TypeVar("BatchT")


def prefetch(make: Callable[[ItemT], BatchT], items: Iterable[ItemT]) -> Iterator[BatchT]:
    """Return an iterator over `make(item)`, in order, one batch ahead; the first batch starts at once.

    One thread per batch keeps the order, copies nothing between processes and leaves nothing behind if the iterator is
    dropped. `make` must depend on its item alone. An exception in `make` is raised in place of its batch.
    """
    iterator = iter(items)
    for first in iterator:
        return _deliver(make, iterator, _start(make, first))
    return iter(())


def _deliver(make: Callable[[ItemT], BatchT], items: Iterator[ItemT], ahead: Future[BatchT]) -> Iterator[BatchT]:
    for item in items:
        ready, ahead = ahead.result(), _start(make, item)
        yield ready
    yield ahead.result()


def _start(make: Callable[[ItemT], BatchT], item: ItemT) -> Future[BatchT]:
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exlm-prefetch")
    future = executor.submit(make, item)
    executor.shutdown(wait=False)  # frees the thread when this batch is done
    return future
