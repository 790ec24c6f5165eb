"""How figures of numbers look: fonts, quiet axes, a title broken into lines, the same bytes for the same data."""

import io
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_cli.files import write_atomically
from exlm_cli.report.palette import FAINT_INK, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRID_INK = "#E6E9EC"
SPINE_INK = "#B5BDC5"

_DPI = 160.0
_TITLE_LETTERS_PER_INCH = 12.5
_CAPTION_LETTERS_PER_INCH = 16.0
_FORMATS = ("png", "svg")


@contextmanager
def drawing(*, font_size: float = 8.5) -> Iterator[None]:
    """Draw with our fonts, whatever a user's matplotlibrc says, and without a word on letters that these lack."""
    from matplotlib import rc_context

    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": font_size,
        "svg.hashsalt": "exlm",
        "svg.fonttype": "path",
    }
    with rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def new_figure(width: float, height: float, title: str, captions: Sequence[str] = ()) -> "Figure":
    """Return a figure of some inches; title and captions come on top of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    titles = textwrap.wrap(title, int(_TITLE_LETTERS_PER_INCH * width))
    small = [line for text in captions for line in textwrap.wrap(text, int(_CAPTION_LETTERS_PER_INCH * width))]
    title_inches, caption_inches = 0.17 * len(titles), 0.15 * len(small)
    size = (width, height + title_inches + caption_inches)
    below = 1 - (title_inches + caption_inches + 0.1) / size[1]
    figure = Figure(figsize=size, facecolor="white", layout=ConstrainedLayoutEngine(rect=(0, 0, 1, below)))
    FigureCanvasAgg(figure)
    top = size[1] - 0.06
    texts = ((titles, 10.0, INK, top), (small, 8.0, FAINT_INK, top - title_inches))
    for lines, font, colour, y in texts:
        figure.text(
            0.08 / width, y / size[1], "\n".join(lines), fontsize=font, color=colour, ha="left", va="top",
            parse_math=False,
        )  # fmt: skip
    return figure


def quieten(axes: "Axes") -> None:
    """Let the data stand out from the axes."""
    axes.tick_params(colors=FAINT_INK, length=3)
    axes.grid(visible=True, color=GRID_INK, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(SPINE_INK)


def render_figure(figure: "Figure", formats: Sequence[str] = _FORMATS, *, dpi: float = _DPI) -> dict[str, bytes]:
    """Return the figure in each format; to be called inside `drawing`. The same figure gives the same bytes."""
    rendered = {}
    for name in formats:
        buffer = io.BytesIO()
        # a date or a version would make every file differ
        figure.savefig(buffer, format=name, dpi=dpi, metadata={"Date" if name == "svg" else "Software": None})
        rendered[name] = buffer.getvalue()
    return rendered


def write_figure(figure: "Figure", folder: Path, stem: str) -> list[Path]:
    """Write `<stem>.png` and `<stem>.svg`; to be called inside `drawing`.

    Raises:
        CheckpointError: The file system refuses.
    """
    written = []
    for name, content in render_figure(figure).items():
        written.append(folder / f"{stem}.{name}")
        write_atomically(written[-1], content)
    return written
