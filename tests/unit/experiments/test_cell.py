"""One cell: what it leaves, that what is done is kept, and that it refuses to continue with another recipe.

Figures are compared with those of a plain pre-training run of the same recipe.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import dump_recipe
from exlm_cli.config.sweep import SweepCell
from exlm_cli.errors import CheckpointError, DivergedError
from exlm_cli.experiments import cell as module
from exlm_cli.experiments.cell import read_result, run_cell
from exlm_cli.experiments.results import SweepCellResult, SweepRun, TaskScores
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import create_run_dir
from exlm_cli.train.pretrain import run_pretraining
from exlm_cli.train.pretrained import load_pretrained
from tests.tiny_sweeps import tiny_grid
from tests.unit.report.results import scores

QUIET = SilentProgress()
Done = tuple[Path, SweepCellResult]


@pytest.fixture(scope="module")
def cell(cache: Path) -> SweepCell:
    return tiny_grid(cache).plan()[1]


@pytest.fixture(scope="module")
def made_cell(cell: SweepCell, tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("made")
    return folder, run_cell(cell, folder, QUIET)


@pytest.fixture
def done(made_cell: Done, tmp_path: Path) -> Done:
    """Return a copy of the folder of a finished cell, and its result."""
    folder, result = made_cell
    return shutil.copytree(folder, tmp_path / "done"), result


def test_a_cell_has_the_figures_of_the_run_it_is(cell, done, tmp_path):
    folder, result = done
    alone = run_pretraining(cell.pretrain, out=tmp_path / "run")
    assert result.metrics == pytest.approx(alone.metrics, rel=1e-5)
    assert (result.num_repeats, result.mask_ratio, result.seed, result.steps) == (2, 0.5, 1, 6)
    assert result.parameters == sum(p.numel() for p in load_pretrained(folder / "pretrain").model.parameters())
    assert result.corruption is not None
    assert result.corruption.expected == 0.25
    assert abs(result.corruption.measured - 0.25) < 5 * result.corruption.standard_error
    (entropy,) = result.entropy
    assert (entropy.mask_ratio, entropy.num_repeats, entropy.objective) == (0.5, 2, "mlm")
    assert entropy.entropy_bits == result.metrics["entropy_bits"]
    assert json.loads((folder / "result.json").read_text()) == result.model_dump(mode="json")


def test_more_entropies_leave_the_training_as_it_is(cell, done, monkeypatch):
    folder, result = done
    wanted = cell.model_copy(update={"entropy_ratios": (0.2, 0.8)})
    assert read_result(wanted, folder) is None
    before = (folder / "pretrain" / "metrics.jsonl").read_bytes()
    again = run_cell(wanted, folder, QUIET)
    assert [entropy.mask_ratio for entropy in again.entropy] == [0.5, 0.2, 0.8]
    assert again.metrics == result.metrics
    assert (folder / "pretrain" / "metrics.jsonl").read_bytes() == before
    assert read_result(cell, folder) == again
    monkeypatch.setattr(module, "run_pretraining", pytest.fail)  # it is measured already
    assert run_cell(wanted, folder, QUIET) == again


def test_another_number_of_sequences_is_measured_again(cell, done):
    folder, result = done
    fewer = cell.model_copy(update={"measure_sequences": 2})
    assert read_result(fewer, folder) is None
    before = (folder / "pretrain" / "metrics.jsonl").read_bytes()
    again = run_cell(fewer, folder, QUIET)
    assert again.metrics["num_sequences"] == 2 < (result.metrics["num_sequences"] or 0)
    assert read_result(fewer, folder) == again
    assert (folder / "pretrain" / "metrics.jsonl").read_bytes() == before


def test_another_recipe_is_refused_and_its_figures_are_not_taken(cell, cache, tmp_path):
    old = run_cell(tiny_grid(cache, seeds=[7]).plan()[1], tmp_path, QUIET)
    with pytest.raises(CheckpointError, match=r"with another recipe$"):
        read_result(cell, tmp_path)
    (tmp_path / "result.json").unlink()
    with pytest.raises(CheckpointError, match=r"with another recipe: `seed` was 7 and is 1$"):
        run_cell(cell, tmp_path, QUIET)
    # only measured.json is left
    shutil.rmtree(tmp_path / "pretrain")
    assert run_cell(cell, tmp_path, QUIET).metrics != old.metrics


def test_a_cell_stopped_before_its_recipe_was_written_begins_anew(cell, tmp_path):
    (create_run_dir(tmp_path / "cell" / "pretrain", "a") / "tokenizer.json").write_text("half")
    assert run_cell(cell, tmp_path / "cell", QUIET).steps == 6


def test_a_cell_that_diverges_is_done(cache, tmp_path):
    cell = tiny_grid(cache).plan()[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exlm_cli.train.pretrain.PretrainTask.losses", _nan_losses)
        result = run_cell(cell, tmp_path, QUIET)
    assert (result.diverged or "").startswith("the loss of step 1 is nan")
    assert "metrics" not in json.loads((tmp_path / "result.json").read_text())
    assert result.corruption is not None
    assert abs(result.corruption.measured - 0.3) < 0.05
    assert read_result(cell, tmp_path) == result


def _nan_losses(self: Any, batch: Any) -> Any:
    nodes = self.model.node_states(batch)
    return nodes.states.sum((1, 2)) * float("nan")


def test_an_entropy_that_is_not_defined_is_null(cache, tmp_path):
    # all 8 copies of a token are masked once in 1e8 times
    result = run_cell(tiny_grid(cache, cells=[[8, 0.1]]).plan()[0], tmp_path, QUIET)
    assert result.metrics["entropy_bits"] is result.entropy[0].entropy_bits is None
    json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)


class Finetuning:
    """Stands in for fine-tuning: RTE diverges while `lr` is high."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, float, bool]] = []

    def __call__(self, recipe: FinetuneRecipe, *, out: Path | None, resume: Path | None, **_: object) -> Any:
        self.begun.append((recipe.task.name, recipe.optim.lr, resume is not None))
        if out is not None:
            out.mkdir(parents=True)
            (out / "recipe.yaml").write_text(dump_recipe(recipe))
        if recipe.task.name == "glue/rte" and recipe.optim.lr > 1e-3:
            raise DivergedError("the loss of step 3 is nan", "lower the learning rate")
        return SimpleNamespace(results=scores((0.5, None)).results)


