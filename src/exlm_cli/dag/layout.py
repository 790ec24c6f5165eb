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
from numpy.typing import NDArray

from exlm_cli.dag.inspect import MAX_MASKS_DRAWN, Inspection, Transition

Points = NDArray[np.float64]

FONT_FAMILY = "DejaVu Sans"
_MARGIN = 14.0
_MIN_WEAK = 0.01


@dataclass(frozen=True)
class NodeBox:
    """Box of a node or of a heading: centre, size, text, and the share of paths that visit the node."""

    node: int
    mask: int
    x: float
    y: float
    width: float
    height: float
    word: str
    occupancy: float

    @property
    def strength(self) -> float:
        """Strength of its colour: a quarter where no path visits the node, 1 where every path does."""
        return 0.25 + 0.75 * math.sqrt(min(1.0, self.occupancy))


@dataclass(frozen=True)
class EdgeCurve:
    """Curve of an edge.

    Attributes:
        source: Node it leaves.
        target: Node it enters.
        probability: E[source, target].
        use: Share of paths that take it.
        control: Control points (4, 2) of the cubic curve.
        label_at: Centre of its number; None where the number finds no room.
        is_weak: Too improbable for the picture; the page shows it when a reader points at one of its ends.
    """

    source: int
    target: int
    probability: float
    use: float
    control: Points
    label_at: tuple[float, float] | None = None
    is_weak: bool = False

    @property
    def width(self) -> float:
        """Width of the line, by transition probability."""
        return 0.6 + 3.4 * self.probability

    @property
    def strength(self) -> float:
        """Strength of the line's colour, by the share of paths that take it."""
        return 0.16 + 0.7 * math.sqrt(min(1.0, self.use))


@dataclass(frozen=True)
class GraphLayout:
    """A whole drawing and the rectangle it fills; `headings` name the columns and belong to no node (-1)."""

    left: float
    top: float
    width: float
    height: float
    font: float
    nodes: tuple[NodeBox, ...]
    edges: tuple[EdgeCurve, ...]
    headings: tuple[NodeBox, ...]

    @property
    def heading_font(self) -> float:
        """Font size of headings."""
        return 0.85 * self.font

    @property
    def label_font(self) -> float:
        """Font size of numbers: those on edges and those of nodes."""
        return 0.74 * self.font


@dataclass(frozen=True)
class _Scale:
    """Sizes of a drawing with at most `max_nodes` nodes."""

    max_nodes: float
    font: float
    node_height: float
    row_pitch: float
    column_gap: float
    max_letters: int
    edges_per_node: int
    min_drawn: float
    min_labelled: float


_SCALES = (
    _Scale(26, 11.0, 26.0, 58.0, 128.0, 16, 12, 0.03, 0.1),
    _Scale(80, 9.0, 21.0, 42.0, 84.0, 13, 4, 0.05, 0.25),
    _Scale(math.inf, 7.0, 16.0, 27.0, 56.0, 10, 2, 0.1, 0.5),
)


def text_width(text: str, font: float, *, is_bold: bool = False) -> float:
    """Return the width of a text in the unit of `font`: exact for the letters of DejaVu Sans, close for others."""
    return font * sum(_advance(letter, is_bold=is_bold) for letter in text)


@functools.cache
def _advance(letter: str, *, is_bold: bool) -> float:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties(family=FONT_FAMILY, weight="bold" if is_bold else "normal")))
    if not font.get_char_index(ord(letter)):
        return 1.0 if unicodedata.east_asian_width(letter) in "WF" else 0.7
    font.set_size(100, 72)
    return float(font.load_char(ord(letter)).linearHoriAdvance) / 65536 / 100


def shorten_word(word: str, max_letters: int) -> str:
    """Cut a word to some letters, the last of them an ellipsis."""
    return word if len(word) <= max_letters else word[: max_letters - 1] + "…"


def fit_word(word: str, font: float, width: float) -> str:
    """Cut a word to a width, with an ellipsis; at least one letter stays."""
    num_letters = len(word)
    while num_letters > 1 and text_width(shorten_word(word, num_letters), font) > width:
        num_letters -= 1
    return shorten_word(word, num_letters)


