"""Where nodes, edges and labels of a drawn DAG lie.

Columns are masks in reading order between BOS and EOS (Figure 11). Edges are cubic curves that bend around nodes which
are not their ends. Axes: N drawn nodes, P points of a curve.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from exlm_cli.dag.inspect import Inspection
from exlm_cli.dag.shapes import (
    HEADING_FONT_SHARE,
    LABEL_FONT_SHARE,
    EdgeCurve,
    GraphLayout,
    NodeBox,
    Points,
    curve_points,
)
from exlm_cli.dag.words import MAX_MASKS_DRAWN
from exlm_cli.report.text_metrics import shorten_word, text_width

_MARGIN = 14.0


@dataclass(frozen=True)
class _Scale:
    font: float
    node_height: float
    row_pitch: float
    column_gap: float
    most_letters: int
    edges_per_node: int
    least_drawn: float
    least_labelled: float


_SCALES = {
    26: _Scale(11.0, 26.0, 58.0, 128.0, 16, 12, 0.03, 0.1),
    80: _Scale(9.0, 21.0, 42.0, 84.0, 13, 4, 0.05, 0.25),
    10_000: _Scale(7.0, 16.0, 27.0, 56.0, 10, 2, 0.1, 0.5),
}
"""By most nodes."""


def lay_out_graph(inspection: Inspection) -> GraphLayout:
    """Place nodes in columns by mask, choose which edges to draw, bend them and find room for their numbers."""
    dag = inspection.dag
    num_masks = min(dag.num_masks, MAX_MASKS_DRAWN)
    drawn = [0, *np.flatnonzero((dag.node_mask >= 0) & (dag.node_mask < num_masks)).tolist()]
    if num_masks == dag.num_masks:
        drawn.append(dag.num_nodes - 1)
    scale = next(scale for most, scale in _SCALES.items() if len(drawn) <= most)
    columns = [[n for n in drawn if _column(inspection, n) == c] for c in range(_column(inspection, drawn[-1]) + 1)]
    nodes = _place_nodes(inspection, columns, scale)
    boxes = {box.node: box for box in nodes}
    headings = _place_headings([boxes[column[0]] for column in columns[1 : num_masks + 1]], scale)
    obstacles = [*nodes, *headings]
    edges = _label_edges(_bend_edges(inspection, boxes, headings, scale), obstacles, scale)
    return _shift(nodes, edges, headings, scale)


def _column(inspection: Inspection, node: int) -> int:
    """0 for BOS, the mask from 1, one more for EOS."""
    mask = int(inspection.dag.node_mask[node])
    if mask >= 0:
        return mask + 1
    return 0 if node == 0 else inspection.dag.num_masks + 1


def _place_nodes(inspection: Inspection, columns: Sequence[Sequence[int]], scale: _Scale) -> list[NodeBox]:
    boxes: list[NodeBox] = []
    x = 0.0
    for column in columns:
        words = [shorten_word(inspection.word(node), scale.most_letters) for node in column]
        widths = [max(text_width(word, scale.font) + scale.node_height * 0.7, scale.node_height) for word in words]
        x += max(widths) / 2
        for row, (node, word, width) in enumerate(zip(column, words, widths, strict=True)):
            y = (row - (len(column) - 1) / 2) * scale.row_pitch
            mask = int(inspection.dag.node_mask[node])
            visited = float(inspection.occupancy[node])
            boxes.append(NodeBox(node, mask, x, y, width, scale.node_height, word, visited))
        x += max(widths) / 2 + scale.column_gap
    return boxes


def _place_headings(first_of_column: Sequence[NodeBox], scale: _Scale) -> list[NodeBox]:
    font = scale.font * HEADING_FONT_SHARE
    headings = []
    for box in first_of_column:
        text = f"[MASK] {box.mask + 1}"
        y = box.y - box.height / 2 - 1.6 * font
        headings.append(NodeBox(-1, box.mask, box.x, y, text_width(text, font) + font, 1.6 * font, text, 1.0))
    return headings


def _choose_edges(inspection: Inspection, drawn: Sequence[int], scale: _Scale) -> list[tuple[int, int]]:
    """Pick the probable edges of every node, at least its best one."""
    log_trans = inspection.dag.log_trans
    chosen = []
    for source in drawn:
        targets = sorted((n for n in drawn if log_trans[source, n] > -np.inf), key=lambda n: -log_trans[source, n])
        likely = [n for n in targets[: scale.edges_per_node] if np.exp(log_trans[source, n]) >= scale.least_drawn]
        chosen += [(source, target) for target in likely or targets[:1]]
    return chosen


def _bend_edges(
    inspection: Inspection, boxes: dict[int, NodeBox], headings: Sequence[NodeBox], scale: _Scale
) -> list[EdgeCurve]:
    edges = []
    for source, target in _choose_edges(inspection, list(boxes), scale):
        others = _corners([*headings, *(box for node, box in boxes.items() if node not in (source, target))])
        candidates = _candidate_curves(boxes[source], boxes[target], list(boxes.values()), scale)
        # the first of those that cross fewest nodes: candidates come least bent first
        control = min(candidates, key=lambda c: _num_crossed(curve_points(c, 40), others))
        probability = float(np.exp(inspection.dag.log_trans[source, target]))
        edges.append(EdgeCurve(source, target, probability, float(inspection.edge_use[source, target]), control, None))
    return edges


def _candidate_curves(source: NodeBox, target: NodeBox, boxes: Sequence[NodeBox], scale: _Scale) -> list[Points]:
    """Curves from one node to another, the straightest first."""
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
    """Straight down to the next state of the mask, around the right of those between."""
    rows = round((target.y - source.y) / scale.row_pitch)
    if rows == 1:
        start = np.array([source.x, source.y + source.height / 2])
        end = np.array([target.x, target.y - target.height / 2])
        return np.linspace(start, end, 4)
    most_rows = round(max(box.y - source.y for box in boxes if box.mask == source.mask) / scale.row_pitch)
    right = max(box.x + box.width / 2 for box in boxes if box.mask == source.mask)
    bulge = scale.column_gap * (0.14 + 0.26 * (rows - 1) / max(most_rows, 2))
    start = np.array([source.x + source.width / 2, source.y + source.height * 0.25])
    end = np.array([target.x + target.width / 2, target.y - target.height * 0.25])
    outward = right + bulge * 4 / 3
    return np.stack([start, [outward, start[1]], [outward, end[1]], end])


def _label_edges(edges: list[EdgeCurve], obstacles: Sequence[NodeBox], scale: _Scale) -> list[EdgeCurve]:
    """Write probabilities where they cover no node and no other number, best away from other edges, or not at all."""
    font = scale.font * LABEL_FONT_SHARE
    size = np.array([text_width("0.00", font) + 3.0, font * 1.3])
    taken = [*_corners(obstacles)]
    curves = [curve_points(edge.control, 60) for edge in edges]
    labelled: list[EdgeCurve] = [*edges]
    for index in sorted(range(len(edges)), key=lambda i: (-edges[i].use, -edges[i].probability)):
        if edges[index].probability < scale.least_labelled:
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
    """(N, 4) left, top, right, bottom, with a little room around."""
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


def _shift(
    nodes: Sequence[NodeBox],
    edges: Sequence[EdgeCurve],
    headings: Sequence[NodeBox],
    scale: _Scale,
) -> GraphLayout:
    """Move everything so that the drawing begins at the margin, and measure it."""
    points = np.concatenate(
        [_corners([*nodes, *headings]).reshape(-1, 2), *(curve_points(e.control, 60) for e in edges)]
    )
    low, high = points.min(axis=0) - _MARGIN, points.max(axis=0) + _MARGIN
    dx, dy = float(-low[0]), float(-low[1])
    width, height = (high - low).tolist()
    return GraphLayout(
        width=width,
        height=height,
        font=scale.font,
        nodes=tuple(replace(box, x=box.x + dx, y=box.y + dy) for box in nodes),
        edges=tuple(
            replace(
                edge,
                control=edge.control + np.array([dx, dy]),
                label_at=None if edge.label_at is None else (edge.label_at[0] + dx, edge.label_at[1] + dy),
            )
            for edge in edges
        ),
        headings=tuple(replace(box, x=box.x + dx, y=box.y + dy) for box in headings),
    )
