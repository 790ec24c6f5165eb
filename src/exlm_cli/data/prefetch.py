"""Makes the next batch while the model works on this one."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ItemT = TypeVar("ItemT")
BatchT = TypeVar("BatchT")


def prefetch(make: Callable[[ItemT], BatchT], items: Iterable[ItemT]) -> Iterator[BatchT]:
    """Yield `make(item)` in order, one ahead, made by a single thread.

    One thread keeps the order and needs no copies between processes; `make` must depend on its item alone. An
    exception in `make` is raised where its batch would have come.
    """
    iterator = iter(items)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="exlm-prefetch") as executor:
        try:
            ahead = executor.submit(make, next(iterator))
        except StopIteration:
            return
        for item in iterator:
            ready, ahead = ahead, executor.submit(make, item)
            yield ready.result()
        yield ahead.result()
