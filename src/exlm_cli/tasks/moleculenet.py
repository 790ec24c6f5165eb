"""MoleculeNet (App. L, Table 9): seven sets of molecules with 0/1 labels, from local CSV files or public ones.

The public files are pinned to a commit and to their SHA-256. KANO's files hold each molecule once and are the rows that
Uni-Mol, and so the paper, split; MUV and ToxCast are DeepChem's own files. DeepChem's other files (`deepchemdata`, read
with `task.data_dir`) hold further rows, which `notes` name.
"""

from dataclasses import dataclass
from pathlib import Path

from exlm_cli.config.tasks import MoleculeNetTaskConfig
from exlm_cli.data.download import RemoteFile, fetch_once
from exlm_cli.errors import DataError
from exlm_cli.format import format_counts
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import SPLITS
from exlm_cli.tasks.rows.assays import Measured
from exlm_cli.tasks.rows.labels import Labels, blank_missing, read_targets
from exlm_cli.tasks.rows.splits import RowSplit, split_rows
from exlm_cli.tasks.rows.table import InputRows, read_table, usable_rows
from exlm_cli.tasks.rows.task import RowTask
from exlm_cli.tasks.sources import OfficialFiles, find_parts
from exlm_cli.tasks.user_table import table_task

_MAX_ROWS_OFF = 5
"""Maximum difference between a public file and Table 9 that the known reasons explain."""
_LABELS = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0}

_KANO = "https://raw.githubusercontent.com/HICAI-ZJU/KANO/766b478fde816ea014c713f380b73e87cd780da8/data"
_DEEPCHEM = "https://raw.githubusercontent.com/deepchem/deepchem/fbe3b911a94a6eb8c84c1a9e7ac67a472c49ea80"
_TENTHS = (
    "Table 9 has a tenth, rounded down, for validation and for testing; our test split has the rows that are left over"
)
_TOXCAST_ROWS = (
    "Table 1 counts 8,575 molecules and Table 9 8,576; DeepChem's file has 8,579 that RDKit reads, and which of them "
    "Uni-Mol leaves out is not published"
)


@dataclass(frozen=True)
class MoleculeNetSet:
    """One set.

    Attributes:
        name: As in `moleculenet/<name>`, and the name of its file.
        pattern: Glob of the names that its file may have, without their ending.
        labels: Names of the label columns; empty: every column that is neither the molecule nor its identifier.
        remote: Public address of its file.
        table_9: Molecules of train, valid and test in Table 9.
        known_difference: Why a public file may give a few rows more or fewer.
    """

    name: str
    pattern: str
    num_labels: int
    labels: tuple[str, ...]
    remote: RemoteFile
    table_9: tuple[int, int, int]
    known_difference: str = ""


_TOX21_ASSAYS = (
    "NR-AR", "NR-AR-LBD", "NR-AhR", "NR-Aromatase", "NR-ER", "NR-ER-LBD", "NR-PPAR-gamma", "SR-ARE", "SR-ATAD5",
    "SR-HSE", "SR-MMP", "SR-p53",
)  # fmt: skip

SMILES_COLUMNS = ("smiles", "mol")
"""Names of the column of molecules; the first one that exists is read (DeepChem's BACE calls it `mol`)."""

IDENTIFIER_COLUMNS = ("mol_id",)


def _kano(name: str, sha256: str, num_bytes: int) -> RemoteFile:
    return RemoteFile(f"{_KANO}/{name}.csv", sha256, num_bytes)


MOLECULENET_SETS = {
    found.name: found
    for found in (
        MoleculeNetSet("bace", "bace", 1, ("Class",), _kano(
            "bace", "5fb6e2a87a148ec7393c1d874d26ec40ee74eb6223ea7d2bfa16d153eb75eb55", 103_230
        ), (1210, 151, 151), _TENTHS),
        MoleculeNetSet("bbbp", "bbbp", 1, ("p_np",), _kano(
            "bbbp", "a61e17872cbec0743a6147dc802a1f7550acfe8dc1053f881f4c42a3ce2dc597", 111_265
        ), (1631, 204, 204)),
        MoleculeNetSet("clintox", "clintox", 2, ("FDA_APPROVED", "CT_TOX"), _kano(
            "clintox", "cc561402d058a0d996a9f5e5d02bc20f6652b7003525b32c3598b8da4b24e9b7", 94_829
        ), (1182, 148, 148), "Uni-Mol's rows leave out the two cobalt complexes of DeepChem's file"),
        MoleculeNetSet("tox21", "tox21", 12, _TOX21_ASSAYS, _kano(
            "tox21", "b58cc1f683e78e3c7a1bf7116e9aac0119804018d100f7b8cdb0857941c31aca", 458_635
        ), (6264, 783, 783), _TENTHS),
        MoleculeNetSet("toxcast", "toxcast*", 617, (), RemoteFile(
            f"{_DEEPCHEM}/examples/toxcast/processing/toxcast_data.csv.gz",
            "56041515e0bb63c1787a26ecdbeb2bd7ae1f538681caa1b03f768853cf81b1a7", 405_299
        ), (6860, 858, 858), _TOXCAST_ROWS),
        MoleculeNetSet("sider", "sider", 27, (), _kano(
            "sider", "87b937d1ddb1879bb14e8f23d94ceffcb9ad3e534ae59602820b3bcf03844fbf", 183_743
        ), (1141, 143, 143)),
        MoleculeNetSet("muv", "muv", 17, (), RemoteFile(
            f"{_DEEPCHEM}/datasets/muv.csv.gz",
            "93c8b4a37c5996c76e57d5f3f065fb8b7cf1c19067011eff2293fd2a94ce274a", 1_749_843
        ), (74469, 9309, 9309)),
    )
}  # fmt: skip
"""Sets by name, in the order of Table 1."""