def curve_points(control: Points, num_points: int) -> Points:
    """Return points (P, 2) along a cubic curve, ends included."""
    t = np.linspace(0.0, 1.0, num_points)[:, None]
    a, b, c, d = control
    return np.asarray((1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * b + 3 * (1 - t) * t**2 * c + t**3 * d)


def lay_out_graph(inspection: Inspection) -> GraphLayout:
    """Place nodes in columns by mask, choose which edges to draw, bend them and find room for their numbers."""
    dag = inspection.dag
    num_masks = min(dag.num_masks, MAX_MASKS_DRAWN)
    drawn = [0, *np.flatnonzero((dag.node_mask >= 0) & (dag.node_mask < num_masks)).tolist()]
    if num_masks == dag.num_masks:
        drawn.append(dag.num_nodes - 1)
    scale = next(scale for scale in _SCALES if len(drawn) <= scale.max_nodes)
    columns = [[n for n in drawn if _column(inspection, n) == c] for c in range(_column(inspection, drawn[-1]) + 1)]
    nodes = _place_nodes(inspection, columns, scale)
    boxes = {box.node: box for box in nodes}
    headings = _place_headings([boxes[column[0]] for column in columns[1 : num_masks + 1]], scale)
    edges = _bend_edges(inspection, boxes, headings, scale)
    weak = [edge for edge in edges if edge.is_weak]
    edges = _label_edges([edge for edge in edges if not edge.is_weak], [*nodes, *headings], scale)
    points = [_corners([*nodes, *headings]).reshape(-1, 2), *(curve_points(edge.control, 60) for edge in edges)]
    low, high = np.concatenate(points).min(axis=0) - _MARGIN, np.concatenate(points).max(axis=0) + _MARGIN
    (left, top), (width, height) = low.tolist(), (high - low).tolist()
    return GraphLayout(left, top, width, height, scale.font, tuple(nodes), (*weak, *edges), tuple(headings))


def _column(inspection: Inspection, node: int) -> int:
    """Return the column of a node: 0 for BOS, masks from 1, EOS last."""
    mask = int(inspection.dag.node_mask[node])
    if mask >= 0:
        return mask + 1
    return 0 if node == 0 else inspection.dag.num_masks + 1


def _place_nodes(inspection: Inspection, columns: Sequence[Sequence[int]], scale: _Scale) -> list[NodeBox]:
    boxes: list[NodeBox] = []
    x = 0.0
    for column in columns:
        words = [shorten_word(inspection.quote(inspection.word(node)), scale.max_letters) for node in column]
        widths = [
            text_width(word, scale.font) + _number_width(inspection, node, scale) + 0.7 * scale.node_height
            for node, word in zip(column, words, strict=True)
        ]
        x += max(widths) / 2
        for row, (node, word, width) in enumerate(zip(column, words, widths, strict=True)):
            y = (row - (len(column) - 1) / 2) * scale.row_pitch
            mask = int(inspection.dag.node_mask[node])
            visited = float(inspection.occupancy[node])
            boxes.append(NodeBox(node, mask, x, y, width, scale.node_height, word, visited))
        x += max(widths) / 2 + scale.column_gap
    return boxes


def _number_width(inspection: Inspection, node: int, scale: _Scale) -> float:
    """Return the room that a node's number takes before its word; BOS and EOS have none."""
    is_inner = inspection.dag.node_mask[node] >= 0
    return text_width(f"{node} ", 0.74 * scale.font) if is_inner else 0.0


def _place_headings(first_of_column: Sequence[NodeBox], scale: _Scale) -> list[NodeBox]:
    font = 0.85 * scale.font
    headings = []
    for box in first_of_column:
        text = f"[MASK {box.mask + 1}]"
        y = box.y - box.height / 2 - 1.6 * font
        headings.append(NodeBox(-1, box.mask, box.x, y, text_width(text, font) + font, 1.6 * font, text, 1.0))
    return headings


def _bend_edges(
    inspection: Inspection, boxes: dict[int, NodeBox], headings: Sequence[NodeBox], scale: _Scale
) -> list[EdgeCurve]:
    """Curve the probable edges of every node around other nodes, and its weak ones simply."""
    edges = []
    for edge, is_weak in _choose_edges(inspection, list(boxes), scale):
        candidates = _candidate_curves(boxes[edge.source], boxes[edge.target], list(boxes.values()), scale)
        control = candidates[0]
        if not is_weak:
            others = _corners([*headings, *(b for node, b in boxes.items() if node not in (edge.source, edge.target))])
            # candidates come least bent first, and `min` takes the first of equals
            control = min(candidates, key=lambda c: _num_crossed(curve_points(c, 40), others))
        edges.append(EdgeCurve(edge.source, edge.target, edge.probability, edge.use, control, is_weak=is_weak))
    return edges


def _choose_edges(inspection: Inspection, drawn: Sequence[int], scale: _Scale) -> list[tuple[Transition, bool]]:
    """Return the edges of every node, the probable ones first, and whether each is weak; the best one never is."""
    log_trans = inspection.dag.log_trans
    chosen = []
    for source in drawn:
        targets = sorted((n for n in drawn if log_trans[source, n] > -np.inf), key=lambda n: -log_trans[source, n])
        for rank, edge in enumerate(inspection.transition(source, target) for target in targets):
            is_likely = rank < scale.edges_per_node and edge.probability >= scale.min_drawn
            if rank == 0 or edge.probability >= _MIN_WEAK:
                chosen.append((edge, rank > 0 and not is_likely))
    return chosen


def _candidate_curves(source: NodeBox, target: NodeBox, boxes: Sequence[NodeBox], scale: _Scale) -> list[Points]:
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
    heights = [0.0]
    for bow in np.arange(1, 4 * highest / scale.row_pitch):
        heights += [-bow * scale.row_pitch / 2, bow * scale.row_pitch / 2]
    bows = [np.array([0.0, height]) for height in heights]
    return [np.stack([start, start + reach + bow, end - reach + bow, end]) for bow in bows]


def _curve_inside_column(source: NodeBox, target: NodeBox, boxes: Sequence[NodeBox], scale: _Scale) -> Points:
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


def _label_edges(edges: list[EdgeCurve], obstacles: Sequence[NodeBox], scale: _Scale) -> list[EdgeCurve]:
    """Write probabilities where they cover no node and no other number, best away from other edges, or not at all."""
    font = 0.74 * scale.font
    size = np.array([text_width("0.00", font) + 3.0, font * 1.3])
    taken = [*_corners(obstacles)]
    curves = [curve_points(edge.control, 60) for edge in edges]
    labelled: list[EdgeCurve] = [*edges]
    for index in sorted(range(len(edges)), key=lambda i: (-edges[i].use, -edges[i].probability)):
        if edges[index].probability < scale.min_labelled:
            continue
        centres = curve_points(edges[index].control, 61)[[30, 27, 33, 24, 36, 21, 39, 18, 42, 15, 45, 12, 48]]
        boxes = [np.concatenate([centre - size / 2, centre + size / 2]) for centre in centres]
        free = [i for i, box in enumerate(boxes) if not _overlaps(box, np.array(taken))]
        if not free:
            continue
        foreign = np.concatenate([curve for i, curve in enumerate(curves) if i != index] or [np.full((1, 2), np.inf)])
        best = min(free, key=lambda i: _num_inside(foreign, boxes[i]))
        taken.append(boxes[best])
        labelled[index] = replace(edges[index], label_at=(float(centres[best][0]), float(centres[best][1])))
    return labelled


def _corners(boxes: Sequence[NodeBox]) -> Points:
    """Return (N, 4) left, top, right, bottom, with a little room around."""
    return np.array(
        [(b.x - b.width / 2 - 3, b.y - b.height / 2 - 3, b.x + b.width / 2 + 3, b.y + b.height / 2 + 3) for b in boxes]
    ).reshape(-1, 4)


def _num_crossed(points: Points, corners: Points) -> int:
    x, y = points[:, :1], points[:, 1:]
    left, top, right, bottom = corners.T
    return int(((x > left) & (x < right) & (y > top) & (y < bottom)).any(axis=0).sum())


def _num_inside(points: Points, box: Points) -> int:
    return int(((points > box[:2]) & (points < box[2:])).all(axis=1).sum())


def _overlaps(box: Points, corners: Points) -> bool:
    left, top, right, bottom = corners.T
    return bool(((box[0] < right) & (box[2] > left) & (box[1] < bottom) & (box[3] > top)).any())
