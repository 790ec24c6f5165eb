"""Look of all pictures, molecules and pages: colours, fonts, axes, titles; the same data give the same bytes."""

import base64
import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_cli.files import write_together
from exlm_cli.format import printable, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MASK_COLOURS = ("#F4C542", "#A86B3C", "#56B4E9", "#147A5C", "#D08CC0", "#3B6FB6", "#E07A5F", "#6E6B3A")
"""Neighbours differ in lightness as well as in hue, so they stay apart for colour-blind readers and in print."""

END_COLOUR = "#C9CED6"
"""BOS and EOS."""

INK = "#1F2933"
"""Words and numbers."""

FAINT_INK = "#67727E"
"""Captions."""

RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#A86B3C", "#56B4E9", "#E69F00", "#333333")
"""Curves of several runs (Okabe and Ito)."""

CORRUPTION_RAMP = ("#FCA636", "#E16462", "#B12A90", "#6A00A8", "#0D0887")
"""Cells of a Repeated-MLM grid from the smallest p^k to the largest: the darker, the more semantics are lost."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINE_STYLES = ("-", "--", ":", "-.")

GRID_INK = "#E6E9EC"
SPINE_INK = "#B5BDC5"

MAX_DRAWN_ATOMS = 150
"""Larger molecules are not drawn: their atoms would be too small to see, and RDKit's layout takes long."""

_DPI = 160.0
_MOLECULE_WIDTH, _MOLECULE_HEIGHT = 300, 220
_LEGEND_CHARACTERS = 34
_TITLE_CHARACTERS_PER_INCH = 12.5
_CAPTION_CHARACTERS_PER_INCH = 16.0
_FORMATS = ("png", "svg")


@contextmanager
def drawing(*, font_size: float = 8.5) -> Iterator[None]:
    """Use matplotlib's defaults and our fonts, not the user's matplotlibrc; do not warn of missing glyphs."""
    import matplotlib

    settings: Any = {
        "axes.edgecolor": SPINE_INK,
        "axes.labelcolor": FAINT_INK,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": INK,
        "axes.titlelocation": "left",
        "axes.titlesize": 9.5,
        "font.family": "DejaVu Sans",
        "font.size": font_size,
        "grid.color": GRID_INK,
        "grid.linewidth": 0.7,
        "legend.frameon": False,
        "legend.labelcolor": INK,
        "svg.fonttype": "path",
        "svg.hashsalt": "exlm",
        "text.parse_math": False,  # a `$` in the name of a run is not a formula
        "xtick.color": FAINT_INK,
        "xtick.major.size": 3,
        "ytick.color": FAINT_INK,
        "ytick.major.size": 3,
    }
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def new_figure(width: float, height: float, title: str = "", captions: Sequence[str] = ()) -> "Figure":
    """Return an empty figure under a title and captions; call it inside `drawing`.

    Args:
        width, height: In inches, without title and captions, which make the figure higher.
        title: Broken into lines.
        captions: Small lines below the title, each broken into lines.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    titles = textwrap.wrap(title, int(_TITLE_CHARACTERS_PER_INCH * width))
    small = [line for text in captions for line in textwrap.wrap(text, int(_CAPTION_CHARACTERS_PER_INCH * width))]
    title_inches, caption_inches = 0.17 * len(titles), 0.15 * len(small)
    heading_inches = title_inches + caption_inches + (0.1 if titles or small else 0.0)
    size = (width, height + title_inches + caption_inches)
    layout = ConstrainedLayoutEngine(rect=(0, 0.07 / size[1], 1, 1 - (heading_inches + 0.07) / size[1]))
    figure = Figure(figsize=size, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    top = size[1] - 0.06
    texts = ((titles, 10.0, INK, top), (small, 8.0, FAINT_INK, top - title_inches))
    for lines, font, colour, y in texts:
        figure.text(0.08 / width, y / size[1], "\n".join(lines), fontsize=font, color=colour, ha="left", va="top")
    return figure


def new_panels(
    count: int, columns: int, inches: tuple[float, float], title: str = "", captions: Sequence[str] = ()
) -> tuple["Figure", list["Axes"]]:
    """Return a figure and its panels, in rows of at most so many columns, each of a size; call it inside `drawing`."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = new_figure(max(3.9, inches[0] * columns), inches[1] * rows, title, captions)
    return figure, [figure.add_subplot(rows, columns, index + 1) for index in range(count)]


def add_legend(owner: "Axes | Figure", handles: Sequence[Any], labels: Sequence[str], **options: Any) -> None:
    """Add a legend, by default at the best place."""
    # by name: where that is matplotlib's default, a busy machine gets a warning
    owner.legend(handles, labels, **{"loc": "best", **options})


def legend_label(text: str) -> str:
    """Return a text as the label of a line; matplotlib leaves labels out of legends that begin with `_`."""
    return f" {text}" if text.startswith("_") else text


