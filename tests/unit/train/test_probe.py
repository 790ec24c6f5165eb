"""The measured speed: FLOPs by the closed form of `config/describe.py`, time by a clock that the test sets."""

import itertools

import pytest
import torch

from exlm_cli.config.describe import count_sequence_flops
from exlm_cli.train import probe
from exlm_cli.train.probe import measure_flops
from tests.tiny import tiny_recipe


def tiny_mlm(num_layers: int = 2):
    return tiny_recipe(objective="mlm", model={"num_layers": num_layers}, train={"microbatch_tokens": 64})


@pytest.mark.parametrize(("pass_s", "num_sequences", "num_passes"), [(0.3, 1, 4), (0.04, 4, 25), (1.5, 1, 1)])
def test_the_speed_is_flops_over_seconds(monkeypatch, pass_s, num_sequences, num_passes):
    """One block more is what a recipe with one layer more costs. Short passes take more sequences, up to a microbatch.

    A clock that moves by `pass_s` between the two readings of a pass alone gives the seconds exactly.
    """
    ticks = (tick for pair in itertools.count() for tick in (0.0, pass_s))
    passes = []
    monkeypatch.setattr(probe.time, "perf_counter", lambda: next(ticks))
    forward = torch.nn.TransformerEncoderLayer.forward
    monkeypatch.setattr(
        torch.nn.TransformerEncoderLayer, "forward", lambda block, x: (passes.append(len(x)), forward(block, x))[1]
    )
    recipe = tiny_mlm()
    length = recipe.repeated_length
    block = count_sequence_flops(tiny_mlm(3), length, 4).total - count_sequence_flops(recipe, length, 4).total
    assert measure_flops(recipe, torch.device("cpu"), None) == pytest.approx(num_sequences * block / pass_s)
    assert passes[-1] == num_sequences
    assert passes.count(num_sequences) == num_passes + 1  # the first one warms up


def test_random_numbers_of_a_run_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(probe, "_PROBE_S", 0.0)
    before = torch.get_rng_state()
    assert measure_flops(tiny_mlm(), torch.device("cpu"), torch.bfloat16) > 0
    assert torch.equal(torch.get_rng_state(), before)
