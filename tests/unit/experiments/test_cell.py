"""One cell: what it leaves, that what is done is kept, and that it refuses to continue with another recipe.

Figures are compared with those of a plain pre-training run of the same recipe.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import dump_recipe
from exlm_cli.config.sweep import SweepCell
from exlm_cli.errors import CheckpointError, DivergedError
from exlm_cli.experiments import cell as module
from exlm_cli.experiments.cell import read_finished, run_cell
from exlm_cli.experiments.results import MeasuredCell, SweepRun
from exlm_cli.files import write_json
from exlm_cli.finetune.scores import write_scores
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import create_run_dir
from exlm_cli.train.pretrain import run_pretraining
from exlm_cli.train.pretrained import load_pretrained
from tests.tiny_sweeps import tiny_grid
from tests.unit.report.results import scored

QUIET = SilentProgress()


@pytest.fixture(scope="module")
def cell(cache: Path) -> SweepCell:
    return tiny_grid(cache).plan()[1]


@pytest.fixture(scope="module")
def made_cell(cell: SweepCell, tmp_path_factory: pytest.TempPathFactory) -> MeasuredCell:
    return run_cell(cell, tmp_path_factory.mktemp("made"), QUIET)


@pytest.fixture
def done(made_cell: MeasuredCell, tmp_path: Path) -> MeasuredCell:
    """Return a copy of a finished cell."""
    return MeasuredCell(shutil.copytree(made_cell.folder, tmp_path / "done"), made_cell.result)


def _metrics(cell: MeasuredCell) -> dict[str, float]:
    """Return the metrics under the cell's own masking."""
    rows = cell.pretrain_scores[cell.pretrain_scores.grid_point == f"p={cell.result.mask_ratio}"]
    return dict(zip(rows.metric, rows.value, strict=True))


def test_a_cell_has_the_figures_of_the_run_it_is(cell, done, tmp_path):
    folder, result = done.folder, done.result
    alone = run_pretraining(cell.pretrain, out=tmp_path / "run")
    assert _metrics(done) == pytest.approx(alone.metrics, rel=1e-5)
    assert done.value("loss") == _metrics(done)["loss"]
    assert (result.num_repeats, result.mask_ratio, result.seed, result.steps) == (2, 0.5, 1, 6)
    assert result.parameters == sum(p.numel() for p in load_pretrained(folder / "pretrain").model.parameters())
    assert result.corruption is not None
    assert result.corruption.expected == 0.25
    assert abs(result.corruption.measured - 0.25) < 5 * result.corruption.standard_error
    assert (result.mask_ratios, result.objective) == ((0.5,), "mlm")
    assert json.loads((folder / "result.json").read_text()) == result.model_dump(mode="json")


def test_more_entropies_leave_the_training_as_it_is(cell, done, monkeypatch):
    folder = done.folder
    wanted = cell.model_copy(update={"entropy_ratios": (0.2, 0.8)})
    assert read_finished(wanted, folder) is None
    before = (folder / "pretrain" / "metrics.jsonl").read_bytes()
    again = run_cell(wanted, folder, QUIET)
    assert again.result.mask_ratios == (0.5, 0.2, 0.8)
    assert again.pretrain_scores.grid_point.unique().tolist() == ["p=0.5", "p=0.2", "p=0.8"]
    assert _metrics(again) == _metrics(done)
    assert (folder / "pretrain" / "metrics.jsonl").read_bytes() == before
    assert read_finished(cell, folder) == again
    monkeypatch.setattr(module, "run_pretraining", pytest.fail)  # it is measured already
    assert run_cell(wanted, folder, QUIET) == again


def test_another_number_of_sequences_is_measured_again(cell, done):
    folder = done.folder
    fewer = cell.model_copy(update={"measure_sequences": 2})
    assert read_finished(fewer, folder) is None
    before, num_sequences = (folder / "pretrain" / "metrics.jsonl").read_bytes(), done.value("num_sequences")
    again = run_cell(fewer, folder, QUIET)
    assert again.value("num_sequences") == 2 < num_sequences
    assert read_finished(fewer, folder) == again
    assert (folder / "pretrain" / "metrics.jsonl").read_bytes() == before


def test_another_recipe_is_refused_and_its_figures_are_not_taken(cell, cache, tmp_path):
    old = run_cell(tiny_grid(cache, seeds=[7]).plan()[1], tmp_path, QUIET)
    with pytest.raises(CheckpointError, match=r"with another recipe: `seed` was 7 and is 1$"):
        read_finished(cell, tmp_path)
    with pytest.raises(CheckpointError, match=r"with another recipe: `seed` was 7 and is 1$"):
        run_cell(cell, tmp_path, QUIET)
    # only its result is left
    shutil.rmtree(tmp_path / "pretrain")
    before = _metrics(old)
    assert _metrics(run_cell(cell, tmp_path, QUIET)) != before


def test_a_cell_stopped_before_its_recipe_was_written_begins_anew(cell, tmp_path):
    (create_run_dir(tmp_path / "cell" / "pretrain", "a") / "tokenizer.json").write_text("half")
    assert run_cell(cell, tmp_path / "cell", QUIET).result.steps == 6


