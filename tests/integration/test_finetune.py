"""Fine-tuning as a whole: it learns what words decide, and ends with the same bits wherever it was killed."""

import numpy as np
import pytest
import torch

from exlm_cli.finetune import training
from exlm_cli.finetune.cells import trainer as trainer_module
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.finetune.results import read_results
from exlm_cli.finetune.run import run_finetuning
from exlm_cli.finetune.scores import point_scores, read_scores
from tests.killed import interrupted_at_call
from tests.unit.finetune.synthetic import (
    WordTask,
    assert_same_run,
    cells,
    finetune_recipe,
    make_pretrained,
    run_tiny,
    untimed,
)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return make_pretrained(tmp_path_factory.mktemp("pretrained") / "run")


NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "pooler_dropout": 0.0}


def test_a_task_that_words_decide_is_learnt(tmp_path):
    """Chance is 0.5 to 0.6; regression and spans are learnt in `test_finetune_text.py`.

    Initial weights have the deviation that a narrow model needs: with 0.02 at width 16 it is up to rounding, and so to
    the processor, whether both labels are learnt.
    """
    pretrained = make_pretrained(tmp_path / "pre", model={"init_std": 0.1})
    train = {"max_epochs": 15, "batch_sequences": 16, "microbatch_tokens": 4096}
    task = WordTask((160, 60, 60))
    result = run_tiny(pretrained, tmp_path / "run", task, seeds=[1], train=train, optim={"lr": 5e-3}, model=NO_DROPOUT)
    for split in ("valid", "test"):
        assert result.scores.average(split, "accuracy").mean > 0.95, result.scores.as_json()


GRID = {"optim.lr": [1e-5, 3e-3], "train.max_epochs": [1, 2]}


@pytest.fixture(scope="module")
def searched(pretrained, tmp_path_factory):
    out = tmp_path_factory.mktemp("searched") / "run"
    run_finetuning(finetune_recipe(grid=GRID), checkpoint=pretrained, out=out, use_grid=True, task=WordTask())
    return out


def test_the_best_grid_point_is_that_with_the_best_validation_and_keeps_its_weights(searched):
    results = read_results(searched)
    assert [point.values for point in results.grid] == [
        {"optim.lr": lr, "train.max_epochs": epochs} for lr in (1e-5, 3e-3) for epochs in (1, 2)
    ]
    means = point_scores(read_scores(searched), "accuracy", "mean")
    assert list(means) == [point.label for point in results.grid]
    best = results.grid[int(np.argmax(list(means.values())))]
    assert results.grid_best == best
    assert read_scores(searched).seeds("valid", "accuracy").mean == pytest.approx(means[best.label])
    assert len(cells(searched)) == 8
    kept = {path.relative_to(searched / "cells").parts[0] for path in searched.rglob("model.safetensors")}
    assert kept == {best.label}
    assert sorted(load_finetuned(searched, device="cpu").runners) == [1, 2]


def test_a_grid_killed_between_cells_goes_on_where_it_was(pretrained, tmp_path, searched):
    out, recipe = tmp_path / "run", finetune_recipe(grid=GRID)
    with interrupted_at_call(trainer_module, "write_json", 5):
        run_finetuning(recipe, checkpoint=pretrained, out=out, use_grid=True, task=WordTask())
    assert len(cells(out)) == 4
    run_finetuning(recipe, checkpoint=None, resume=out, task=WordTask())
    assert_same_run(out, searched)


def choose_by_seeds(scores, metric, aggregate):
    """Stand for the scores of grid points: with seed 7 the larger learning rate is better, else the smaller."""
    has_7 = (scores.table.seed == "7").any()
    points = scores.table.grid_point.unique()
    return {point: float(point.removeprefix("lr-")) * (1 if has_7 else -1) for point in points}


def test_a_point_that_wins_with_other_seeds_has_its_weights_again(pretrained, tmp_path, monkeypatch):
    """Two cells are new, two are trained again, three steps each; killed in the first one that is trained again."""
    monkeypatch.setattr(training, "point_scores", choose_by_seeds)

    def recipe(*seeds):
        return finetune_recipe(grid={"optim.lr": [1e-5, 3e-3]}, seeds=seeds, train={"max_epochs": 1})

    def kept(run):
        return {str(path.parents[2].relative_to(run / "cells")) for path in run.rglob("model.safetensors")}

    run, fresh = tmp_path / "run", tmp_path / "fresh"
    small = run_finetuning(recipe(1, 2), checkpoint=pretrained, out=run, use_grid=True, task=WordTask()).results
    assert kept(run) == {f"{small.grid_best.label}/split-0/seed-{seed}" for seed in (1, 2)}
    with interrupted_at_call(torch.optim.AdamW, "step", 8):
        run_finetuning(recipe(1, 2, 7), checkpoint=None, resume=run, task=WordTask())
    assert len(cells(run)) == 4
    run_finetuning(recipe(1, 2, 7), checkpoint=None, resume=run, task=WordTask())
    run_finetuning(recipe(1, 2, 7), checkpoint=pretrained, out=fresh, use_grid=True, task=WordTask())
    assert_same_run(run, fresh)
    assert sorted(load_finetuned(run, device="cpu").runners) == [1, 2, 7]
    again = run_finetuning(recipe(1, 2), checkpoint=None, resume=run, task=WordTask()).results
    assert untimed(again.as_json()) == untimed(small.as_json())
    assert sorted(load_finetuned(run, device="cpu").runners) == [1, 2]


@pytest.fixture(scope="module")
def undisturbed(pretrained, tmp_path_factory):
    return run_tiny(pretrained, tmp_path_factory.mktemp("undisturbed") / "run").run_dir


@pytest.mark.parametrize("killed_at", [2, 5, 12])
def test_a_run_killed_in_the_middle_of_a_cell_ends_with_the_same_bits(pretrained, tmp_path, undisturbed, killed_at):
    """Killed at a step: between checkpoints, in the first and in the second cell."""
    out = tmp_path / "run"
    with interrupted_at_call(torch.optim.AdamW, "step", killed_at):
        run_tiny(pretrained, out)
    run_finetuning(finetune_recipe(), checkpoint=None, resume=out, task=WordTask())
    assert_same_run(out, undisturbed)
