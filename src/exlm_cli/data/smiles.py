r"""Atom-wise SMILES vocabulary (Schwaller et al. 2018, "Found in Translation"), and the check of SMILES strings."""

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from exlm_cli.data.tokenizer import SPECIAL_TOKENS, UNK, Tokenizer
from exlm_cli.format import shorten
from exlm_cli.progress import Progress

if TYPE_CHECKING:
    from rdkit.Chem import Mol

SMILES_PATTERN = (
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>|\*|\$|\%[0-9]{2}|[0-9])"
)
"""The regular expression of Schwaller et al. 2018: bracket atoms, two-letter halogens and %NN closures stay whole."""

_MAX_NAMED = 12
_SHOWN_CHARACTERS = 40

MAX_ATOMS = 1000
"""Atoms of the largest molecule that is read; RDKit's time for a scaffold grows with their cube."""

RDKIT_ERRORS = (RuntimeError, ValueError)
"""What RDKit raises where it neither reads nor refuses a molecule."""

_NON_METALS = {
    "H", "B", "C", "N", "O", "F", "Si", "P", "S", "Cl", "Ge", "As", "Se", "Br", "Te", "I", "He", "Ne", "Ar", "Kr", "Xe",
}  # fmt: skip
_TOKEN = re.compile(SMILES_PATTERN)
_COVERED = re.compile(f"{SMILES_PATTERN}*")
_ATOM = re.compile(r"\[[^\]]+]|Br?|Cl?|[NOSPFIbcnops*]")
_BRACKET_ATOM = re.compile(r"\[[^\]]+]")
_LARGE_NUMBER = re.compile(r"\[\d{4}|H\d\d|[+-]\d\d|#\d{3}")
# RDKit takes larger numbers modulo 256 or 65,536. `@TH1` and `@OH12` are chirality, not hydrogens.
_NUMBERS_OF_ATOM = (
    ("an isotope", re.compile(r"\[(\d+)"), 999),
    ("a number of hydrogens", re.compile(r"(?<!@[TO])H(\d+)"), 9),
    ("a charge", re.compile(r"[+-](\d+)"), 15),
    ("an element", re.compile(r"#(\d+)"), 118),
)


def train_smiles_vocabulary(rows: Iterable[str], vocab_size: int, min_frequency: int, progress: Progress) -> Tokenizer:
    """Collect the atom-wise tokens of SMILES, the most frequent first, equally frequent ones in alphabetical order.

    `rows` are read once and never held; those with characters that no SMILES has do not count. Tokens that occur less
    than `min_frequency` times, or do not fit into `vocab_size`, which counts special tokens, become [UNK].
    """
    counts: Counter[str] = Counter()
    for row in rows:
        if _COVERED.fullmatch(row):
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
    progress.message(f"collected {len(kept):,} SMILES tokens{dropped}")
    return Tokenizer(backend)


def find_invalid_smiles(row: str) -> str | None:
    """Return the objection of `parse_molecule` to a row, or None if it is a usable SMILES."""
    return parse_molecule(row)[1]


def parse_molecule(row: str) -> tuple["Mol | None", str | None]:
    """Return the molecule of a SMILES, or None, and the objection to it: ours before RDKit reads it, or RDKit's.

    A molecule in which RDKit refuses the valence of a metal and nothing else is returned with the objection. RDKit's
    versions differ in the valences that a metal may have. RDKit's own log stays silent.
    """
    refused = _find_refused_text(row)
    if refused is not None:
        return None, refused
    try:
        return _parse(row)
    except RDKIT_ERRORS as error:
        return None, describe_failure(error)


def describe_failure(error: Exception) -> str:
    """Return an exception of RDKit as the reason why a row is not used."""
    return f"RDKit fails on it: {(str(error).strip().splitlines() or [type(error).__name__])[-1].strip()}"


def _find_refused_text(row: str) -> str | None:
    """Return why a row is refused before RDKit reads it; None if it is not.

    It is empty, has characters that the regular expression does not cover (named with their positions, counted from 1),
    has more atoms than `MAX_ATOMS`, or a number that SMILES does not allow in an atom.
    """
    if not row:
        return "is empty"
    if not _COVERED.fullmatch(row):
        return _describe_unknown(row)
    num_atoms = len(_ATOM.findall(row)) if len(row) > MAX_ATOMS else 0
    if num_atoms > MAX_ATOMS:
        return f"has {num_atoms:,} atoms; molecules of at most {MAX_ATOMS:,} are read"
    return _find_large_number(row) if _LARGE_NUMBER.search(row) else None


def _parse(row: str) -> tuple["Mol | None", str | None]:
    from rdkit import Chem, rdBase

    with rdBase.BlockLogs():
        molecule = Chem.MolFromSmiles(row)
        if molecule is not None:
            return molecule, None
        molecule = Chem.MolFromSmiles(row, sanitize=False)
        if molecule is None:
            return None, "RDKit cannot parse it: it breaks the SMILES grammar"
        problems = Chem.DetectChemistryProblems(molecule)
        objection = f"RDKit refuses it: {'; '.join(problem.Message() for problem in problems) or 'no reason given'}"
        is_of_metal = [
            problem.GetType() == "AtomValenceException"
            and molecule.GetAtomWithIdx(problem.GetAtomIdx()).GetSymbol() not in _NON_METALS
            for problem in problems
        ]
        if not (is_of_metal and all(is_of_metal)):
            return None, objection
        with suppress(*RDKIT_ERRORS):
            Chem.SanitizeMol(molecule, Chem.SANITIZE_ALL ^ Chem.SANITIZE_PROPERTIES)
            molecule.UpdatePropertyCache(strict=False)
            return molecule, objection
    return None, objection


def _describe_unknown(row: str) -> str:
    # "C" is a token, so every other character that is left is part of none
    rest = _TOKEN.sub(lambda token: "C" * len(token[0]), row)
    unknown = [character for character in dict.fromkeys(rest) if character != "C"]
    named = ", ".join(f"{character!r} at position {rest.index(character) + 1}" for character in unknown[:_MAX_NAMED])
    more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
    return f"characters that are not SMILES tokens: {named}{more}"


def _find_large_number(row: str) -> str | None:
    for atom in _BRACKET_ATOM.findall(row):
        for name, pattern, most in _NUMBERS_OF_ATOM:
            for digits in pattern.findall(atom):
                if len(digits.lstrip("0")) > len(str(most)) or int(digits) > most:
                    return f"{shorten(atom, _SHOWN_CHARACTERS)} has {name} above {most}"
    return None
