"""Atom-wise SMILES vocabulary (Schwaller et al. 2018, "Found in Translation")."""

import re
from collections import Counter
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from exlm_cli.data.tokenizer import SPECIAL_TOKENS, UNK, Tokenizer
from exlm_cli.progress import Progress

SMILES_PATTERN = (
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>|\*|\$|\%[0-9]{2}|[0-9])"
)
"""The regular expression of Schwaller et al. 2018: bracket atoms, two-letter halogens and %NN closures stay whole."""

SMILES_TOKEN = re.compile(SMILES_PATTERN)
SMILES_TOKENS = re.compile(f"{SMILES_PATTERN}*")
"""Matches a whole text if it has nothing but SMILES tokens."""


def train_smiles_vocabulary(rows: Iterable[str], vocab_size: int, min_frequency: int, progress: Progress) -> Tokenizer:
    """Collect the atom-wise tokens of SMILES, the most frequent first, equally frequent ones in alphabetical order.

    `rows` are read once and never held; those with characters that no SMILES has do not count. Tokens that occur fewer
    than `min_frequency` times, or do not fit into `vocab_size`, which counts special tokens, become [UNK].
    """
    counts: Counter[str] = Counter()
    for row in rows:
        if SMILES_TOKENS.fullmatch(row):
            counts.update(SMILES_TOKEN.findall(row))
    for token in SPECIAL_TOKENS:
        counts.pop(token, None)
    frequent = sorted((t for t in counts if counts[t] >= min_frequency), key=lambda t: (-counts[t], t))
    kept = frequent[: max(0, vocab_size - len(SPECIAL_TOKENS))]
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *kept))}
    backend = Backend(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(SMILES_PATTERN), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    num_dropped = len(counts) - len(kept)
    dropped = f"; {num_dropped:,} rarer ones become {UNK}" if num_dropped else ""
    progress.message(f"collected {len(kept):,} SMILES tokens{dropped}")
    return Tokenizer(backend)
