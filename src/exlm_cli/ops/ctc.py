"""Loss of one target over the k states of its [MASK]: the paper's "w/o Transitions" (Table 2).

Connectionist temporal classification with k frames and one label. Axes: N masks, k states.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def single_target_ctc_nll(log_target: Float[Tensor, "N k"], log_blank: Float[Tensor, "N k"]) -> Float[Tensor, " N"]:
    """Return the negative log of the sum over all frame strings blank* target+ blank*.

    Args:
        log_target: log-probability of the target at each state.
        log_blank: log-probability of the blank at each state.

    Returns:
        Nats per mask; equal to `torch.nn.functional.ctc_loss` with one label.
    """
    before = torch.zeros_like(log_target[:, 0])
    inside = after = torch.full_like(before, -torch.inf)
    for state in range(log_target.shape[1]):
        target, blank = log_target[:, state], log_blank[:, state]
        if state == 0:
            before, inside = blank, target
            continue
        after_candidates = inside if state == 1 else torch.logaddexp(inside, after)
        after = after_candidates + blank
        inside = torch.logaddexp(before, inside) + target
        before = before + blank
    if log_target.shape[1] == 1:
        return -inside
    return -torch.logaddexp(inside, after)
