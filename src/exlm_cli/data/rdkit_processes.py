"""RDKit in a process per core, results in order; a row that hangs or crashes its process gets an error as result.

RDKit holds the interpreter's lock, so every core gets a process. The first rows are answered in the main process: up to
4,096, while none is over 500 characters or has over 10 dummy atoms.
"""

import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import TypeVar

import loky

from exlm_cli.processes import start_processes
from exlm_cli.progress import Progress

MAX_SECONDS = 20
"""Processor time that a row may take."""

SLOW_CHUNK_ROWS = 64
"""Texts of a chunk where each takes about 10 ms."""
_CHUNK_ROWS = 1024
_CHUNKS_BEFORE_HELP = 4
"""Starting processes costs as much as the work on this many chunks."""
_SHORT_CHARACTERS = 500
"""Longer texts go to a worker process, which RDKit may crash."""
_FEW_DUMMY_ATOMS = 10
"""Texts with more go there too: at n aromatic dummy atoms RDKit tries 2^n ways to place double bonds."""
_MAX_PROCESSES = 32
_BAR_EVERY_ROWS = 64

_Answer = TypeVar("_Answer")


def map_in_order(
    function: Callable[[str], _Answer],
    texts: Iterable[str],
    on_crash: Callable[[str], _Answer],
    *,
    chunk_rows: int | None = None,
) -> Iterator[_Answer]:
    """Yield what a function of RDKit returns for each text, in order.

    Args:
        function: Must be picklable.
        texts: The first ones, if quick, are processed here; the rest in worker processes.
        on_crash: Reason -> answer for a text on which the function takes over 20 s of processor time, or crashes its
            process.
        chunk_rows: Texts that a worker gets at a time, and a quarter of those that are processed here at most; None:
            1,024. Fewer pay off where each takes long.
    """
    chunk_rows = _CHUNK_ROWS if chunk_rows is None else chunk_rows
    source = iter(texts)
    for text in islice(source, _CHUNKS_BEFORE_HELP * chunk_rows):
        if len(text) > _SHORT_CHARACTERS or text.count("*") + text.count("#0") > _FEW_DUMMY_ATOMS:
            source = chain([text], source)
            break
        yield function(text)
    chunks = iter(lambda: list(islice(source, chunk_rows)), [])
    num_processes = min(_MAX_PROCESSES, loky.cpu_count())
    while (chunk := next(chunks, None)) is not None:
        left = yield from _run_until_worker_dies(function, chain([chunk], chunks), num_processes)
        yield from _one_by_one(function, chain.from_iterable(left), on_crash)


def behind_bar(answers: Iterable[_Answer], label: str, total: int, progress: Progress) -> Iterator[_Answer]:
    """Yield answers while a bar shows how many of them there are."""
    with progress.bar(label, total) as bar:
        for number, answer in enumerate(answers, start=1):
            yield answer
            if number % _BAR_EVERY_ROWS == 0:
                bar.update(number)
        bar.update(total)


def _run_until_worker_dies(
    function: Callable[[str], _Answer], chunks: Iterable[list[str]], num_processes: int
) -> Generator[_Answer, None, list[list[str]]]:
    """Yield answers until a worker dies; return the submitted chunks that have no answers yet."""
    begun: deque[list[str]] = deque()
    futures: deque[Future[list[_Answer]]] = deque()
    with start_processes(num_processes) as executor:
        try:
            for chunk in chunks:
                begun.append(chunk)
                futures.append(executor.submit(_answer, function, chunk))
                if len(begun) == 2 * num_processes:
                    yield from futures.popleft().result()
                    begun.popleft()
            while begun:
                yield from futures.popleft().result()
                begun.popleft()
        except BrokenProcessPool:
            return list(begun)
    return []


def _one_by_one(
    function: Callable[[str], _Answer], texts: Iterable[str], on_crash: Callable[[str], _Answer]
) -> Iterator[_Answer]:
    """Yield answers with one text at a time in a worker, to find the text that kills it."""
    left = deque(texts)
    while left:
        with start_processes(1) as executor:
            try:
                while left:
                    yield from executor.submit(_answer, function, [left[0]]).result()
                    left.popleft()
            except BrokenProcessPool:
                left.popleft()
                yield on_crash(f"RDKit needs over {MAX_SECONDS} s for it, or crashes")


def _answer(function: Callable[[str], _Answer], texts: Sequence[str]) -> list[_Answer]:
    answers = []
    for text in texts:
        # the signal kills the process when the time is over: Python handles no signals while RDKit runs
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        answers.append(function(text))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return answers
