"""What a reader must be able to rely on in a drawing: nothing covers anything else."""

import itertools

import numpy as np
import pytest

from exlm_cli.dag.inspection import Inspection
from exlm_cli.dag.layout import GraphLayout, NodeBox, curve_points, lay_out_graph, text_width
from tests.unit.dag.inspections import awkward, case_study, many_masks, smiles

DRAWINGS = {
    "case study": case_study,
    "smiles": smiles,
    "awkward words": awkward,
    "five masks": lambda: many_masks(5, 4),
    "twelve masks": lambda: many_masks(12, 3),
    "21 masks": lambda: many_masks(21, 4),
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


def test_nodes_names_and_numbers_do_not_cover_each_other_and_words_fit_into_their_boxes(layout):
    things = [_rectangle(box) for box in (*layout.nodes, *layout.headings)] + _labels(layout)
    assert not [pair for pair in itertools.combinations(things, 2) if _overlap(*pair)]
    for box in layout.nodes:
        number_width = text_width(box.number, layout.scale.number_font)
        assert text_width(box.word, layout.scale.font) + number_width < box.width


def test_every_node_but_the_end_has_its_likeliest_edges_as_wide_as_they_are_probable(layout, inspection):
    assert all(box.occupancy == inspection.occupancy[box.node] for box in layout.nodes)
    for box in layout.nodes[:-1]:
        drawn = [edge for edge in layout.edges if edge.source == box.node]
        best = np.sort(inspection.dag.trans[box.node])[::-1][: len(drawn)]
        assert [edge.probability for edge in drawn] == best.tolist()
        assert best[0] > 0
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
