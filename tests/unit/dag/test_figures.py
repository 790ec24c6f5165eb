"""Pictures: that they can be read back, are the same every time, and take every word as it is."""

import io
import xml.etree.ElementTree as ET

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from exlm_cli.dag.figures import render_graph, render_heat_map
from exlm_cli.format import printable, shorten
from tests.unit.dag.inspections import AWKWARD, awkward, awkward_files, case_files, case_study, many_masks, smiles

SVG = "{http://www.w3.org/2000/svg}"


def _svg(render, inspection) -> ET.Element:
    return ET.fromstring(render(inspection, ["svg"])["svg"])


def _texts(svg: ET.Element) -> list[str]:
    return ["".join(text.itertext()).strip() for text in svg.iter(f"{SVG}text")]


def test_a_picture_is_the_same_every_time():
    assert render_heat_map(case_study(), ["svg"])["svg"] == case_files()["dag_heatmap.svg"]


def test_words_come_back_from_the_svg_as_they_went_in():
    """Mathematics and markup would not; a letter that the font lacks must not warn."""
    graph, heat_map = (_texts(ET.fromstring(awkward_files()[f"dag_{name}.svg"])) for name in ("graph", "heatmap"))
    for node, word in enumerate(AWKWARD, start=1):
        shown = awkward().quote(printable(word))
        assert shorten(shown, 16) in graph
        assert any(text.startswith(f"{node} {shown[:9]}") for text in heat_map)
    title = awkward().numbered_sentence()
    assert title.startswith("<i>$x$")
    assert title in graph
    assert title in heat_map


def test_every_node_and_likely_edge_has_an_id():
    """Likely are those from 0.03 on."""
    svg = ET.fromstring(case_files()["dag_graph.svg"])
    ids = [element.attrib["id"] for element in svg.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    assert {f"node-{node}" for node in range(10)} <= set(ids)
    likely = {f"edge-{source}-{target}" for source, target in np.argwhere(case_study().dag.trans >= 0.03)}
    assert {name for name in ids if name.startswith("edge-")} == likely
    numbered = {name.replace("number", "edge") for name in ids if name.startswith("number-")}
    assert "edge-2-5" in numbered <= likely


def test_probabilities_of_the_heat_map_are_in_the_row_of_the_left_node_and_the_column_of_the_entered_one(monkeypatch):
    drawn: list[Figure] = []
    monkeypatch.setattr("exlm_cli.dag.figures.render_figure", lambda figure, *_, **__: drawn.append(figure))
    render_heat_map(case_study(), ["png"])
    axes = drawn[0].axes[0]
    columns, rows = (
        dict(zip(axis.get_ticklocs(), (label.get_text().split()[0] for label in axis.get_ticklabels()), strict=True))
        for axis in (axes.xaxis, axes.yaxis)
    )
    assert [*rows.values()] == ["BOS", *map(str, range(1, 9))]
    assert [*columns.values()] == [*map(str, range(1, 9)), "EOS"]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.yaxis_inverted()) == ("to", "from", True)
    trans = case_study().dag.trans
    names = ["BOS", *map(str, range(1, 9)), "EOS"]
    expected = {(names[v], names[u]): f"{trans[v, u]:.2f}" for v, u in np.argwhere(trans > 0)}
    places = [(text.get_position(), text.get_text()) for text in axes.texts]
    assert {(rows[y], columns[x]): text for (x, y), text in places} == expected


def test_large_drawings_are_cut_and_say_so():
    inspection = many_masks(43, 1)
    drawn = render_graph(inspection, ["svg", "png"])
    graph, heat_map = _texts(ET.fromstring(drawn["svg"])), _texts(_svg(render_heat_map, inspection))
    assert inspection.note_on_cut() in {*graph} & {*heat_map}
    assert not {"EOS", "Most probable joint fillings"} & {*graph, *heat_map}
    assert 4000 < Image.open(io.BytesIO(drawn["png"])).size[0] <= 5000


def test_smiles_that_rdkit_refuses_are_marked():
    refused = [f for f in smiles().n_best.fillings if not f.is_valid_smiles]
    assert 0 < len(refused) < len(smiles().n_best.fillings)
    assert _texts(_svg(render_graph, smiles())).count("\N{BALLOT X}") == len(refused)
