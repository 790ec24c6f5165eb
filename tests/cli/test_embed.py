"""`exlm embed` on small runs: both formats, and mistakes that leave nothing behind."""

import numpy as np
import pytest

from exlm_cli.cli.app import main
from tests.cli.asserts import result_of
from tests.unit.finetune.finetuned_runs import write_rows


@pytest.mark.parametrize("run", ["P", "M"])
def test_vectors_of_any_run_are_written(run_folder, capsys, run):
    write_rows(run_folder / "new.csv", ["smiles"], [["CCO"], ["(("]])
    result = result_of(capsys, "embed", run, "new.csv", "--out", "a/v.npz")
    assert (result["rows"], result["unreadable_rows"], result["files"]) == (2, 1, ["a/v.npz"])
    vectors = np.load(run_folder / "a/v.npz")
    assert vectors["cls"].shape == vectors["mean"].shape == (2, 16)
    assert np.isnan(vectors["cls"][1]).all()
    assert main(["embed", run, "new.csv", "--out", "a/v.npz"]) == 0
    assert "note: 16 numbers a vector" in capsys.readouterr().out
