"""Atom-wise SMILES vocabulary (Schwaller et al. 2018, "Found in Translation"), without holes.

Frequent bracket atoms and ring closures are tokens; all others are spelled by pieces (`[`, `##1`, `##3`, `##C`, `##]`),
which are always in the vocabulary, so that no molecule has an [UNK].
"""

import re
from collections import Counter
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from exlm_cli.data.tokenizer import PIECE_PREFIX, SPECIAL_TOKENS, UNK, Tokenizer
from exlm_cli.progress import Progress

SMILES_PATTERN = (
    r"(\[[^\]]+]|<-|->|\%\([0-9]{1,5}\)|\%[0-9]{2}|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p"
    r"|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>|\*|\$|[0-9])"
)
"""The regular expression of Schwaller et al. 2018 with dative bonds and closures from 100 on.

Bracket atoms, two-letter halogens and %NN and %(NNN) closures stay whole.
"""

SMILES_TOKEN = re.compile(SMILES_PATTERN)
SMILES_TOKENS = re.compile(f"{SMILES_PATTERN}*")
"""Matches a whole text if it has nothing but SMILES tokens."""

ELEMENTS = (
    "H", "He", "Li", "Be", "B", "C", "N", "O", "F", "Ne", "Na", "Mg", "Al", "Si", "P", "S", "Cl", "Ar", "K", "Ca",
    "Sc", "Ti", "V", "Cr", "Mn", "Fe", "Co", "Ni", "Cu", "Zn", "Ga", "Ge", "As", "Se", "Br", "Kr", "Rb", "Sr", "Y",
    "Zr", "Nb", "Mo", "Tc", "Ru", "Rh", "Pd", "Ag", "Cd", "In", "Sn", "Sb", "Te", "I", "Xe", "Cs", "Ba", "La", "Ce",
    "Pr", "Nd", "Pm", "Sm", "Eu", "Gd", "Tb", "Dy", "Ho", "Er", "Tm", "Yb", "Lu", "Hf", "Ta", "W", "Re", "Os", "Ir",
    "Pt", "Au", "Hg", "Tl", "Pb", "Bi", "Po", "At", "Rn", "Fr", "Ra", "Ac", "Th", "Pa", "U", "Np", "Pu", "Am", "Cm",
    "Bk", "Cf", "Es", "Fm", "Md", "No", "Lr", "Rf", "Db", "Sg", "Bh", "Hs", "Mt", "Ds", "Rg", "Cn", "Nh", "Fl", "Mc",
    "Lv", "Ts", "Og",
)  # fmt: skip
_AROMATIC = ("b", "c", "n", "o", "p", "s", "si", "as", "se", "te")
_SYMBOLS = (*ELEMENTS, *_AROMATIC, "*")
_CHIRALITY = ("@", "@@", "@TH", "@AL", "@SP", "@TB", "@OH")
_DIGITS = tuple("0123456789")
# a piece that continues a token has the prefix: no `Hg` outside brackets is mercury
_ALPHABET = (
    *"BCNOSPFIbcnops*", "Br", "Cl", "<-", "->", *"().=#-+\\/:~@?>$", *_DIGITS, "[", "%",
    *(PIECE_PREFIX + piece for piece in (*_SYMBOLS, *_CHIRALITY, *_DIGITS, *"+-:#()]")),
)  # fmt: skip
_ATOM = (
    rf"\[[0-9]*(?:{'|'.join(map(re.escape, _SYMBOLS))})(?:@(?:@|(?:TH|AL|SP|TB|OH)[0-9]+)?)?(?:H[0-9]?)?"
    r"(?:\++|-+|[+-][0-9]+)?]"
)
_WHOLE = re.compile(rf"{_ATOM}|%[0-9]{{2}}|%\([0-9]+\)")
"""What is spelled unless it is frequent; an atom with a map number, which names no kind of atom, is always spelled."""

_MAX_TOKEN_CHARACTERS = 100


def train_smiles_vocabulary(rows: Iterable[str], vocab_size: int, min_frequency: int, progress: Progress) -> Tokenizer:
    """Make the vocabulary of SMILES: all that spells any molecule, and the bracket atoms and closures of these rows.

    The most frequent ones come first, equally frequent ones in alphabetical order. Those that occur fewer than
    `min_frequency` times, or do not fit into `vocab_size`, which counts special tokens and pieces, are spelled: by
    element, isotope digits, chirality, hydrogens and charge. The special tokens and pieces are there whatever the size.
    `rows` are read once and never held; those with characters that no SMILES has do not count.
    """
    counts: Counter[str] = Counter()
    for row in rows:
        found = _WHOLE.findall(row)
        if found and SMILES_TOKENS.fullmatch(row):
            counts.update(found)
    frequent = sorted((t for t in counts if counts[t] >= min_frequency), key=lambda t: (-counts[t], t))
    kept = frequent[: max(0, vocab_size - len(SPECIAL_TOKENS) - len(_ALPHABET))]
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *_ALPHABET, *kept))}
    model = models.WordPiece(
        vocabulary,
        unk_token=UNK,
        max_input_chars_per_word=_MAX_TOKEN_CHARACTERS,
        continuing_subword_prefix=PIECE_PREFIX,
    )
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(SMILES_PATTERN), "isolated")
    backend.decoder = decoders.Sequence([decoders.Replace(PIECE_PREFIX, ""), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    num_dropped = len(counts) - len(kept)
    dropped = f"; {num_dropped:,} rarer ones are spelled" if num_dropped else ""
    progress.message(
        f"a SMILES vocabulary of {len(vocabulary):,} tokens, {len(kept):,} of them whole bracket atoms or ring closures"
        f"{dropped}"
    )
    return Tokenizer(backend, "smiles")
