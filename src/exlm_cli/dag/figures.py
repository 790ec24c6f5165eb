"""The graph (Figure 11) and the transition heat map (Figures 7 and 10) of one DAG, as PNG and SVG."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exlm_cli.dag.canvas import Canvas, open_canvas
from exlm_cli.dag.filling_panel import FillingPanel
from exlm_cli.dag.inspect import Inspection
from exlm_cli.dag.layout import lay_out_graph
from exlm_cli.dag.shapes import GRAPH_CAPTION, EdgeCurve, GraphLayout, NodeBox
from exlm_cli.dag.words import MAX_MASKS_DRAWN, health, note_on_cut, note_on_proof, sentence_words
from exlm_cli.report.style import FAINT_INK, INK, fade, ink_on, mask_colour
from exlm_cli.report.text_metrics import fit_word, text_width

_MOST_MASKS_IN_PANEL = 5
_HEAT_COLOURS = "Blues"
_NOTE_ON_SMILES = "\N{BALLOT X}: RDKit refuses it."


def render_graph(inspection: Inspection, formats: Sequence[str]) -> dict[str, bytes]:
    """Draw the DAG with its nodes in columns by mask and, where there is room, the n best fillings beside it.

    Args:
        inspection: What to draw.
        formats: Of "png" and "svg".

    Returns:
        The file of each format.
    """
    layout = lay_out_graph(inspection)
    panel = FillingPanel.of(inspection) if inspection.dag.num_masks <= _MOST_MASKS_IN_PANEL else None
    width = layout.width + (panel.width if panel else 0.0)
    height = max(layout.height, panel.height if panel else 0.0)
    captions = [
        GRAPH_CAPTION,
        health(inspection),
        note_on_cut(inspection),
        note_on_proof(inspection),
        _NOTE_ON_SMILES if inspection.dag.kind == "smiles" else "",
    ]
    with open_canvas(width, height, sentence_words(inspection), captions) as canvas:
        drop = (height - layout.height) / 2
        for edge in sorted(layout.edges, key=lambda e: e.use):
            _draw_edge(canvas, edge, drop)
        for box in layout.nodes:
            _draw_node(canvas, box, layout, drop)
        for edge in layout.edges:
            if edge.label_at is not None:
                x, y = edge.label_at
                canvas.note(x, y + drop, edge.label, layout.label_font)
        for box in layout.headings:
            canvas.chip(box.x, box.y + drop, box.word, layout.heading_font, box.mask)
        if panel:
            panel.draw(canvas, inspection, layout.width + 6.0)
        return canvas.save(formats)


def render_heat_map(inspection: Inspection, formats: Sequence[str]) -> dict[str, bytes]:
    """Draw exp(log E) with the words of every node on both axes, coloured by mask; arguments as `render_graph`."""
    grid = _Grid.of(inspection)
    captions = [
        "Row: the node a path leaves. Column: the node it enters next. Rows of the whole DAG sum to 1; grey: no edge.",
        note_on_cut(inspection),
    ]
    size = (grid.left + len(grid.columns) * grid.cell + 62.0, grid.top + len(grid.rows) * grid.cell + 16.0)
    with open_canvas(*size, sentence_words(inspection), captions) as canvas:
        _draw_cells(canvas, inspection, grid)
        _draw_axes(canvas, inspection, grid)
        _draw_colour_bar(canvas, grid)
        return canvas.save(formats)


def _draw_edge(canvas: Canvas, edge: EdgeCurve, drop: float) -> None:
    down = np.array([0.0, drop])
    canvas.line(edge.shaft() + down, INK, edge.width, edge.opacity)
    canvas.polygon(edge.arrow_head() + down, INK, edge.opacity)


def _draw_node(canvas: Canvas, box: NodeBox, layout: GraphLayout, drop: float) -> None:
    colour = fade(mask_colour(box.mask), box.strength)
    y = box.y + drop
    canvas.box(box.x, y, box.width, box.height, colour, edge=mask_colour(box.mask), radius=box.height / 2)
    canvas.text(box.x, y, box.word, layout.font, ink_on(colour))


@dataclass(frozen=True)
class _Grid:
    """Which nodes are rows and columns of the heat map, and how large everything is."""

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
        is_cut = num_masks < dag.num_masks
        cell, font, num_lines = (
            (46.0, 8.5, 3) if len(inner) <= 16 else (25.0, 8.0, 1) if len(inner) <= 48 else (9.0, 6.0, 1)
        )
        labels = {0: ["BOS"], dag.num_nodes - 1: ["EOS"]}
        for node in inner:
            labels[node] = [
                fit_word(token.text, font, 80.0) + (f" {token.probability:.2f}" if font > 7 else "")
                for token in inspection.tokens[node][:num_lines]
            ]
        label_width = 10.0 + max(
            text_width(line, font, is_bold=number == 0)
            for lines in labels.values()
            for number, line in enumerate(lines)
        )
        columns = inner if is_cut else [*inner, dag.num_nodes - 1]
        return cls([0, *inner], columns, labels, cell, font, label_width)

    @property
    def left(self) -> float:
        return self.label_width + 42.0

    @property
    def top(self) -> float:
        return self.label_width + 36.0


def _draw_cells(canvas: Canvas, inspection: Inspection, grid: _Grid) -> None:
    probabilities = np.exp(inspection.dag.log_trans[np.ix_(grid.rows, grid.columns)])
    is_edge = np.array(grid.rows)[:, None] < np.array(grid.columns)
    height, width = grid.cell * len(grid.rows), grid.cell * len(grid.columns)
    canvas.box(grid.left + width / 2, grid.top + height / 2, width, height, "#EEF0F2")
    canvas.image(np.where(is_edge, probabilities, np.nan), grid.left, grid.top, width, height, _HEAT_COLOURS)
    if grid.cell < 20:
        return
    value_font = min(9.5, grid.cell * 0.3)
    for row, column in np.argwhere(is_edge & (probabilities >= 0.005)):
        value = probabilities[row, column]
        x, y = grid.left + (column + 0.5) * grid.cell, grid.top + (row + 0.5) * grid.cell
        canvas.text(x, y, f"{value:.2f}", value_font, "#FFFFFF" if value > 0.55 else INK)


def _draw_axes(canvas: Canvas, inspection: Inspection, grid: _Grid) -> None:
    for index, node in enumerate(grid.rows):
        _draw_label(canvas, inspection, grid, node, grid.top + (index + 0.5) * grid.cell, is_column=False)
    for index, node in enumerate(grid.columns):
        _draw_label(canvas, inspection, grid, node, grid.left + (index + 0.5) * grid.cell, is_column=True)
    font = max(9.0, grid.font)
    canvas.text(16.0, grid.top + grid.cell * len(grid.rows) / 2, "from", font, FAINT_INK, is_turned=True)
    canvas.text(grid.left + grid.cell * len(grid.columns) / 2, 8.0, "to", font, FAINT_INK)


def _draw_label(canvas: Canvas, inspection: Inspection, grid: _Grid, node: int, at: float, *, is_column: bool) -> None:
    """Write the words of a node on the colour of its mask, beside its row or above its column."""
    lines = grid.labels[node]
    colour = mask_colour(int(inspection.dag.node_mask[node]))
    across, along = grid.cell - (2.0 if grid.cell > 20 else 0.4), grid.label_width - 4.0
    middle = grid.left - 2.0 - along / 2
    if is_column:
        middle = grid.top - 2.0 - along / 2
        canvas.box(at, middle, across, along, colour)
    else:
        canvas.box(middle, at, along, across, colour)
    pitch = 1.42 * grid.font
    for number, line in enumerate(lines):
        offset = (number - (len(lines) - 1) / 2) * pitch
        is_best = number == 0 and len(lines) > 1
        if is_column:
            canvas.text(at + offset, middle, line, grid.font, ink_on(colour), is_turned=True, is_bold=is_best)
        else:
            canvas.text(middle, at + offset, line, grid.font, ink_on(colour), is_bold=is_best)


def _draw_colour_bar(canvas: Canvas, grid: _Grid) -> None:
    left, height = grid.left + grid.cell * len(grid.columns) + 14.0, min(grid.cell * len(grid.rows), 260.0)
    canvas.image(np.linspace(1, 0, 128)[:, None], left, grid.top, 10.0, height, _HEAT_COLOURS)
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        canvas.text(left + 14.0, grid.top + (1 - value) * height, f"{value:g}", 8.0, FAINT_INK, align="left")
