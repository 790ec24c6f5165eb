"""A matplotlib figure measured in points with y downwards, so that a font size means the same in every picture."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from exlm_cli.report.style import FAINT_INK, INK, drawing, ink_on, mask_colour, render_figure
from exlm_cli.report.text_metrics import flow_words, text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS_PER_INCH = 72.0
_DPI = 200.0
_MOST_PIXELS = 5000.0
_MARGIN = 14.0
_TITLE_FONT, _CAPTION_FONT = 12.0, 8.0


class Canvas:
    """What pictures are drawn on."""

    def __init__(self, figure: "Figure", axes: "Axes", dpi: float) -> None:
        self._figure, self._axes, self._dpi = figure, axes, dpi
        self._num_drawn = 0

    def text(
        self,
        x: float,
        y: float,
        text: str,
        font: float,
        colour: str = INK,
        *,
        align: str = "center",
        is_turned: bool = False,
        is_bold: bool = False,
    ) -> None:
        """Write a text around (x, y); turned texts read upwards. No character of it is a command to matplotlib."""
        self._axes.text(
            x,
            y,
            text,
            fontsize=font,
            color=colour,
            ha=align,
            va="center_baseline",
            rotation=90 if is_turned else 0,
            rotation_mode="anchor",
            fontweight="bold" if is_bold else "normal",
            zorder=self._next(),
            parse_math=False,
        )

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, *, edge: str = "none", radius: float = 0.0
    ) -> None:
        """Fill a rectangle around (x, y)."""
        from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

        corner = (x - width / 2, y - height / 2)
        patch: Patch = Rectangle(corner, width, height)
        if radius:
            patch = FancyBboxPatch(corner, width, height, boxstyle=f"round,pad=0,rounding_size={radius}")
        patch.set(facecolor=colour, edgecolor=edge, linewidth=1.2, zorder=self._next())
        self._axes.add_patch(patch)

    def line(self, points: Any, colour: str, width: float, opacity: float = 1.0) -> None:
        """Draw a line through points (P, 2)."""
        (line,) = self._axes.plot(points[:, 0], points[:, 1], solid_capstyle="butt")
        line.set(color=colour, linewidth=width, alpha=opacity, zorder=self._next())

    def polygon(self, points: Any, colour: str, opacity: float = 1.0) -> None:
        """Fill a polygon (P, 2)."""
        from matplotlib.patches import Polygon

        patch = Polygon(points, closed=True)
        patch.set(facecolor=colour, edgecolor="none", alpha=opacity, zorder=self._next())
        self._axes.add_patch(patch)

    def image(self, values: Any, left: float, top: float, width: float, height: float, colours: str) -> None:
        """Show a matrix of values between 0 and 1 as cells; NaN stays empty."""
        image = self._axes.imshow(values, cmap=colours, vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        image.set(extent=(left, left + width, top + height, top), zorder=self._next())

    def chip(self, x: float, y: float, text: str, font: float, mask: int, *, align: str = "center") -> float:
        """Write a word on the colour of its mask, around x or to its left or right; return how wide it is."""
        width = text_width(text, font) + 0.8 * font
        centre = x + {"center": 0.0, "left": width / 2, "right": -width / 2}[align]
        colour = mask_colour(mask)
        self.box(centre, y, width, 1.55 * font, colour, radius=0.35 * font)
        self.text(centre, y, text, font, ink_on(colour))
        return width

    def _next(self) -> int:
        """Order of painting: what is drawn later lies on top."""
        self._num_drawn += 1
        return self._num_drawn

    def note(self, x: float, y: float, text: str, font: float) -> None:
        """Write a text that may lie on lines: on white of its own."""
        self.box(x, y, text_width(text, font) + 2.0, 1.15 * font, "#FFFFFF", radius=0.3 * font)
        self.text(x, y, text, font)

    def save(self, formats: Sequence[str]) -> dict[str, bytes]:
        """Return the file of each format; the same picture gives the same bytes."""
        return render_figure(self._figure, formats, dpi=self._dpi)


@contextmanager
def open_canvas(
    width: float, height: float, title: Sequence[tuple[str, int]], captions: Sequence[str]
) -> Iterator[Canvas]:
    """Open a canvas of `width` by `height` points with a title above and captions below it.

    Args:
        width: Of the drawing; a canvas is at least 400 wide.
        height: Of the drawing.
        title: Words, each with the mask it names or -1; the blank after a word is part of it.
        captions: Lines.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = max(width, 400.0)
    captions = [line for caption in captions for line in _wrap(caption, width - 2 * _MARGIN)]
    places = flow_words([text for text, _ in title], _TITLE_FONT, width - 2 * _MARGIN)
    line_height = 1.75 * _TITLE_FONT
    above = (places[-1][1] + 1) * line_height + 1.5 * _MARGIN
    below = len(captions) * 1.5 * _CAPTION_FONT + _MARGIN
    # letters that its font lacks are drawn as boxes; the HTML report has them
    with drawing():
        size = (width / _POINTS_PER_INCH, (above + height + below) / _POINTS_PER_INCH)
        figure = Figure(figsize=size, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height + below, -above))
        axes.set_axis_off()
        axes.set_autoscale_on(False)
        canvas = Canvas(figure, axes, min(_DPI, _MOST_PIXELS / max(size)))
        for (word, mask), (x, line) in zip(title, places, strict=True):
            y = -above + _MARGIN + (line + 0.5) * line_height
            if mask >= 0:
                # smaller than the words around it, so that its box fits into the space of the word
                canvas.chip(_MARGIN + x, y, word.rstrip(), 0.84 * _TITLE_FONT, mask, align="left")
            else:
                canvas.text(_MARGIN + x, y, word, _TITLE_FONT, align="left")
        for number, caption in enumerate(captions):
            y = height + (number + 0.5) * 1.5 * _CAPTION_FONT
            canvas.text(_MARGIN, y, caption, _CAPTION_FONT, FAINT_INK, align="left")
        yield canvas


def _wrap(text: str, width: float) -> list[str]:
    """Break a caption into lines."""
    words = [word + " " for word in text.split()]
    lines: dict[int, str] = {}
    for word, (_, line) in zip(words, flow_words(words, _CAPTION_FONT, width), strict=True):
        lines[line] = lines.get(line, "") + word
    return [line.rstrip() for line in lines.values()]
