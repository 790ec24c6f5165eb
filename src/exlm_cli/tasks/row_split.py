"""From the rows of a table to the rows of each split: which can be used, how they are cut, what is in two splits."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from exlm_cli.config.spelling import how_to_set
from exlm_cli.config.tasks import RowTaskConfig
from exlm_cli.data.masking import IntArray
from exlm_cli.data.rows.records import SkippedRow
from exlm_cli.data.rows.table import Table
from exlm_cli.errors import DataError
from exlm_cli.files import expand_path
from exlm_cli.tasks.base import Split
from exlm_cli.tasks.molecules import Molecule, repeated_molecules
from exlm_cli.tasks.scaffold import (
    SPLITS,
    SplitIndices,
    keeps_chirality,
    read_split_file,
    split_at_random,
    split_balanced,
    split_by_scaffold,
)
from exlm_cli.tasks.table_task import name_some
from exlm_cli.tasks.task_files import choose_rows

_FEWEST_ROWS = 10


def scaffold_chirality(config: RowTaskConfig) -> bool | None:
    """Return whether the recipe's split needs scaffolds with chirality, without it, or (None) no scaffolds."""
    return keeps_chirality(config.split) if config.split.startswith("scaffold") else None


def usable_molecules(
    table: Table, smiles: Sequence[str], molecules: Sequence[Molecule], config: RowTaskConfig
) -> tuple[IntArray, list[str], list[SkippedRow]]:
    """Return the rows that are molecules, notes on those that are not, and these.

    Raises:
        DataError: A row is no molecule while `task.on_invalid` is `error`, or none is one.
    """
    bad = [row for row, molecule in enumerate(molecules) if molecule.problem is not None]
    if bad and (config.on_invalid == "error" or len(bad) == len(molecules)):
        raise DataError(
            f"{table.where(bad[0])}: no molecule: {molecules[bad[0]].problem}",
            f"{how_to_set('task.on_invalid', 'skip')} leaves such rows out and lists them",
        )
    notes = []
    if bad:
        listed = "; ".join(f"line {table.short_place(row)}: {molecules[row].problem}" for row in bad[:20])
        more = f"; and {len(bad) - 20:,} more" if len(bad) > 20 else ""
        notes.append(f"left out {len(bad):,} of {len(table):,} rows that are no molecules: {listed}{more}")
    odd = [table.short_place(row) for row, molecule in enumerate(molecules) if molecule.has_odd_metal]
    if odd:
        notes.append(
            f"kept {len(odd):,} molecules in which RDKit refuses the valence of a metal and nothing else: "
            f"lines {name_some(odd, most=20)}"
        )
    left_out = [table.skipped(row, smiles[row], str(molecules[row].problem)) for row in bad]
    return np.array([row for row, molecule in enumerate(molecules) if molecule.problem is None]), notes, left_out


def split_rows(
    config: RowTaskConfig,
    rows: IntArray,
    num_rows: int,
    *,
    molecules: Sequence[Molecule] | None,
    classes: Sequence[Hashable] | None,
) -> tuple[SplitIndices, list[str]]:
    """Cut the usable rows as the recipe says, and draw `task.max_rows` of the training ones.

    Args:
        config: `split`, `split_file`, `split_seed`, `max_rows`.
        rows: Rows of the table that can be used, ascending.
        num_rows: Rows of the table.
        molecules: What is known of each row of the table; None for text, which has no scaffolds.
        classes: The class of each row of the table, for an even random split; None: rows have no single class.

    Returns:
        Rows of the table by split, and notes.

    Raises:
        DataError: Too few rows, or a split file that does not fit.
    """
    notes: list[str] = []
    if config.split == "file":
        assert config.split_file is not None, "the recipe checks it"
        named = read_split_file(expand_path(config.split_file), num_rows)
        indices = {split: part[np.isin(part, rows)] for split, part in named.items()}
        num_named, num_used = (sum(map(len, parts.values())) for parts in (named, indices))
        if num_used < num_named:
            notes.append(f"{num_named - num_used:,} rows of {config.split_file} cannot be used")
        if num_used < len(rows):
            notes.append(f"{len(rows) - num_used:,} rows are in no split of {config.split_file}")
    else:
        if len(rows) < _FEWEST_ROWS:
            raise DataError(
                f"{config.name}: {len(rows)} rows can be used, a split 80/10/10 needs at least {_FEWEST_ROWS}",
                "give more rows, or files of your own for training and validation",
            )
        parts = _cut(config, rows, molecules, classes)
        indices = {split: rows[part] for split, part in parts.items()}
    return limit_training_rows(config, indices, notes), notes


def limit_training_rows(config: RowTaskConfig, indices: SplitIndices, notes: list[str]) -> SplitIndices:
    """Draw `task.max_rows` of the training rows where there are more, and note it."""
    train = indices["train"]
    chosen = choose_rows(len(train), config)
    if len(chosen) < len(train):
        notes.append(f"trained on {len(chosen):,} of {len(train):,} rows (`task.max_rows`)")
    return {**indices, "train": train[chosen]}


def describe_repeats(
    table: Table, indices: Mapping[Split, IntArray], molecules: Sequence[Molecule], targets_RC: Any
) -> list[str]:
    """Note molecules that stand in more than one split, and molecules whose rows have different labels."""
    home = {int(row): split for split in SPLITS if split in indices for row in indices[split]}
    groups = repeated_molecules(sorted(home), molecules)
    across = [group for group in groups if len({home[row] for row in group}) > 1]
    notes = []
    if across:
        shown = name_some(
            (" = ".join(f"line {table.short_place(r)} ({home[r]})" for r in group) for group in across), most=3
        )
        notes.append(f"{len(across):,} molecules are in more than one split: {shown}")
    differing = [group for group in groups if _labels_differ(targets_RC[group])]
    if differing:
        named = ("lines " + " and ".join(table.short_place(row) for row in group) for group in differing)
        shown = name_some(named, most=3)
        notes.append(f"{len(differing):,} molecules occur more than once with different labels: {shown}")
    return notes


def _cut(
    config: RowTaskConfig, rows: IntArray, molecules: Sequence[Molecule] | None, classes: Sequence[Hashable] | None
) -> SplitIndices:
    if config.split == "random" or molecules is None:
        chosen = None if classes is None else [classes[row] for row in rows]
        return split_at_random(len(rows), config.split_seed, chosen)
    scaffolds = [molecules[row].scaffold for row in rows]
    if config.split == "scaffold-balanced":
        return split_balanced(scaffolds, config.split_seed)
    return split_by_scaffold(scaffolds)


def _labels_differ(targets_GC: Any) -> bool:
    """Return whether the rows of a group contradict each other in a column that both know."""
    known = np.where(np.isnan(targets_GC), -np.inf, targets_GC).max(axis=0)
    least = np.where(np.isnan(targets_GC), np.inf, targets_GC).min(axis=0)
    return bool((least < known).any())
