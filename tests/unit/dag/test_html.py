"""The page: needs nothing from outside, takes every word as text, and shows pictures and tables."""

import re
from dataclasses import replace
from html.parser import HTMLParser

from exlm_cli.dag.report import render_html
from exlm_cli.format import printable
from tests.unit.dag.inspections import AWKWARD, awkward, awkward_files, case_files, case_study, smiles


class Page(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def _page() -> str:
    return case_files()["dag.html"].decode()


def test_the_page_needs_nothing_from_outside():
    html = _page()
    page = Page(html)
    names = {name for _, attributes in page.tags for name in attributes}
    assert not names & {"href", "action", "data", "srcset", "onclick", "onload"}
    assert [a["src"].partition(",")[0] for _, a in page.tags if "src" in a] == ["data:image/svg+xml;base64"]
    names_of_formats = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\s\"'<]+", html)) == names_of_formats
    assert "url(" not in html
    policy = [a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"]


def test_the_page_shows_graph_heat_map_fillings_and_nodes():
    page = Page(_page())
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert {"graph", "node-3", "edge-2-5"} <= set(ids)
    assert page.text.count("This is amazing, and I'm very glad to see this.") == 2
    for text in (
        f"runs/example/checkpoints/step-10: {case_study().health()}",
        "11.8 %",
        "terrible 0.46, awful 0.31, sad 0.09",
        "7.2 % if masks were independent",
    ):
        assert text in page.text


def test_words_stay_words():
    page = Page(awkward_files()["dag.html"].decode())
    assert all(printable(word) in page.text for word in AWKWARD)
    assert printable(awkward().dag.text) in page.text
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not {"b", "i"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_without_pictures_the_page_has_tables_only_and_molecules_a_verdict():
    no_dag = replace(smiles(), dag=replace(smiles().dag, has_transitions=False))
    page = Page(render_html(no_dag, b"", b""))
    assert not {"svg", "script"} & {tag for tag, _ in page.tags}
    assert all(text in page.text for text in (no_dag.health(), "RDKit", "valid", "refused"))
    assert "RDKit" not in Page(_page()).text
