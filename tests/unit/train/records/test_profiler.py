"""The trace of a run's steps: a file that a viewer of Chrome traces opens, with the steps that were asked for."""

import gzip
import json

import pytest

from exlm_cli.train.pretrain import run_pretraining
from exlm_cli.train.records.profiler import StepProfiler
from tests.recorder import Recorder
from tests.tiny import tiny_recipe


@pytest.mark.parametrize(("max_steps", "last"), [(14, 12), (11, 11), (10, None)])
def test_a_trace_has_the_steps_after_the_tenth_as_far_as_the_run_goes(cache, tmp_path, max_steps, last):
    lines = Recorder()
    data, train = {"bundled_rows": 300, "cache_dir": str(cache)}, {"max_steps": max_steps, "batch_sequences": 2}
    run_pretraining(tiny_recipe(data=data, train=train), out=tmp_path / "run", callbacks=[StepProfiler(2, lines)])
    (said,) = lines.said
    if last is None:
        assert said == "no step is traced: the run ended before step 11"
        assert not (tmp_path / "run/profile").exists()
        return
    (trace,) = (tmp_path / "run/profile").iterdir()
    assert trace.name == f"steps-11-to-{last}.json.gz"
    assert str(trace) in said
    with gzip.open(trace, "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {f"ProfilerStep#{step - 1}" for step in range(11, last + 1)} <= names
    # whole steps: forward, backward, optimiser
    assert {"aten::linear", "autograd::engine::evaluate_function: AddmmBackward0"} <= names
    assert any(name.startswith("Optimizer.step") for name in names)
