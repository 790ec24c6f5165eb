"""Pictures of a grid: which there are, that equal p^k has equal colour, that they are readable and repeatable."""

import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path

from PIL import Image

from exlm_cli.report.grid_figures import render_grid_figures, write_grid_figures
from exlm_cli.report.grid_table import grid_rows
from exlm_cli.report.style import corruption_colour
from tests.unit.report.grids import CELLS, diverged, paper_results

CURVES = {
    cell: [{"kind": "train", "step": i, "loss": 3 / i} for i in range(1, 9)]
    + [{"kind": "valid", "step": 8, "loss": 1.0, "perplexity": 2.7, "mask_accuracy": 0.4}]
    for cell in CELLS
}


def _texts(svg: bytes) -> list[str]:
    ET.fromstring(svg)
    return re.findall(r"<!-- (.*?) -->", svg.decode())


def test_every_figure_of_the_paper_has_its_file() -> None:
    files = render_grid_figures(grid_rows(paper_results()), CURVES, ["svg"])
    assert sorted(files) == ["corruption.svg", "curves.svg", "entropy.svg", "glue-mnli-accuracy.svg"]
    assert "7.26" in _texts(files["entropy.svg"])
    assert "83.6" in _texts(files["glue-mnli-accuracy.svg"])
    assert "k=8, p=62.2%" in _texts(files["curves.svg"])


def test_cells_of_equal_p_to_the_k_have_the_same_colour_and_no_other_cell_has_it() -> None:
    svg = render_grid_figures(grid_rows(paper_results()), {}, ["svg"])["entropy.svg"].decode()
    for group, num_cells in enumerate([4, 4, 3, 2, 1]):
        colour = corruption_colour(group, 5).lower()
        # rectangles of the table; markers repeat the colour with a white edge
        table_cells = re.findall(rf'<path d="[^"]+" clip-path="[^"]+" style="fill: {colour}; stroke: #ffffff', svg)
        assert len(table_cells) == num_cells


def test_without_tasks_or_curves_their_pictures_are_left_out() -> None:
    files = render_grid_figures(grid_rows(paper_results(has_task=False)), {}, ["png"])
    assert sorted(files) == ["corruption.png", "entropy.png"]
    with Image.open(io.BytesIO(files["entropy.png"])) as image:
        assert image.width > image.height > 300


def test_spreads_over_seeds_are_written_into_the_cells() -> None:
    files = render_grid_figures(grid_rows(paper_results(seeds=(1, 3))), {}, ["svg"])
    assert "±0.01" in _texts(files["entropy.svg"])


def test_a_diverged_cell_stands_in_the_table_and_not_among_the_points() -> None:
    rows = grid_rows([*paper_results()[:5], diverged(2, 0.15, 1)])
    assert "diverged" in _texts(render_grid_figures(rows, {}, ["svg"])["entropy.svg"])


def test_the_same_rows_give_the_same_files(tmp_path: Path) -> None:
    rows = grid_rows(paper_results(has_task=False)[:3])
    written = write_grid_figures(rows, {}, tmp_path)
    assert [path.name for path in written] == ["corruption.png", "corruption.svg", "entropy.png", "entropy.svg"]
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in write_grid_figures(rows, {}, tmp_path)] == before


def test_a_figure_that_is_not_defined_is_no_point_and_has_no_picture_where_no_cell_has_it() -> None:
    results = paper_results(has_task=False)
    results[-1]["metrics"]["entropy_bits"] = None
    texts = _texts(render_grid_figures(grid_rows(results), {}, ["svg"])["entropy.svg"])
    assert {"not", "defined"} <= set(" ".join(texts).split())
    for result in results:
        result["metrics"]["entropy_bits"] = None
    assert sorted(render_grid_figures(grid_rows(results), {}, ["png"])) == ["corruption.png"]


def test_a_correlation_that_is_not_defined_is_not_in_the_title() -> None:
    svg = render_grid_figures(grid_rows(paper_results()[:2]), {}, ["svg"])["entropy.svg"].decode()
    assert "Entropy, bits" in _texts(svg.encode())
    assert "rank correlation" not in svg
    assert "nan" not in " ".join(_texts(svg.encode()))
    assert "rank correlation" in render_grid_figures(grid_rows(paper_results()), {}, ["svg"])["entropy.svg"].decode()
