"""Splits of a table's rows into train, valid and test: 80/10/10 by scaffold or at random, or as a file says.

The Bemis-Murcko scaffold of a molecule is its rings and what links them. Molecules without a ring have an empty
scaffold and form one group.

- `scaffold`: Uni-Mol's, which the paper follows (section 5.1). Whole groups of one scaffold,
  chirality kept in it, go to train while train stays within 80 % of the rows, else to valid while both stay within
  90 %, else to test. The largest group comes first; of equal groups, the one that begins later in the file. Nothing is
  random. On Uni-Mol's rows these are its splits, row for row: compared with a public copy of its valid and test for
  bace, bbbp, clintox, tox21, sider and muv.
- `scaffold-deepchem`: DeepChem's default: the same without chirality in scaffolds.
- `scaffold-balanced`: chemprop 1's, without chirality. Groups larger than half a tenth of the rows come first, then the
  others, each part shuffled; a group goes to the first of train, valid and test that still has room; test takes all.
- `random`: rows at random. Where each row has one class, every split has its share of each class, within a few rows.
- `group`: whole groups of a column, in the order of `scaffold-balanced`; if valid or test has none then, the smallest
  group of train goes there. A row without a group is one of its own.
- `time`: by the times of a column, the first for train and the last for test, cut where that comes nearest to 80/10/10;
  rows of one time stay together. Rows without a time are in no split.

Uni-Mol's rule trains on a fifth where one scaffold has more than 80 % of the rows. In a user's own table (`csv`) such a
scaffold goes to train, and valid and test share the rest; so does `scaffold-balanced` for every task.

In `csv` all of these keep rows of one molecule, and the forms of one compound, in one split: salts, stereoisomers,
isotopes and tautomers (`Molecule.compound`). Compounds are drawn as rows are; those with more than a tenth of the rows
come first. Where no compound has two rows, nothing changes. By `group`, groups that share a compound (or a text) are
one; by `time`, a compound (or a text) has its first time.
"""

import datetime
import hashlib
import itertools
import json
import math
import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from exlm_cli.config.tasks import CsvTaskConfig, RowTaskConfig, TaskSection
from exlm_cli.data import IntArray
from exlm_cli.errors import DataError
from exlm_cli.format import format_number_of, name_some, shorten
from exlm_cli.paths import expand_path
from exlm_cli.tasks.base import SPLITS, FloatArray, Split, SplitIndices
from exlm_cli.tasks.rows.table import InputRows, Table, read_number

# in tenths, so that comparisons are between integers
_TRAIN_TENTHS, _VALID_TENTHS = 8, 1
_MIN_ROWS = 10
_SHOWN_CHARACTERS = 40
_FORMS = "salts, stereoisomers, isotopes, tautomers"
_LIMITS: dict[Split, tuple[str, str]] = {"train": ("max_rows", "trained"), "valid": ("max_valid_rows", "validated")}


@dataclass(frozen=True)
class RowSplit:
    """Rows of each split, how they were split, and what a report says about it.

    Attributes:
        imitates: Which new rows the test rows are like; empty where nobody knows.
    """

    name: str
    indices: SplitIndices
    notes: tuple[str, ...] = ()
    imitates: str = ""


