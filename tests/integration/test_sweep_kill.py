"""`kill -9` of a sweep, anywhere, then running it again: no number changes, and what was done is not done again."""

import pytest

from exlm_cli.experiments import cell
from exlm_cli.experiments.sweep import run_sweep
from exlm_cli.progress import SilentProgress
from exlm_cli.train.pretrain_task import PretrainTask
from tests.killed import die_at_call, run_until_killed, untimed_rows
from tests.tiny_sweeps import run_cell, scores_of, tiny_grid, tiny_sweep, work_in_this_process

POINTS = {
    "between checkpoints": (PretrainTask, "losses", 6),
    "between training and measuring": (cell, "measure_entropy", 1),
    "before what was measured is written": (cell, "write_atomically", 1),
}
KEPT_STEPS = dict(zip(POINTS, (4, 6, 6), strict=True))


def run_cell_and_die(cache, folder, point):
    """Run the second cell in the process at hand until it dies."""
    die_at_call(*POINTS[point])
    run_cell(tiny_grid(cache).plan()[1], folder)


def run_sweep_and_die(cache, out):
    """Run a sweep in the process at hand until it dies in the fourth of the six steps of its second cell."""
    work_in_this_process(pytest.MonkeyPatch())
    die_at_call(PretrainTask, "begin_step", 10)
    run_sweep(tiny_sweep(cache), out=out, resume=None, workers=1, progress=SilentProgress())


@pytest.fixture(scope="module")
def undisturbed(cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, [run_cell(plan, folder / plan.name) for plan in tiny_grid(cache).plan()]


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_cell_ends_like_an_undisturbed_one(undisturbed, cache, tmp_path, point):
    whole, results = undisturbed
    plan, folder = tiny_grid(cache).plan()[1], tmp_path / "cell"
    run_until_killed(run_cell_and_die, cache, folder, point)
    assert not (folder / "scores.csv").exists()
    steps = [int(path.name.removeprefix("step-")) for path in (folder / "pretrain/checkpoints").glob("step-*")]
    assert max(steps) == KEPT_STEPS[point]
    assert scores_of([run_cell(plan, folder)]) == scores_of(results[1:2])
    assert untimed_rows(folder / "pretrain") == untimed_rows(whole / plan.name / "pretrain")


def test_a_sweep_killed_with_a_cell_on_the_way_goes_on_where_it_was(cache, tmp_path, monkeypatch):
    """Workers die with their parent: see the tests of workers, and of fine-tuning by two."""
    work_in_this_process(monkeypatch)
    recipe, whole = tiny_sweep(cache), tmp_path / "whole"
    results = [run_cell(plan, whole / plan.name) for plan in recipe.plan()]
    run = tmp_path / "run"
    run_until_killed(run_sweep_and_die, cache, run)
    done = {path: path.stat().st_mtime_ns for path in run.glob("cells/*/*/scores.csv")}
    assert len(done) == 1
    assert len([*run.glob("cells/*/*/pretrain/checkpoints/step-2")]) == 1, "of the cell on the way"
    again = run_sweep(recipe, out=None, resume=run, workers=1, progress=SilentProgress())
    assert scores_of(again.cells) == scores_of(results)
    for path, written_ns in done.items():
        assert path.stat().st_mtime_ns == written_ns
    for plan in recipe.plan():
        assert untimed_rows(run / "cells" / plan.name / "pretrain") == untimed_rows(whole / plan.name / "pretrain")
