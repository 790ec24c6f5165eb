"""Steps of an epoch, from (seed, epoch) alone, and their batches: read, masked, cut into microbatches, expanded.

A plan has no state: a resumed run computes it again and jumps to its step. Orders are those of hashes of counters, as
masks are, so that they are the same with every version of NumPy. A step is cut into microbatches by length,
then by masks where their number is from a range, and each is made one ahead of the model.
"""

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import PAIRS_PER_POSITION
from exlm_cli.cost.counts import FlopCounter
from exlm_cli.data import IntArray
from exlm_cli.data.batch import Batch, DeviceBatch, expand
from exlm_cli.data.corpus.shards import TokenDataset
from exlm_cli.data.masking import ORDER_OF_SEQUENCES, ORDER_OF_STEPS, BitArray, Masker, Sequences, hash_words
from exlm_cli.data.tokenizer import Tokenizer

ItemT = TypeVar("ItemT")
BatchT = TypeVar("BatchT", bound=DeviceBatch)


EpochPlan = list[IntArray]
"""Indices of the samples of each step of an epoch."""


def plan_epoch(
    lengths: IntArray,
    *,
    seed: int,
    epoch: int,
    batch_sequences: int | None,
    batch_tokens: int | None,
    bucket_steps: int,
) -> EpochPlan:
    """Shuffle one epoch and cut it into steps, each of sequences of similar length.

    Sequences go to windows of about `bucket_steps` steps at random, are sorted by length there (which saves padding)
    and cut into steps, and the steps of a window are shuffled. Every epoch has the same number of steps: the lengths
    alone decide it.

    Args:
        lengths: (N,) input tokens of each sequence, with [CLS] and [SEP].
        epoch: Counted from 0.
        batch_sequences: Sequences of a step, or None; the last step of an epoch may be smaller.
        batch_tokens: Maximum of input tokens of a step, if `batch_sequences` is None; at least the longest length. The
            steps have about equal numbers of tokens.
        bucket_steps: Steps sorted together; 1 sorts none.
    """
    bits = hash_words(seed, epoch, ORDER_OF_SEQUENCES, np.arange(len(lengths)))
    if batch_sequences is None:
        assert batch_tokens is not None
        return _plan_tokens(lengths, bits, seed, epoch, batch_tokens, bucket_steps)
    order: IntArray = np.argsort(bits)
    if bucket_steps == 1:
        return _split(order, batch_sequences)
    window = batch_sequences * bucket_steps
    plan: EpochPlan = []
    for start in range(0, len(order), window):
        in_window = order[start : start + window]
        steps = _split(in_window[np.argsort(lengths[in_window], kind="stable")], batch_sequences)
        # The last window's remainder stays last: a small step in the middle of an epoch would be a surprise.
        movable = len(steps) - 1 if start + window >= len(order) else len(steps)
        plan += (steps[i] for i in np.argsort(hash_words(seed, epoch, ORDER_OF_STEPS, start, np.arange(movable))))
        plan += steps[movable:]
    return plan


def _split(order: IntArray, batch_sequences: int) -> EpochPlan:
    return [order[start : start + batch_sequences] for start in range(0, len(order), batch_sequences)]


def _plan_tokens(
    lengths: IntArray, bits: BitArray, seed: int, epoch: int, batch_tokens: int, bucket_steps: int
) -> EpochPlan:
    """Return the steps of an epoch with at most `batch_tokens` each.

    Windows of sequences drawn freely would differ in tokens, and so epochs in steps. Here W windows are drawn alike:
    the sequences in order of length are cut into strata of W neighbours, and each window gets one of each stratum, at
    random. What fits the longest of each stratum fits every window of every epoch, so all windows are cut at the same
    strata; their sums of tokens differ by less than one longest sequence, whatever W is.

    Args:
        bits: (N,) random bits of each sequence, which decide its window.
    """
    order = np.argsort(bits)
    by_length = order[np.argsort(lengths[order], kind="stable")]
    num_windows, bounds = _cut_windows(lengths[by_length], batch_tokens, bucket_steps)
    # the stratum of the shortest may lack some
    strata = np.concatenate([np.full(-len(lengths) % num_windows, -1), by_length]).reshape(-1, num_windows)
    drawn = np.argsort(bits[strata], axis=1, kind="stable")
    windows = np.ascontiguousarray(np.take_along_axis(strata, drawn, axis=1).T)
    number, step = np.arange(num_windows)[:, None], np.arange(len(bounds) - 1)
    shuffled = np.argsort(hash_words(seed, epoch, ORDER_OF_STEPS, number, step), axis=1)
    steps = (
        window[bounds[i] : bounds[i + 1]]
        for window, in_order in zip(windows, shuffled.tolist(), strict=True)
        for i in in_order
    )
    return [kept for indices in steps if len(kept := indices[indices >= 0])]


