"""One cell: what it leaves, and that what is done is kept.

Figures are compared with those of a plain pre-training run of the same recipe.
"""

import dataclasses
import math
import shutil

import pytest

from exlm_cli.errors import CheckpointError
from exlm_cli.experiments import cell as module
from exlm_cli.experiments.results import CellRuns
from exlm_cli.run_dir import create_run_dir
from exlm_cli.train.pretrain import run_pretraining
from exlm_cli.train.pretrained import load_pretrained
from tests.tiny_sweeps import run_cell, tiny_grid


@pytest.fixture(scope="module")
def cell(cache):
    return tiny_grid(cache).plan()[1]


@pytest.fixture(scope="module")
def made_cell(cell, tmp_path_factory):
    return run_cell(cell, tmp_path_factory.mktemp("made"))


@pytest.fixture
def done(made_cell, tmp_path):
    """Return a copy of a finished cell."""
    return CellRuns(made_cell.plan, shutil.copytree(made_cell.folder, tmp_path / "done"))


def _metrics(cell):
    """Return the metrics under the cell's own masking."""
    rows = cell.pretrain_scores
    rows = rows[(rows.grid_point == f"p={cell.plan.mask_ratios[0]}") & (rows.split == "valid")]
    return dict(zip(rows.metric, rows.value, strict=True))


def test_a_cell_has_the_figures_of_the_run_it_is(cell, done, tmp_path):
    alone = run_pretraining(cell.pretrain, out=tmp_path / "run")
    assert _metrics(done) == pytest.approx(alone.metrics, rel=1e-5)
    assert done.value("loss") == _metrics(done)["loss"]
    assert (done.run.steps, done.run.seed, done.diverged, done.is_done) == (6, 1, None, True)
    assert done.run.parameters == sum(p.numel() for p in load_pretrained(done.pretrain).model.parameters())
    assert done.value("corrupted_expected") == 0.25
    assert abs(done.value("corrupted_measured") - 0.25) < 5 * done.value("corrupted_standard_error")
    assert set(done.scores.variant) == {"k2-p0.5"}


def test_more_entropies_leave_the_training_as_it_is(cell, done):
    wanted = dataclasses.replace(cell, mask_ratios=(0.5, 0.2, 0.8))
    assert not CellRuns(wanted, done.folder).is_measured
    before = (done.pretrain / "metrics.jsonl").read_bytes()
    again = run_cell(wanted, done.folder)
    assert again.pretrain_scores.grid_point.unique().tolist() == ["p=0.5", "p=0.2", "p=0.8"]
    assert _metrics(again) == _metrics(done)
    assert (done.pretrain / "metrics.jsonl").read_bytes() == before
    assert again.is_measured
    assert CellRuns(cell, done.folder).is_measured


def test_damaged_scores_are_refused_and_those_without_their_run_are_not_taken(done):
    path = done.folder / "scores.csv"
    path.write_text(path.read_text().replace(",loss,", ",loss,x"))
    with pytest.raises(CheckpointError, match=r"scores\.csv: not readable as scores: ") as caught:
        assert done.is_measured
    assert caught.value.hint.startswith("delete the file and continue the sweep")
    shutil.rmtree(done.pretrain)
    assert not done.is_measured


def test_a_cell_stopped_before_its_recipe_was_written_begins_anew(cell, tmp_path):
    (create_run_dir(tmp_path / "cell" / "pretrain", "a") / "tokenizer.json").write_text("half")
    assert run_cell(cell, tmp_path / "cell").run.steps == 6


def test_a_cell_that_diverges_is_done_and_not_tried_again(cache, tmp_path, monkeypatch):
    cell = tiny_grid(cache).plan()[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exlm_cli.train.pretrain_task.PretrainTask.losses", _nan_losses)
        found = run_cell(cell, tmp_path)
    assert (found.diverged, found.is_done) == ("step 1", True)
    assert abs(found.value("corrupted_measured") - 0.3) < 0.05
    assert math.isnan(found.value("loss"))
    before = (tmp_path / "scores.csv").read_bytes()
    monkeypatch.setattr(module, "run_pretraining", pytest.fail)
    assert run_cell(cell, tmp_path).diverged == "step 1"
    assert (tmp_path / "scores.csv").read_bytes() == before
    (tmp_path / "pretrain" / "diverged.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"diverged\.json: `step` is missing"):
        assert CellRuns(cell, tmp_path).diverged


def _nan_losses(self, batch):
    nodes = self.model.node_states(batch)
    return nodes.states.sum((1, 2)) * float("nan")