def split_rows(config: RowTaskConfig, usable: InputRows, classes: Sequence[Hashable] | None) -> RowSplit:
    """Split the usable rows as `task.split` says, and draw those that `limit_rows` keeps.

    Args:
        usable: Rows to split. Texts have no scaffolds and are split at random.
        classes: (R,) class of each row of the table, for an even random split; None: rows have no single class.

    Raises:
        DataError: Too few rows, or a split file that does not fit.
    """
    rows = usable.rows
    if config.split == "file":
        return limit_rows(config, _follow_file(str(config.split_file), usable))
    if len(rows) < _MIN_ROWS:
        raise DataError(
            f"{config.name}: {len(rows)} rows can be used; an 80/10/10 split needs at least {_MIN_ROWS}",
            "give more rows, or files of your own for training and validation",
        )
    compounds = None
    if usable.molecules is not None and config.name == "csv":
        compounds = [usable.molecules[row].compound for row in rows]
    notes = () if compounds is None else _describe_kept(usable, compounds)
    imitates = "new rows that are like the training rows"
    if isinstance(config, CsvTaskConfig) and config.split in ("group", "time"):
        split = (_split_by_group if config.split == "group" else _split_by_time)(config, usable)
        return limit_rows(config, replace(split, notes=(*notes, *split.notes)))
    if config.split == "random" or usable.molecules is None:
        chosen = None if classes is None else [classes[row] for row in rows]
        name, parts = "random", split_at_random(len(rows), config.split_seed, chosen, compounds)
    else:
        imitates = "molecules with other scaffolds than the training molecules"
        scaffolds = [usable.molecules[row].scaffold or "" for row in rows]
        name, groups = config.split, scaffolds if compounds is None else _join(scaffolds, compounds)
        if config.split == "scaffold-balanced":
            parts = split_balanced(groups, config.split_seed)
        else:
            parts = split_by_scaffold(groups, trains_on_largest=config.name == "csv")
        notes += _describe_largest(scaffolds, groups, parts)
    return limit_rows(config, RowSplit(name, {part: rows[index] for part, index in parts.items()}, notes, imitates))