def _cut_windows(ascending: IntArray, batch_tokens: int, bucket_steps: int) -> tuple[int, IntArray]:
    """Return the least number of windows that have at most `bucket_steps` steps, and at which strata their steps begin.

    Args:
        ascending: (N,) lengths in order.
    """

    def cut(num_windows: int) -> IntArray:
        return _cut_evenly(ascending[::-num_windows][::-1], batch_tokens)

    least = max(1, int(ascending.sum()) // (batch_tokens * bucket_steps))
    numbers = range(least, max(least, len(ascending)) + 1)
    num_windows = numbers[bisect.bisect_left(numbers, True, key=lambda number: len(cut(number)) - 1 <= bucket_steps)]
    return num_windows, cut(num_windows)


def cut_microbatches(
    lengths: IntArray, microbatch_tokens: int, num_nodes: IntArray | None = None
) -> Iterator[IntArray]:
    """Split a step into microbatches of at most `microbatch_tokens` positions, padding counted.

    Each gets sequences of one length, unless that makes over twice as many microbatches. Sequences of one length are
    ordered by the size of their DAGs, so that few masks go with few, and a microbatch of B sequences is cut again where
    its B * S^2 pairs of nodes, padded to S nodes, are more than `PAIRS_PER_POSITION * microbatch_tokens`.

    Args:
        lengths: (n,) positions of the sequences of the step.
        microbatch_tokens: Most positions of a microbatch; a longer sequence is a microbatch of its own.
        num_nodes: (n,) nodes of their DAGs; None: they need no bound.

    Yields:
        Places in `lengths`, from the shortest sequences to the longest.
    """
    by_length = np.argsort(lengths, kind="stable") if num_nodes is None else np.lexsort((num_nodes, lengths))
    ordered = lengths[by_length]
    bounds = _fill(ordered, 0, len(ordered), microbatch_tokens)
    edges = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1, [len(ordered)]]).tolist()
    if len(edges) - 1 <= 2 * len(bounds):
        groups = [_fill(ordered, start, stop, microbatch_tokens) for start, stop in itertools.pairwise(edges)]
        alike = list(itertools.chain(*groups))
        bounds = alike if len(alike) <= 2 * len(bounds) else bounds
    for start, stop in bounds:
        part = by_length[start:stop]
        if num_nodes is None:
            yield part
            continue
        part = part[np.argsort(num_nodes[part], kind="stable")]
        for few, many in _fill(num_nodes[part] ** 2, 0, len(part), PAIRS_PER_POSITION * microbatch_tokens):
            yield part[few:many]


def prefetch(items: Iterable[ItemT]) -> Iterator[ItemT]:
    """Return an iterator that makes each item in a thread, one ahead of its use; it starts on the first one at once.

    One thread per item keeps the order, copies nothing between processes and leaves nothing behind if the iterator is
    dropped. If making an item fails, its exception is raised in place of the item.
    """
    iterator = iter(items)
    return _deliver(iterator, _start(iterator))


def prefetch_to(device: torch.device, batches: Iterable[BatchT]) -> Iterator[BatchT]:
    """Return batches on a device, made as `prefetch` does; they go to CUDA from page-locked memory."""
    made = prefetch(batch.pin_memory() if device.type == "cuda" else batch for batch in batches)
    return (batch.to(device) for batch in made)


def _deliver(items: Iterator[ItemT], ahead: Future[ItemT | None]) -> Iterator[ItemT]:
    while (ready := ahead.result()) is not None:
        ahead = _start(items)
        yield ready


def _start(items: Iterator[ItemT]) -> Future[ItemT | None]:
    return in_background(lambda: next(items, None))


