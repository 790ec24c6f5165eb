"""Pictures: that they can be read back, are the same every time, and take every word as it is."""

import io
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from exlm_cli.dag.figures import render_graph, render_heat_map
from exlm_cli.format import printable, shorten
from exlm_cli.report.style import MASK_COLOURS
from tests.unit.dag.inspections import AWKWARD, awkward, awkward_files, case_files, case_study, many_masks, smiles

SVG = "{http://www.w3.org/2000/svg}"


def _svg(render, inspection) -> ET.Element:
    return ET.fromstring(render(inspection, ["svg"])["svg"])


@pytest.fixture(scope="module")
def graph() -> ET.Element:
    return ET.fromstring(case_files()["dag_graph.svg"])


@pytest.fixture(scope="module")
def heat_map() -> ET.Element:
    return ET.fromstring(case_files()["dag_heatmap.svg"])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the figures as they are before they become files."""
    kept: list[Figure] = []

    def keep(figure: Figure, formats: Sequence[str], **_: float) -> dict[str, bytes]:
        kept.append(figure)
        return dict.fromkeys(formats, b"")

    monkeypatch.setattr("exlm_cli.dag.figures.render_figure", keep)
    return kept


def _texts(svg: ET.Element) -> list[str]:
    return ["".join(text.itertext()).strip() for text in svg.iter(f"{SVG}text")]


def _by_id(svg: ET.Element) -> dict[str, ET.Element]:
    found = [element for element in svg.iter() if "id" in element.attrib]
    by_id = {element.attrib["id"]: element for element in found}
    assert len(by_id) == len(found)
    return by_id


@pytest.mark.parametrize(("render", "name"), [(render_graph, "dag_graph"), (render_heat_map, "dag_heatmap")])
def test_pictures_show_the_colours_of_the_masks_and_are_the_same_every_time(render, name):
    files = render(case_study(), ["svg", "png"])
    assert {f"{name}.{form}": data for form, data in files.items()}.items() <= case_files().items()
    pixels = np.asarray(Image.open(io.BytesIO(files["png"])).convert("RGB")).reshape(-1, 3)
    for colour in MASK_COLOURS[:2]:
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels.astype(int) - rgb).max(axis=1) <= 2).sum() > 500


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


def test_every_node_and_likely_edge_has_an_id(graph):
    """Likely are those from 0.03 on."""
    by_id = _by_id(graph)
    assert {f"node-{node}" for node in range(10)} <= by_id.keys()
    likely = {f"edge-{source}-{target}" for source, target in np.argwhere(case_study().dag.trans >= 0.03)}
    assert {name for name in by_id if name.startswith("edge-")} == likely
    numbered = {name for name in by_id if name.startswith("number-")}
    assert "number-2-5" in numbered
    assert {name.replace("number", "edge") for name in numbered} <= by_id.keys()


def test_probabilities_of_the_heat_map_are_in_the_row_of_the_left_node_and_the_column_of_the_entered_one(drawn):
    render_heat_map(case_study(), ["png"])
    axes = drawn[0].axes[0]
    columns, rows = (
        dict(zip(axis.get_ticklocs(), (label.get_text().split()[0] for label in axis.get_ticklabels()), strict=True))
        for axis in (axes.xaxis, axes.yaxis)
    )
    assert [*rows.values()] == ["BOS", *map(str, range(1, 9))]
    assert [*columns.values()] == [*map(str, range(1, 9)), "EOS"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("to", "from")
    assert axes.yaxis_inverted()
    nodes = {"BOS": 0, "EOS": 9, **{str(node): node for node in range(1, 9)}}
    found = {}
    for text in axes.texts:
        x, y = text.get_position()
        found[nodes[rows[y]], nodes[columns[x]]] = text.get_text()
    trans = case_study().dag.trans
    assert found == {(source, target): f"{trans[source, target]:.2f}" for source, target in np.argwhere(trans > 0)}
    (cells,) = axes.collections
    colours = {tuple(path.vertices[0]): value for path, value in zip(cells.get_paths(), cells.get_array(), strict=True)}
    for (column, row), value in colours.items():
        assert value == trans[int(row), int(column) + 1]


def test_large_drawings_are_cut_and_say_so():
    graph, heat_map = (_texts(_svg(render, many_masks(43, 1))) for render in (render_graph, render_heat_map))
    assert many_masks(43, 1).note_on_cut() in {*graph} & {*heat_map}
    assert not {"EOS", "Most probable joint fillings"} & {*graph, *heat_map}
    png = render_graph(many_masks(43, 1), ["png"])["png"]
    assert 4000 < Image.open(io.BytesIO(png)).size[0] <= 5000


def test_smiles_that_rdkit_refuses_are_marked():
    refused = [f for f in smiles().n_best.fillings if not f.is_valid_smiles]
    assert 0 < len(refused) < len(smiles().n_best.fillings)
    assert _texts(_svg(render_graph, smiles())).count("\N{BALLOT X}") == len(refused)
