"""Losses by hand: logarithms written out, missing labels left out, weights where they belong."""

import math

import pytest
import torch
from torch import Tensor

from exlm_cli.finetune.batch import TaskBatch, example_losses

NAN = math.nan


def batch(targets: list[list[float]], answerable: list[list[bool]] | None = None) -> TaskBatch:
    empty = torch.zeros(len(targets), 1, dtype=torch.long)
    mask = None if answerable is None else torch.tensor(answerable)
    return TaskBatch(empty, empty[:, 0], torch.tensor(targets, dtype=torch.float32), mask, empty[:, 0])


def nll(logit: float, label: int) -> float:
    return math.log1p(math.exp(-logit if label else logit))


def test_binary_is_the_mean_over_the_labels_that_are_there() -> None:
    outputs = torch.tensor([[0.3, -1.0], [2.0, 0.5], [1.0, 1.0]])
    losses = example_losses("binary", outputs, batch([[1, 0], [NAN, 1], [NAN, NAN]]), None)
    assert losses.tolist() == pytest.approx([(nll(0.3, 1) + nll(-1.0, 0)) / 2, nll(0.5, 1), math.inf])


def test_weights_of_labels_are_those_of_positives() -> None:
    outputs = torch.tensor([[0.3, -1.0]])
    losses = example_losses("binary", outputs, batch([[1, 0]]), torch.tensor([3.0, 5.0]))
    assert losses.tolist() == pytest.approx([(3 * nll(0.3, 1) + nll(-1.0, 0)) / 2])


def test_classes_are_one_softmax_each_weighed_by_its_class() -> None:
    outputs = torch.tensor([[0.0, math.log(3.0)], [0.0, math.log(3.0)], [5.0, 0.0]])
    targets = batch([[1], [0], [NAN]])
    assert example_losses("classes", outputs, targets, None).tolist() == pytest.approx(
        [math.log(4 / 3), math.log(4), math.inf]
    )
    weighed = example_losses("classes", outputs, targets, torch.tensor([2.0, 0.5]))
    assert weighed.tolist() == pytest.approx([0.5 * math.log(4 / 3), 2 * math.log(4), math.inf])


def test_regression_is_the_mean_square_over_the_values_that_are_there() -> None:
    outputs = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]])
    losses = example_losses("regression", outputs, batch([[0, 5], [NAN, 4], [NAN, NAN]]), None)
    assert losses.tolist() == pytest.approx([(1 + 9) / 2, 4, math.inf])


def test_spans_are_softmaxes_over_the_tokens_that_may_answer() -> None:
    logits = torch.tensor([[[0.0, math.log(2.0)], [math.log(3.0), 0.0], [9.0, 9.0]]])
    losses = example_losses("span", logits, batch([[1, 0]], [[True, True, False]]), None)
    assert losses.tolist() == pytest.approx([(math.log(4 / 3) + math.log(3 / 2)) / 2])


@pytest.mark.parametrize("loss", ["binary", "regression", "classes", "span"])
def test_what_is_left_out_has_gradient_zero_and_never_nan(loss: str) -> None:
    outputs: Tensor = torch.randn(2, 3, 2) if loss == "span" else torch.randn(2, 2)
    outputs.requires_grad_()
    answerable = [[True, True, False]] * 2 if loss == "span" else None
    targets = [[0.0, 1.0], [1.0, 1.0]] if loss == "span" else [[NAN, NAN], [1.0, NAN]]
    losses = example_losses(loss, outputs, batch(targets, answerable), None)
    torch.where(losses == math.inf, 0.0, losses).sum().backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()
    left_out = outputs.grad[:, 2] if loss == "span" else outputs.grad[0]
    assert (left_out == 0).all()
