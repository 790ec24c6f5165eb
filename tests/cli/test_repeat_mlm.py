"""`exlm repeat-mlm`: its files, what scripts read, resuming. Its errors are in golden/repeat-mlm.txt."""

import json
import math
from pathlib import Path

import pytest

from tests.cli.asserts import printed_by
from tests.cli.conftest import TINY as TINY_VALUES
from tests.unit.finetune.finetuned_runs import read_rows

TINY = [word for value in TINY_VALUES if not value.startswith("device=") for word in ("--set", f"pretrain.{value}")]
COMMAND = ["repeat-mlm", "quickstart-repeat-mlm", *TINY, "--device", "cpu"]


@pytest.mark.usefixtures("cells_in_this_process")
def test_a_grid_from_training_to_figures(folder, capsys):
    words = [*COMMAND, "--num-repeats", "1,2", "--mask-ratios", "0.15,0.01", "--workers", "1", "--task", "none"]
    captured = printed_by(capsys, [*words, "--out", "run", "--json"])
    result = json.loads(captured.out)
    assert "left out: k = 2, p = 1 %, which corrupts only 0.01 % of the tokens" in captured.err
    cells = [(cell["num_repeats"], cell["mask_ratio"]) for cell in result["cells"]]
    assert cells == [(1, 0.01), (1, 0.15), (2, 0.15)]
    for row, cell in zip(read_rows(folder / "run/report/grid.csv"), result["cells"], strict=True):
        assert float(row["corrupted_expected"]) == pytest.approx(cell["mask_ratio"] ** cell["num_repeats"], rel=1e-5)
        assert float(row["entropy_bits"]) == pytest.approx(cell["entropy_bits"], rel=1e-5)
        assert 0 <= float(row["mask_accuracy"]) <= 1
    assert all(Path(path).is_file() for path in result["files"])
    assert math.isfinite(result["agreement"]["entropy_bits"]["spearman"])

    # done: the report again, nothing trained
    captured = printed_by(capsys, ["repeat-mlm", "--resume", "run"])
    assert "3 cells, 3 of them done" in captured.err
    assert ["k", "\\", "p", "1", "%", "15", "%"] in [line.split() for line in captured.out.splitlines()]
