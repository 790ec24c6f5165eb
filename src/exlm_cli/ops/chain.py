"""Sums and maxima over the paths of a chain, whose edges lead from the k states of a mask to those of the next alone.

Each path visits one state of every mask, so the t-th mask emits the t-th token:

    alpha[0, c] = P(start at c) P_0c(y_0),   alpha[t, d] = P_td(y_t) * sum over c of alpha[t - 1, c] E_t[c, d],
    likelihood  = sum over c of alpha[T - 1, c].

This is `ops.alignment` on the same states with `-inf` for all other edges, in T k^2 steps in place of T (k T)^2.

Axes: B sequences, T masks, k states of a mask, U = T - 1 pairs of neighbouring masks.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable


class Chain(NamedTuple):
    """Log-probabilities of a chain, nats, float32 or float64.

    Attributes:
        log_share: (B, T, k) of the states of each mask by itself; a path begins with those of the first mask.
        log_next: (B, U, k, k) of the next mask's states given those of a mask; rows sum to 1.
        log_emit: (B, T, k) of the target of a mask, by the state that emits it.
        target_lengths: (B,) masks of each sequence; what lies beyond is finite and never read.
    """

    log_share: Float[Tensor, "B T k"]
    log_next: Float[Tensor, "B U k k"]
    log_emit: Float[Tensor, "B T k"]
    target_lengths: Int64[Tensor, " B"]


class ChainPosterior(NamedTuple):
    """Probabilities of states and edges, zero beyond `target_lengths`."""

    states: Float[Tensor, "B T k"]
    edges: Float[Tensor, "B U k k"]


def chain_nll(chain: Chain) -> Float[Tensor, " B"]:
    """Return -log P(targets), nats; 0 for a sequence without masks. Differentiable once in all but the lengths."""
    result: Tensor = _ChainNll.apply(*_read(chain))  # type: ignore[no-untyped-call]
    return result


def chain_posterior(chain: Chain) -> ChainPosterior:
    """Return the probabilities of states and edges given the targets; not differentiable."""
    with torch.no_grad():
        log_alpha_BTk, nll_B = _forward(*_read(chain))
        return _posterior(log_alpha_BTk, -nll_B, *_read(chain))


def best_chain(chain: Chain) -> Int64[Tensor, "B T"]:
    """Return the states of the most probable path (Viterbi); -1 beyond the length of a sequence."""
    with torch.no_grad():
        log_best_Bk = chain.log_share[:, 0] + chain.log_emit[:, 0]
        came_from: list[Tensor] = []
        stay_k = torch.arange(log_best_Bk.shape[1], device=log_best_Bk.device)
        for t, log_edge_Bkk in enumerate(chain.log_next.unbind(1), 1):
            log_reach_Bk, from_Bk = (log_best_Bk[:, :, None] + log_edge_Bkk).max(1)
            is_mask_B1 = (t < chain.target_lengths)[:, None]
            log_best_Bk = torch.where(is_mask_B1, log_reach_Bk + chain.log_emit[:, t], log_best_Bk)
            came_from.append(torch.where(is_mask_B1, from_Bk, stay_k))
        state_B = log_best_Bk.argmax(1)
        path = [state_B]
        for from_Bk in reversed(came_from):
            path.append(state_B := from_Bk.gather(1, state_B[:, None])[:, 0])
        index_T = torch.arange(len(path), device=state_B.device)
        return torch.stack(path[::-1], 1).masked_fill(index_T >= chain.target_lengths[:, None], -1)


def share_imbalance(chain: Chain) -> Float[Tensor, " B"]:
    """Return the KL divergence (uniform || mean shares of states over a sequence's masks), nats; 0 without masks."""
    index_T = torch.arange(chain.log_share.shape[1], device=chain.target_lengths.device)
    is_mask_BT1 = (index_T < chain.target_lengths[:, None])[..., None]
    share_Bk = chain.log_share.exp().where(is_mask_BT1, 0.0).sum(1) / chain.target_lengths.clamp(min=1)[:, None]
    even = 1 / share_Bk.shape[-1]
    share_Bk = share_Bk.where(chain.target_lengths[:, None] > 0, even)
    return -(share_Bk / even).clamp(min=torch.finfo(share_Bk.dtype).tiny).log().mean(-1)


def _read(chain: Chain) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what paths read."""
    return chain.log_share[:, 0], chain.log_next, chain.log_emit, chain.target_lengths


class _ChainNll(torch.autograd.Function):
    """Keeps alpha alone; a gradient is minus a posterior."""

    @staticmethod
    def forward(ctx: Any, log_start: Tensor, log_next: Tensor, log_emit: Tensor, target_lengths: Tensor) -> Tensor:
        log_alpha_BTk, nll_B = _forward(log_start, log_next, log_emit, target_lengths)
        ctx.save_for_backward(log_alpha_BTk, nll_B, log_start, log_next, log_emit, target_lengths)
        return nll_B

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:
        log_alpha_BTk, nll_B, *chain = ctx.saved_tensors
        state_BTk, edge_BUkk = _posterior(log_alpha_BTk, -nll_B, *chain)
        grad_emit_BTk = state_BTk.mul_(-grad_B[:, None, None])
        return grad_emit_BTk[:, 0], edge_BUkk.mul_(-grad_B[:, None, None, None]), grad_emit_BTk, None


def _forward(
    log_start: Tensor, log_next: Tensor, log_emit: Tensor, target_lengths: Tensor
) -> tuple[Float[Tensor, "B T k"], Float[Tensor, " B"]]:
    """Return log alpha, which stays as it is beyond the masks of a sequence, and -log P(targets)."""
    log_alpha_Bk = log_start + log_emit[:, 0]
    rows = [log_alpha_Bk]
    for t, log_edge_Bkk in enumerate(log_next.unbind(1), 1):
        reached_Bk = _step(log_alpha_Bk, log_edge_Bkk) + log_emit[:, t]
        log_alpha_Bk = torch.where((t < target_lengths)[:, None], reached_Bk, log_alpha_Bk)
        rows.append(log_alpha_Bk)
    nll_B = -log_alpha_Bk.logsumexp(1)
    return torch.stack(rows, 1), nll_B.masked_fill(target_lengths == 0, 0.0)


def _posterior(
    log_alpha: Tensor, log_total: Tensor, log_start: Tensor, log_next: Tensor, log_emit: Tensor, target_lengths: Tensor
) -> ChainPosterior:
    """Return probabilities of states and edges from log alpha (B, T, k) and log P(targets) (B,)."""
    num_masks = log_emit.shape[1]
    log_beta_Bk = torch.zeros_like(log_start)
    rows = [log_beta_Bk]
    for t in range(num_masks - 1, 0, -1):
        # from the states of mask t - 1 to the end
        through_Bk = (log_next[:, t - 1] + (log_emit[:, t] + log_beta_Bk)[:, None]).logsumexp(2)
        log_beta_Bk = torch.where((t < target_lengths)[:, None], through_Bk, log_beta_Bk)
        rows.append(log_beta_Bk)
    log_beta_BTk = torch.stack(rows[::-1], 1)
    is_mask_BT = torch.arange(num_masks, device=target_lengths.device) < target_lengths[:, None]
    state_BTk = (log_alpha + log_beta_BTk - log_total[:, None, None]).exp()
    log_after_BUk = (log_emit + log_beta_BTk)[:, 1:] - log_total[:, None, None]
    edge_BUkk = (log_alpha[:, :-1, :, None] + log_next + log_after_BUk[:, :, None]).exp()
    return ChainPosterior(
        state_BTk.where(is_mask_BT[..., None], 0.0), edge_BUkk.where(is_mask_BT[:, 1:, None, None], 0.0)
    )


def _step(log_state_Bk: Tensor, log_edge_Bkk: Tensor) -> Float[Tensor, "B k"]:
    return (log_state_Bk[:, :, None] + log_edge_Bkk).logsumexp(1)
