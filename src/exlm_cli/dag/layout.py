"""Layout of a drawn DAG: widths of words, positions of nodes, curves of edges, places for their numbers.

Columns are masks in reading order between BOS and EOS (Figure 11). Edges are cubic curves that bend around nodes which
are not their ends. All coordinates are points with y downwards. Axes: N drawn nodes, P points of a curve.
"""

import functools
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.font_manager import FontProperties, findfont, get_font
from numpy.typing import NDArray

from exlm_cli.dag.graph import FloatArray
from exlm_cli.dag.inspection import MAX_MASKS_DRAWN, Inspection
from exlm_cli.format import shorten

FONT_FAMILY = "DejaVu Sans"
_MARGIN = 14.0


@dataclass(frozen=True)
class NodeBox:
    """Box of a node or of a heading: centre, size, text, and the share of paths that visit the node.

    `number` precedes the word of an inner node; it is empty for BOS, EOS and headings.
    """

    node: int
    mask: int
    x: float
    y: float
    width: float
    height: float
    word: str
    number: str = ""
    occupancy: float = 1.0

    @property
    def strength(self) -> float:
        """Strength of its colour: a quarter where no path visits the node, 1 where every path does."""
        return 0.25 + 0.75 * math.sqrt(min(1.0, self.occupancy))


@dataclass(frozen=True)
class EdgeCurve:
    """Curve of an edge: its ends, E, the share of paths that take it, and control points (4, 2) of a cubic curve.

    `label_at` is the centre of its number, None where the number finds no room.
    """

    source: int
    target: int
    probability: float
    use: float
    control: FloatArray
    label_at: tuple[float, float] | None = None

    @property
    def width(self) -> float:
        """Width of the line, by transition probability."""
        return 0.6 + 3.4 * self.probability

    @property
    def strength(self) -> float:
        """Strength of the line's colour, by the share of paths that take it."""
        return 0.16 + 0.7 * math.sqrt(min(1.0, self.use))


@dataclass(frozen=True)
class Scale:
    """Sizes of a drawing with at most `max_nodes` nodes."""

    max_nodes: float
    font: float
    node_height: float
    row_pitch: float
    column_gap: float
    max_characters: int
    edges_per_node: int
    min_drawn: float
    min_labelled: float

    @property
    def heading_font(self) -> float:
        """Font size of headings."""
        return 0.85 * self.font

    @property
    def number_font(self) -> float:
        """Font size of numbers: those on edges and those of nodes."""
        return 0.74 * self.font


@dataclass(frozen=True)
class GraphLayout:
    """A whole drawing and the rectangle it fills; `headings` name the columns and belong to no node (-1)."""

    left: float
    top: float
    width: float
    height: float
    scale: Scale
    nodes: tuple[NodeBox, ...]
    edges: tuple[EdgeCurve, ...]
    headings: tuple[NodeBox, ...]


_SCALES = (
    Scale(26, 11.0, 26.0, 58.0, 128.0, 16, 12, 0.03, 0.1),
    Scale(80, 9.0, 21.0, 42.0, 84.0, 13, 4, 0.05, 0.25),
    Scale(math.inf, 7.0, 16.0, 27.0, 56.0, 10, 2, 0.1, 0.5),
)


def text_width(text: str, font: float) -> float:
    """Return the width of a text in the unit of `font`: exact for the characters of DejaVu Sans, close for others."""
    return font * sum(_advance(character) for character in text)


@functools.cache
def _advance(character: str) -> float:
    font = get_font(findfont(FontProperties(family=FONT_FAMILY)))
    if not font.get_char_index(ord(character)):
        return 1.0 if unicodedata.east_asian_width(character) in "WF" else 0.7
    font.set_size(100, 72)
    return float(font.load_char(ord(character)).linearHoriAdvance) / 65536 / 100


def fit_word(word: str, font: float, width: float) -> str:
    """Cut a word to a width, with an ellipsis; at least one character stays."""
    num_characters = len(word)
    while num_characters > 1 and text_width(shorten(word, num_characters), font) > width:
        num_characters -= 1
    return shorten(word, num_characters)


