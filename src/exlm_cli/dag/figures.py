"""Two pictures of a DAG: its graph (Figure 11) and its transition heat map (Figures 7 and 10), as PNG and SVG.

Axes of the graph are measured in points with y downwards, so that a font size means the same in every picture. In the
SVG, nodes, edges and their numbers have ids, by which the HTML page, which shows this same SVG, finds them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path
from numpy.typing import NDArray

from exlm_cli.dag.fillings import Filling
from exlm_cli.dag.graph import FloatArray
from exlm_cli.dag.inspection import MAX_MASKS_DRAWN, WITHOUT_DAG, Inspection
from exlm_cli.dag.layout import FONT_FAMILY, EdgeCurve, GraphLayout, NodeBox, fit_word, lay_out_graph, text_width
from exlm_cli.format import format_percent
from exlm_cli.report.style import FAINT_INK, INK, drawing, fade, ink_on, mask_colour, new_figure, render_figure

GRAPH_CAPTION = (
    "Each box is one state of a [MASK]: its number and its most probable word. The more of its colour it shows, the "
    "more paths visit it. Edges are as wide as their transition probability and as dark as they are used."
)
HEAT_MAP_CAPTION = (
    "Row: the node a path leaves. Column: the node it enters next. Rows of the whole DAG sum to 1; grey: no edge."
)
_NOTE_ON_SMILES = "\N{BALLOT X}: RDKit refuses it."

# words stay words in the SVG: browsers find fonts for all characters, and readers can search for them
_TEXT_SETTINGS: Any = {"svg.fonttype": "none", "font.family": [FONT_FAMILY, "sans-serif"]}
_DPI, _MAX_PIXELS = 200.0, 5000.0
_MAX_MASKS_IN_PANEL = 5
_MIN_VALUE_SHOWN = 0.005
_NO_EDGE = "#EEF0F2"


def render_graph(inspection: Inspection, formats: Sequence[str]) -> dict[str, bytes]:
    """Draw the DAG with its nodes in columns by mask and, where there is room, the n best fillings beside it.

    Returns the file of each format, "png" or "svg".
    """
    layout = lay_out_graph(inspection)
    panel = _FillingPanel(inspection) if inspection.dag.num_masks <= _MAX_MASKS_IN_PANEL else None
    width = layout.width + (panel.width if panel else 0.0)
    height = max(layout.height, panel.height if panel else 0.0)
    captions = [GRAPH_CAPTION, inspection.health(), inspection.note_on_cut()]
    if panel:
        captions += [inspection.note_on_proof(), _NOTE_ON_SMILES if inspection.dag.kind == "smiles" else ""]
    with drawing(), rc_context(_TEXT_SETTINGS):
        figure = new_figure(max(width, 400.0) / 72, height / 72, inspection.numbered_sentence(), captions)
        figure.set_layout_engine("none")
        bottom = (height - layout.height) / 2
        axes = _add_axes(figure, 0.0, bottom, layout.width, layout.height)
        _measure_in_points(axes, layout.left, layout.top, layout.width, layout.height)
        for edge in sorted(layout.edges, key=lambda edge: edge.use):
            _draw_edge(axes, edge, layout)
        for box in layout.nodes:
            _draw_node(axes, box, layout)
        for box in layout.headings:
            _draw_chip(axes, box.x, box.y, box.word, layout.scale.heading_font, box.mask)
        if panel:
            panel.draw(_add_axes(figure, layout.width, height - panel.height, panel.width, panel.height))
        return _render(figure, formats)


def render_heat_map(inspection: Inspection, formats: Sequence[str]) -> dict[str, bytes]:
    """Draw exp(log E) with the words of every node on both axes, coloured by mask; arguments as `render_graph`."""
    dag = inspection.dag
    num_masks = min(dag.num_masks, MAX_MASKS_DRAWN)
    rows = [0, *np.flatnonzero((dag.node_mask >= 0) & (dag.node_mask < num_masks)).tolist()]
    columns = [*rows[1:], dag.num_nodes - 1] if num_masks == dag.num_masks else rows[1:]
    small, middle, large = (46.0, 8.0, 3), (25.0, 7.5, 1), (9.0, 5.5, 1)
    cell, font, num_words = small if len(rows) <= 17 else middle if len(rows) <= 49 else large
    labels = {node: _heat_map_label(inspection, node, font, num_words) for node in {*rows, *columns}}
    label_width = max(text_width(line, font) for label in labels.values() for line in label.splitlines()) + 34.0
    width, height = len(columns) * cell, len(rows) * cell
    full_width, full_height = label_width + width + 60.0, label_width + height + 12.0
    values = dag.trans[np.ix_(rows, columns)]
    is_drawn = (np.array(rows)[:, None] < columns) & ((cell > 20) | (values >= _MIN_VALUE_SHOWN))
    captions = [HEAT_MAP_CAPTION, inspection.note_on_cut()]
    with drawing(), rc_context(_TEXT_SETTINGS):
        figure = new_figure(full_width / 72, full_height / 72, inspection.numbered_sentence(), captions)
        figure.set_layout_engine("none")
        axes = _add_axes(figure, label_width, 6.0, width, height)
        cells = _draw_cells(axes, values, is_drawn, cell)
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.xaxis.set_tick_params(labelrotation=90)
        axes.set_xlabel("to", color=FAINT_INK)
        axes.set_ylabel("from", color=FAINT_INK)
        for axis, nodes in ((axes.xaxis, columns), (axes.yaxis, rows)):
            _label_axis(axis, [labels[node] for node in nodes], dag.node_mask[nodes].tolist(), font)
        bar_height = min(height, 260.0)
        _draw_colour_bar(
            cells, _add_axes(figure, label_width + width + 14.0, 6.0 + height - bar_height, 10.0, bar_height)
        )
        return _render(figure, formats)


def _draw_cells(axes: Axes, values: FloatArray, is_drawn: NDArray[np.bool_], cell: float) -> PolyCollection:
    """Draw a matrix of probabilities, one unit a cell, with numbers where cells are large enough."""
    num_rows, num_columns = values.shape
    axes.set(xlim=(0, num_columns), ylim=(num_rows, 0), facecolor=_NO_EDGE)
    axes.spines[:].set_visible(False)
    corners = [[(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)] for y, x in np.argwhere(is_drawn)]
    cells = PolyCollection(corners, array=values[is_drawn], cmap="Blues", clim=(0, 1), clip_on=False)
    cells.set(edgecolor="white", linewidth=0.5)
    axes.add_collection(cells, autolim=False)
    for y, x in np.argwhere(is_drawn & (values >= _MIN_VALUE_SHOWN) & (cell > 20)):
        ink = "#FFFFFF" if values[y, x] > 0.55 else INK
        _write(axes, x + 0.5, y + 0.5, f"{values[y, x]:.2f}", 0.2 * cell, ink)
    return cells


def _draw_colour_bar(cells: PolyCollection, axes: Axes) -> None:
    bar = axes.figure.colorbar(cells, cax=axes, format="{x:g}")
    bar.outline.set_visible(False)
    axes.tick_params(length=0, colors=FAINT_INK)


def _add_axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Add axes whose position in the figure is given in points."""
    scale = 72 * figure.get_size_inches()
    return figure.add_axes((left / scale[0], bottom / scale[1], width / scale[0], height / scale[1]))


