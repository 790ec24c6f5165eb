"""Batches of a step: sequences read, masked, cut into microbatches and expanded, one microbatch ahead of the model."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data import IntArray
from exlm_cli.data.batch import Batch, expand
from exlm_cli.data.corpus.shards import TokenDataset
from exlm_cli.data.masking import Masker, Sequences, SpecialTokens
from exlm_cli.data.sampler import cut_microbatches, prefetch

_BLOCK_TOKENS = 1 << 15
"""Tokens whose masks are counted together, 256 KiB a temporary: blocks beyond the cache take five times as long."""


@dataclass(frozen=True)
class Feed:
    """Batches of sequences of a data set; they depend on the indices of the sequences and on the epoch alone.

    Attributes:
        dataset: Where the sequences are.
        recipe: Its masking, seed and objective apply.
        special: Special tokens of the vocabulary.
        epoch: Selects the masks.
    """

    dataset: TokenDataset
    recipe: PretrainRecipe
    special: SpecialTokens
    epoch: int

    def microbatches(self, indices: IntArray, device: torch.device) -> Iterator[Batch]:
        """Return the batches of one step on a device; start preparing the first one now.

        Args:
            indices: (n,) sequences of the step.
            device: Where batches go, from page-locked memory to CUDA.
        """
        is_pinned = device.type == "cuda"
        made = prefetch(batch.pin_memory() if is_pinned else batch for batch in self._make(indices))
        return (batch.to(device) for batch in made)

    def expanded_lengths(self, indices: IntArray) -> IntArray:
        """Return the (n,) positions of sequences after repetition and expansion, as their batches will have them."""
        masking = self.recipe.masking
        lengths: IntArray = self.dataset.lengths[indices] * masking.num_repeats + 2
        per_block = max(1, _BLOCK_TOKENS // int(lengths.max(initial=1)))
        for start in range(0, len(indices), per_block):
            block = slice(start, start + per_block)
            lengths[block] += (masking.num_states_per_mask - 1) * self._masker.count(self._read(indices[block]))
        return lengths

    def batch(self, indices: IntArray) -> Batch:
        """Return one batch of (B,) sequences, on the CPU."""
        masked = self._masker.mask(self._read(indices))
        recipe = self.recipe
        return expand(masked, recipe.masking.num_states_per_mask, recipe.objective, pad_id=self.special.pad)

    @property
    def _masker(self) -> Masker:
        return Masker(self.recipe.masking, self.special, self.recipe.seed, self.epoch)

    def _read(self, indices: IntArray) -> Sequences:
        return Sequences(*self.dataset.read(indices, self.special.pad), indices)

    def _make(self, indices: IntArray) -> Iterator[Batch]:
        lengths = self.expanded_lengths(indices)
        for part in cut_microbatches(lengths, self.recipe.train.microbatch_tokens):
            yield self.batch(indices[part])