def _join(scaffolds: Sequence[str], compounds: Sequence[str]) -> list[int]:
    """Return a number for each row, the same for rows that a chain of equal scaffolds or compounds links."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # each row is an edge from its scaffold to its compound
    (by_scaffold, scaffold_of), (by_compound, compound_of) = (
        np.unique(keys, return_inverse=True) for keys in (scaffolds, compounds)
    )
    edges = (np.ones(len(scaffolds)), (scaffold_of, len(by_scaffold) + compound_of))
    num_nodes = len(by_scaffold) + len(by_compound)
    _, group_of = connected_components(coo_array(edges, shape=(num_nodes, num_nodes)), directed=False)
    return cast(list[int], group_of[scaffold_of].tolist())


def _describe_kept(usable: InputRows, compounds: Sequence[str]) -> tuple[str, ...]:
    """Return a note on compounds that have several forms among the rows."""
    keys, rows, place = usable.keys, usable.rows, usable.table.short_place
    groups = [rows[group].tolist() for group in group_rows(range(len(rows)), compounds)]
    several = [group for group in groups if len({keys[row] for row in group}) > 1]
    if not several:
        return ()
    named = name_some((" and ".join(map(place, group)) for group in several), limit=3)
    return (f"kept together {format_number_of(len(several), 'compound')} in several forms ({_FORMS}): {named}",)


def _describe_largest(scaffolds: Sequence[str], keys: Sequence[Hashable], parts: SplitIndices) -> tuple[str, ...]:
    """Return a note on a scaffold, or scaffolds that compounds link, with more rows than train should have."""
    largest = max(group_rows(range(len(keys)), keys), key=len)
    if 10 * len(largest) <= _TRAIN_TENTHS * len(keys):
        return ()
    found = list(dict.fromkeys(scaffolds[row] for row in largest))
    what = f"the scaffold {shorten(found[0], _SHOWN_CHARACTERS)}" if found[0] else "no ring, which is one scaffold"
    if len(found) > 1:
        what = f"one of {len(found)} scaffolds that forms of one compound link"
    place = next(split for split, part in parts.items() if largest[0] in part)
    said = f"{len(largest):,} of {len(keys):,} molecules have {what}: all of them are in {place}"
    return (f"{said}, and the other splits have none; `--split random` spreads them over all splits",)


def _compounds(usable: InputRows, rows: IntArray) -> list[str]:
    """Return the compound of each of some rows; texts have themselves."""
    keys = usable.keys if usable.molecules is None else [molecule.compound for molecule in usable.molecules]
    return [keys[row] for row in rows]


def _split_by_group(config: CsvTaskConfig, usable: InputRows) -> RowSplit:
    rows, column = usable.rows, str(config.group_column)
    cells = usable.table.column(column, "name the column of groups with `--group-column NAME`")
    alone = [row for row in rows.tolist() if not cells[row]]
    groups = [cells[row] or f"\0{row}" for row in rows.tolist()]
    joined = _join(groups, _compounds(usable, rows))
    if len(set(joined)) < 2:
        raise DataError(
            f"{usable.table.path}: all rows are of one group of `{column}`, or the groups share compounds",
            "leave out compounds that are in several groups, such as references, or give another `--group-column`",
        )
    counts = {
        "row{s} without a group, each a group of its own": len(alone),
        f"group{{s}} of `{column}` joined with others, as they share compounds": len(set(groups)) - len(set(joined)),
    }
    notes = [f"{num:,} {what.format(s='' if num == 1 else 's')}" for what, num in counts.items() if num]
    parts = split_by_group(joined, config.split_seed)
    indices: SplitIndices = {part: rows[index] for part, index in parts.items()}
    return RowSplit("group", indices, tuple(notes), f"rows of another `{column}` than all training rows")


def split_by_group(groups: Sequence[Hashable], seed: int) -> SplitIndices:
    """Split rows with given groups by the rule of `group`; two groups leave no test."""
    filled = split_balanced(groups, seed)
    parts = {part: set(filled[part].tolist()) if part in filled else set() for part in SPLITS}
    for part in ("valid", "test"):
        if not parts[part]:
            source = max(SPLITS, key=lambda name: len({groups[row] for row in parts[name]}))
            found = group_rows(sorted(parts[source]), groups)
            moved = min(found, key=len) if len(found) > 1 else []
            if part == "valid" and not moved:
                source, moved = "test", sorted(parts["test"])
            parts[source] -= set(moved)
            parts[part] |= set(moved)
    return _as_arrays({part: sorted(of_part) for part, of_part in parts.items()})


def _split_by_time(config: CsvTaskConfig, usable: InputRows) -> RowSplit:
    column, table = str(config.time_column), usable.table
    cells = table.column(column, "name the column of dates with `--time-column NAME`")
    rows = np.array([row for row in usable.rows.tolist() if cells[row]], dtype=np.int64)
    time_of = dict(zip(rows.tolist(), _read_times(table, column, rows), strict=True))
    compounds = dict(zip(rows.tolist(), _compounds(usable, rows), strict=True))
    first: dict[str, float] = {}
    for row, compound in compounds.items():
        first[compound] = min(time_of[row], first.get(compound, math.inf))
    times = np.array([first[compounds[row]] for row in rows.tolist()])
    place = np.searchsorted(_cut_times(table, column, times), times, side="right")
    indices: SplitIndices = {part: rows[place == number] for number, part in enumerate(SPLITS)}
    counts = {
        f"row{{s}} in no split: `{column}` is empty": len(usable.rows) - len(rows),
        "row{s} of compounds that were measured before stay with the first of them": sum(
            time_of[row] > first[compounds[row]] for row in rows.tolist()
        ),
    }
    notes = [f"{num:,} {what.format(s='' if num == 1 else 's')}" for what, num in counts.items() if num]
    begin = cells[min(indices["test"].tolist(), key=time_of.__getitem__)]
    return RowSplit("time", indices, tuple(notes), f"rows later than the training rows (`{column}` from {begin} on)")


def _cut_times(table: Table, column: str, times_N: FloatArray) -> list[float]:
    """Return the first times of valid and of test."""
    times, counts = np.unique(times_N, return_counts=True)
    if len(times) < len(SPLITS):
        raise DataError(
            f"{table.path}: `{column}` has {format_number_of(len(times), 'different time')}; a split needs three",
            "give another `--time-column`, or another `--split`",
        )
    ends = 10 * counts.cumsum()
    train = int(np.argmin(np.abs(ends[:-2] - _TRAIN_TENTHS * len(times_N))))
    seen = np.abs(ends[train + 1 : -1] - (_TRAIN_TENTHS + _VALID_TENTHS) * len(times_N))
    return [float(times[train + 1]), float(times[train + 2 + int(np.argmin(seen))])]


def _read_times(table: Table, column: str, rows: IntArray) -> list[float]:
    """Return the times of some rows: numbers where all cells are numbers, else seconds of dates."""
    cells = [table.columns[column][row] for row in rows]
    numbers = [value for cell in cells if (value := read_number(cell)) is not None]
    if len(numbers) == len(cells):
        return numbers
    found = []
    for row, cell in zip(rows.tolist(), cells, strict=True):
        try:
            time = datetime.datetime.fromisoformat(cell.replace("/", "-"))
        except ValueError as error:
            raise DataError(
                f"{table.where(row)}: `{column}` is `{cell}`; accepted: dates such as 2024-05-31, with a time or "
                "without, or numbers in all rows",
                "write year-month-day: 03/04/2024 may be in March or in April",
            ) from error
        found.append((time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp())
    return found


def _follow_file(path: str, usable: InputRows) -> RowSplit:
    named = read_split_file(expand_path(path), len(usable.table))
    split = follow_split("file", named, usable)
    num_named, num_used = (sum(map(len, parts.values())) for parts in (named, split.indices))
    name = Path(path).name  # without its folder: notes are published with a model
    counts = {
        f"of {name} cannot be used": num_named - num_used,
        f"in no split of {name}": len(usable.rows) - num_used,
    }
    return replace(
        split, notes=tuple(f"{format_number_of(count, 'row')} {what}" for what, count in counts.items() if count)
    )


def follow_split(name: str, named: SplitIndices, usable: InputRows, notes: Sequence[str] = ()) -> RowSplit:
    """Return a split that files or a column give, without the rows that cannot be used."""
    return RowSplit(name, {split: part[np.isin(part, usable.rows)] for split, part in named.items()}, tuple(notes))


def limit_rows(config: TaskSection, split: RowSplit) -> RowSplit:
    """Draw `task.max_rows` of the training rows and `task.max_valid_rows` of the validation rows if there are more."""
    indices, notes = dict(split.indices), list(split.notes)
    for part in _LIMITS:
        chosen, of_part = choose_rows(config, part, len(indices[part]))
        indices[part] = indices[part][chosen]
        notes += of_part
    return replace(split, indices=indices, notes=tuple(notes))


def choose_rows(
    config: TaskSection, split: Split, num_rows: int, what: str = "rows"
) -> tuple[IntArray, tuple[str, ...]]:
    """Return which training or validation rows are used, in order, drawn by `split_seed`; and a note if not all."""
    key, verb = _LIMITS[split]
    limit = getattr(config, key)
    if limit is None or limit >= num_rows:
        return np.arange(num_rows), ()
    chosen = np.sort(np.random.default_rng(config.split_seed).choice(num_rows, limit, replace=False))
    return chosen, (f"{verb} on {len(chosen):,} of {num_rows:,} {what} (`task.{key}`)",)


def split_by_scaffold(scaffolds: Sequence[Hashable], *, trains_on_largest: bool = False) -> SplitIndices:
    """Split rows with given scaffolds by the rule of `scaffold` and `scaffold-deepchem`.

    Args:
        trains_on_largest: Put a scaffold that is too large for train into train, not into valid or test.
    """
    groups = sorted(
        group_rows(range(len(scaffolds)), scaffolds), key=lambda group: (len(group), group[0]), reverse=True
    )
    return _fill(groups, len(scaffolds), shares_train_room=True, trains_on_largest=trains_on_largest)


def split_balanced(scaffolds: Sequence[Hashable], seed: int) -> SplitIndices:
    """Split rows with given scaffolds by the rule of `scaffold-balanced`; one too large for train is in train."""
    num_rows = len(scaffolds)
    groups = group_rows(range(num_rows), scaffolds)
    large = [group for group in groups if 20 * len(group) > _VALID_TENTHS * num_rows]
    small = [group for group in groups if 20 * len(group) <= _VALID_TENTHS * num_rows]
    shuffler = random.Random(seed)  # noqa: S311 (chemprop's generator, so that its splits come out; nothing secret)
    shuffler.shuffle(large)
    shuffler.shuffle(small)
    return _fill(large + small, num_rows, shares_train_room=False, trains_on_largest=True)


def _fill(groups: list[list[int]], num_rows: int, *, shares_train_room: bool, trains_on_largest: bool) -> SplitIndices:
    """Put each group into the first split with room; with `shares_train_room`, valid may use the room left in train."""
    parts: dict[Split, list[int]] = {split: [] for split in SPLITS}
    train, valid, test = parts.values()
    most_train = _TRAIN_TENTHS * num_rows // 10
    most_valid, most_seen = _VALID_TENTHS * num_rows // 10, (_TRAIN_TENTHS + _VALID_TENTHS) * num_rows // 10
    too_large = [group for group in groups if len(group) > most_train] if trains_on_largest else []
    if too_large:
        train += too_large[0]
        groups = [group for group in groups if group not in too_large]
        most_valid = (num_rows - len(train)) // 2
        most_seen = len(train) + most_valid
    for group in groups:
        num_taken = len(valid) + len(group)
        has_room = len(train) + num_taken <= most_seen if shares_train_room else num_taken <= most_valid
        if len(train) + len(group) <= most_train:
            train += group
        else:
            (valid if has_room or (too_large and not valid) else test).extend(group)
    return _as_arrays(parts)


def split_at_random(
    num_rows: int, seed: int, classes: Sequence[Hashable] | None = None, compounds: Sequence[Hashable] | None = None
) -> SplitIndices:
    """Split rows at random into 80/10/10, rounded down; test takes the rest.

    Args:
        seed: Decides the split, together with the order of the rows.
        classes: One class a row; each is spread evenly over the splits.
        compounds: One compound a row, to be kept in one split; None: each row is one.
    """
    order = np.random.default_rng(seed).permutation(num_rows)
    if classes is not None:
        # the n rows of a class get the positions (0.5, 1.5, ... n - 0.5) / n: a cut at 0.8 cuts every class at 0.8
        position = np.empty(num_rows)
        for group in group_rows(order.tolist(), classes):
            position[group] = (np.arange(len(group)) + 0.5) / len(group)
        order = order[np.argsort(position[order], kind="stable")]
    # a compound stands where its first row of the file does: its number of rows moves it nowhere
    by_first = {group[0]: group for group in group_rows(range(num_rows), compounds or range(num_rows))}
    groups = [by_first[row] for row in order.tolist() if row in by_first]
    groups.sort(key=lambda group: 10 * len(group) <= _VALID_TENTHS * num_rows)
    parts = _fill(groups, num_rows, shares_train_room=True, trains_on_largest=compounds is not None)
    if compounds is not None and not len(parts["valid"]) and "test" in parts:  # few compounds of several rows each
        parts["valid"] = parts.pop("test")
    return parts


def read_split_file(path: Path, num_rows: int) -> SplitIndices:
    """Read the rows of each split, counted from 0, from JSON: `{"train": [...], "valid": [...], "test": [...]}`.

    The `split.json` of a run is such a file, so that a run's split can be used again. `test` may be missing or
    empty; other keys are ignored.

    Raises:
        DataError: The file cannot be read, has no `train` or `valid`, names a row that does not exist, or one twice.
    """
    hint = 'write {"train": [rows], "valid": [rows], "test": [rows]}, or give the split.json of a run'
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such split file", hint) from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not readable as JSON: {error}", hint) from error
    if isinstance(content, dict) and isinstance(content.get("indices"), dict):
        content = content["indices"]
    seen: dict[int, str] = {}
    for name in SPLITS:
        rows = content.get(name) if isinstance(content, dict) else None
        if name == "test" and rows in (None, []):
            continue
        if not isinstance(rows, list) or not rows:
            raise DataError(f"{path}: `{name}` must be a list of row numbers", hint)
        for row in rows:
            if type(row) is not int or not 0 <= row < num_rows:
                raise DataError(f"{path}: `{name}` names row {row!r}; rows are 0 to {num_rows - 1}", hint)
            if row in seen:
                raise DataError(f"{path}: row {row} is in `{seen[row]}` and in `{name}`", hint)
            seen[row] = name
    return _as_arrays({name: content.get(name) or [] for name in SPLITS})


def split_fingerprint(indices: Mapping[Any, IntArray]) -> str:
    """Return the SHA-256, in hex, of the row numbers of each split, in the order train, valid, test."""
    content = {name: indices[name].tolist() for name in SPLITS if name in indices}
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def _as_arrays(parts: Mapping[Split, Sequence[int]]) -> SplitIndices:
    """Sort the rows of each split and leave out a test split without rows."""
    return {
        name: np.sort(np.asarray(parts[name], dtype=np.int64)) for name in SPLITS if len(parts[name]) or name != "test"
    }


def group_rows(rows: Iterable[int], keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the rows that share a key, in the order given; groups in the order of their first rows.

    Args:
        keys: Key of each row of the table.
    """
    by_key: dict[Hashable, list[int]] = {}
    for row in rows:
        by_key.setdefault(keys[row], []).append(row)
    return list(by_key.values())


