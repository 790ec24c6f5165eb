"""Makes the next batch while the model works on this one."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

ItemT = TypeVar("ItemT")
BatchT = TypeVar("BatchT")


def prefetch(make: Callable[[ItemT], BatchT], items: Iterable[ItemT]) -> Iterator[BatchT]:
    """Return `make(item)` in order, one ahead; the first one is begun now, whenever it is asked for.

    A thread a batch keeps the order, needs no copies between processes and leaves nothing behind where the rest is not
    asked for; `make` must depend on its item alone. An exception in `make` is raised where its batch would have come.
    """
    iterator = iter(items)
    for first in iterator:
        return _deliver(make, iterator, _begin(make, first))
    return iter(())


def _deliver(make: Callable[[ItemT], BatchT], items: Iterator[ItemT], ahead: Future[BatchT]) -> Iterator[BatchT]:
    for item in items:
        ready, ahead = ahead.result(), _begin(make, item)
        yield ready
    yield ahead.result()


def _begin(make: Callable[[ItemT], BatchT], item: ItemT) -> Future[BatchT]:
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exlm-prefetch")
    future = executor.submit(make, item)
    executor.shutdown(wait=False)  # of its thread, when this batch is done
    return future
