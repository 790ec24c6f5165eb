"""Which rows are trained on, validated on and tested on: 80/10/10 by scaffold, by chance, or as a file says.

The Bemis-Murcko scaffold of a molecule is its rings and what links them, as RDKit's `MurckoScaffoldSmiles` writes it;
that of a molecule without a ring is empty, and all of those are one group.

- `scaffold`: Uni-Mol's, which the paper follows (section 5.1). Groups of one scaffold, chirality kept in it, the
  largest first and among equals the one that begins later in the file, go whole to train while train stays within 80 %
  of the rows, else to valid while both stay within 90 %, else to test. Nothing is drawn. On the rows that Uni-Mol has,
  these are its splits, row for row: compared with a public copy of them for bace, bbbp, clintox, tox21, sider and muv
  (its valid and test).
- `scaffold-chiral`: another name for it, beside the next one.
- `scaffold-deepchem`: DeepChem's default: the same, with chirality left out of scaffolds.
- `scaffold-balanced`: chemprop 1's, chirality left out too. Groups larger than half a tenth of the rows first, then
  the others, each part shuffled; a group goes to the first of train, valid and test in which it still finds room; test
  takes all.
- `random`: rows by chance. Where each has one class, every split has its share of each class, to within one row.
"""

import hashlib
import json
import random
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from exlm_cli.data.masking import IntArray
from exlm_cli.errors import DataError
from exlm_cli.tasks.base import Split

if TYPE_CHECKING:
    from rdkit.Chem import Mol

SPLITS: tuple[Split, ...] = ("train", "valid", "test")

# tenths, so that every comparison is one of integers
_TRAIN_TENTHS, _VALID_TENTHS = 8, 1

SplitIndices = dict[Split, IntArray]


def keeps_chirality(split: str) -> bool:
    """Return whether the scaffolds of a named split tell stereoisomers apart."""
    return split in ("scaffold", "scaffold-chiral")


def murcko_scaffold(molecule: "Mol", *, has_chirality: bool) -> str:
    """Return the scaffold as SMILES; empty for a molecule without a ring."""
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    return cast(str, MurckoScaffoldSmiles(mol=molecule, includeChirality=has_chirality))  # type: ignore[no-untyped-call]


def split_by_scaffold(scaffolds: Sequence[Hashable]) -> SplitIndices:
    """Split rows with given scaffolds by the rule of `scaffold` and `scaffold-deepchem`."""
    groups = sorted(_groups(scaffolds), key=lambda group: (len(group), group[0]), reverse=True)
    num_rows = len(scaffolds)
    parts: dict[Split, list[int]] = {split: [] for split in SPLITS}
    for group in groups:
        num_train = len(parts["train"]) + len(group)
        if 10 * num_train <= _TRAIN_TENTHS * num_rows:
            parts["train"] += group
        elif 10 * (num_train + len(parts["valid"])) <= (_TRAIN_TENTHS + _VALID_TENTHS) * num_rows:
            parts["valid"] += group
        else:
            parts["test"] += group
    return _as_arrays(parts)


def split_balanced(scaffolds: Sequence[Hashable], seed: int) -> SplitIndices:
    """Split rows with given scaffolds by the rule of `scaffold-balanced`."""
    num_rows = len(scaffolds)
    groups = _groups(scaffolds)
    is_large = [20 * len(group) > _VALID_TENTHS * num_rows for group in groups]
    large = [group for group, large in zip(groups, is_large, strict=True) if large]
    small = [group for group, large in zip(groups, is_large, strict=True) if not large]
    shuffler = random.Random(seed)  # noqa: S311 (chemprop's generator, so that its splits come out; nothing secret)
    shuffler.shuffle(large)
    shuffler.shuffle(small)
    parts: dict[Split, list[int]] = {split: [] for split in SPLITS}
    for group in large + small:
        if 10 * (len(parts["train"]) + len(group)) <= _TRAIN_TENTHS * num_rows:
            parts["train"] += group
        elif 10 * (len(parts["valid"]) + len(group)) <= _VALID_TENTHS * num_rows:
            parts["valid"] += group
        else:
            parts["test"] += group
    return _as_arrays(parts)


def split_at_random(num_rows: int, seed: int, classes: Sequence[Hashable] | None = None) -> SplitIndices:
    """Split rows by chance into 80/10/10, rounded down; the rest is for testing.

    Args:
        num_rows: How many there are.
        seed: Decides the split, together with the order of the rows.
        classes: One class a row: each is spread evenly over the splits.
    """
    order = np.random.default_rng(seed).permutation(num_rows)
    if classes is not None:
        # the n rows of a class stand at (0.5, 1.5, ... n - 0.5) / n: a cut at 0.8 cuts every class at 0.8
        place = np.empty(num_rows)
        for group in _groups([classes[row] for row in order]):
            place[order[group]] = (np.arange(len(group)) + 0.5) / len(group)
        order = order[np.argsort(place[order], kind="stable")]
    num_train = _TRAIN_TENTHS * num_rows // 10
    num_seen = (_TRAIN_TENTHS + _VALID_TENTHS) * num_rows // 10
    return _as_arrays(
        {
            "train": order[:num_train].tolist(),
            "valid": order[num_train:num_seen].tolist(),
            "test": order[num_seen:].tolist(),
        }
    )


def read_split_file(path: Path, num_rows: int) -> SplitIndices:
    """Read the rows of each split, counted from 0, from JSON: `{"train": [...], "valid": [...], "test": [...]}`.

    The `split.json` of a run is such a file, so a run's split can be used again. `test` may be missing; what else the
    file holds is not read.

    Raises:
        DataError: The file cannot be read, has no `train` or `valid`, names a row that is not there, or one twice.
    """
    hint = 'write {"train": [rows], "valid": [rows], "test": [rows]}, or give the split.json of a run'
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such split file", hint) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not readable as JSON: {error}", hint) from error
    if isinstance(content, dict) and isinstance(content.get("indices"), dict):
        content = content["indices"]
    seen: dict[int, str] = {}
    for name in SPLITS:
        rows = content.get(name) if isinstance(content, dict) else None
        if rows is None and name == "test":
            continue
        if not isinstance(rows, list) or not rows:
            raise DataError(f"{path}: `{name}` must be a list of row numbers", hint)
        for row in rows:
            if type(row) is not int or not 0 <= row < num_rows:
                raise DataError(f"{path}: `{name}` names row {row!r}; rows are 0 to {num_rows - 1}", hint)
            if row in seen:
                where = f"in `{seen[row]}` and in `{name}`" if seen[row] != name else f"twice in `{name}`"
                raise DataError(f"{path}: row {row} is {where}", hint)
            seen[row] = name
    return _as_arrays({name: content.get(name, []) for name in SPLITS})


def split_fingerprint(indices: Mapping[Any, IntArray]) -> str:
    """Return the sha256, in hex, of the row numbers of each split, in the order given by the splits' names."""
    content = {name: indices[name].tolist() for name in SPLITS if name in indices}
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def _groups(keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the rows of each key, ascending; keys in the order in which they first occur."""
    rows_by_key: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        rows_by_key.setdefault(key, []).append(row)
    return list(rows_by_key.values())


def _as_arrays(parts: Mapping[Split, Sequence[int]]) -> SplitIndices:
    """Sort the rows of each split and leave out a test split without rows."""
    return {
        name: np.sort(np.asarray(parts[name], dtype=np.int64)) for name in SPLITS if len(parts[name]) or name != "test"
    }