def test_fine_tuning_that_diverges_leaves_what_was_measured_and_the_other_tasks(
    cache, made_cell, tmp_path, monkeypatch
):
    fake = Finetuning()
    monkeypatch.setattr("exlm_cli.finetune.run.run_finetuning", fake)
    grid = tiny_grid(cache, tasks=["glue/rte", "glue/qnli"])

    def cell(lr: float) -> SweepCell:
        optim = grid.finetune.optim.model_copy(update={"lr": lr})
        return grid.model_copy(update={"finetune": grid.finetune.model_copy(update={"optim": optim})}).plan()[1]

    result = run_cell(cell(0.5), tmp_path, QUIET)
    assert result.metrics == made_cell[1].metrics
    assert result.diverged_tasks == ["glue/rte"]
    assert list(result.scored_tasks) == ["glue/qnli"]
    qnli = result.finetune["glue/qnli"]
    assert isinstance(qnli, TaskScores)
    assert (qnli.score, qnli.metric) == (0.5, "accuracy")
    assert SweepRun(tmp_path, grid, [result, made_cell[1]], 2).num_diverged == 1
    # the same recipe would diverge again: neither alone nor beside another task is it tried
    assert read_result(cell(0.5), tmp_path) == result
    more = grid.finetune.of_task("glue/sst2", {})
    beside = cell(0.5)
    beside = run_cell(beside.model_copy(update={"finetune": (*beside.finetune, more)}), tmp_path, QUIET)
    assert beside.diverged_tasks == ["glue/rte"]
    assert list(beside.finetune) == ["glue/rte", "glue/qnli", "glue/sst2"]
    assert [task for task, _, _ in fake.begun] == ["glue/rte", "glue/qnli", "glue/sst2"]
    # another one may not go on with scores of the first, but begins what diverged anew
    with pytest.raises(CheckpointError, match=r"was fine-tuned with another recipe: `optim.lr` was 0.5 and is 0.0001$"):
        run_cell(cell(1e-4), tmp_path, QUIET)
    shutil.rmtree(tmp_path / "finetune" / "glue-qnli")
    again = run_cell(cell(1e-4), tmp_path, QUIET)
    assert fake.begun[3:] == [("glue/rte", 1e-4, False), ("glue/qnli", 1e-4, False)]
    assert again.diverged_tasks == []


def test_another_task_leaves_the_scores_of_earlier_ones(cache, tmp_path, monkeypatch):
    fake = Finetuning()
    monkeypatch.setattr("exlm_cli.finetune.run.run_finetuning", fake)
    first, other, none = (tiny_grid(cache, tasks=tasks).plan()[1] for tasks in (["glue/qnli"], ["glue/sst2"], []))
    before = run_cell(first, tmp_path, QUIET)
    after = run_cell(other, tmp_path, QUIET)
    assert [task for task, _, _ in fake.begun] == ["glue/qnli", "glue/sst2"]
    assert list(after.finetune) == ["glue/qnli", "glue/sst2"]
    assert after.finetune["glue/qnli"] == before.finetune["glue/qnli"]
    assert read_result(first, tmp_path) == read_result(other, tmp_path) == after
    assert run_cell(none, tmp_path, QUIET) == after
