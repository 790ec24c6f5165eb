"""The explanations of predicted molecules: a page, an SVG of each molecule, and a table of the changes of all atoms.

Axes: A atoms of a molecule, C outputs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exlm_cli.data.molecules import atom_spans
from exlm_cli.files import csv_bytes
from exlm_cli.format import format_number, format_number_of
from exlm_cli.report.style import MAX_DRAWN_ATOMS, RUN_COLOURS, Card, draw_molecule, fade, render_page
from exlm_cli.tasks.base import FloatArray, Loss

if TYPE_CHECKING:
    from exlm_cli.finetune.prediction.explain import AtomChanges

RAISES, LOWERS = RUN_COLOURS[1], RUN_COLOURS[0]
"""Colours of atoms that raise and that lower a prediction."""
MAX_PANELS = 4
"""Outputs that are drawn of a molecule; the table has all."""
_STRONG = 0.95
"""Share of the changes of an output up to which the colour grows; few atoms have the largest changes."""


@dataclass(frozen=True)
class ExplainedRow:
    """A row of a file, and what its atoms add to its prediction.

    Attributes:
        line: Line of the file on which it begins, as in the table of predictions.
        truth: (C,) known targets; NaN where unknown; (1,) class index for `classes`.
    """

    line: int
    changes: "AtomChanges"
    truth: FloatArray


def explanation_files(
    rows: Sequence[ExplainedRow],
    folder: Path,
    *,
    names: Sequence[str],
    loss: Loss,
    heading: str,
    num_rows: int,
    predictor: str,
) -> dict[Path, bytes]:
    """Return the content of `index.html`, `atoms.csv` and an SVG of each molecule, by path.

    Atoms that raise a prediction are orange, those that lower it blue, white is no change. The scale is the same for
    all molecules. Of classes, the one that is predicted is drawn; of several labels or values, the first four.

    Args:
        rows: The first rows that the model can read.
        folder: Where the files go.
        names: C outputs.
        loss: Of the run.
        heading: Of the page.
        num_rows: Rows of the file that the model can read.
        predictor: What predicts, in words.
    """
    scales_C = _scales([row.changes.changes for row in rows], len(names), is_shared=loss == "classes")
    files: dict[Path, bytes] = {}
    cards: list[Card] = []
    for row in rows:
        shown = [int(np.argmax(row.changes.predicted))] if loss == "classes" else range(min(MAX_PANELS, len(names)))
        panels = [
            (
                names[index] if len(names) > 1 else "",
                change_colours(row.changes.changes[:, index].tolist(), scales_C[index]),
            )
            for index in shown
        ]
        drawn = draw_molecule(row.changes.smiles, panels)
        lines = [f"line {row.line} of the file", *(_describe(row, index, names, loss) for index in shown)]
        if drawn is None:
            lines.append(f"not drawn: more than {MAX_DRAWN_ATOMS} atoms; atoms.csv has them")
        else:
            files[folder / f"line-{row.line}.svg"] = drawn
        cards.append(Card(drawn, row.changes.smiles, [*lines, row.changes.smiles]))
    page = render_page(
        "explanations.html",
        title=heading,
        heading=heading,
        about=[
            f"The first {format_number_of(len(rows), 'molecule')} of {num_rows:,} that the model reads. The colour of "
            "an atom says what it adds to the prediction: orange atoms raise it, blue ones lower it. It is the mean of "
            "what the prediction loses when the atom is hidden, and what it gains by the atom when all others are. "
            f"Predictions are those of {predictor}, as in the table. This explains what predicts, not the molecule.",
            "atoms.csv has the change of every atom and output, and each molecule is an SVG file beside this page.",
        ],
        scales=_show_scales(scales_C, [""] if loss == "classes" else names),
        raises=RAISES,
        lowers=LOWERS,
        molecules=cards,
    )
    return {folder / "index.html": page.encode(), folder / "atoms.csv": _table(rows, names), **files}


def change_colours(changes_A: Sequence[float], scale: float) -> dict[int, str]:
    """Return the colour of each atom by its change: white for 0, the full colour from `scale` on; none for NaN."""
    return {
        atom: fade(RAISES if change > 0 else LOWERS, min(1.0, abs(change) / scale) if scale else 0.0)
        for atom, change in enumerate(changes_A)
        if not math.isnan(change)
    }


def _scales(changes: Sequence[FloatArray], num_outputs: int, *, is_shared: bool) -> list[float]:
    """Return the change of each output that has its full colour."""
    together = np.concatenate([np.zeros((0, num_outputs)), *changes])
    known = np.abs(together[~np.isnan(together).any(axis=1)])
    if not len(known):
        return [0.0] * num_outputs
    if is_shared:
        return [float(np.quantile(known, _STRONG))] * num_outputs
    return [float(value) for value in np.quantile(known, _STRONG, axis=0)]


def _show_scales(scales_C: Sequence[float], names: Sequence[str]) -> list[tuple[str, str]]:
    """Return both ends of the scale of each output that is drawn; classes share one, without a name."""
    shown = list(zip(names, scales_C, strict=False))[:MAX_PANELS]
    return [(f"{f'{name}: ' if name else ''}-{scale:.2g}", f"+{scale:.2g}") for name, scale in shown]


def _describe(row: ExplainedRow, index: int, names: Sequence[str], loss: Loss) -> str:
    """Return prediction and truth of an output in words."""
    value, name = row.changes.predicted[index], names[index]
    if loss == "regression":
        truth = row.truth[index]
        known = "" if np.isnan(truth) else f", true {format_number(float(truth))}"
        return f"{name}: {format_number(float(value))}{known}"
    truth = row.truth[0 if loss == "classes" else index]
    true_name = "" if np.isnan(truth) else names[int(truth)] if loss == "classes" else f"{truth:g}"
    known = f", true {true_name}" if true_name else ""
    return f"{name}: probability {value:.3f}{known}"


def _table(rows: Sequence[ExplainedRow], names: Sequence[str]) -> bytes:
    """Return a row for each atom: line of the file, its place in the SMILES, from 0, its text there, its changes."""
    lines: list[Sequence[object]] = []
    for row in rows:
        smiles = row.changes.smiles
        for atom, ((start, end), changes_C) in enumerate(zip(atom_spans(smiles), row.changes.changes, strict=True)):
            cells = ["" if np.isnan(change) else f"{change:.6g}" for change in changes_C.tolist()]
            lines.append([row.line, smiles, atom, smiles[start:end], *cells])
    return csv_bytes(["line", "smiles", "atom", "symbol", *(f"{name}_change" for name in names)], lines)
