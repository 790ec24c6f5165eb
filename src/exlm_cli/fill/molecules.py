"""Molecules with open places: other spellings of the same unfinished molecule, and fillings as molecules."""

import re
from functools import cache

from exlm_cli.data.molecules import canonical_smiles, parse_molecule
from exlm_cli.data.spellings import other_spellings
from exlm_cli.data.tokenizer import MASK
from exlm_cli.format import shorten

ONE_SPELLING = "asked in one spelling: a mask there is no atom, but a bond, a branch or half of a ring closure"
_LABELLED = re.compile(r"\[(\d+)\*]")


def spell(text: str, num_spellings: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return a SMILES with [MASK]s and other spellings of the same unfinished molecule.

    Each has the masks of the text, counted from 0, in the order in which it names them. Masks are atoms `*` with their
    numbers as isotopes while RDKit writes the spellings; where they are no atoms, the text is the only one.
    """
    *pieces, last = text.split(MASK)
    labelled = "".join(f"{piece}[{number}*]" for number, piece in enumerate(pieces, start=1)) + last
    found = [(text, tuple(range(len(pieces))))]
    molecule, objection = parse_molecule(labelled)
    if molecule is None or objection is not None:
        return found
    for spelling in other_spellings(canonical_smiles(molecule), num_spellings):
        order = tuple(int(label) - 1 for label in _LABELLED.findall(spelling))
        if sorted(order) == list(found[0][1]):
            found.append((_LABELLED.sub(MASK, spelling), order))
    return found


@cache
def read_molecule(smiles: str) -> tuple[str, str]:
    """Return the canonical SMILES of a filling and no problem, or what is filled and why it is no molecule."""
    molecule, objection = parse_molecule(smiles)
    if molecule is None or objection is not None:
        return smiles, shorten(f"not a molecule: {objection}", 120)
    return canonical_smiles(molecule), ""
