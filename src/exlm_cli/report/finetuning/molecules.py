"""Drawings of molecules, whose atoms may have colours, as SVG files that hold nothing but shapes.

Axes: A atoms of a molecule, P panels of a drawing.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from exlm_cli.data.molecules import read_all_atoms
from exlm_cli.format import printable, shorten
from exlm_cli.report import style

MAX_DRAWN_ATOMS = 150
"""Larger molecules are not drawn: their atoms would be too small to see, and RDKit's layout takes long."""
RAISES, LOWERS = style.RUN_COLOURS[1], style.RUN_COLOURS[0]
"""Colours of atoms that raise and that lower a prediction."""
_WIDTH, _HEIGHT = 300, 220
_LEGEND_CHARACTERS = 34


def draw_molecule(smiles: str, panels: Sequence[tuple[str, Mapping[int, str]]] = (("", {}),)) -> bytes | None:
    """Return the SVG of a molecule; None of one that is too large.

    Args:
        panels: For each drawing, side by side: a line below it, and the colours, as `#RRGGBB`, of atoms by their place
            in the SMILES.
    """
    from rdkit import rdBase
    from rdkit.Chem.Draw import rdMolDraw2D

    with rdBase.BlockLogs():
        molecule = read_all_atoms(smiles)
        if molecule is None or molecule.GetNumAtoms() > MAX_DRAWN_ATOMS:
            return None
        drawer = rdMolDraw2D.MolDraw2DSVG(_WIDTH * len(panels), _HEIGHT, _WIDTH, _HEIGHT)
        options: Any = drawer.drawOptions()
        options.fixedBondLength = 26.0
        options.highlightRadius = 0.42
        options.legendFontSize = 13
        if any(colours for _, colours in panels):
            options.useBWAtomPalette()  # letters in the colours of elements would be lost on coloured atoms
        colours_P = [
            {atom: tuple(c / 255 for c in style.channels(colour)) for atom, colour in colours.items()}
            for _, colours in panels
        ]
        with suppress(RuntimeError, ValueError):  # an odd metal: draw it with the bonds as they were read
            molecule = rdMolDraw2D.PrepareMolForDrawing(molecule, forceCoords=True)
        options.prepareMolsBeforeDrawing = False
        drawer.DrawMolecules(
            [molecule] * len(panels),
            legends=[shorten(printable(legend), _LEGEND_CHARACTERS) for legend, _ in panels],
            highlightAtoms=[list(colours) for colours in colours_P],
            highlightAtomColors=colours_P,
            highlightBonds=[[] for _ in panels],
        )
        drawer.FinishDrawing()
        return str(drawer.GetDrawingText()).encode()


def change_colours(changes_A: Sequence[float], scale: float) -> dict[int, str]:
    """Return the colour of each atom by its change: white for 0, the full colour from `scale` on; none for NaN."""
    return {
        atom: style.fade(RAISES if change > 0 else LOWERS, min(1.0, abs(change) / scale) if scale else 0.0)
        for atom, change in enumerate(changes_A)
        if not math.isnan(change)
    }