def in_background(work: Callable[[], ItemT]) -> Future[ItemT]:
    """Do work in a thread of its own, and return its result to come."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exlm-prefetch")
    future = executor.submit(work)
    executor.shutdown(wait=False)  # frees the thread when the work is done
    return future


def _fill(ordered: IntArray, start: int, stop: int, microbatch_tokens: int) -> list[tuple[int, int]]:
    """Return where microbatches of ascending lengths begin and end, as few as fit."""
    bounds = []
    while start < stop:
        # ascending lengths: the last sequence decides the padded size, and none is shorter than the first
        longer = ordered[start : min(stop, start + microbatch_tokens // int(ordered[start]))]
        sizes = longer * np.arange(1, len(longer) + 1)
        end = start + max(1, int(np.searchsorted(sizes, microbatch_tokens, side="right")))
        bounds.append((start, end))
        start = end
    return bounds


def _cut_evenly(lengths: IntArray, batch_tokens: int) -> IntArray:
    """Return step bounds over a window, about equal in tokens: no small step of the longest sequences remains."""
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    for num_steps in range(-(-total // batch_tokens), len(lengths) + 1):
        inner = np.searchsorted(ends, total * np.arange(1, num_steps) / num_steps, side="right")
        bounds = np.unique(np.concatenate([[0], inner, [len(lengths)]])).astype(np.int64)
        if (np.add.reduceat(lengths, bounds[:-1]) <= batch_tokens).all():
            return bounds
    raise AssertionError("a step holds the longest sequence")


_BLOCK_TOKENS = 1 << 15
"""Tokens whose masks are counted together, 256 KiB a temporary: blocks beyond the cache take five times as long."""


@dataclass(frozen=True)
class Feed:
    """Batches of sequences of a data set; they depend on the indices of the sequences and on the epoch alone.

    Attributes:
        recipe: Its masking, seed and objective apply.
        epoch: Selects the masks.
        flops: Counts those of each batch; None: they are not counted.
        at: A number of masks or a mask ratio, as of `Masker`; None: as `masking` of the recipe says.
    """

    dataset: TokenDataset
    recipe: PretrainRecipe
    tokenizer: Tokenizer
    epoch: int
    flops: FlopCounter | None = None
    at: float | None = None

    def microbatches(self, indices: IntArray, device: torch.device) -> Iterator[Batch]:
        """Return the batches of one step, of (n,) sequences, on a device; start preparing the first one now."""
        return prefetch_to(device, self._make(indices))

    def count_microbatches(self, indices: IntArray) -> int:
        """Return how many batches `microbatches` gives."""
        return sum(1 for _ in self._cut(indices))

    def sizes(self, indices: IntArray) -> tuple[IntArray, IntArray | None]:
        """Return the (n,) positions of sequences in the encoder and nodes of their DAGs, as in their batches.

        None for the nodes where the length of a sequence decides them, or there is no DAG.
        """
        masking = self.recipe.masking
        lengths: IntArray = self.dataset.lengths[indices] * masking.num_repeats + 2
        is_one_ratio = self.at is None and not isinstance(masking.mask_ratio, tuple)
        varies = self.recipe.has_transitions and not is_one_ratio
        expands = self.recipe.expands_input and masking.num_states_per_mask > 1
        if not varies and not expands:
            return lengths, None
        num_masks = np.empty_like(lengths)
        per_block = max(1, _BLOCK_TOKENS // int(lengths.max(initial=1)))
        for start in range(0, len(indices), per_block):
            block = slice(start, start + per_block)
            num_masks[block] = self._masker.count(self._read(indices[block]))
        if expands:
            lengths = lengths + (masking.num_states_per_mask - 1) * num_masks
        return lengths, masking.num_states_per_mask * num_masks + 2 if varies else None

    def batch(self, indices: IntArray) -> Batch:
        """Return one batch of (B,) sequences, on the CPU."""
        masked = self._masker.mask(self._read(indices))
        recipe = self.recipe
        batch = expand(
            masked,
            recipe.masking.num_states_per_mask,
            expands_input=recipe.expands_input,
            pad_id=self.tokenizer.pad_id,
        )
        if self.flops is None:
            return batch
        return replace(batch, flops=self.flops.count(batch.lengths.tolist(), batch.target_lengths.tolist()))

    @property
    def _masker(self) -> Masker:
        return Masker(self.recipe.masking, self.tokenizer, self.recipe.seed, self.epoch, self.at)

    def _read(self, indices: IntArray) -> Sequences:
        return Sequences(*self.dataset.read(indices, self.tokenizer.pad_id), indices)

    def _make(self, indices: IntArray) -> Iterator[Batch]:
        for part in self._cut(indices):
            yield self.batch(indices[part])

    def _cut(self, indices: IntArray) -> Iterator[IntArray]:
        lengths, num_nodes = self.sizes(indices)
        return cut_microbatches(lengths, self.recipe.train.microbatch_tokens, num_nodes)
