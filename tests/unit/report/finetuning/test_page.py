"""The page of a run holds its scores, verdict and pictures, escapes the names of others, and needs no other file."""

import re
import shlex
import shutil
from html import unescape
from pathlib import Path

import pytest

from exlm_cli.finetune.results import FinetunedRun, read_results
from exlm_cli.report.finetuning.page import write_page
from tests.unit.report.results import svg_texts


@pytest.fixture(scope="module")
def page(molecules: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of a run of two seeds and two labels, whose table, folder, label, note and verdict have tags."""
    run = shutil.copytree(molecules, tmp_path_factory.mktemp("page") / "<my run>")
    recipe = (run / "recipe.yaml").read_text(encoding="utf-8")
    (run / "recipe.yaml").write_text(recipe.replace("assay.csv", "<x>.csv").replace("toxic", "<x>toxic"))
    said = {"notes": ("cut `a<b` of the rows",), "verdict": ("The model is <better>.",)}
    return write_page(FinetunedRun("run", run, read_results(run).model_copy(update=said)))


def test_a_page_holds_everything_and_names_no_other_file(page):
    text = page.read_text(encoding="utf-8")
    assert all(said in text for said in ("The model is &lt;better&gt;.", "roc_auc", "<code>a&lt;b</code>"))
    assert f"exlm predict {shlex.quote(str(page.parent))} FILE --explain\n" in unescape(text)
    assert not re.search(r"<x>|<script|https?://|<link", text)
    assert "<title>&lt;x&gt;.csv: active, &lt;x&gt;toxic: &lt;my run&gt;</title>" in text
    assert "<h1>&lt;x&gt;.csv: active, &lt;x&gt;toxic</h1>" in text
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', text)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    headings = {"Scores", "Scores of each label", "Worst predicted molecules", "Notes"}
    assert headings <= {heading.removesuffix(", test") for heading in re.findall("<h2>(.*?)</h2>", text)}
    assert re.search('<tr><td>toxic</td><td class="number">', text)


def test_page_and_pictures_say_which_split_they_are_of(page):
    assert "57/7/8 rows in train, valid, test (random split 0)" in page.read_text(encoding="utf-8")
    drawn = {path.stem: " ".join(svg_texts(path)) for path in (page.parent / "report").glob("*.svg")}
    assert {"labels", "error-by-distance", "test-curves", "test-calibration"} <= drawn.keys()
    assert all("random split" in texts for texts in drawn.values())
