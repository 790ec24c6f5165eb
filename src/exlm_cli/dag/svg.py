"""The graph and the heat map as SVG to be put into HTML: colours follow the page, nodes and edges can be pointed at.

Figures for papers come from `dag_figures`; these share its layout, not its renderer.
"""

from html import escape

import numpy as np

from exlm_cli.dag.inspect import Inspection
from exlm_cli.dag.layout import lay_out_graph
from exlm_cli.dag.shapes import EdgeCurve, GraphLayout, NodeBox, Points
from exlm_cli.dag.words import MAX_MASKS_DRAWN
from exlm_cli.report.style import fade, ink_on, mask_colour
from exlm_cli.report.text_metrics import fit_word, text_width

_LEAST_SHOWN = 0.005
_LABEL_WIDTH = 96.0


def graph_svg(inspection: Inspection) -> str:
    """Draw the graph; a node carries `data-node`, an edge `data-source` and `data-target`."""
    layout = lay_out_graph(inspection)
    parts = [_edge(inspection, edge, layout) for edge in sorted(layout.edges, key=lambda e: e.use)]
    parts += [_node(inspection, box, layout.font) for box in layout.nodes]
    parts += [_chip(box, layout.heading_font) for box in layout.headings]
    return _svg("graph", layout.width, layout.height, parts)


def heat_map_svg(inspection: Inspection) -> str:
    """Draw exp(log E), rows to columns; cells below 0.005 stay empty."""
    dag = inspection.dag
    num_masks = min(dag.num_masks, MAX_MASKS_DRAWN)
    inner = np.flatnonzero((dag.node_mask >= 0) & (dag.node_mask < num_masks)).tolist()
    rows = [0, *inner]
    columns = inner if num_masks < dag.num_masks else [*inner, dag.num_nodes - 1]
    cell = 40.0 if len(inner) <= 16 else 24.0 if len(inner) <= 48 else 12.0
    font = {40.0: 11.0, 24.0: 10.0, 12.0: 8.0}[cell]
    parts = []
    for index, node in enumerate(rows):
        parts.append(_axis_label(inspection, node, 0.0, _LABEL_WIDTH + index * cell, cell, font, is_column=False))
    for index, node in enumerate(columns):
        parts.append(_axis_label(inspection, node, _LABEL_WIDTH + index * cell, 0.0, cell, font, is_column=True))
    for y, source in enumerate(rows):
        for x, target in enumerate(columns):
            probability = float(np.exp(dag.log_trans[source, target]))
            if source < target:
                parts.append(_cell(inspection, source, target, probability, x * cell, y * cell, cell))
    width, height = _LABEL_WIDTH + len(columns) * cell, _LABEL_WIDTH + len(rows) * cell
    return _svg("heat", width, height, [part for part in parts if part])


def _svg(name: str, width: float, height: float, parts: list[str]) -> str:
    inside = "\n".join(parts)
    return (
        f'<svg id="{name}" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.1f} {height:.1f}" '
        f'width="{width:.0f}pt" height="{height:.0f}pt">\n{inside}\n</svg>'
    )


def _edge(inspection: Inspection, edge: EdgeCurve, layout: GraphLayout) -> str:
    a, b, c, d = (f"{x:.1f} {y:.1f}" for x, y in edge.control)
    title = (
        f"{inspection.word(edge.source)} → {inspection.word(edge.target)}: transition {edge.probability:.3f}, "
        f"on {edge.use:.3f} of the paths"
    )
    label = ""
    if edge.label_at is not None:
        x, y = edge.label_at
        font = layout.label_font
        width = text_width(edge.label, font) + 2
        label = (
            f'<rect class="paper" x="{x - width / 2:.1f}" y="{y - 0.6 * font:.1f}" width="{width:.1f}" '
            f'height="{1.2 * font:.1f}" rx="2"/>{_text(x, y, edge.label, font)}'
        )
    return (
        f'<g class="edge" data-source="{edge.source}" data-target="{edge.target}" opacity="1">'
        f'<title>{escape(title)}</title><g opacity="{edge.opacity:.2f}">'
        f'<path d="M {a} C {b}, {c}, {d}" stroke-width="{edge.width:.2f}"/>'
        f'<polygon points="{_points(edge.arrow_head())}"/></g>{label}</g>'
    )


def _node(inspection: Inspection, box: NodeBox, font: float) -> str:
    colour = fade(mask_colour(box.mask), box.strength)
    words = ", ".join(f"{token.text} {token.probability:.2f}" for token in inspection.tokens[box.node])
    title = f"node {box.node}, on {box.occupancy:.3f} of the paths" + (f": {words}" if words else "")
    return (
        f'<g class="node" data-node="{box.node}" tabindex="0"><title>{escape(title)}</title>'
        f"{_box(box, colour, box.height / 2, mask_colour(box.mask))}"
        f"{_text(box.x, box.y, box.word, font, ink_on(colour))}</g>"
    )


def _chip(box: NodeBox, font: float) -> str:
    colour = mask_colour(box.mask)
    return _box(box, colour, 3.0, colour) + _text(box.x, box.y, box.word, font, ink_on(colour))


def _box(box: NodeBox, colour: str, radius: float, line: str) -> str:
    return (
        f'<rect x="{box.x - box.width / 2:.1f}" y="{box.y - box.height / 2:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="{radius:.1f}" fill="{colour}" stroke="{line}" stroke-width="1.2"/>'
    )


def _cell(
    inspection: Inspection, source: int, target: int, probability: float, left: float, top: float, cell: float
) -> str:
    if probability < _LEAST_SHOWN and cell < 20:
        return ""
    x, y = _LABEL_WIDTH + left, _LABEL_WIDTH + top
    title = f"{inspection.word(source)} → {inspection.word(target)}: {probability:.3f}"
    number = ""
    if probability >= _LEAST_SHOWN and cell > 20:
        ink = "#FFFFFF" if probability > 0.5 else ""
        number = _text(x + cell / 2, y + cell / 2, f"{probability:.2f}", 0.28 * cell, ink)
    return (
        f'<g><title>{escape(title)}</title><rect class="cell" x="{x:.1f}" y="{y:.1f}" width="{cell:.0f}" '
        f'height="{cell:.0f}" fill-opacity="{probability:.3f}"/>{number}</g>'
    )


def _axis_label(
    inspection: Inspection, node: int, left: float, top: float, cell: float, font: float, *, is_column: bool
) -> str:
    """Write the word of a node in a strip of its colour, beside a row or turned above a column."""
    colour = mask_colour(int(inspection.dag.node_mask[node]))
    word = fit_word(inspection.word(node), font, _LABEL_WIDTH - 12.0)
    width, height = (cell - 1, _LABEL_WIDTH - 2) if is_column else (_LABEL_WIDTH - 2, cell - 1)
    x, y = left + width / 2, top + height / 2
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if is_column else ""
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
        f"<g{turn}>{_text(x, y, word, font, ink_on(colour))}</g>"
    )


def _text(x: float, y: float, text: str, font: float, ink: str = "") -> str:
    fill = f' fill="{ink}"' if ink else ' class="ink"'
    return f'<text x="{x:.1f}" y="{y + 0.35 * font:.1f}" font-size="{font:.1f}"{fill}>{escape(text)}</text>'


def _points(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