def set_up_axes(axes: "Axes", x: str, y: str = "", title: str = "", *, title_size: float = 9.5) -> None:
    """Name axes, and draw a grid."""
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=title_size)
    axes.grid(visible=True)


def render_figure(figure: "Figure", formats: Sequence[str] = _FORMATS, *, dpi: float = _DPI) -> dict[str, bytes]:
    """Return the bytes of a figure in each format; call it inside `drawing`. The same figure gives the same bytes."""
    # a date or a version would make every file differ
    metadata = {"svg": dict.fromkeys(("Creator", "Date", "Format", "Type")), "png": {"Software": None}}
    rendered = {}
    for name in formats:
        buffer = io.BytesIO()
        figure.savefig(buffer, format=name, dpi=dpi, metadata=metadata[name])
        rendered[name] = buffer.getvalue()
    return rendered


def figure_files(figure: "Figure", folder: Path, stem: str) -> dict[Path, bytes]:
    """Return the content of `<stem>.png` and `<stem>.svg`; call it inside `drawing`."""
    return {folder / f"{stem}.{name}": content for name, content in render_figure(figure).items()}


def write_figure(figure: "Figure", folder: Path, stem: str) -> list[Path]:
    """Write the `figure_files` and return their paths; call it inside `drawing`.

    Raises:
        CheckpointError: A file cannot be written.
    """
    files = figure_files(figure, folder, stem)
    write_together(files)
    return list(files)


def render_page(template: str, **values: Any) -> str:
    """Return an HTML page, light and dark, that needs nothing else, from a file in `report/templates`.

    Values are plain, never markup, unless the template says otherwise; control characters are shown.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("exlm_cli.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # not what is markup already
    )
    # pages hold SVG files as images, so that no browser runs what is in them
    environment.filters["base64"] = lambda drawing: base64.b64encode(drawing).decode()
    return environment.get_template(template).render(values)


@dataclass(frozen=True)
class Card:
    """A picture or a text on a page, and lines below it.

    Attributes:
        drawing: An SVG file; None: the text is shown.
        text: What the picture shows, for those who cannot see it.
    """

    drawing: bytes | None
    text: str
    lines: Sequence[str]


def corruption_colour(group: int, num_groups: int) -> str:
    """Return the colour of a group of equal p^k, from 0 for the smallest, by its place on `CORRUPTION_RAMP`."""
    place = (len(CORRUPTION_RAMP) - 1) * (group / (num_groups - 1) if num_groups > 1 else 0.5)
    below = min(int(place), len(CORRUPTION_RAMP) - 2)
    pairs = zip(channels(CORRUPTION_RAMP[below]), channels(CORRUPTION_RAMP[below + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - below)):02X}" for a, b in pairs)


def mask_colour(mask: int) -> str:
    """Return the colour of a mask, from 0; -1 is BOS or EOS. Colours repeat after eight masks."""
    return END_COLOUR if mask < 0 else MASK_COLOURS[mask % len(MASK_COLOURS)]


def ink_on(colour: str) -> str:
    """Return black or white, whichever reads better on a colour (WCAG contrast)."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in channels(colour)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "#FFFFFF"


def fade(colour: str, strength: float) -> str:
    """Mix a colour with white: 1 is the colour, 0 white."""
    mixed = [round(255 + (c - 255) * strength) for c in channels(colour)]
    return "#" + "".join(f"{c:02X}" for c in mixed)


def channels(colour: str) -> tuple[int, int, int]:
    """Return red, green and blue of `#RRGGBB`, from 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def draw_molecule(smiles: str, panels: Sequence[tuple[str, Mapping[int, str]]] = (("", {}),)) -> bytes | None:
    """Return the SVG of a molecule, which holds nothing but shapes; None of one that is too large.

    Args:
        panels: For each drawing, side by side: a line below it, and the colours, as `#RRGGBB`, of atoms by their place
            in the SMILES.
    """
    from rdkit import rdBase
    from rdkit.Chem.Draw import rdMolDraw2D

    from exlm_cli.data.molecules import read_all_atoms

    with rdBase.BlockLogs():
        molecule = read_all_atoms(smiles)
        if molecule is None or molecule.GetNumAtoms() > MAX_DRAWN_ATOMS:
            return None
        drawer = rdMolDraw2D.MolDraw2DSVG(
            _MOLECULE_WIDTH * len(panels), _MOLECULE_HEIGHT, _MOLECULE_WIDTH, _MOLECULE_HEIGHT
        )
        options: Any = drawer.drawOptions()
        options.fixedBondLength = 26.0
        options.highlightRadius = 0.42
        options.legendFontSize = 13
        if any(colours for _, colours in panels):
            options.useBWAtomPalette()  # letters in the colours of elements would be lost on coloured atoms
        colours_P = [
            {atom: tuple(c / 255 for c in channels(colour)) for atom, colour in colours.items()}
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
