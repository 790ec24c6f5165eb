"""Rows of SMILES for pre-training: which are usable, their canonical text, and other spellings of the same molecule."""

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import tee
from typing import NamedTuple

import numpy as np

from exlm_cli.data.molecules import RDKIT_ERRORS, canonical_smiles, describe_failure, parse_molecule
from exlm_cli.data.rdkit_processes import map_in_order
from exlm_cli.data.rows.records import Row

_SPELLED_CHUNK = 1024
"""Spellings that are written in another process at a time, and a quarter of those in this one at most."""


def read_smiles(rows: Iterable[Row], *, is_canonical: bool, num_spellings: int = 1) -> Iterator[Row]:
    """Yield each row, in order, with its problem if it is not a usable SMILES.

    A row that already has a problem keeps it. With `is_canonical`, RDKit's canonical SMILES, with stereochemistry and
    without atom-map numbers, replaces the text of a usable row, which also gets its `other_spellings`.
    """
    read, kept = tee(rows)
    rewrite = partial(_rewrite, is_canonical=is_canonical, num_spellings=num_spellings)
    chunk_rows = None if num_spellings == 1 else max(1, _SPELLED_CHUNK // num_spellings)
    rewritten = map_in_order(rewrite, (row.text for row in read), _Rewritten, chunk_rows=chunk_rows)
    for row, new in zip(kept, rewritten, strict=True):
        if row.problem is not None or new == _UNCHANGED:
            yield row
        elif new.problem is not None:
            yield row._replace(problem=new.problem)
        else:
            yield row._replace(text=new.text, spellings=new.spellings)


class _Rewritten(NamedTuple):
    """What becomes of a row: its problem, or its canonical SMILES and other spellings."""

    problem: str | None = None
    text: str = ""
    spellings: tuple[str, ...] = ()


_UNCHANGED = _Rewritten()


def _rewrite(row: str, is_canonical: bool, num_spellings: int) -> _Rewritten:
    molecule, problem = parse_molecule(row)
    if problem is not None:
        return _Rewritten(problem)
    if not is_canonical:
        return _UNCHANGED
    assert molecule is not None
    try:
        text = canonical_smiles(molecule)
        spellings = other_spellings(text, num_spellings) if num_spellings > 1 else ()
    except RDKIT_ERRORS as error:
        return _Rewritten(describe_failure(error))
    return _UNCHANGED if text == row and not spellings else _Rewritten(text=text, spellings=spellings)


def other_spellings(canonical: str, num_spellings: int) -> tuple[str, ...]:
    """Return at most `num_spellings` - 1 other SMILES of a molecule, each from another order of its atoms.

    Spelling j is written by RDKit from the atoms in the order of their hashes with j and the canonical SMILES, so that
    it depends on nothing else: the randomised SMILES of Arus-Pous et al. (2019), restricted. Equal ones are left out,
    and those that RDKit does not read back as the molecule: of a symmetric cage it may write another stereoisomer.

    Args:
        canonical: The SMILES that `canonical_smiles` returns.
    """
    from rdkit import Chem, rdBase

    molecule, _ = parse_molecule(canonical)
    if molecule is None:
        return ()
    written = [canonical]
    for number in range(1, num_spellings):
        digest = hashlib.shake_256(f"{number} {canonical}".encode()).digest(8 * molecule.GetNumAtoms())
        order = np.frombuffer(digest, dtype="<u8").argsort(kind="stable").tolist()
        with rdBase.BlockLogs():
            spelling = Chem.MolToSmiles(Chem.RenumberAtoms(molecule, order), canonical=False)
        if spelling not in written and _is_spelling_of(canonical, spelling):
            written.append(spelling)
    return tuple(written[1:])


def _is_spelling_of(canonical: str, smiles: str) -> bool:
    molecule, objection = parse_molecule(smiles)
    if molecule is None or objection is not None:
        return False
    try:
        return canonical_smiles(molecule) == canonical
    except RDKIT_ERRORS:
        return False