def _measure_in_points(axes: Axes, left: float, top: float, width: float, height: float) -> None:
    """Make a point the unit of axes with this rectangle, y downwards."""
    axes.set(xlim=(left, left + width), ylim=(top + height, top), autoscale_on=False)
    axes.set_axis_off()


def _write(axes: Axes, x: float, y: float, text: str, font: float, colour: str = INK, **style: Any) -> None:
    """Write a text around (x, y)."""
    axes.text(x, y, text, **{"fontsize": font, "color": colour, "ha": "center", "va": "center_baseline", **style})


def _draw_box(
    axes: Axes, x: float, y: float, size: tuple[float, float], colour: str, radius: float, **style: Any
) -> None:
    corner, shape = (x - size[0] / 2, y - size[1] / 2), f"round,pad=0,rounding_size={radius}"
    box = FancyBboxPatch(corner, *size, boxstyle=shape, facecolor=colour, clip_on=False)
    box.set(**({"edgecolor": "none", "linewidth": 1.2} | style))
    axes.add_patch(box)


def _draw_chip(axes: Axes, x: float, y: float, text: str, font: float, mask: int) -> None:
    """Write a word on the colour of its mask."""
    colour = mask_colour(mask)
    _draw_box(axes, x, y, (_chip_width(text, font), 1.55 * font), colour, 0.35 * font)
    _write(axes, x, y, text, font, ink_on(colour))


def _chip_width(text: str, font: float) -> float:
    return text_width(text, font) + 0.8 * font


def _draw_edge(axes: Axes, edge: EdgeCurve, layout: GraphLayout) -> None:
    length = 3.5 + 0.6 * edge.width
    style = f"-|>,head_length={length:.3f},head_width={0.4 * length:.3f}"
    path = Path(edge.control, [Path.MOVETO, *[Path.CURVE4] * 3])
    arrow = FancyArrowPatch(path=path, arrowstyle=style, shrinkA=0, shrinkB=0, mutation_scale=1, clip_on=False)
    # not transparent: line and head overlap
    arrow.set(color=fade(INK, edge.strength), linewidth=edge.width, joinstyle="miter", capstyle="butt")
    arrow.set_gid(f"edge-{edge.source}-{edge.target}")
    axes.add_patch(arrow)
    if edge.label_at is not None:
        paper = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}
        number = f"number-{edge.source}-{edge.target}"
        _write(axes, *edge.label_at, f"{edge.probability:.2f}", layout.scale.number_font, gid=number, bbox=paper)


