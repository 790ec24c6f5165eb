"""What the probes of `probe.py` read out of vectors: properties of molecules and texts, and the labels of GLUE tasks.

Axes: R rows, P properties.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from exlm_cli.config.tasks import GlueTaskConfig
from exlm_cli.data.molecules import parse_molecule
from exlm_cli.data.rows.table import read_table
from exlm_cli.errors import DataError
from exlm_cli.files import make_folder, write_atomically
from exlm_cli.progress import Progress
from exlm_cli.tasks.glue import GLUE_TASKS, load_glue

if TYPE_CHECKING:
    from rdkit.Chem import Mol

Metric = Literal["r2", "roc_auc"]
Numbers = NDArray[np.float64]

LEAST_OF_A_CLASS = 100
"""A yes-or-no property with fewer rows of one answer is left out: its score is mostly noise."""
MOST_HEAVY_ATOMS = 50
"""Larger molecules are left out: they are few, but they decide the R2 of every property that grows with size."""
WORDS_OF_A_TEXT = (4, 60)
"""Fewest and most words: shorter texts have nothing to read out, and models see different parts of longer ones."""


@dataclass(frozen=True)
class ProbeData:
    """Rows and what is known of them.

    Attributes:
        name: `molecules`, `texts`, or a GLUE task.
        parts: One column of R inputs, or two where a row is a pair of texts.
        targets: (R, P) numbers; 0 or 1 for a yes-or-no property.
        properties: P names.
        metrics: P scores: R2 of a number, ROC-AUC of a yes-or-no property.
    """

    name: str
    parts: tuple[tuple[str, ...], ...]
    targets: Numbers
    properties: tuple[str, ...]
    metrics: tuple[Metric, ...]

    def __len__(self) -> int:
        return len(self.targets)


def molecule_numbers() -> dict[str, Callable[["Mol"], float]]:
    """Return functions from a molecule to a number, by name; linear models predict these numbers."""
    from rdkit.Chem import QED, Crippen, GraphDescriptors, rdMolDescriptors

    return {
        "logp": Crippen.MolLogP,
        "molar_refractivity": Crippen.MolMR,
        "tpsa": rdMolDescriptors.CalcTPSA,
        "qed": QED.qed,
        "weight": rdMolDescriptors.CalcExactMolWt,
        "fraction_csp3": rdMolDescriptors.CalcFractionCSP3,
        "rotatable_bonds": rdMolDescriptors.CalcNumRotatableBonds,
        "h_acceptors": rdMolDescriptors.CalcNumHBA,
        "h_donors": rdMolDescriptors.CalcNumHBD,
        "rings": rdMolDescriptors.CalcNumRings,
        "aromatic_rings": rdMolDescriptors.CalcNumAromaticRings,
        "complexity": GraphDescriptors.BertzCT,
    }


def molecule_groups() -> dict[str, Callable[["Mol"], float]]:
    """Return functions that count a group in a molecule, by name; linear models predict whether there is any."""
    from rdkit.Chem import Fragments, rdMolDescriptors

    return {
        "amide": Fragments.fr_amide,
        "ester": Fragments.fr_ester,
        "carboxylic_acid": Fragments.fr_COO,
        "ketone": Fragments.fr_ketone,
        "nitro": Fragments.fr_nitro,
        "halogen": Fragments.fr_halogen,
        "sulfonamide": Fragments.fr_sulfonamd,
        "phenol": Fragments.fr_phenol,
        "primary_amine": Fragments.fr_NH2,
        "pyridine": Fragments.fr_pyridine,
        "stereocentre": rdMolDescriptors.CalcNumAtomStereoCenters,
        "spiro_or_bridge": lambda m: rdMolDescriptors.CalcNumSpiroAtoms(m) + rdMolDescriptors.CalcNumBridgeheadAtoms(m),
    }


TEXT_NUMBERS: dict[str, Callable[[str], float]] = {
    "words": lambda text: len(text.split()),
    "letters_of_a_word": lambda text: math.fsum(map(len, text.split())) / len(text.split()),
    "commas": lambda text: text.count(","),
}
TEXT_PATTERNS = {
    "digit": re.compile(r"\d"),
    "quotation": re.compile(r"[\"“”]"),
    "negation": re.compile(r"\b(not|no|never|nor|none|nothing)\b|n't\b", re.IGNORECASE),
    "first_person": re.compile(r"\b(I|me|my|we|us|our)\b"),
    "name": re.compile(r"(?<=[a-z,] )[A-Z][a-z]"),
    "past": re.compile(r"\b(was|were|had|did)\b", re.IGNORECASE),
}


def read_molecules(
    files: Sequence[Path], num_rows: int, column: str | None, kept: Path, progress: Progress
) -> ProbeData:
    """Return a sample of the molecules of some files and their properties.

    Rows that RDKit refuses and molecules of more than 50 heavy atoms are passed over.

    Args:
        files: SMILES, one a line, or tables.
        num_rows: Rows to draw.
        column: Column of the tables; none: `smiles`.
        kept: File of the properties, which take RDKit minutes; read if it holds the same rows, else written.
        progress: Shows a bar.

    Raises:
        DataError: A file cannot be read, or no row is a molecule.
    """
    numbers, groups = molecule_numbers(), molecule_groups()
    rows: list[str] = []
    for smiles in _shuffled(_read_column(files, "smiles", column)):
        if len(rows) < num_rows and _as_molecule(smiles) is not None:
            rows.append(smiles)
    if not rows:
        raise DataError(
            f"{files[0]}: no row of the files is a molecule of at most {MOST_HEAVY_ATOMS} heavy atoms",
            "give files of SMILES, or name their column with `--column`",
        )
    columns = [*numbers, *groups]
    if kept.is_file():
        with np.load(kept) as arrays:
            if (arrays["rows"].tolist(), arrays["columns"].tolist()) == (rows, columns):
                return _with_usable_properties("molecules", (tuple(rows),), arrays["values"], numbers, groups, progress)
    from rdkit import rdBase

    values = np.empty((len(rows), len(columns)))
    with progress.bar("properties", len(rows)) as bar, rdBase.BlockLogs():
        for index, smiles in enumerate(rows):
            molecule = _as_molecule(smiles)
            answers = [float(count(molecule) > 0) for count in groups.values()]
            values[index] = [*(number(molecule) for number in numbers.values()), *answers]
            bar.update(index + 1)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, rows=np.array(rows), columns=np.array(columns), values=values)
    make_folder(kept.parent)
    write_atomically(kept, buffer.getvalue())
    return _with_usable_properties("molecules", (tuple(rows),), values, numbers, groups, progress)


def read_texts(files: Sequence[Path], num_rows: int, column: str | None, progress: Progress) -> ProbeData:
    """Return a sample of the texts of some files, of 4 to 60 words, and properties worked out of their letters.

    Raises:
        DataError: A file cannot be read, or no text has the length.
    """
    fewest, most = WORDS_OF_A_TEXT
    texts = [text for text in _read_column(files, "text", column) if fewest <= len(text.split()) <= most]
    if not texts:
        raise DataError(
            f"{files[0]}: no text of the files has {fewest} to {most} words", "give files with a text a row"
        )
    rows = tuple(_shuffled(texts)[:num_rows])
    values = [
        [*(number(row) for number in TEXT_NUMBERS.values()), *(bool(p.search(row)) for p in TEXT_PATTERNS.values())]
        for row in rows
    ]
    targets = np.array(values, dtype=np.float64)
    return _with_usable_properties("texts", (rows,), targets, TEXT_NUMBERS, TEXT_PATTERNS, progress)


def read_glue(folder: Path, num_rows: int, progress: Progress) -> list[ProbeData]:
    """Return a sample of each task of two classes whose official folder exists, training and development rows together.

    Raises:
        DataError: There is no such folder, or a file in it cannot be read.
    """
    found = []
    for info in GLUE_TASKS.values():
        if len(info.classes) != 2 or not (folder / info.folder).is_dir():
            continue
        config = GlueTaskConfig.model_validate({"name": f"glue/{info.name}", "data_dir": str(folder)})
        examples = load_glue(config, progress).examples
        texts = [row for part in ("train", "valid") for row in examples[part].texts]
        labels = np.concatenate([examples["train"].targets, examples["valid"].targets])
        chosen = np.random.default_rng(0).permutation(len(texts))[:num_rows]
        parts = tuple(zip(*(texts[row] for row in chosen), strict=True))
        found.append(ProbeData(info.name, parts, labels[chosen], (info.classes[1],), ("roc_auc",)))
    if not found:
        raise DataError(
            f"{folder}: no folder of a GLUE task of two classes, like `SST-2`", "give the folder around them"
        )
    return found


def _read_column(files: Sequence[Path], kind: Literal["smiles", "text"], column: str | None) -> list[str]:
    cells: dict[str, None] = {}  # each text once, in order
    for path in files:
        cells |= dict.fromkeys(read_table(path, bare=kind).column(column or kind, "name it with `--column`"))
    return [cell for cell in cells if cell]


def _as_molecule(smiles: str) -> Any:
    """Return the molecule; None where RDKit refuses it, or the valence of a metal in it, or it is too large."""
    molecule, objection = parse_molecule(smiles)
    if molecule is None or objection is not None or molecule.GetNumHeavyAtoms() > MOST_HEAVY_ATOMS:
        return None
    return molecule


def _shuffled(rows: Sequence[str]) -> list[str]:
    return [rows[index] for index in np.random.default_rng(0).permutation(len(rows))]


def _with_usable_properties(
    name: str,
    parts: tuple[tuple[str, ...], ...],
    targets: Numbers,
    numbers: dict[str, Any],
    answers: dict[str, Any],
    progress: Progress,
) -> ProbeData:
    """Return the data without properties that are nearly the same for all rows."""
    names = (*numbers, *answers)
    metrics: tuple[Metric, ...] = (*("r2" for _ in numbers), *("roc_auc" for _ in answers))
    yes = targets.sum(axis=0)
    is_rare = np.minimum(yes, len(targets) - yes) < LEAST_OF_A_CLASS
    is_left_out = np.where([metric == "r2" for metric in metrics], targets.std(axis=0) == 0, is_rare)
    if is_left_out.any():
        listed = ", ".join(np.array(names)[is_left_out])
        progress.message(f"note: {name}: left out for want of rows that differ: {listed}")
    kept = np.flatnonzero(~is_left_out)
    return ProbeData(name, parts, targets[:, kept], tuple(names[i] for i in kept), tuple(metrics[i] for i in kept))
