"""Shares of classes and statistics of states against whole distributions in float64."""

import pytest
import torch

from exlm_cli.ops.classes import LMHeadOutput, class_shares, state_entropies

M, D, V, R, K = 7, 5, 11, 4, 3


def _draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def head():
    return LMHeadOutput(_draw(M, D), _draw(V, D, seed=1), _draw(V, seed=2))


@pytest.fixture
def membership():
    return _draw(V, R, seed=3).softmax(-1)


TOKENS = torch.tensor([0, 10, 3, 3, 7, 1, 5])


def _probabilities(head):
    return (head.features @ head.weight.t() + head.bias).softmax(-1)


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_shares_are_sums_over_the_vocabulary_however_rows_are_cut(head, membership, chunk_rows):
    log_prob, shares = class_shares(head, membership, TOKENS, chunk_rows=chunk_rows)
    probs = _probabilities(head)
    torch.testing.assert_close(log_prob, probs[range(M), TOKENS].log())
    torch.testing.assert_close(shares, probs @ membership)
    torch.testing.assert_close(shares.sum(-1), torch.ones(M, dtype=torch.float64))


def test_gradients_are_those_of_finite_differences(head, membership):
    inputs = [tensor.requires_grad_() for tensor in (*head, membership)]

    def run(*tensors):
        return class_shares(LMHeadOutput(*tensors[:3]), tensors[3], TOKENS, chunk_rows=3)

    assert torch.autograd.gradcheck(run, inputs)


def test_under_autocast_only_the_product_is_in_16_bits(head, membership):
    narrow = LMHeadOutput(*(tensor.float().requires_grad_() for tensor in head))
    with torch.autocast("cpu", torch.bfloat16):
        log_prob, shares = class_shares(narrow, membership.float(), TOKENS, chunk_rows=3)
    assert log_prob.dtype == shares.dtype == torch.float32
    product = (narrow.features.bfloat16() @ narrow.weight.bfloat16().t()).float()
    probs = (product + narrow.bias).softmax(-1)
    torch.testing.assert_close(shares, probs @ membership.float())
    (log_prob.sum() + shares[:, 0].sum()).backward()
    assert all(tensor.grad.dtype == torch.float32 and tensor.grad.isfinite().all() for tensor in narrow)


def test_states_have_the_entropy_of_their_distribution(head, membership):
    states = _draw(M, R, K, seed=4).softmax(-1)
    found = state_entropies(head, membership.float(), states.float(), chunk_rows=4)
    parts = _probabilities(head)[:, None] * (membership @ states).mT
    parts = parts / parts.sum(-1, keepdim=True)
    torch.testing.assert_close(found.double(), -(parts * parts.log()).sum(-1), atol=1e-5, rtol=1e-5)


def test_no_masks_are_no_rows(head, membership):
    empty = LMHeadOutput(head.features[:0], head.weight, head.bias)
    log_prob, shares = class_shares(empty, membership, TOKENS[:0], chunk_rows=3)
    assert (log_prob.shape, shares.shape) == ((0,), (0, R))
    found = state_entropies(empty, membership, torch.empty(0, R, K), chunk_rows=3)
    assert found.shape == (0, K)
