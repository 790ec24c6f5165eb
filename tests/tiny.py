"""A recipe small enough for tests, batches made of made-up tokens, and what tests read of either."""

from collections.abc import Iterable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data import IntArray
from exlm_cli.data.batch import Batch, MaskedSequences, expand
from exlm_cli.data.masking import Masker, Sequences
from exlm_cli.data.smiles import SMILES_PATTERN
from exlm_cli.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from exlm_cli.run_dir import read_metrics

_VOCABULARY = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *map(str, range(5, 40))))}
SPECIAL = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(_VOCABULARY, unk_token="[UNK]")), "smiles")
"""A vocabulary of 40 with the special tokens at ids 0 to 4."""

CHAIN: dict[str, Any] = {"rope": "1d", "alignment": "chain", "chain": {"num_classes": 5, "starts_at": 0.5}}
"""`model` of `tiny_recipe` whose DAG is a chain, from the fourth of its six steps on."""


def word_level(tokens: Iterable[str]) -> Tokenizer:
    """Return a SMILES tokenizer that has these tokens and no others, so that rows have unknown ones."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *tokens))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(SMILES_PATTERN), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend, "smiles")


def tiny_recipe(**sections: Any) -> PretrainRecipe:
    """Return a two-layer recipe; keyword arguments replace top-level values or update sections."""
    content: dict[str, Any] = {
        "name": "tiny",
        "objective": "exlm",
        "device": "cpu",  # what is asserted of it, bit by bit, holds there
        "data": {"kind": "text", "train": ["bundled:grammar"], "sequence_length": 16, "sample_break": "line"},
        "tokenizer": {"vocab_size": 300},
        "masking": {"mask_ratio": 0.3, "num_states_per_mask": 3},
        "model": {"num_layers": 2, "num_heads": 2, "width": 16, "ffn_width": 32, "max_length": 64},
        "optim": {"lr": 1e-3, "warmup_steps": 2},
        "train": {"max_steps": 6, "batch_sequences": 8, "microbatch_tokens": 256},
    }
    for key, value in sections.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) and key in content else value
    if content["objective"] == "mlm":
        content["masking"] = {**content["masking"], "num_states_per_mask": 1}
    return PretrainRecipe.model_validate(content)


def tiny_batch(recipe: PretrainRecipe, lengths: tuple[int, ...] = (9, 4, 12), seed: int = 0) -> Batch:
    """Return a masked and expanded batch of random tokens, one sequence for each length."""
    rng = np.random.default_rng(seed)
    masker = Masker(recipe.masking, SPECIAL, seed, epoch=0)
    masked = masker.mask(sequences([rng.integers(5, SPECIAL.vocab_size, size=length) for length in lengths]))
    return expand(masked, recipe.masking.num_states_per_mask, expands_input=recipe.expands_input, pad_id=SPECIAL.pad_id)


def per_sequence(batch: Batch) -> tuple[Field[Any], ...]:
    """Return the fields of a batch that have an axis of sequences."""
    return tuple(field for field in fields(batch)[:10] if getattr(batch, field.name) is not None)


def train_losses(run: Path) -> list[float]:
    """Return the losses of a run's training steps, as far as they were logged."""
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]


def sequences(rows: Iterable[npt.ArrayLike], sample_index: Sequence[int] | None = None) -> Sequences:
    """Return rows of tokens without [CLS] and [SEP] as a data set reads them; indices 0, 1, ... if none are given."""
    padded, lengths = _padded(rows)
    return Sequences(padded, lengths, np.arange(len(lengths)) if sample_index is None else np.array(sample_index))


def masked_by_hand(
    rows: Iterable[npt.ArrayLike], targets: Iterable[int], mask_id: int = SPECIAL.mask_id
) -> MaskedSequences:
    """Return rows of tokens with [CLS], [SEP] and [MASK] as masked sequences with these targets, none repeated."""
    padded, lengths = _padded(rows)
    is_masked = padded == mask_id
    target_ids: IntArray = np.array(list(targets), dtype=np.int64)
    return MaskedSequences(padded, lengths, is_masked, target_ids, is_masked.nonzero()[1], np.arange(len(lengths)))


def _padded(rows: Iterable[npt.ArrayLike]) -> tuple[IntArray, IntArray]:
    arrays = [np.asarray(row, dtype=np.int64) for row in rows]
    padded = np.full((len(arrays), max(map(len, arrays))), SPECIAL.pad_id, dtype=np.int64)
    for to, row in zip(padded, arrays, strict=True):
        to[: len(row)] = row
    return padded, np.array([len(row) for row in arrays])
