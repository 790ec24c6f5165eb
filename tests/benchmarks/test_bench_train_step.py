"""The benchmark of a training step: its arithmetic by hand, and that splitting a step neither loses nor changes it."""

import argparse
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

import bench_train_step as bench
import step_measurements as measurements
import step_split as split
from exlm_cli.config.describe import TrainingFlops
from exlm_cli.config.load import load_recipe
from exlm_cli.train.process import StopSignal
from tests.tiny import tiny_recipe
from tests.unit.finetune.finetuned_runs import read_rows

ARGUMENTS = argparse.Namespace(device=torch.device("cpu"), backend="reference", batch_share=1.0)


def _side(folder: Path, **sections: Any) -> Any:
    recipe = tiny_recipe(**sections)
    return bench.build_side(recipe, bench.generate_data(recipe, folder), ARGUMENTS, folder)


def test_ratios_pair_what_was_measured_in_one_round():
    """A machine that slows down by ten between rounds leaves the ratio alone."""
    assert measurements.paired_ratio([4.0, 40.0, 60.0], [2.0, 20.0, 20.0]).median_ms == 2.0


def test_a_row_has_times_shares_flops_and_multiples_of_the_twin():
    recipe = tiny_recipe(train={"max_steps": 3600})
    exlm = measurements.Measured(recipe, 0.5, "native", "fp32")
    mlm = measurements.Measured(tiny_recipe(objective="mlm", train={"max_steps": 3600}), 0.5, "", "fp32")
    for measured, factor in ((exlm, 2.0), (mlm, 1.0)):
        flops = TrainingFlops(3e9, 1e9, factor * 1e9, (factor - 1) * 1e9)
        for step, slower in ((measurements.WHOLE, 1.0), (measurements.SPLIT, 1.25)):
            measured.times_ms[step] = [500.0 * factor * slower] * 2
            measured.sizes[step] = [measurements.StepSize(flops, 100, 90, 120)] * 2
        measured.times_ms[split.Part("encoder")] = [500.0 * factor] * 2
        measured.times_ms[split.Part("encoder", "forward")] = [125.0 * factor] * 2
    exlm.times_ms[split.Part("transition")] = [50.0] * 2
    rows = measurements.rows_of(exlm, mlm)
    assert [(row["part"], row["pass"]) for row in rows] == [
        ("step", "both"),
        ("split step", "both"),
        ("encoder", "both"),
        ("encoder", "forward"),
        ("transition", "both"),
    ]
    step, _, encoder, forward, transition = rows
    # a whole step takes 2 s, since half of one takes 1 s
    assert step["hours"] == 2.0
    assert (step["median_ms"], step["times_mlm"], step["flops_times_mlm"]) == (1000.0, 2.0, 1.4)
    assert (step["gflop"], step["gflop_per_s"], step["share"], step["padding_share"]) == (7.0, 7.0, "", 0.25)
    assert (encoder["share"], encoder["gflop"], encoder["flops_times_mlm"], encoder["hours"]) == (0.8, 4.0, 1.0, "")
    assert (forward["share"], forward["gflop"], forward["times_mlm"]) == (0.2, "", 2.0)
    assert (transition["gflop"], transition["times_mlm"], transition["flops_times_mlm"]) == (1.0, "", "")
    concluded = measurements.conclude(rows, measurements.rows_of(mlm, None)).splitlines()
    assert concluded == [
        "ExLM / MLM: 2.00 (2.00 to 2.00); floor 1.40, measured / floor 1.43",
        "Table 12 (ablation-exlm, two A100): 1.90; floor 1.66, measured / floor 1.15",
        "Splitting a step costs +25.0%",
        "Hours for the recipe's steps: ExLM 2, MLM 1",
    ]
    assert all(row["times_mlm"] == "" and row.keys() == step.keys() for row in measurements.rows_of(mlm, None))


