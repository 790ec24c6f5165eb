"""What a reader must be able to rely on in a drawing: nothing covers anything else."""

import itertools

import numpy as np
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from exlm_cli.dag.inspection import MAX_MASKS_DRAWN, Inspection
from exlm_cli.dag.layout import GraphLayout, NodeBox, curve_points, fit_word, lay_out_graph, text_width
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


def test_everything_lies_in_the_rectangle(layout):
    right, bottom = layout.left + layout.width, layout.top + layout.height
    things = [_rectangle(box) for box in (*layout.nodes, *layout.headings)] + _labels(layout)
    assert all(layout.left < x[0] and layout.top < x[1] and x[2] < right and x[3] < bottom for x in things)
    points = np.concatenate([curve_points(edge.control, 60) for edge in layout.edges])
    assert (points > (layout.left, layout.top)).all()
    assert (points < (right, bottom)).all()


def test_words_and_their_numbers_fit_into_their_boxes(layout):
    for box in layout.nodes:
        number_width = text_width(box.number, layout.scale.number_font)
        assert text_width(box.word, layout.scale.font) + number_width < box.width


def test_columns_are_masks_in_reading_order(layout):
    by_node = sorted(layout.nodes, key=lambda box: box.node)
    assert [box.x for box in by_node] == sorted(box.x for box in by_node)
    for one, other in itertools.pairwise(by_node):
        assert (one.x == other.x) == (one.mask == other.mask)
        assert one.x < other.x or one.y < other.y
    assert [box.word for box in layout.headings] == [f"[MASK {i + 1}]" for i in range(len(layout.headings))]


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


def test_curves_begin_and_end_at_the_borders_of_their_nodes(layout):
    boxes = {box.node: box for box in layout.nodes}
    for edge in layout.edges:
        for node, point in ((edge.source, edge.control[0]), (edge.target, edge.control[3])):
            left, top, right, bottom = _rectangle(boxes[node])
            assert min(abs(point[0] - left), abs(point[0] - right), abs(point[1] - top), abs(point[1] - bottom)) < 1e-6
        np.testing.assert_allclose(curve_points(edge.control, 5)[[0, 4]], edge.control[[0, 3]])


def test_more_masks_than_can_be_drawn_are_cut():
    layout = lay_out_graph(many_masks(MAX_MASKS_DRAWN + 3, 2))
    assert len(layout.headings) == MAX_MASKS_DRAWN
    assert len(layout.nodes) == 2 * MAX_MASKS_DRAWN + 1
    assert {edge.target for edge in layout.edges} <= {box.node for box in layout.nodes}


def test_widths_are_those_that_matplotlib_draws():
    """The ink of a text with a bar at both ends spans all but the bearings of the bars."""
    font = FontProperties(family="DejaVu Sans")
    for text in ("a — b", "naïve “x”…", "0.25"):
        drawn = TextPath((0, 0), f"|{text}|", size=100, prop=font).get_extents().width
        bars = TextPath((0, 0), "||", size=100, prop=font).get_extents().width
        assert text_width(text, 100) == pytest.approx(drawn - bars, abs=2.0)
    assert text_width("字", 10) == 10, "another font has it"


def test_words_are_cut_with_an_ellipsis():
    cut = fit_word("internationalisation", 10, 40)
    assert cut.endswith("…")
    assert text_width(cut, 10) <= 40
    assert fit_word("word", 10, 0) == "…"
