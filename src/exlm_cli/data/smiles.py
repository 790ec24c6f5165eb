r"""Atom-wise SMILES vocabulary (Schwaller et al. 2018, "Found in Translation"), and the check of SMILES strings."""

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

_TOKEN = re.compile(SMILES_PATTERN)
_COVERED = re.compile(f"{SMILES_PATTERN}*")


def train_smiles_vocabulary(rows: Iterable[str], vocab_size: int, min_frequency: int, progress: Progress) -> Tokenizer:
    """Collect the atom-wise tokens of SMILES, the most frequent first, equally frequent ones in alphabetical order.

    `rows` are read once and never held. Tokens that occur less than `min_frequency` times, or for which `vocab_size`,
    special tokens included, has no room, become [UNK].
    """
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(_TOKEN.findall(row))
    for token in SPECIAL_TOKENS:
        counts.pop(token, None)
    frequent = sorted((t for t in counts if counts[t] >= min_frequency), key=lambda t: (-counts[t], t))
    kept = frequent[: vocab_size - len(SPECIAL_TOKENS)]
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *kept))}
    backend = Backend(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(SMILES_PATTERN), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    num_dropped = len(counts) - len(kept)
    dropped = f"; {num_dropped:,} rarer ones become {UNK}" if num_dropped else ""
    progress.message(f"collected {len(vocabulary):,} SMILES tokens{dropped}")
    return Tokenizer(backend)


def find_invalid_smiles(row: str) -> str | None:
    """Return why a row is not a usable SMILES, or None if it is one.

    The reason names the characters that the regular expression does not cover and their positions (counted from 1), or
    RDKit's objection. RDKit's own log stays silent.
    """
    unreadable = find_unknown_characters(row)
    if unreadable is not None:
        return unreadable
    from rdkit import Chem, rdBase

    with rdBase.BlockLogs():
        if Chem.MolFromSmiles(row) is not None:
            return None
        unchecked = Chem.MolFromSmiles(row, sanitize=False)
        if unchecked is None:
            return "RDKit cannot parse it: it breaks the SMILES grammar"
        problems = Chem.DetectChemistryProblems(unchecked)
    reasons = "; ".join(problem.Message() for problem in problems) or "no reason given"
    return f"RDKit refuses it: {reasons}"


def find_unknown_characters(row: str) -> str | None:
    """Return that a row is empty, or which of its characters no token covers; None if tokens cover all of it."""
    if not row:
        return "is empty"
    if _COVERED.fullmatch(row):
        return None
    # "C" is a token, so every other character that is left is part of none
    rest = _TOKEN.sub(lambda token: "C" * len(token[0]), row)
    unknown = [character for character in dict.fromkeys(rest) if character != "C"]
    named = ", ".join(f"{character!r} at position {rest.index(character) + 1}" for character in unknown)
    return f"characters that are no SMILES tokens: {named}"