def test_a_cell_that_diverges_is_done(cache, tmp_path):
    cell = tiny_grid(cache).plan()[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exlm_cli.train.pretrain.PretrainTask.losses", _nan_losses)
        found = run_cell(cell, tmp_path, QUIET)
    result = found.result
    assert (result.diverged or "").startswith("the loss of step 1 is nan")
    assert "steps" not in json.loads((tmp_path / "result.json").read_text())
    assert found.scores.empty
    assert result.corruption is not None
    assert abs(result.corruption.measured - 0.3) < 0.05
    assert read_finished(cell, tmp_path) == found


def _nan_losses(self: Any, batch: Any) -> Any:
    nodes = self.model.node_states(batch)
    return nodes.states.sum((1, 2)) * float("nan")


def test_an_entropy_that_is_not_defined_has_no_value(cache, tmp_path):
    # all 8 copies of a token are masked once in 1e8 times
    cell = run_cell(tiny_grid(cache, cells=[[8, 0.1]]).plan()[0], tmp_path, QUIET)
    assert math.isnan(cell.value("entropy_bits"))
    assert ",entropy_bits,\n" in (tmp_path / "scores.csv").read_text()


class Finetuning:
    """Stands in for fine-tuning: RTE diverges while `lr` is high."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, float, bool]] = []

    def __call__(self, recipe: FinetuneRecipe, *, out: Path | None, resume: Path | None, **_: object) -> None:
        self.begun.append((recipe.task.name, recipe.optim.lr, resume is not None))
        if out is not None:
            out.mkdir(parents=True)
            (out / "recipe.yaml").write_text(dump_recipe(recipe))
        if recipe.task.name == "glue/rte" and recipe.optim.lr > 1e-3:
            raise DivergedError("the loss of step 3 is nan", "lower the learning rate")
        run = scored("", "glue/qnli", {"accuracy": [0.5, None]})
        assert out is not None
        write_json(out / "results.json", run.results)
        write_scores(out, run.scores)


def test_fine_tuning_that_diverges_leaves_what_was_measured_and_the_other_tasks(
    cache, made_cell, tmp_path, monkeypatch
):
    fake = Finetuning()
    monkeypatch.setattr("exlm_cli.finetune.run.run_finetuning", fake)
    grid = tiny_grid(cache, tasks=["glue/rte", "glue/qnli"])

    def cell(lr: float) -> SweepCell:
        optim = grid.finetune.optim.model_copy(update={"lr": lr})
        return grid.model_copy(update={"finetune": grid.finetune.model_copy(update={"optim": optim})}).plan()[1]

    found = run_cell(cell(0.5), tmp_path, QUIET)
    assert _metrics(found) == _metrics(made_cell)
    assert found.result.diverged_tasks == ["glue/rte"]
    assert (found.task_metrics, found.value("glue/qnli accuracy")) == (["glue/qnli accuracy"], 0.5)
    assert SweepRun(tmp_path, grid, [found, made_cell], 2).num_diverged == 1
    # the same recipe would diverge again: neither alone nor beside another task is it tried
    assert read_finished(cell(0.5), tmp_path) == found
    more = grid.finetune.of_task("glue/sst2", {})
    beside = cell(0.5)
    beside = run_cell(beside.model_copy(update={"finetune": (*beside.finetune, more)}), tmp_path, QUIET).result
    assert beside.diverged_tasks == ["glue/rte"]
    assert list(beside.finetune) == ["glue/rte", "glue/qnli", "glue/sst2"]
    assert [task for task, _, _ in fake.begun] == ["glue/rte", "glue/qnli", "glue/sst2"]
    # another one may not go on with scores of the first, but begins what diverged anew
    with pytest.raises(CheckpointError, match=r"was fine-tuned with another recipe: `optim.lr` was 0.5 and is 0.0001$"):
        run_cell(cell(1e-4), tmp_path, QUIET)
    shutil.rmtree(tmp_path / "finetune" / "glue-qnli")
    again = run_cell(cell(1e-4), tmp_path, QUIET)
    assert fake.begun[3:] == [("glue/rte", 1e-4, False), ("glue/qnli", 1e-4, False)]
    assert again.result.diverged_tasks == []


def test_another_task_leaves_the_scores_of_earlier_ones(cache, tmp_path, monkeypatch):
    fake = Finetuning()
    monkeypatch.setattr("exlm_cli.finetune.run.run_finetuning", fake)
    first, other, none = (tiny_grid(cache, tasks=tasks).plan()[1] for tasks in (["glue/qnli"], ["glue/sst2"], []))
    before = run_cell(first, tmp_path, QUIET).result
    found = run_cell(other, tmp_path, QUIET)
    after = found.result
    assert [task for task, _, _ in fake.begun] == ["glue/qnli", "glue/sst2"]
    assert list(after.finetune) == ["glue/qnli", "glue/sst2"]
    assert after.finetune["glue/qnli"] == before.finetune["glue/qnli"]
    assert read_finished(first, tmp_path) == read_finished(other, tmp_path) == found
    assert run_cell(none, tmp_path, QUIET) == found
