"""Training of byte-level BPE for text: every byte has a token, so nothing is unknown and decoding is exact."""

from collections.abc import Iterable

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from exlm_cli.data.tokenizer import MASK, SPECIAL_TOKENS, Tokenizer
from exlm_cli.errors import TokenizerError
from exlm_cli.progress import Progress

MIN_BPE_VOCABULARY = 256 + len(SPECIAL_TOKENS)
"""The 256 bytes and the special tokens."""


def train_bpe(rows: Iterable[str], vocab_size: int, min_frequency: int, progress: Progress) -> Tokenizer:
    """Train a GPT-2-style byte-level BPE; the blank before a word belongs to the word.

    `rows` are read once and never held. `vocab_size` counts the five special tokens; a text with fewer pairs of
    `min_frequency` occurrences gives fewer tokens.

    Raises:
        TokenizerError: `vocab_size` does not hold all bytes and the special tokens.
    """
    if vocab_size < MIN_BPE_VOCABULARY:
        raise TokenizerError(
            f"`tokenizer.vocab_size` {vocab_size} is too small for byte-level BPE: 256 bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens need at least {MIN_BPE_VOCABULARY}",
            f"give `tokenizer.vocab_size={MIN_BPE_VOCABULARY}` or more",
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        # other programs read from `lstrip` what `Tokenizer.encode_with_masks` does here
        special_tokens=[AddedToken(t, special=True, normalized=False, lstrip=t == MASK) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(rows, trainer)
    tokenizer = Tokenizer(backend)
    progress.message(f"trained a byte-level BPE of {tokenizer.vocab_size:,} tokens")
    return tokenizer
