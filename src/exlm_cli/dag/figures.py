"""The two pictures of a DAG: its graph (Figure 11) and its transition heat map (Figures 7 and 10), as PNG and SVG.

Figures are measured in points with y downwards, so that a font size means the same in every picture. In SVG, nodes,
edges and their numbers have ids, and a tooltip says what each one is; the HTML page shows this very SVG.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from exlm_cli.dag.inspect import MAX_MASKS_DRAWN, Inspection
from exlm_cli.dag.layout import (
    FONT_FAMILY,
    EdgeCurve,
    GraphLayout,
    NodeBox,
    fit_word,
    flow_words,
    lay_out_graph,
    text_width,
)
from exlm_cli.format import format_percent
from exlm_cli.report.style import FAINT_INK, INK, drawing, fade, ink_on, mask_colour, render_figure

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRAPH_CAPTION = (
    "Each box is one state of a [MASK]: its number and its most probable word. The more of its colour it shows, the "
    "more paths visit it. Edges are as wide as their transition probability and as dark as they are used."
)
HEAT_MAP_CAPTION = (
    "Row: the node a path leaves. Column: the node it enters next. Rows of the whole DAG sum to 1; grey: no edge."
)
_NOTE_ON_SMILES = "\N{BALLOT X}: RDKit refuses it."

_DPI, _MAX_PIXELS = 200.0, 5000.0
_MARGIN = 14.0
_TITLE_FONT, _CAPTION_FONT = 12.0, 8.0
_HEAT_COLOURS = "Blues"
_MIN_VALUE_SHOWN = 0.005
_MAX_MASKS_IN_PANEL = 5


def render_graph(inspection: Inspection, formats: Sequence[str]) -> dict[str, bytes]:
    """Draw the DAG with its nodes in columns by mask and, where there is room, the n best fillings beside it.

    Args:
        inspection: What to draw.
        formats: Of "png" and "svg". The root element of an SVG has `data-graphic`, the view box of the graph alone.

    Returns:
        The file of each format.
    """
    layout = lay_out_graph(inspection)
    panel = _FillingPanel.of(inspection) if inspection.dag.num_masks <= _MAX_MASKS_IN_PANEL else None
    width = layout.width + (panel.width if panel else 0.0)
    height = max(layout.height, panel.height if panel else 0.0)
    captions = [
        GRAPH_CAPTION,
        inspection.health(),
        inspection.note_on_cut(),
        inspection.note_on_proof(),
        _NOTE_ON_SMILES if inspection.dag.kind == "smiles" else "",
    ]
    top = (height - layout.height) / 2
    with _open_canvas(width, height, inspection.sentence(), captions) as canvas:
        _draw_graph(replace(canvas, origin=(-layout.left, top - layout.top)), inspection, layout)
        if panel:
            panel.draw(replace(canvas, origin=(layout.width + 6.0, 0.0)), inspection)
        return canvas.save(formats, (0.0, top, layout.width, layout.height))


def render_heat_map(inspection: Inspection, formats: Sequence[str]) -> dict[str, bytes]:
    """Draw exp(log E) with the words of every node on both axes, coloured by mask; arguments as `render_graph`."""
    grid = _Grid.of(inspection)
    width = grid.left + len(grid.columns) * grid.cell + 62.0
    height = grid.top + len(grid.rows) * grid.cell + 16.0
    captions = [HEAT_MAP_CAPTION, inspection.note_on_cut()]
    with _open_canvas(width, height, inspection.sentence(), captions) as canvas:
        _draw_cells(canvas, inspection, grid)
        _draw_axes(canvas, inspection, grid)
        _draw_colour_bar(canvas, grid)
        return canvas.save(formats, (0.0, 0.0, width, height))


@dataclass(frozen=True)
class _Canvas:
    """Axes that fill a figure, one unit a point. What is drawn later lies on top.

    Attributes:
        figure, axes: Of matplotlib.
        above: Height of the title, whose top is at -above.
        origin: Added to all coordinates; `replace` it to draw elsewhere on the same figure.
        tooltips: Texts that the SVG shows for what is pointed at, by id.
        square_tooltips: Those of the squares with id `cells`, in their order.
        hidden: Artists that only the SVG has, by id, and that it hides.
        order: Counts what was drawn.
    """

    figure: "Figure"
    axes: "Axes"
    above: float
    origin: tuple[float, float] = (0.0, 0.0)
    tooltips: dict[str, str] = field(default_factory=dict)
    square_tooltips: list[str] = field(default_factory=list)
    hidden: "dict[str, Artist]" = field(default_factory=dict)
    order: Iterator[int] = field(default_factory=itertools.count)

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
        **style: Any,
    ) -> None:
        """Write a text around (x, y); turned texts read upwards. No text is ever read as a formula."""
        artist = self.axes.text(x, y, text, fontsize=font, color=colour, ha=align, parse_math=False)
        artist.set(va="center_baseline", rotation=90 if is_turned else 0, rotation_mode="anchor")
        self._add(artist, **style)

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, *, radius: float = 0.0, **style: Any
    ) -> None:
        """Fill a rectangle around (x, y)."""
        from matplotlib.patches import FancyBboxPatch

        shape = f"round,pad=0,rounding_size={radius}" if radius else "square,pad=0"
        corner = (x - width / 2, y - height / 2)
        patch = FancyBboxPatch(corner, width, height, boxstyle=shape)
        patch.set(facecolor=colour, edgecolor="none", linewidth=1.2)
        self._add(patch, **style)

    def chip(self, x: float, y: float, text: str, font: float, mask: int, *, align: str = "center") -> None:
        """Write a word on the colour of its mask, around x or to its right."""
        width, colour = text_width(text, font) + 0.8 * font, mask_colour(mask)
        centre = x + (width / 2 if align == "left" else 0.0)
        self.box(centre, y, width, 1.55 * font, colour, radius=0.35 * font)
        self.text(centre, y, text, font, ink_on(colour))

    def arrow(self, edge: EdgeCurve, gid: str) -> None:
        """Draw an edge with a head at its end."""
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.path import Path

        length = 3.5 + 0.9 * edge.width
        head = f"-|>,head_length={length:.3f},head_width={0.4 * length:.3f}"
        path = Path(edge.control, [Path.MOVETO, *[Path.CURVE4] * 3])
        arrow = FancyArrowPatch(path=path, arrowstyle=head, shrinkA=0, shrinkB=0, mutation_scale=1)
        arrow.set(color=INK, alpha=edge.opacity, linewidth=edge.width, joinstyle="miter", capstyle="butt")
        self._add(arrow, gid=gid)
        if edge.is_weak:
            self.hidden[gid] = arrow

    def squares(self, left: Any, top: Any, size: tuple[float, float], values: Any, **style: Any) -> None:
        """Fill rectangles of one size with the colours of values between 0 and 1, given their corners (N,)."""
        from matplotlib.collections import PolyCollection

        corner = np.stack([left, top], axis=-1)[:, None]
        corners = corner + np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * size
        squares = PolyCollection(list(corners), array=values, cmap=_HEAT_COLOURS, clim=(0, 1), linewidth=0.5)
        self._add(squares, **style)

    def save(self, formats: Sequence[str], graphic: tuple[float, float, float, float]) -> dict[str, bytes]:
        """Return the file of each format; the same drawing gives the same bytes.

        Args:
            formats: Of "png" and "svg".
            graphic: Left, top, width and height of the drawing without title, captions and what lies beside it.
        """
        dpi = min(_DPI, _MAX_PIXELS / max(self.figure.get_size_inches()))
        files: dict[str, bytes] = {}
        for name in formats:
            for artist in self.hidden.values():
                artist.set_visible(name == "svg")
            files |= render_figure(self.figure, [name], dpi=dpi)
        if "svg" in files:
            left, top, width, height = graphic
            view_box = f"{left:.1f} {top + self.above:.1f} {width:.1f} {height:.1f}"
            files["svg"] = self._annotate(files["svg"].decode(), view_box).encode()
        return files

    def _add(self, artist: "Artist", **style: Any) -> None:
        from matplotlib.transforms import Affine2D

        # without clipping, the SVG needs no clip paths
        artist.set(clip_on=False, zorder=next(self.order), **style)
        artist.set_transform(Affine2D().translate(*self.origin) + self.axes.transData)
        if artist.axes is None:
            self.axes.add_artist(artist)

    def _annotate(self, svg: str, view_box: str) -> str:
        """Add tooltips, hide what only a reader's pointer shows, drop metadata and the ids that nothing refers to."""
        tooltips = iter(self.square_tooltips)

        def annotate_group(group: re.Match[str]) -> str:
            name = group[1]
            if name not in self.tooltips:
                return "<g>" if re.fullmatch(r"\w+_\d+", name) else group[0]
            hidden = ' visibility="hidden"' if name in self.hidden else ""
            return f'<g id="{name}"{hidden}><title>{escape(self.tooltips[name])}</title>'

        def annotate_squares(squares: re.Match[str]) -> str:
            return re.sub(r"/>", lambda _: f"><title>{escape(next(tooltips))}</title></path>", squares[0])

        # only markup has angle brackets: matplotlib escapes those of texts
        svg = re.sub(r"\s*<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
        svg = re.sub(r'(?<=<g id="cells">).*?(?=</g>)', annotate_squares, svg, flags=re.DOTALL)
        svg = re.sub(r'<g id="([^"]*)">', annotate_group, svg)
        return svg.replace("<svg ", f'<svg data-graphic="{view_box}" ', 1)


@contextmanager
def _open_canvas(
    width: float, height: float, title: Sequence[tuple[str, int]], captions: Sequence[str]
) -> Iterator[_Canvas]:
    """Open a canvas with a title above the drawing and captions below it.

    Args:
        width: Of the drawing, points; a canvas is at least 400 wide.
        height: Of the drawing.
        title: Words with the blanks after them, each with the mask it is or -1.
        captions: Paragraphs.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = max(width, 400.0)
    captions = [line for caption in captions for line in _wrap(caption, width - 2 * _MARGIN)]
    starts = flow_words([text for text, _ in title], _TITLE_FONT, width - 2 * _MARGIN)
    line_height = 1.75 * _TITLE_FONT
    above = (starts[-1][1] + 1) * line_height + 1.5 * _MARGIN
    below = len(captions) * 1.5 * _CAPTION_FONT + _MARGIN
    # words stay words in the SVG: browsers find fonts for all letters, and readers can search for them
    with drawing(), rc_context({"svg.fonttype": "none", "font.family": [FONT_FAMILY, "sans-serif"]}):
        figure = Figure(figsize=(width / 72, (above + height + below) / 72), facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height + below, -above))
        axes.set_axis_off()
        canvas = _Canvas(figure, axes, above)
        for (word, mask), (x, line) in zip(title, starts, strict=True):
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


def _draw_graph(canvas: _Canvas, inspection: Inspection, layout: GraphLayout) -> None:
    for edge in sorted(layout.edges, key=lambda e: e.use):
        name = f"{edge.source}-{edge.target}"
        canvas.arrow(edge, f"edge-{name}")
        canvas.tooltips[f"edge-{name}"] = (
            f"{_name(inspection, edge.source)} → {_name(inspection, edge.target)}: "
            f"transition {edge.probability:.3f}, on {edge.use:.3f} of the paths"
        )
    for box in layout.nodes:
        _draw_node(canvas, inspection, box, layout)
    for edge in layout.edges:
        if edge.label_at is not None:
            paper = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}
            number = f"number-{edge.source}-{edge.target}"
            canvas.text(*edge.label_at, f"{edge.probability:.2f}", layout.label_font, gid=number, bbox=paper)
    for box in layout.headings:
        canvas.chip(box.x, box.y, box.word, layout.heading_font, box.mask)


def _draw_node(canvas: _Canvas, inspection: Inspection, box: NodeBox, layout: GraphLayout) -> None:
    """Draw a box with a node's number, but for BOS and EOS, and its word."""
    colour = fade(mask_colour(box.mask), box.strength)
    name, radius = f"node-{box.node}", box.height / 2
    canvas.box(box.x, box.y, box.width, box.height, colour, edgecolor=mask_colour(box.mask), radius=radius, gid=name)
    number = f"{box.node} " if box.mask >= 0 else ""
    left = box.x - (text_width(number, layout.label_font) + text_width(box.word, layout.font)) / 2
    canvas.text(left, box.y, number, layout.label_font, ink_on(colour), align="left", alpha=0.7)
    left += text_width(number, layout.label_font)
    canvas.text(left, box.y, box.word, layout.font, ink_on(colour), align="left")
    words = inspection.listed_words(box.node)
    canvas.tooltips[name] = f"node {box.node}, on {box.occupancy:.3f} of the paths" + (f": {words}" if words else "")


def _name(inspection: Inspection, node: int) -> str:
    """Return a node's number and word."""
    word = inspection.quote(inspection.word(node))
    return f"{node} {word}" if inspection.tokens[node] else word


@dataclass(frozen=True)
class _FillingPanel:
    """The list beside the graph: shares, bars and words in columns by mask, and below them the independent guess.

    Attributes:
        words: Words of every filling, one a mask, cut to fit; the guess comes last.
        columns: Left edge of each mask's words; the last one is that of RDKit's marks.
    """

    words: list[list[str]]
    columns: list[float]

    _FONT, _PITCH = 9.0, 19.0
    _TOP, _BAR_LEFT, _BAR_WIDTH, _WORDS_LEFT, _MAX_WORD = 22.0, 46.0, 46.0, 98.0, 84.0

    @classmethod
    def of(cls, inspection: Inspection) -> "_FillingPanel":
        fillings = [*inspection.n_best.fillings, inspection.guess.filling]
        words = [[fit_word(w, cls._FONT, cls._MAX_WORD) for w in inspection.filled_words(f)] for f in fillings]
        columns = [cls._WORDS_LEFT]
        for in_mask in zip(*words, strict=True):
            columns.append(columns[-1] + max(text_width(word, cls._FONT) for word in in_mask) + 12.0)
        return cls(words, columns)

    @property
    def width(self) -> float:
        return max(self.columns[-1] + 30.0, 262.0)

    @property
    def height(self) -> float:
        return self._TOP + 92.0 + self._PITCH * (len(self.words) - 1)

    def draw(self, canvas: _Canvas, inspection: Inspection) -> None:
        canvas.text(0, self._TOP, "Most probable joint fillings", 10.0, align="left", weight="bold")
        counted = f"share {inspection.counted_fillings()}"
        canvas.text(0, self._TOP + 14, counted, 8.0, FAINT_INK, align="left")
        y = self._TOP + 36.0
        for filling, words in zip(inspection.n_best.fillings, self.words, strict=False):
            canvas.text(self._BAR_LEFT - 6, y, format_percent(inspection.share(filling)), self._FONT, align="right")
            bar = max(self._BAR_WIDTH * inspection.relative_probability(filling), 0.5)
            canvas.box(self._BAR_LEFT + bar / 2, y, bar, 9, "#B8C4D0")
            self._draw_words(canvas, words, y)
            if filling.is_valid_smiles is False:
                canvas.text(self.columns[-1] + 6, y, "\N{BALLOT X}", self._FONT)
            y += self._PITCH
        guess = inspection.guess
        alone = format_percent(float(np.exp(guess.log_prob_independent)))
        together = format_percent(inspection.share(guess.filling))
        canvas.text(0, y + 8, "Each [MASK] guessed on its own", 10.0, align="left", weight="bold")
        note = f"{alone} if masks were independent; {together} in the DAG"
        canvas.text(0, y + 22, note, 8.0, FAINT_INK, align="left")
        self._draw_words(canvas, self.words[-1], y + 42)

    def _draw_words(self, canvas: _Canvas, words: list[str], y: float) -> None:
        for mask, (word, x) in enumerate(zip(words, self.columns, strict=False)):
            canvas.chip(x, y, word, self._FONT, mask, align="left")


@dataclass(frozen=True)
class _Grid:
    """Rows, columns and sizes of the heat map."""

    rows: list[int]
    columns: list[int]
    labels: dict[int, list[str]]
    cell: float
    font: float
    label_width: float

    @classmethod
    def of(cls, inspection: Inspection) -> "_Grid":
        dag = inspection.dag
        num_masks = min(dag.num_masks, MAX_MASKS_DRAWN)
        inner = np.flatnonzero((dag.node_mask >= 0) & (dag.node_mask < num_masks)).tolist()
        small, middle, large = (46.0, 8.5, 3), (25.0, 8.0, 1), (9.0, 6.0, 1)
        cell, font, num_lines = small if len(inner) <= 16 else middle if len(inner) <= 48 else large
        labels = {0: ["BOS"], dag.num_nodes - 1: ["EOS"]}
        for node in inner:
            labels[node] = [
                fit_word(inspection.quote(token.text), font, 80.0) + (f" {token.probability:.2f}" if font > 7 else "")
                for token in inspection.tokens[node][:num_lines]
            ]
            labels[node][0] = f"{node} {labels[node][0]}"
        label_width = 10.0 + max(
            text_width(line, font, is_bold=number == 0)
            for lines in labels.values()
            for number, line in enumerate(lines)
        )
        columns = inner if num_masks < dag.num_masks else [*inner, dag.num_nodes - 1]
        return cls([0, *inner], columns, labels, cell, font, label_width)

    @property
    def left(self) -> float:
        return self.label_width + 42.0

    @property
    def top(self) -> float:
        return self.label_width + 36.0


def _draw_cells(canvas: _Canvas, inspection: Inspection, grid: _Grid) -> None:
    probabilities = np.exp(inspection.dag.log_trans[np.ix_(grid.rows, grid.columns)])
    is_edge = np.array(grid.rows)[:, None] < np.array(grid.columns)
    if grid.cell < 20:
        is_edge &= probabilities >= _MIN_VALUE_SHOWN
    height, width = grid.cell * len(grid.rows), grid.cell * len(grid.columns)
    canvas.box(grid.left + width / 2, grid.top + height / 2, width, height, "#EEF0F2")
    row, column = np.nonzero(is_edge)
    left, top, values = grid.left + column * grid.cell, grid.top + row * grid.cell, probabilities[is_edge]
    canvas.squares(left, top, (grid.cell, grid.cell), values, edgecolor="white", gid="cells")
    for r, c, x, y, value in zip(row, column, left, top, values, strict=True):
        ends = f"{_name(inspection, grid.rows[r])} → {_name(inspection, grid.columns[c])}"
        canvas.square_tooltips.append(f"{ends}: {value:.3f}")
        if grid.cell > 20 and value >= _MIN_VALUE_SHOWN:
            middle = x + grid.cell / 2, y + grid.cell / 2
            canvas.text(*middle, f"{value:.2f}", min(9.5, grid.cell * 0.3), "#FFFFFF" if value > 0.55 else INK)


def _draw_axes(canvas: _Canvas, inspection: Inspection, grid: _Grid) -> None:
    for index, node in enumerate(grid.rows):
        _draw_label(canvas, inspection, grid, node, grid.top + (index + 0.5) * grid.cell, is_column=False)
    for index, node in enumerate(grid.columns):
        _draw_label(canvas, inspection, grid, node, grid.left + (index + 0.5) * grid.cell, is_column=True)
    font = max(9.0, grid.font)
    canvas.text(16.0, grid.top + grid.cell * len(grid.rows) / 2, "from", font, FAINT_INK, is_turned=True)
    canvas.text(grid.left + grid.cell * len(grid.columns) / 2, 8.0, "to", font, FAINT_INK)


def _draw_label(canvas: _Canvas, inspection: Inspection, grid: _Grid, node: int, at: float, *, is_column: bool) -> None:
    """Write the words of a node on the colour of its mask, beside its row or above its column."""
    lines = grid.labels[node]
    colour = mask_colour(int(inspection.dag.node_mask[node]))
    across, along = grid.cell - (2.0 if grid.cell > 20 else 0.4), grid.label_width - 4.0
    if is_column:
        middle = grid.top - 2.0 - along / 2
        canvas.box(at, middle, across, along, colour)
    else:
        middle = grid.left - 2.0 - along / 2
        canvas.box(middle, at, along, across, colour)
    for number, line in enumerate(lines):
        line_at = at + (number - (len(lines) - 1) / 2) * 1.42 * grid.font
        x, y = (line_at, middle) if is_column else (middle, line_at)
        weight = "bold" if number == 0 and len(lines) > 1 else "normal"
        canvas.text(x, y, line, grid.font, ink_on(colour), is_turned=is_column, weight=weight)


def _draw_colour_bar(canvas: _Canvas, grid: _Grid) -> None:
    left, height = grid.left + grid.cell * len(grid.columns) + 14.0, min(grid.cell * len(grid.rows), 260.0)
    step = height / 128
    tops = grid.top + step * np.arange(128)
    canvas.squares(np.full(128, left), tops, (10.0, step), np.linspace(1, 0, 128), edgecolor="face")
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        canvas.text(left + 14.0, grid.top + (1 - value) * height, f"{value:g}", 8.0, FAINT_INK, align="left")
