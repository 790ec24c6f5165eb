"""Loss of one target over the k states of its [MASK]: the paper's "w/o Transitions" (Table 2).

Connectionist temporal classification with k frames and one label. Axes: N masks, k states, V vocabulary.
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
    before, inside = log_blank[:, 0], log_target[:, 0]
    after: Tensor | None = None
    for state in range(1, log_target.shape[1]):
        target, blank = log_target[:, state], log_blank[:, state]
        after = (inside if after is None else torch.logaddexp(inside, after)) + blank
        inside = torch.logaddexp(before, inside) + target
        before = before + blank
    return -inside if after is None else -torch.logaddexp(inside, after)


def one_token_log_probs(log_probs: Float[Tensor, "N k V"], blank_id: int) -> Float[Tensor, "N V"]:
    """Return the log-probabilities of the token that the k states yield, given that they yield one."""
    N, k, V = log_probs.shape
    log_target = log_probs.transpose(1, 2).reshape(N * V, k)
    log_blank = log_probs[:, None, :, blank_id].expand(N, V, k).reshape(N * V, k)
    log_yield_NV: Tensor = -single_target_ctc_nll(log_target, log_blank).unflatten(0, (N, V))
    log_yield_NV[:, blank_id] = -torch.inf
    return log_yield_NV.log_softmax(-1)
