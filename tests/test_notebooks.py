"""Python in the documents runs as it stands: blocks of `docs/alignment_op.md`, and notebooks, with few steps."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
BLOCKS = re.findall(r"```python\n(.*?)```", (DOCS / "alignment_op.md").read_text(encoding="utf-8"), re.DOTALL)
SHORTER = {"STEPS": 2, "EPOCHS": 1}


def test_there_are_three_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["alignment_op", "own_molecules", "own_text"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        code = "".join(cell["source"])
        for name, value in SHORTER.items():
            code = re.sub(rf"^{name} = \d+", f"{name} = {value}", code, flags=re.MULTILINE)
        tree = ast.parse(code)
        last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, path.name, "exec"), names)
        if last is not None:
            shown = eval(compile(last, path.name, "eval"), names)
            # what a notebook shows of an object
            assert repr(shown) if not hasattr(shown, "_repr_svg_") else shown._repr_svg_().startswith("<?xml")


def run(block: str) -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(block, names)  # the project's own document
    return names


def test_a_decoder_of_the_document_learns_and_decodes_and_its_ctc_is_that_of_torch():
    names = run(BLOCKS[0])
    assert names["hidden"].grad.isfinite().all()
    assert names["hidden"].grad.abs().sum() > 0
    nodes = names["nodes"]
    assert (nodes[0] > 0).all()
    assert (nodes[0].diff() > 0).all()
    assert nodes[1, 4:].tolist() == [-1, -1]
    names = run(BLOCKS[1])
    torch.testing.assert_close(names["nll"][0], names["expected"], rtol=1e-4, atol=0)