def load_moleculenet(config: MoleculeNetTaskConfig, progress: Progress) -> RowTask:
    """Read one set, split and ready for fine-tuning.

    The file is `task.files.train`, else `<set>.csv` (also .gz) in `task.data_dir` or its folder `moleculenet`,
    else it is downloaded once. A row with exactly the same SMILES as an earlier row is left out, and so are rows that
    are not molecules; that gives the sizes of Table 9. Empty labels are missing.

    Raises:
        DataError: The file is missing, cannot be downloaded, is malformed or lacks a column, or a label is not 0 or 1.
    """
    known = MOLECULENET_SETS[config.name.removeprefix("moleculenet/")]
    table = read_table(find_set_file(config, progress))
    usual = next((name for name in SMILES_COLUMNS if name in table.columns), SMILES_COLUMNS[0])
    smiles = table.column(config.smiles_column or usual, "choose one with `--smiles-column NAME`")
    unlabelled = (*SMILES_COLUMNS, *IDENTIFIER_COLUMNS, config.smiles_column)
    names = known.labels or tuple(name for name in table.columns if name not in unlabelled)
    for name in names:
        table.column(name, "give the official file of that set")
    if len(names) != known.num_labels:
        raise DataError(
            f"{table.path}: {len(names)} label columns; {known.name} has {known.num_labels}",
            "give the official file of that set, or fine-tune on a file of your own with `--set task.name=csv`",
        )
    labels = Labels("binary", names, read_targets(blank_missing(table, names), names, _LABELS.get, "0, 1"), ())
    progress.message(f"{config.name}: {len(table):,} rows of {table.path}")
    usable = _without_repeats(usable_rows(table, smiles, config, progress))
    split = split_rows(config, usable, labels.classes)
    is_whole = config.max_rows is None and config.max_valid_rows is None
    notes = _compare_with_table_9(known, split) if config.is_split_by_scaffold and is_whole else []
    return table_task(config, usable, Measured(labels), split, notes)


def find_set_file(config: MoleculeNetTaskConfig, progress: Progress) -> Path:
    """Return the file of a set; without `task.data_dir` and `task.files` it is downloaded.

    Raises:
        DataError: It is missing, or cannot be downloaded.
    """
    known = MOLECULENET_SETS[config.name.removeprefix("moleculenet/")]
    if config.files.train is None and config.data_dir is None:
        hint = f"fetch it elsewhere, keep its name {known.remote.name}, and give the folder it is in: `--data-dir DIR`"
        return fetch_once(known.remote, "moleculenet", progress, hint)
    official = OfficialFiles(None, None, ("moleculenet",), {"train": (known.pattern, "")}, (".csv",), ())
    ((_, path),) = find_parts(config, official)
    assert isinstance(path, Path), "it is not on the Hub"
    return path


def _without_repeats(usable: InputRows) -> InputRows:
    """Drop rows with exactly the SMILES of an earlier row."""
    first_rows = {text: row for row, text in reversed(list(enumerate(usable.inputs)))}
    reasons = {
        row: f"has the SMILES of {usable.table.where(first_rows[text])}"
        for row, text in enumerate(usable.inputs)
        if first_rows[text] != row
    }
    return usable.without(reasons, "with the SMILES of an earlier row")


def _compare_with_table_9(known: MoleculeNetSet, split: RowSplit) -> list[str]:
    sizes = tuple(len(split.indices.get(part, ())) for part in SPLITS)
    if sizes == known.table_9:
        return []
    is_public_file = all(abs(a - b) <= _MAX_ROWS_OFF for a, b in zip(sizes, known.table_9, strict=True))
    reason = f": {known.known_difference}" if known.known_difference and is_public_file else ""
    return [f"{format_counts(sizes)} molecules; Table 9 has {format_counts(known.table_9)}{reason}"]
