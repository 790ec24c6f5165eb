"""One-target CTC against torch.nn.functional.ctc_loss."""

import pytest
import torch
import torch.nn.functional as F

from exlm_cli.ops.ctc import single_target_ctc_nll


@pytest.mark.parametrize("num_states", [1, 2, 4, 7])
def test_loss_is_that_of_torch(num_states: int) -> None:
    log_probs = torch.randn(num_states, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    log_probs = log_probs.log_softmax(-1)
    expected = F.ctc_loss(
        log_probs,
        torch.ones(5, 1, dtype=torch.long),
        torch.full((5,), num_states),
        torch.ones(5, dtype=torch.long),
        blank=0,
        reduction="none",
    )
    given = single_target_ctc_nll(log_probs[..., 1].t(), log_probs[..., 0].t())
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("num_states", [1, 2, 4])
def test_gradients_are_right(num_states: int) -> None:
    inputs = [
        torch.randn(3, num_states, dtype=torch.float64, generator=torch.Generator().manual_seed(s), requires_grad=True)
        for s in (2, 3)
    ]
    assert torch.autograd.gradcheck(single_target_ctc_nll, inputs)
