"""Pictures: that they can be read back, are the same every time, and take every word as it is."""

import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from xml.sax.saxutils import escape

import numpy as np
import pytest
from PIL import Image

from exlm_cli.dag.figures import render_graph, render_heat_map
from exlm_cli.report.style import MASK_COLOURS
from tests.unit.dag.inspections import AWKWARD, case_study, long_chain, many_masks, smiles

RENDERERS = [render_graph, render_heat_map]


@pytest.mark.parametrize("render", RENDERERS)
def test_pictures_can_be_read_and_show_the_colours_of_the_masks(render) -> None:
    files = render(case_study(), ["png", "svg"])
    assert list(files) == ["png", "svg"]
    pixels = np.asarray(Image.open(io.BytesIO(files["png"])).convert("RGB")).reshape(-1, 3)
    for colour in MASK_COLOURS[:2]:
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels.astype(int) - rgb).max(axis=1) <= 2).sum() > 500
    assert ET.fromstring(files["svg"]).tag.endswith("svg")


@pytest.mark.parametrize("render", RENDERERS)
def test_the_same_inspection_gives_the_same_bytes(render) -> None:
    assert render(case_study(), ["png", "svg"]) == render(case_study(), ["png", "svg"])


@pytest.mark.parametrize("render", RENDERERS)
@pytest.mark.parametrize("word", AWKWARD)
def test_no_word_is_a_command_to_the_renderer(render, word: str) -> None:
    """Matplotlib notes each text beside its outlines; mathematics or a missing letter would warn or differ."""
    inspection = many_masks(2, 2, 3, (word, "plain", "other", "words"))
    svg = render(inspection, ["svg"])["svg"].decode()
    ET.fromstring(svg)
    shown = {t[0].text for t in inspection.tokens if t}
    if word in shown and word.isascii() and len(word) < 10:
        assert escape(word) in svg


def _texts(svg: bytes) -> str:
    return svg.decode()


def test_the_graph_names_words_fillings_and_probabilities() -> None:
    svg = _texts(render_graph(case_study(), ["svg"])["svg"])
    for text in ("amazing", "sorry", "[MASK] 2", "BOS", "EOS", "0.86", "11.8 %", "Most probable joint fillings",
                 "7.20 % if masks were independent; 11.8 % in the DAG"):  # fmt: skip
        assert f"<!-- {text} -->" in svg


def test_the_heat_map_has_three_words_a_node_where_they_fit_and_one_elsewhere() -> None:
    svg = _texts(render_heat_map(case_study(), ["svg"])["svg"])
    assert svg.count("<!-- beautiful 0.10 -->") == 2
    assert "<!-- 0.86 -->" in svg
    first, second = (token.text for token in many_masks(9, 2).tokens[1][:2])
    svg = _texts(render_heat_map(many_masks(9, 2), ["svg"])["svg"])
    assert f"<!-- {first} 0.60 -->" in svg
    assert f"<!-- {second} 0.20 -->" not in svg


def test_large_and_cut_drawings_say_so() -> None:
    svg = _texts(render_graph(many_masks(43, 2), ["svg"])["svg"])
    assert "<!-- Only the first 40 [MASK]s are drawn; the tables have the other 3. -->" in svg
    assert "Most probable joint fillings" not in svg
    svg = _texts(render_heat_map(many_masks(43, 2), ["svg"])["svg"])
    assert "<!-- Only the first 40 [MASK]s are drawn; the tables have the other 3. -->" in svg
    assert "<!-- EOS -->" not in svg


def test_smiles_that_rdkit_refuses_are_marked() -> None:
    svg = _texts(render_graph(smiles(), ["svg"])["svg"])
    refused = [f for f in smiles().n_best.fillings if not f.is_valid_smiles]
    assert 0 < len(refused) < len(smiles().n_best.fillings)
    assert svg.count("<!-- \N{BALLOT X} -->") == len(refused)
    assert "<!-- \N{BALLOT X}: RDKit refuses it. -->" in svg


def test_a_list_that_is_not_proven_says_so() -> None:
    inspection = case_study()
    doubtful = replace(inspection, n_best=replace(inspection.n_best, is_proven=False))
    svg = _texts(render_graph(doubtful, ["svg"])["svg"])
    assert "fillings as probable as the last ones may be missing" in svg
    assert "may be missing" not in _texts(render_graph(inspection, ["svg"])["svg"])


def test_pictures_grow_with_the_dag_but_stay_within_five_thousand_pixels() -> None:
    widths = [Image.open(io.BytesIO(render_graph(many_masks(n, 2), ["png"])["png"])).size[0] for n in (2, 5, 40)]
    assert widths == sorted(widths)
    assert widths[0] < widths[1] < widths[2] <= 5000


def test_bars_of_fillings_are_as_long_however_small_the_shares_are() -> None:
    def bars(svg: bytes) -> list[str]:
        return re.findall(r'<path d="([^"]+)" clip-path="[^"]+" style="fill: #b8c4d0', svg.decode())

    expected = bars(render_graph(case_study(), ["svg"])["svg"])
    assert len(expected) == len(case_study().n_best.fillings)
    assert bars(render_graph(long_chain(), ["svg"])["svg"]) == expected