def describe_repeats(rows: InputRows, indices: Mapping[Split, IntArray], targets_RC: FloatArray) -> list[str]:
    """Return notes on molecules or texts in more than one split, and on those whose rows have different labels.

    Forms of one molecule in different splits, such as a base and its salt, have a note too.
    """
    what = "text" if rows.molecules is None else "molecule"
    split_of = {int(row): split for split in SPLITS if split in indices for row in indices[split]}
    groups = [group for group in group_rows(sorted(split_of), rows.keys) if len(group) > 1]
    place = rows.table.short_place
    notes = []
    across = [group for group in groups if len({split_of[row] for row in group}) > 1]
    if across:
        named = (" = ".join(f"{place(row)} ({split_of[row]})" for row in group) for group in across)
        notes.append(f"{format_number_of(len(across), what)} in more than one split: {name_some(named, limit=3)}")
    notes += _describe_forms(rows, split_of)
    known = ([column[~np.isnan(column)] for column in targets_RC[group].T] for group in groups)
    differing = [g for g, columns in zip(groups, known, strict=True) if any(len(np.unique(c)) > 1 for c in columns)]
    if differing:
        named = (" and ".join(map(place, group)) for group in differing)
        found = format_number_of(len(differing), what)
        notes.append(f"{found} with different labels in different rows: {name_some(named, limit=3)}")
    return notes


def _describe_forms(rows: InputRows, split_of: Mapping[int, Split]) -> list[str]:
    """Return a note on forms of one compound in different splits, such as a base and its hydrochloride."""
    if rows.molecules is None:
        return []
    keys, place = rows.keys, rows.table.short_place
    across = []
    for group in group_rows(sorted(split_of), [molecule.compound for molecule in rows.molecules]):
        forms: dict[tuple[str, Split], int] = {}
        for row in group:
            forms.setdefault((keys[row], split_of[row]), row)
        if any(a != b and s != t for (a, s), (b, t) in itertools.combinations(forms, 2)):
            across.append(list(forms.values()))
    if not across:
        return []
    named = (" and ".join(f"{place(row)} ({split_of[row]})" for row in group) for group in across)
    what = f"{format_number_of(len(across), 'molecule')} in different forms ({_FORMS}) in different splits"
    return [f"{what}: {name_some(named, limit=3)}; in `csv`, `--split random` and scaffold splits keep them together"]
