"""The schedule and the loss scale of fp16 by hand, the parameter groups, updates to the bit."""

import math

import pytest
import torch
from torch import Tensor, nn

from exlm_cli.config.sections import OptimConfig
from exlm_cli.train.optim import LossScale, build_optimizer, learning_rate, set_learning_rates, update_weights


def test_warm_up_is_linear_and_ends_at_the_peak():
    optim = OptimConfig(lr=4e-4, warmup_steps=4)
    assert [learning_rate(s, optim, 10) for s in range(4)] == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4])


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("polynomial", [1, 0.75, 0.5, 0, 0]),
        ("cosine", [1, (2 + math.sqrt(2)) / 4, 0.5, 0, 0]),
        ("constant", [1] * 5),
    ],
)
def test_decay_falls_from_the_peak_to_zero(schedule, shares):
    optim = OptimConfig.model_validate({"lr": 0.8, "warmup_steps": 10, "schedule": schedule})
    assert [learning_rate(s, optim, 110) for s in (10, 35, 60, 110, 500)] == pytest.approx([0.8 * s for s in shares])


def test_biases_and_norms_do_not_decay_and_betas_are_those_of_the_recipe():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Embedding(4, 2))
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5, betas=(0.9, 0.97), eps=1e-3))
    decay_of = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {n: decay_of[id(p)] for n, p in model.named_parameters()} == {
        "0.weight": 0.5, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.5,
    }  # fmt: skip
    assert {(g["betas"], g["eps"]) for g in optimizer.param_groups} == {((0.9, 0.97), 1e-3)}


def test_the_encoder_starts_late_and_learns_slowly():
    """Of ten steps it rests in the first three and then learns at a tenth of the rate of the heads."""
    model = nn.ModuleDict({"encoder": nn.Linear(3, 2), "head": nn.Linear(2, 1)})
    optim = OptimConfig(lr=1.0, encoder_lr_scale=0.1, encoder_starts_at=0.25)
    optimizer = build_optimizer(model, optim)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for step in range(10):
        set_learning_rates(optimizer, step, optim, 10)
        rate = 1.0 - step / 10
        rates = {name: group_of[id(p)]["lr"] for name, p in model.named_parameters()}
        assert rates == {
            name: pytest.approx(rate if name.startswith("head") else 0.0 if step < 3 else 0.1 * rate) for name in rates
        }


@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
def test_an_update_scales_the_gradients_to_the_mean_clips_them_and_tells_the_norm_before(clip_norm):
    """Of 8 sequences on 2 ranks that averaged: a quarter. A parameter without a gradient is left out."""
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    model.bias.grad = None
    optimizer = build_optimizer(model, OptimConfig(lr=0.1))
    sums = {"loss_sum": torch.tensor(1.0), "num_counted": torch.tensor(8.0)}
    norm = update_weights(optimizer, list(model.parameters()), **sums, num_ranks=2, clip_norm=clip_norm)
    mean_norm = 0.25 * math.sqrt(2)
    assert float(norm) == pytest.approx(mean_norm)
    entry = 0.25 * min(1, (clip_norm or 1) / mean_norm)
    assert model.weight.grad is not None
    assert model.weight.grad[0].tolist() == pytest.approx([entry] * 2, rel=1e-4)


def _updated(*steps: tuple[float, float, float], loss_scale: LossScale | None = None) -> list[Tensor]:
    """Return weights, moments and the last norm after steps of a gradient, a sum of losses and their number."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1))
    norm = torch.zeros(())
    for gradient, loss_sum, num_counted in steps:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient) * (1 if loss_scale is None else loss_scale.value)
        norm = update_weights(
            optimizer, list(model.parameters()), loss_sum=torch.tensor(loss_sum), num_counted=torch.tensor(num_counted),
            num_ranks=1, clip_norm=0.7, loss_scale=loss_scale,
        )  # fmt: skip
    moments = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [*(p.detach() for p in model.parameters()), *moments, norm]


@pytest.mark.parametrize(
    ("gradient", "loss_sum", "num_counted"),
    [(1.0, math.nan, 1.0), (1.0, math.inf, 1.0), (0.0, 0.0, 0.0), (math.nan, 1.0, 1.0), (math.inf, 1.0, 1.0)],
)
def test_an_update_that_is_not_finite_changes_no_bit_of_weights_and_moments(gradient, loss_sum, num_counted):
    """A run with such a step between two good ones ends with the bits of a run without it."""
    good, bad = (0.5, 2.0, 1.0), (gradient, loss_sum, num_counted)
    assert all(map(torch.equal, _updated(good, bad, good), _updated(good, good)))


def test_scaled_gradients_give_the_update_of_plain_ones_bit_by_bit():
    """The scale is a power of two: nothing is rounded."""
    step = (3.7, 4.0, 4.0)
    assert all(map(torch.equal, _updated(step, loss_scale=LossScale(torch.device("cpu"))), _updated(step)))


def test_the_scale_halves_at_an_overflow_and_doubles_after_good_steps_in_a_row(monkeypatch):
    monkeypatch.setattr(LossScale, "START", 8.0)
    monkeypatch.setattr(LossScale, "GROWTH_STEPS", 3)
    scale, values = LossScale(torch.device("cpu")), []
    for step in ".....x.......":
        scale.update(torch.tensor(step == "."))
        values.append(float(scale.value))
    assert values == [8, 8, 16, 16, 16, 8, 8, 8, 16, 16, 16, 32, 32]
