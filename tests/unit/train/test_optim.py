"""The schedule by hand, the parameter groups, and AdamW's step against its formula."""

import math

import pytest
import torch
from torch import nn

from exlm_cli.config.sections import OptimConfig
from exlm_cli.train.optim import build_optimizer, learning_rate, scale_gradients, set_learning_rates


def test_warm_up_is_linear_and_ends_at_the_peak():
    optim = OptimConfig(lr=4e-4, warmup_steps=4)
    assert [learning_rate(s, optim, 10) for s in range(4)] == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4])


@pytest.mark.parametrize(
    ("schedule", "power", "halfway"), [("polynomial", 1.0, 0.5), ("polynomial", 2.0, 0.25), ("cosine", 1.0, 0.5)]
)
def test_decay_falls_from_the_peak_to_the_end(schedule, power, halfway):
    optim = OptimConfig.model_validate(
        {"lr": 1.0, "warmup_steps": 10, "schedule": schedule, "power": power, "end_lr": 0.1}
    )
    assert learning_rate(10, optim, 110) == pytest.approx(1.0)
    assert learning_rate(60, optim, 110) == pytest.approx(0.1 + 0.9 * halfway)
    assert learning_rate(110, optim, 110) == pytest.approx(0.1)
    assert learning_rate(500, optim, 110) == pytest.approx(0.1)


def test_a_constant_schedule_stays_at_the_peak():
    optim = OptimConfig(lr=0.3, schedule="constant")
    assert {learning_rate(s, optim, 10) for s in range(10)} == {0.3}


def test_biases_and_norms_do_not_decay():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Embedding(4, 2))
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    decay_of = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {n: decay_of[id(p)] for n, p in model.named_parameters()} == {
        "0.weight": 0.5, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.5,
    }  # fmt: skip


def test_one_step_is_adamw_with_the_betas_of_the_recipe():
    parameter = nn.Parameter(torch.tensor([[2.0]]))
    model = nn.Module()
    model.register_parameter("weight", parameter)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01))
    for gradient in (3.0, -1.0):
        parameter.grad = torch.tensor([[gradient]])
        optimizer.step()
    value, first, second = 2.0, 0.0, 0.0
    for step, gradient in enumerate((3.0, -1.0), start=1):
        value *= 1 - 0.1 * 0.01
        first, second = 0.9 * first + 0.1 * gradient, 0.98 * second + 0.02 * gradient**2
        value -= 0.1 * (first / (1 - 0.9**step)) / (math.sqrt(second / (1 - 0.98**step)) + 1e-6)
    assert float(parameter.detach()) == pytest.approx(value, rel=1e-6)


def test_scaling_touches_gradients_alone():
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    model.bias.grad = None
    scale_gradients(model.parameters(), 0.25)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[0.25, 0.25]]


def test_the_transition_head_has_a_learning_rate_of_its_own():
    model = nn.ModuleDict({"transition": nn.Linear(2, 2), "encoder": nn.Linear(2, 2)})
    optim = OptimConfig(lr=0.1, schedule="constant", transition_lr_scale=0.03, transition_start_ratio=0.25)
    optimizer = build_optimizer(model, optim)
    for step, of_transition in ((0, 0.0), (9, 0.0), (10, 0.003), (39, 0.003)):
        set_learning_rates(optimizer, step, optim, total_steps=40)
        rate_of = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
        assert {n: rate_of[id(p)] for n, p in model.named_parameters()} == {
            "transition.weight": of_transition, "transition.bias": of_transition,
            "encoder.weight": 0.1, "encoder.bias": 0.1,
        }  # fmt: skip
