"""Byte-level BPE for running text: every byte has a token, so nothing is unknown and decoding gives the text back."""

from collections.abc import Iterable

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from exlm_cli.data.tokenizer import MASK, SPECIAL_TOKENS, Tokenizer
from exlm_cli.errors import TokenizerError
from exlm_cli.progress import Progress

SMALLEST_BPE_VOCABULARY = 256 + len(SPECIAL_TOKENS)
"""The 256 bytes and the special tokens."""


def train_bpe(rows: Iterable[str], vocab_size: int, min_frequency: int, progress: Progress) -> Tokenizer:
    """Train a GPT-2-style byte-level BPE; a word in the middle of a sentence carries the blank before it.

    Args:
        rows: Texts to learn from; read once, never held.
        vocab_size: Tokens, the five special ones included; fewer come out where the text has fewer pairs.
        min_frequency: How often a pair must occur to be merged.
        progress: Told when the merges begin, which takes a while after the last row.

    Raises:
        TokenizerError: `vocab_size` does not hold all bytes and the special tokens.
    """
    if vocab_size < SMALLEST_BPE_VOCABULARY:
        raise TokenizerError(
            f"`tokenizer.vocab_size` {vocab_size} is too small for byte-level BPE: 256 bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens need at least {SMALLEST_BPE_VOCABULARY}",
            f"give `--set tokenizer.vocab_size={SMALLEST_BPE_VOCABULARY}` or more",
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        # `lstrip` says for other programs what `Tokenizer.encode_with_masks` does here
        special_tokens=[AddedToken(t, special=True, normalized=False, lstrip=t == MASK) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(rows, trainer)
    tokenizer = Tokenizer(backend)
    progress.message(f"trained a byte-level BPE of {tokenizer.vocab_size:,} tokens")
    return tokenizer
