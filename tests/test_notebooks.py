"""Python in the documents runs as it stands: blocks of `docs/alignment_op.md`, and notebooks, with few steps.

`EXLM_UPDATE_NOTEBOOKS=1` runs the notebooks with all steps and stores what they show; read it before you commit it.
"""

import ast
import io
import json
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exlm_cli import bundled_models
from exlm_cli.data.bundled.molecules import generate_molecules
from exlm_cli.data.smiles import SMILES_TOKEN
from tests.tiny import word_level
from tests.unit.finetune.synthetic import grow_little, make_pretrained

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
BLOCKS = re.findall(r"```python\n(.*?)```", (DOCS / "alignment_op.md").read_text(encoding="utf-8"), re.DOTALL)
SHORTER = {"STEPS": 2, "EPOCHS": 1}
TRAINS = ("run_pretraining(", ".fit(")
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def outputs_of(code: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a notebook shows below a cell: what it prints, then its last expression, drawn where it can be."""
    tree = ast.parse(code)
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "cell", "exec"), names)
        value = eval(compile(last, "cell", "eval"), names) if last is not None else None
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        shown = repr(value) if not hasattr(value, "_repr_svg_") else value._repr_svg_()
        kind = "text/plain" if not hasattr(value, "_repr_svg_") else "image/svg+xml"
        data = {kind: shown.splitlines(keepends=True)}
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return outputs


def texts_of(outputs: list[dict[str, Any]]) -> list[str]:
    """Return the texts of outputs; of a drawing its first letters."""
    parts = [output["text"] if "text" in output else next(iter(output["data"].values())) for output in outputs]
    return ["<?xml" if lines[0].startswith("<?xml") else "".join(lines) for lines in parts]


def make_models(folder: Path) -> None:
    """Make models in place of the package's, which take most of the time to read rows."""
    atoms = word_level(sorted(set(SMILES_TOKEN.findall("".join(generate_molecules(120, 0))))))
    for kind, tokenizer in (("text", None), ("smiles", atoms)):
        data = {"kind": kind, "sequence_length": 96}
        make_pretrained(folder / kind, tokenizer, data=data, model={"num_layers": 1, "max_length": 256})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom_and_shows_what_it_stores(path, own_cache, tmp_path, monkeypatch):
    """Before anything is trained the same text, up to rounding; then as many lines, whose words depend on all steps."""
    monkeypatch.chdir(tmp_path)
    is_update = "EXLM_UPDATE_NOTEBOOKS" in os.environ
    models = Path(bundled_models.__file__).parent / "pretrained" if is_update else tmp_path / "models"
    monkeypatch.setattr(bundled_models, "FOLDER", models)
    if not is_update:
        make_models(models)
        grow_little(monkeypatch)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    has_trained = False
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["execution_count"] is None
        code = "".join(cell["source"])
        for name, value in {} if is_update else SHORTER.items():
            code = re.sub(rf"^{name} = \d+", f"{name} = {value}", code, flags=re.MULTILINE)
        outputs = outputs_of(code, names)
        if is_update:
            cell["outputs"] = outputs
            continue
        has_trained |= any(call in code for call in TRAINS)
        ours, stored = texts_of(outputs), texts_of(cell["outputs"])
        assert len(ours) == len(stored)
        for one, other in zip(ours, stored, strict=True):
            if has_trained:
                assert one.count("\n") == other.count("\n")
            else:
                assert NUMBER.sub("#", one) == NUMBER.sub("#", other)
                numbers = (np.array([float(n) for n in NUMBER.findall(text)]) for text in (one, other))
                np.testing.assert_allclose(*numbers, rtol=1e-9)
    if is_update:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


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