def _draw_node(axes: Axes, box: NodeBox, layout: GraphLayout) -> None:
    """Draw a box with a node's number, except for BOS and EOS, and its word."""
    colour = fade(mask_colour(box.mask), box.strength)
    size, line = (box.width, box.height), mask_colour(box.mask)
    _draw_box(axes, box.x, box.y, size, colour, box.height / 2, edgecolor=line, gid=f"node-{box.node}")
    number_width = text_width(box.number, layout.scale.number_font)
    left = box.x - (number_width + text_width(box.word, layout.scale.font)) / 2
    _write(axes, left, box.y, box.number, layout.scale.number_font, ink_on(colour), ha="left", alpha=0.7)
    _write(axes, left + number_width, box.y, box.word, layout.scale.font, ink_on(colour), ha="left")


class _FillingPanel:
    """The list beside the graph: shares, bars and words in columns by mask, and below them the independent guess."""

    _FONT, _NOTE_FONT, _PITCH, _TOP = 9.0, 8.0, 19.0, 58.0
    _BAR_LEFT, _BAR_WIDTH, _WORDS_LEFT, _MAX_WORD = 52.0, 46.0, 104.0, 84.0

    def __init__(self, inspection: Inspection) -> None:
        self._inspection = inspection
        fillings = [*inspection.n_best.fillings, inspection.guess.filling]
        columns = [self._WORDS_LEFT]
        for words in zip(*map(self._words, fillings), strict=True):
            columns.append(columns[-1] + max(_chip_width(word, self._FONT) for word in words) + 6.0)
        self._columns = columns
        joint = format_percent(inspection.share(inspection.guess.filling))
        self._note = f"{inspection.share_if_independent()}; {joint} in the DAG"
        self.width = max(columns[-1] + 30.0, 262.0, text_width(self._note, self._NOTE_FONT) + 12.0)
        self.height = self._TOP + 56.0 + self._PITCH * len(inspection.n_best.fillings)

    def draw(self, axes: Axes) -> None:
        _measure_in_points(axes, 0.0, 0.0, self.width, self.height)
        self._draw_heading(axes, 22.0, "Most probable joint fillings", f"share {self._inspection.counted_fillings()}")
        y = self._TOP
        for filling in self._inspection.n_best.fillings:
            share = format_percent(self._inspection.share(filling))
            _write(axes, self._BAR_LEFT - 6, y, share, self._FONT, ha="right")
            bar = max(self._BAR_WIDTH * self._inspection.relative_probability(filling), 0.5)
            _draw_box(axes, self._BAR_LEFT + bar / 2, y, (bar, 9.0), "#B8C4D0", 0.0)
            self._draw_words(axes, filling, y)
            if filling.is_valid_smiles is False:
                _write(axes, self._columns[-1] + 6, y, "\N{BALLOT X}", self._FONT)
            y += self._PITCH
        self._draw_heading(axes, y + 8, WITHOUT_DAG, self._note)
        self._draw_words(axes, self._inspection.guess.filling, y + 42)

    def _draw_heading(self, axes: Axes, y: float, heading: str, note: str) -> None:
        _write(axes, 6.0, y, heading, 10.0, ha="left", weight="bold")
        _write(axes, 6.0, y + 14, note, self._NOTE_FONT, FAINT_INK, ha="left")

    def _draw_words(self, axes: Axes, filling: Filling, y: float) -> None:
        for mask, (word, left) in enumerate(zip(self._words(filling), self._columns, strict=False)):
            _draw_chip(axes, left + _chip_width(word, self._FONT) / 2, y, word, self._FONT, mask)

    def _words(self, filling: Filling) -> list[str]:
        return [fit_word(word, self._FONT, self._MAX_WORD) for word in self._inspection.filled_words(filling)]


def _heat_map_label(inspection: Inspection, node: int, font: float, num_words: int) -> str:
    """Return the lines that name a node on an axis: its number, and words with their probabilities."""
    lines = [
        f"{fit_word(inspection.quote(token.text), font, 80.0)} {token.probability:.2f}"
        for token in inspection.tokens[node][:num_words]
    ]
    return f"{node} " + "\n".join(lines) if lines else inspection.word(node)


def _label_axis(axis: XAxis | YAxis, labels: Sequence[str], masks: Sequence[int], font: float) -> None:
    """Write the labels of nodes beside rows or above columns, each on the colour of its mask."""
    axis.set_ticks(np.arange(len(labels)) + 0.5, labels)
    axis.set_tick_params(length=0, labelsize=font)
    for mask, label in zip(masks, axis.get_ticklabels(), strict=True):
        colour = mask_colour(mask)
        label.set(color=ink_on(colour), bbox={"boxstyle": "round,pad=0.2", "facecolor": colour, "edgecolor": "none"})


def _render(figure: Figure, formats: Sequence[str]) -> dict[str, bytes]:
    return render_figure(figure, formats, dpi=min(_DPI, _MAX_PIXELS / max(figure.get_size_inches())))
