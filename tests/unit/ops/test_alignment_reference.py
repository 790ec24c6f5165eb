"""`safe_logsumexp` against `torch.logsumexp` where that is right, and against the limit where its gradient is NaN."""

import math

import torch

from exlm_cli.ops.alignment.reference import safe_logsumexp


def test_it_equals_logsumexp_where_something_is_alive() -> None:
    log_terms = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 300
    log_terms[1, :4, 2] = -math.inf
    for dim in (0, 1, 2, -1):
        torch.testing.assert_close(safe_logsumexp(log_terms, dim), log_terms.logsumexp(dim))


def test_the_gradient_is_the_softmax_and_zero_where_all_is_dead() -> None:
    log_terms = torch.tensor([[0.5, -math.inf, 2.0], [-math.inf] * 3], requires_grad=True)
    total = safe_logsumexp(log_terms, dim=1)
    total[0].backward(retain_graph=True)
    assert log_terms.grad is not None
    torch.testing.assert_close(log_terms.grad, torch.stack([log_terms[0].detach().softmax(0), torch.zeros(3)]))
    log_terms.grad = None
    total[1].backward()
    assert total[1] == -math.inf
    assert log_terms.grad.equal(torch.zeros(2, 3))
