"""The page: needs nothing from outside, takes every word as text, and has what the issue asks for."""

import re
from dataclasses import replace
from html.parser import HTMLParser

from exlm_cli.dag.html import render_html
from exlm_cli.dag.report import render_report
from exlm_cli.format import printable
from tests.unit.dag.inspections import AWKWARD, awkward, case_files, case_study, long_chain, many_masks, smiles

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Collects tags and text, and checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


EMPTY = '<svg data-graphic="0 0 1 1" width="2pt" height="2pt" viewBox="0 0 2 2"></svg>'


def _page() -> str:
    return case_files()["dag.html"].decode()


def test_the_page_needs_nothing_from_outside() -> None:
    html = _page()
    page = Page(html)
    names = {name for _, attributes in page.tags for name in attributes}
    assert not names & {"src", "href", "action", "data", "srcset", "onclick", "onload"}
    names_of_formats = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\s\"'<]+", html)) == names_of_formats
    assert "url(" not in html
    policy = [a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"]


def test_the_page_shows_graph_heat_map_fillings_and_nodes() -> None:
    page = Page(_page())
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert {"graph", "heatmap"} <= set(ids)
    assert page.text.count("This is amazing, and I'm very glad to see this.") == 2
    for text in (
        "[MASK 2]",
        f"runs/example/checkpoints/step-10: {case_study().states_in_use().mean():.2f} of 4 states in use per [MASK]; "
        "87.9 % of the probability lies on paths with 2 tokens.",
        "11.8 %",
        "terrible 0.46, awful 0.31, sad 0.09",
        f"2 terrible → 5 sorry: transition 0.860, on {case_study().edge_use[2, 5]:.3f} of the paths",
        "each [MASK] guessed on its own; 7.2 % if masks were independent",
        "Share of all fillings with 2 tokens",
    ):
        assert text in page.text


def test_the_page_shows_the_saved_pictures_cut_to_their_graphics() -> None:
    html = _page()
    for name in ("graph", "heatmap"):
        svg = case_files()[f"dag_{name}.svg"].decode()
        assert svg[svg.index("<defs>") :] in html
        view_box = re.findall(r'data-graphic="([^"]+)"', svg)[0]
        assert f'viewBox="{view_box}"' in html
        assert f'viewBox="{view_box}"' not in svg


def test_words_stay_words() -> None:
    page = Page(render_report(awkward(), ["html"])["dag.html"].decode())
    assert all(printable(word) in page.text for word in AWKWARD)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not {"b", "i"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_smiles_have_a_column_for_rdkit() -> None:
    text = Page(render_html(smiles(), {})).text
    assert "RDKit" in text
    assert "valid" in text
    assert "refused" in text
    assert "RDKit" not in Page(_page()).text


def test_without_pictures_the_page_has_tables_only() -> None:
    inspection = replace(case_study(), dag=replace(case_study().dag, has_transitions=False), checkpoint="")
    page = Page(render_html(inspection, {}))
    assert not {"svg", "script"} & {tag for tag, _ in page.tags}
    assert inspection.health() in page.text
    assert "amazing" in page.text


def test_a_page_with_cut_pictures_says_so_and_has_all_masks_in_its_tables() -> None:
    page = Page(render_html(many_masks(43, 1), {"graph": EMPTY, "heatmap": EMPTY}))
    assert page.text.count("Only the first 40 [MASK]s are drawn; the tables have the other 3.") == 2
    assert "[MASK 43]" in page.text


def test_bars_are_as_long_however_small_the_shares_are() -> None:
    def widths(html: str) -> list[str]:
        return re.findall(r'class="bar" style="width:([0-9.]+)px"', html)

    assert widths(render_html(long_chain(), {})) == widths(_page())
    assert widths(_page())[0] == "90.0"