def curve_points(control: FloatArray, num_points: int) -> FloatArray:
    """Return points (P, 2) along a cubic curve, ends included."""
    t = np.linspace(0.0, 1.0, num_points)[:, None]
    a, b, c, d = control
    return np.asarray((1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * b + 3 * (1 - t) * t**2 * c + t**3 * d)


def lay_out_graph(inspection: Inspection) -> GraphLayout:
    """Place nodes in columns by mask, choose which edges to draw, bend them and find room for their numbers."""
    dag = inspection.dag
    num_masks = min(dag.num_masks, MAX_MASKS_DRAWN)
    columns = [[0], *(np.flatnonzero(dag.node_mask == mask).tolist() for mask in range(num_masks))]
    if num_masks == dag.num_masks:
        columns.append([dag.num_nodes - 1])
    scale = next(scale for scale in _SCALES if sum(map(len, columns)) <= scale.max_nodes)
    nodes = _place_nodes(inspection, columns, scale)
    boxes = {box.node: box for box in nodes}
    headings = [_heading_above(boxes[column[0]], scale) for column in columns[1 : num_masks + 1]]
    edges = _label_edges(_bend_edges(inspection, boxes, headings, scale), [*nodes, *headings], scale)
    points = [_corners([*nodes, *headings]).reshape(-1, 2), *(curve_points(edge.control, 60) for edge in edges)]
    low, high = np.concatenate(points).min(axis=0) - _MARGIN, np.concatenate(points).max(axis=0) + _MARGIN
    (left, top), (width, height) = low.tolist(), (high - low).tolist()
    return GraphLayout(left, top, width, height, scale, tuple(nodes), tuple(edges), tuple(headings))


def _place_nodes(inspection: Inspection, columns: Sequence[Sequence[int]], scale: Scale) -> list[NodeBox]:
    boxes: list[NodeBox] = []
    x = 0.0
    for column in columns:
        top = -(len(column) - 1) / 2
        placed = [_node_box(inspection, node, (top + row) * scale.row_pitch, scale) for row, node in enumerate(column)]
        x += max(box.width for box in placed) / 2
        boxes += [replace(box, x=x) for box in placed]
        x += max(box.width for box in placed) / 2 + scale.column_gap
    return boxes


def _node_box(inspection: Inspection, node: int, y: float, scale: Scale) -> NodeBox:
    """Return the box of a node whose column has no place yet."""
    mask, visited = int(inspection.dag.node_mask[node]), float(inspection.occupancy[node])
    word = shorten(inspection.quote(inspection.word(node)), scale.max_characters)
    number = f"{node} " if mask >= 0 else ""
    width = text_width(word, scale.font) + text_width(number, scale.number_font) + 0.7 * scale.node_height
    return NodeBox(node, mask, 0.0, y, width, scale.node_height, word, number, visited)


def _heading_above(box: NodeBox, scale: Scale) -> NodeBox:
    font, text = scale.heading_font, f"[MASK {box.mask + 1}]"
    y = box.y - box.height / 2 - 1.6 * font
    return NodeBox(-1, box.mask, box.x, y, text_width(text, font) + font, 1.6 * font, text)


def _bend_edges(
    inspection: Inspection, boxes: dict[int, NodeBox], headings: Sequence[NodeBox], scale: Scale
) -> list[EdgeCurve]:
    """Curve the probable edges of every node around other nodes."""
    edges = []
    for source, target in _choose_edges(inspection, list(boxes), scale):
        others = _corners([*headings, *(box for node, box in boxes.items() if node not in (source, target))])
        candidates = _candidate_curves(boxes[source], boxes[target], list(boxes.values()), scale)
        # candidates come least bent first, and `min` takes the first of equals
        control = min(candidates, key=lambda c: _overlaps(_curve_corners(c, 40), others).any(axis=0).sum())
        probability, use = float(inspection.dag.trans[source, target]), float(inspection.edge_use[source, target])
        edges.append(EdgeCurve(source, target, probability, use, control))
    return edges


def _choose_edges(inspection: Inspection, drawn: Sequence[int], scale: Scale) -> list[tuple[int, int]]:
    """Return the edges to draw, by source and falling probability; the best of a node is always one."""
    trans = inspection.dag.trans
    chosen = []
    for source in drawn:
        targets = sorted((n for n in drawn if trans[source, n] > 0), key=lambda n: -trans[source, n])
        chosen += [
            (source, n)
            for n in targets[: scale.edges_per_node]
            if n == targets[0] or trans[source, n] >= scale.min_drawn
        ]
    return chosen


def _candidate_curves(source: NodeBox, target: NodeBox, boxes: Sequence[NodeBox], scale: Scale) -> list[FloatArray]:
    """Return curves from one node to another, the straightest first."""
    if source.mask == target.mask and source.mask >= 0:
        return [_curve_inside_column(source, target, boxes, scale)]
    start = np.array([source.x + source.width / 2, source.y])
    end = np.array([target.x - target.width / 2, target.y])
    if not any(source.x < box.x < target.x for box in boxes):
        reach = np.array([0.42 * (end[0] - start[0]), 0.0])
        return [np.stack([start, start + reach, end - reach, end])]
    reach = np.array([min(0.42 * (end[0] - start[0]), 1.3 * scale.column_gap), 0.0])
    highest = max(abs(box.y) for box in boxes) + 1.5 * scale.row_pitch
    steps = np.arange(1, 4 * highest / scale.row_pitch) * scale.row_pitch / 2
    bows = [(0.0, height) for height in (0.0, *np.stack([-steps, steps], axis=1).ravel())]
    return [np.stack([start, start + reach + bow, end - reach + bow, end]) for bow in bows]


def _curve_inside_column(source: NodeBox, target: NodeBox, boxes: Sequence[NodeBox], scale: Scale) -> FloatArray:
    """Return a line down to the next state of the mask, or a curve to the right of those between."""
    rows = round((target.y - source.y) / scale.row_pitch)
    if rows == 1:
        start = np.array([source.x, source.y + source.height / 2])
        end = np.array([target.x, target.y - target.height / 2])
        return np.linspace(start, end, 4)
    max_rows = round(max(box.y - source.y for box in boxes if box.mask == source.mask) / scale.row_pitch)
    right = max(box.x + box.width / 2 for box in boxes if box.mask == source.mask)
    bulge = scale.column_gap * (0.14 + 0.26 * (rows - 1) / max(max_rows, 2))
    start = np.array([source.x + source.width / 2, source.y + source.height * 0.25])
    end = np.array([target.x + target.width / 2, target.y - target.height * 0.25])
    outward = right + bulge * 4 / 3
    return np.stack([start, [outward, start[1]], [outward, end[1]], end])


def _label_edges(edges: list[EdgeCurve], obstacles: Sequence[NodeBox], scale: Scale) -> list[EdgeCurve]:
    """Write probabilities where they cover no node and no other number, best away from other edges, or not at all."""
    size = np.array([text_width("0.00", scale.number_font) + 3.0, scale.number_font * 1.3])
    taken = _corners(obstacles)
    curves = [_curve_corners(edge.control, 60) for edge in edges]
    labelled: list[EdgeCurve] = [*edges]
    for index in sorted(range(len(edges)), key=lambda i: (-edges[i].use, -edges[i].probability)):
        if edges[index].probability < scale.min_labelled:
            continue
        centres = curve_points(edges[index].control, 61)[[30, 27, 33, 24, 36, 21, 39, 18, 42, 15, 45, 12, 48]]
        boxes = np.concatenate([centres - size / 2, centres + size / 2], axis=1)
        is_taken = _overlaps(taken, boxes).any(axis=0)
        if is_taken.all():
            continue
        others = np.concatenate([curve for i, curve in enumerate(curves) if i != index])
        best = np.where(is_taken, np.inf, _overlaps(others, boxes).sum(axis=0)).argmin()
        taken = np.concatenate([taken, boxes[[best]]])
        labelled[index] = replace(edges[index], label_at=(float(centres[best, 0]), float(centres[best, 1])))
    return labelled


def _corners(boxes: Sequence[NodeBox]) -> FloatArray:
    """Return (N, 4) left, top, right, bottom, with a little room around."""
    return np.array(
        [(b.x - b.width / 2 - 3, b.y - b.height / 2 - 3, b.x + b.width / 2 + 3, b.y + b.height / 2 + 3) for b in boxes]
    )


def _curve_corners(control: FloatArray, num_points: int) -> FloatArray:
    """Return points along a curve as rectangles without size, (P, 4)."""
    return np.tile(curve_points(control, num_points), 2)


def _overlaps(some: FloatArray, others: FloatArray) -> NDArray[np.bool_]:
    """Return which rectangles (N, 4) overlap which others (M, 4), as (N, M)."""
    is_before = some[:, None, :2] < others[:, 2:]
    return np.asarray((is_before & (some[:, None, 2:] > others[:, :2])).all(axis=2))