@pytest.mark.parametrize(
    ("objective", "modules"),
    [("exlm", ["encoder", "lm_head", "transition", "alignment"]), ("mlm", ["encoder", "lm_head"])],
)
def test_the_parts_of_a_split_step_come_in_the_order_of_the_computation(objective, modules, tmp_path):
    """The backward pass runs the parts in reverse; every part has a share, and they add up to the step."""
    side = _side(tmp_path, objective=objective)
    with split.split_step(side.loop) as clock:
        side.loop.advance(StopSignal())
    order = [part for part, _ in groupby(clock._entered) if part != split.OTHER]
    forward = [split.Part(name, "forward") for name in modules]
    backward = [split.Part(name, "backward") for name in modules[::-1]]
    microbatches = [split.DATA, *forward, *backward] * len(side.loop.last_batches)
    assert order == [split.OPTIMISER, *microbatches, split.DATA, split.OPTIMISER]
    totals = clock.totals_ms()
    whole = {part.name: ms for part, ms in totals.items() if part.direction == "both"}
    assert whole.keys() == {"data", *modules, "optimiser", "other"}
    assert min(whole.values()) > 0
    assert sum(whole.values()) == pytest.approx(sum(clock._stopwatch.laps_ms()))
    for name in modules:
        assert totals[split.Part(name, "forward")] + totals[split.Part(name, "backward")] == pytest.approx(whole[name])


def test_measuring_changes_no_loss_and_leaves_nothing_behind(tmp_path):
    plain, measured = (_side(tmp_path / name) for name in ("plain", "measured"))
    before = {name: set(vars(owner)) for name, owner in (("model", measured.task.model), ("loop", measured.loop))}
    losses = []
    for _ in range(3):
        with split.split_step(measured.loop):
            losses.append(measured.loop.advance(StopSignal()))
        assert plain.loop.advance(StopSignal()) == losses[-1]
    assert set(vars(measured.task.model)) == before["model"]
    # its last gradient norm, and what the benchmark remembers
    assert set(vars(measured.loop)) - {"_grad_norm", "last_batches"} == before["loop"]


def test_generated_data_has_the_lengths_that_the_recipe_asks_for(tmp_path):
    packed = bench.generate_data(tiny_recipe(data={"sample_break": "none"}), tmp_path / "packed")
    assert set(packed.train.lengths) == {14}
    rows = bench.generate_data(tiny_recipe(train={"batch_sequences": None, "batch_tokens": 900}), tmp_path / "rows")
    assert len(rows.train) == 16 * (900 // 45)
    assert set(rows.train.lengths) <= set(range(1, 15))
    assert rows.train.tokens.min() >= 5
    assert rows.train.tokens.max() < rows.tokenizer.vocab_size == 300


def test_the_script_prints_ratio_and_floor_and_keeps_its_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.harness, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr(bench.harness, "surroundings", lambda device: {"device": device.type})  # asks git
    command = "x --recipes quickstart-text --steps 2 --warmup 1 --batch-share 0.06 --backend reference --threads"
    monkeypatch.setattr("sys.argv", [*command.split(), str(torch.get_num_threads())])
    bench.main()
    printed = capsys.readouterr().out
    found = re.search(r"quickstart-text: (\d+) tokens a step, fp32", printed)
    assert found is not None
    assert 4 * 3 <= int(found[1]) <= 4 * 32  # four sequences of one to 30 tokens and both ends
    assert "measured / floor" in printed
    assert max(map(len, printed.splitlines())) <= 80
    rows = read_rows(tmp_path / "train_step.csv")
    assert {row["recipe"] for row in rows} == {"quickstart-text", "quickstart-text-mlm"}
    assert all(row["device"] == "cpu" and row["rounds"] == "2" for row in rows)


@pytest.mark.parametrize("name", ["text-base", "smiles-small", "quickstart-text"])
def test_the_twin_of_a_recipe_is_its_mlm(name):
    told = {"purpose", "paper"}
    twin = measurements.mlm_twin(load_recipe(name))
    assert twin.model_dump(exclude=told) == load_recipe(f"{name}-mlm").model_dump(exclude=told)
