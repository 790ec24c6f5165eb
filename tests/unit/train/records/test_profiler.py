"""The trace of a run's steps: a file that a viewer of Chrome traces opens, with the steps that were asked for."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from exlm_cli.train.pretrain import run_pretraining
from exlm_cli.train.records.profiler import StepProfiler
from tests.recorder import Recorder
from tests.tiny import tiny_recipe


def _trained(cache: Path, out: Path, num_steps: int, max_steps: int) -> list[str]:
    """Train with a profiler, and return what is said of it."""
    lines = Recorder()
    recipe = tiny_recipe(
        data={"bundled_rows": 300, "cache_dir": str(cache)}, train={"max_steps": max_steps, "batch_sequences": 2}
    )
    run_pretraining(recipe, out=out, callbacks=[StepProfiler(num_steps, lines)])
    return lines.said


def _events(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


@pytest.mark.parametrize(("max_steps", "last"), [(14, 12), (11, 11)])
def test_a_trace_has_the_steps_after_the_tenth_as_far_as_the_run_goes(cache, tmp_path, max_steps, last):
    (said,) = _trained(cache, tmp_path / "run", num_steps=2, max_steps=max_steps)
    (trace,) = (tmp_path / "run/profile").iterdir()
    assert trace.name == f"steps-11-to-{last}.json.gz"
    assert str(trace) in said
    assert f"steps 11 to {last} " in said
    events = _events(trace)
    names = [event["name"] for event in events]
    steps = {name for name in names if name.startswith("ProfilerStep#")}
    assert {f"ProfilerStep#{step - 1}" for step in range(11, last + 1)} <= steps
    # whole steps: forward, backward, optimiser
    assert {"aten::linear", "autograd::engine::evaluate_function: AddmmBackward0"} <= set(names)
    assert any(name.startswith("Optimizer.step") for name in names)
    assert all(event["dur"] >= 0 for event in events if event.get("ph") == "X")


def test_a_run_that_ends_before_the_first_traced_step_says_so(cache, tmp_path):
    assert _trained(cache, tmp_path / "run", 2, 6) == ["no step is traced: the run ended before step 11"]
    assert not (tmp_path / "run/profile").exists()
