"""What a reader must be able to rely on in a drawing: nothing covers anything else."""

import itertools

import numpy as np
import pytest

from exlm_cli.dag.inspection import MAX_MASKS_DRAWN, Inspection
from exlm_cli.dag.layout import GraphLayout, NodeBox, curve_points, lay_out_graph, text_width
from tests.unit.dag.inspections import awkward, case_study, many_masks, smiles

DRAWINGS = {
    "case study": case_study,
    "one mask": lambda: many_masks(1, 4),
    "smiles": smiles,
    "awkward words": awkward,
    "five masks": lambda: many_masks(5, 4),
    "twelve masks": lambda: many_masks(12, 3),
    "thirty masks": lambda: many_masks(30, 4),
}


@pytest.fixture(params=DRAWINGS, scope="module")
def inspection(request: pytest.FixtureRequest) -> Inspection:
    return DRAWINGS[request.param]()


@pytest.fixture(scope="module")
def layout(inspection: Inspection) -> GraphLayout:
    return lay_out_graph(inspection)


Rectangle = tuple[float, float, float, float]


def _rectangle(box: NodeBox) -> Rectangle:
    return box.x - box.width / 2, box.y - box.height / 2, box.x + box.width / 2, box.y + box.height / 2


def _labels(layout: GraphLayout) -> list[Rectangle]:
    rectangles = []
    for edge in layout.edges:
        if edge.label_at is not None:
            x, y = edge.label_at
            width, height = text_width(f"{edge.probability:.2f}", layout.scale.number_font), layout.scale.number_font
            rectangles.append((x - width / 2, y - height / 2, x + width / 2, y + height / 2))
    return rectangles


def _overlap(one: Rectangle, other: Rectangle) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def test_nodes_names_and_numbers_do_not_cover_each_other(layout):
    things = [_rectangle(box) for box in (*layout.nodes, *layout.headings)] + _labels(layout)
    assert not [pair for pair in itertools.combinations(things, 2) if _overlap(*pair)]


def test_words_and_their_numbers_fit_into_their_boxes(layout):
    for box in layout.nodes:
        number_width = text_width(box.number, layout.scale.number_font)
        assert text_width(box.word, layout.scale.font) + number_width < box.width


def test_every_node_but_the_end_has_an_edge_and_likely_edges_come_first(layout, inspection):
    for box in layout.nodes[:-1]:
        drawn = [edge.probability for edge in layout.edges if edge.source == box.node]
        best = np.exp(inspection.dag.log_trans[box.node].max())
        assert drawn[0] == pytest.approx(best)
        assert drawn == sorted(drawn, reverse=True)


def test_nodes_are_as_strong_as_they_are_visited_and_edges_as_wide_as_they_are_probable(inspection, layout):
    assert all(box.occupancy == inspection.occupancy[box.node] for box in layout.nodes)
    for edge in layout.edges:
        assert edge.probability == inspection.dag.trans[edge.source, edge.target]
        assert edge.use == inspection.edge_use[edge.source, edge.target]
    widths = [edge.width for edge in sorted(layout.edges, key=lambda edge: edge.probability)]
    strengths = [edge.strength for edge in sorted(layout.edges, key=lambda edge: edge.use)]
    assert (widths, strengths) == (sorted(widths), sorted(strengths))


def test_edges_go_around_nodes_that_are_not_their_ends(inspection, layout):
    crossings = 0
    for edge in layout.edges:
        points = curve_points(edge.control, 100)
        for box in layout.nodes:
            if box.node not in (edge.source, edge.target):
                left, top, right, bottom = _rectangle(box)
                x, y = points.T
                crossings += bool(((x > left) & (x < right) & (y > top) & (y < bottom)).any())
    # in small drawings there is always a way around; in large ones a few faint edges may find none
    assert crossings <= (0 if inspection.dag.num_masks <= 5 else 0.02 * len(layout.edges))


def test_more_masks_than_can_be_drawn_are_cut():
    layout = lay_out_graph(many_masks(MAX_MASKS_DRAWN + 3, 2))
    assert len(layout.headings) == MAX_MASKS_DRAWN
    assert len(layout.nodes) == 2 * MAX_MASKS_DRAWN + 1
    assert {edge.target for edge in layout.edges} <= {box.node for box in layout.nodes}
