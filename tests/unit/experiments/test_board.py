"""Live view of a sweep: the text of a finished cell, and the progress of a running one."""

import json
from pathlib import Path

import pytest

from exlm_cli.config.sweep import SweepCell
from exlm_cli.experiments.board import open_board, trained_share
from exlm_cli.experiments.results import DivergedTask, SweepCellResult
from tests.recorder import Recorder
from tests.tiny_sweeps import tiny_grid
from tests.unit.report.results import diverge, grid_results, scores

RESULT = grid_results(has_task=False)[1]
STSB = "glue/stsb"


@pytest.fixture(scope="module")
def cells(cache: Path) -> list[SweepCell]:
    return tiny_grid(cache, tasks=["glue/rte"]).plan()


def _with(**changes: object) -> SweepCellResult:
    return RESULT.model_copy(update=changes)


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (diverge(RESULT), "diverged: loss is nan"),
        (RESULT, "loss 1.390, entropy 2.78 bits"),
        (_with(metrics=RESULT.metrics | {"entropy_bits": None}), "loss 1.390, entropy not defined"),
        (
            _with(finetune={STSB: scores((None, 0.5, 0.25), metric="spearmanr")}),
            "loss 1.390, entropy 2.78 bits, glue/stsb spearmanr 0.375",
        ),
        (
            _with(finetune={STSB: scores((None,)), "csv": DivergedTask(identity="x", diverged="nan")}),
            "loss 1.390, entropy 2.78 bits, glue/stsb accuracy not defined, csv diverged",
        ),
    ],
)
def test_a_finished_cell_has_its_line(cells, tmp_path, result, line):
    progress = Recorder()
    with open_board(tmp_path, cells, dict.fromkeys((cell.folder for cell in cells), None), progress) as board:
        board.look(cells)
        board.finish(cells[1], result)
    assert progress.said == [f"k2-p0.5/seed-1: {line} (1 of 2 cells)"]


def test_the_table_has_all_seeds_of_a_place_and_the_bar_weighs_cells_by_their_length(cache, tmp_path):
    """A cell of k copies trains on 14 k + 2 tokens: 16 and 30, with two seeds 92 in all."""
    one, two, one_again, two_again = cells = tiny_grid(cache, seeds=[1, 2], tasks=["glue/rte"]).plan()
    progress = Recorder()
    results: dict[str, SweepCellResult | None] = {cell.folder: None for cell in cells} | {one.folder: RESULT}
    with open_board(tmp_path, cells, results, progress) as board:
        (table,), (bar,) = progress.boards, progress.bars
        assert (table.rows, table.columns, bar.begun_at) == (["k = 1", "k = 2"], ["30%", "50%"], 100 * 16 // 92)
        assert table.cells == {("k = 1", "30%"): ("2.78 ·", False), ("k = 2", "50%"): ("· ·", False)}
        metrics = tmp_path / "cells" / two.folder / "pretrain/metrics.jsonl"
        metrics.parent.mkdir(parents=True)
        metrics.write_text('{"step": 6}\n')  # the first of four trainings
        board.look([two])
        assert table.cells["k = 2", "50%"] == ("25 % ·", False)
        board.finish(two, diverge(RESULT))
        assert table.cells["k = 2", "50%"] == ("diverged ·", False)
        assert bar.fields == {"rate": "2 of 4 cells"}
        board.finish(two_again, _with(metrics=RESULT.metrics | {"entropy_bits": None}))
        board.finish(one_again, RESULT)
    assert table.cells == {("k = 1", "30%"): ("2.78 2.78", True), ("k = 2", "50%"): ("diverged not defined", True)}
    assert bar.done == [100 * done // 92 for done in (16 + 30 / 4, 16 + 30, 16 + 2 * 30, 92)]


def test_the_files_of_a_cell_say_how_far_it_is(cells, tmp_path):
    # pre-training of 6 steps and three seeds of fine-tuning: four trainings
    assert trained_share(cells[0], tmp_path) == 0.0
    (tmp_path / "pretrain").mkdir()
    rows = [{"step": step, "epoch": 0, "kind": "train"} for step in (1, 2, 3)]
    (tmp_path / "pretrain/metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 6')
    assert trained_share(cells[0], tmp_path) == 0.5 / 4
    for seed in (1, 2):
        folder = tmp_path / f"finetune/glue-rte/cells/single/seed-{seed}"
        folder.mkdir(parents=True)
        (folder / "result.json").touch()
    assert trained_share(cells[0], tmp_path) == 2.5 / 4


def test_a_damaged_row_does_not_end_the_sweep(cells, tmp_path):
    """The process of the cell refuses the file and names it."""
    (tmp_path / "pretrain").mkdir()
    damaged = [b'{"step": 3}', b'{"step": 4', b'{"step": "5"}', b'{"step": null}', b"\xff\x00", b"7", b"{}"]
    (tmp_path / "pretrain/metrics.jsonl").write_bytes(b"".join(row + b"\n" for row in damaged))
    assert trained_share(cells[0], tmp_path) == 0.5 / 4


def test_training_by_epochs_is_measured_in_epochs(cells, tmp_path):
    pretrain = cells[0].pretrain
    train = pretrain.train.model_copy(update={"max_steps": None, "max_epochs": 4})
    cell = cells[0].model_copy(update={"pretrain": pretrain.model_copy(update={"train": train}), "finetune": ()})
    (tmp_path / "pretrain").mkdir()
    (tmp_path / "pretrain/metrics.jsonl").write_text('{"step": 90, "epoch": 1}\n{"kind": "valid", "step": 90}\n')
    assert trained_share(cell, tmp_path) == 0.25
