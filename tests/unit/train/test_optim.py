"""The schedule by hand, the parameter groups, AdamW's step against its formula, the loss scale of fp16 by hand."""

import math

import pytest
import torch
from torch import nn

from exlm_cli.config.sections import OptimConfig
from exlm_cli.train.optim import LossScale, build_optimizer, learning_rate, set_learning_rates, update_weights


def test_warm_up_is_linear_and_ends_at_the_peak():
    optim = OptimConfig(lr=4e-4, warmup_steps=4)
    assert [learning_rate(s, optim, 10) for s in range(4)] == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4])


@pytest.mark.parametrize(
    ("schedule", "quarter", "half"), [("polynomial", 0.75, 0.5), ("cosine", (2 + math.sqrt(2)) / 4, 0.5)]
)
def test_decay_falls_from_the_peak_to_zero(schedule, quarter, half):
    optim = OptimConfig.model_validate({"lr": 0.8, "warmup_steps": 10, "schedule": schedule})
    assert learning_rate(10, optim, 110) == pytest.approx(0.8)
    assert learning_rate(35, optim, 110) == pytest.approx(0.8 * quarter)
    assert learning_rate(60, optim, 110) == pytest.approx(0.8 * half)
    assert learning_rate(110, optim, 110) == pytest.approx(0.0)
    assert learning_rate(500, optim, 110) == pytest.approx(0.0)


def test_biases_and_norms_do_not_decay():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Embedding(4, 2))
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    decay_of = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {n: decay_of[id(p)] for n, p in model.named_parameters()} == {
        "0.weight": 0.5, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.5,
    }  # fmt: skip


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


def test_one_step_is_adamw_with_the_betas_of_the_recipe():
    parameter = nn.Parameter(torch.tensor([[2.0]]))
    model = nn.Module()
    model.register_parameter("weight", parameter)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, betas=(0.9, 0.98), eps=1e-3, weight_decay=0.01))
    for gradient in (3.0, -1.0):
        parameter.grad = torch.tensor([[gradient]])
        optimizer.step()
    value, first, second = 2.0, 0.0, 0.0
    for step, gradient in enumerate((3.0, -1.0), start=1):
        value *= 1 - 0.1 * 0.01
        first, second = 0.9 * first + 0.1 * gradient, 0.98 * second + 0.02 * gradient**2
        value -= 0.1 * (first / (1 - 0.9**step)) / (math.sqrt(second / (1 - 0.98**step)) + 1e-3)
    assert float(parameter.detach()) == pytest.approx(value, rel=1e-6)


def _update(model: nn.Module, optimizer: torch.optim.AdamW, loss_sum: float, num_counted: float) -> float:
    figures = torch.tensor([loss_sum, num_counted], dtype=torch.float64)
    norm = update_weights(
        optimizer, list(model.parameters()), loss_sum=figures[0], num_counted=figures[1], num_ranks=2, clip_norm=0.0
    )
    return float(norm)


def test_an_update_scales_the_gradients_to_the_mean():
    """Of 8 sequences on 2 ranks that averaged: a quarter. A parameter without a gradient is left out."""
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    model.bias.grad = None
    assert _update(model, build_optimizer(model, OptimConfig(lr=0.1)), 1.0, 8.0) == pytest.approx(0.25 * math.sqrt(2))
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[0.25, 0.25]]


@pytest.mark.parametrize(
    ("loss_sum", "num_counted", "gradient"),
    [(math.nan, 1, 1.0), (math.inf, 1, 1.0), (0.0, 0, 0.0), (1.0, 1, math.nan), (1.0, 1, math.inf)],
)
def test_an_update_that_is_not_finite_changes_no_bit_of_weights_and_moments(loss_sum, num_counted, gradient):
    """A run with such a step between two good ones ends with the bits of a run without it."""

    def train(*, with_bad_step: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = build_optimizer(model, OptimConfig(lr=0.1))
        for is_bad in (False, True, False) if with_bad_step else (False, False):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, gradient if is_bad else 0.5)
            _update(model, optimizer, *((loss_sum, num_counted) if is_bad else (2.0, 1)))
        moments = [value for p in model.parameters() for value in optimizer.state[p].values()]
        return [*(p.detach() for p in model.parameters()), *moments]

    for mine, theirs in zip(train(with_bad_step=True), train(with_bad_step=False), strict=True):
        assert torch.equal(mine, theirs)


CPU = torch.device("cpu")


def _follow(scale: LossScale, steps: str) -> list[float]:
    """Return the scale after each step: `.` was finite, `x` overflowed."""
    values = []
    for step in steps:
        scale.update(torch.tensor(step == "."))
        values.append(float(scale.value))
    return values


def test_the_scale_halves_at_an_overflow_and_doubles_after_good_steps_in_a_row(monkeypatch):
    monkeypatch.setattr(LossScale, "START", 8.0)
    monkeypatch.setattr(LossScale, "GROWTH_STEPS", 3)
    assert _follow(LossScale(CPU), ".....x.......") == [8, 8, 16, 16, 16, 8, 8, 8, 16, 16, 16, 32, 32]


def _updated(gradient: float, scale: LossScale | None) -> tuple[list[torch.Tensor], float]:
    """Return weights and moments after one update, and its gradient norm; gradients have the factor of the scale."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient) * (1.0 if scale is None else float(scale.value))
    counted = torch.tensor(4.0, dtype=torch.float64)
    norm = update_weights(
        optimizer, list(model.parameters()), loss_sum=counted, num_counted=counted, num_ranks=1, clip_norm=0.7,
        loss_scale=scale,
    )  # fmt: skip
    moments = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [*(p.detach() for p in model.parameters()), *moments], float(norm)


def test_scaled_gradients_give_the_update_of_plain_ones_bit_by_bit():
    """The scale is a power of two: nothing is rounded."""
    (mine, norm), (theirs, expected) = _updated(3.7, LossScale(CPU)), _updated(3.7, None)
    assert norm == expected
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_constant_schedule_stays_at_the_peak():
    optim = OptimConfig(lr=0.3, schedule="constant")
    assert {learning_rate(s, optim, 10) for s in range(10)} == {0.3}
