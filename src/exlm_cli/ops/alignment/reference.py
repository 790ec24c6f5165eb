"""Reference backend: the recursion of App. I.1 in log space. It defines correct results, and needs no compiler.

    alpha[0, 0] = 1,   alpha[t, u] = P_u(y_t) * sum over v < u of alpha[t - 1, v] * E[v, u],
    likelihood  = sum over v of alpha[T, v] * E[v, end]

Autograd keeps a (B, S, S) matrix for every target. So a batch is cut into chunks of sequences, whose gradients are
taken at once: only the graph of one chunk is in memory.

Axes: B sequences, T targets, S states. Arguments have been checked by `api`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Float, Int64  # annotations only: the op needs torch and nothing else

_CPU_CHUNK_ELEMENTS, _DEVICE_CHUNK_ELEMENTS = 1 << 24, 1 << 28
"""Terms of a chunk, (rows, T, S, S), which autograd keeps twice: more are no faster, on a device fewer are slower."""


def states_alignment_nll(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int64[Tensor, " B"],
    state_lengths: Int64[Tensor, " B"],
) -> Float[Tensor, " B"]:
    """See `api.states_alignment_nll`; any float dtype."""
    dag = (log_emit, log_trans, target_lengths, state_lengths)
    if torch.is_grad_enabled() and (log_emit.requires_grad or log_trans.requires_grad):
        nll: Tensor = _Differentiable.apply(*dag)  # type: ignore[no-untyped-call]
        return nll
    return torch.cat([_nll(*(tensor[rows] for tensor in dag)) for rows in _chunks(log_emit)])


class _Differentiable(torch.autograd.Function):
    """The loss with its gradients, by autograd within each chunk."""

    @staticmethod
    def forward(ctx: Any, *dag: Tensor) -> Tensor:
        wanted = [i for i in range(2) if ctx.needs_input_grad[i]]
        parts: list[tuple[Tensor, ...]] = []
        for rows in _chunks(dag[0]):
            chunk = [tensor[rows].detach() for tensor in dag]
            with torch.enable_grad():
                leaves = [chunk[i].requires_grad_() for i in wanted]
                nll = _nll(*chunk)
                parts.append((nll.detach(), *torch.autograd.grad(nll.sum(), leaves)))
        nll, *gradients = (torch.cat(columns) for columns in zip(*parts, strict=True))
        ctx.wanted = wanted
        ctx.save_for_backward(*gradients)
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nll: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * 4
        for i, gradient in zip(ctx.wanted, ctx.saved_tensors, strict=True):
            gradients[i] = gradient * grad_nll[:, None, None]
        return tuple(gradients)


def _chunks(log_emit: Tensor) -> Iterator[slice]:
    B, T, S = log_emit.shape
    num_rows = max(1, _chunk_elements(log_emit) // (T * S * S))
    for start in range(0, B, num_rows):
        yield slice(start, start + num_rows)


def _chunk_elements(log_emit: Tensor) -> int:
    return _CPU_CHUNK_ELEMENTS if log_emit.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS


def _nll(log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor) -> Float[Tensor, " B"]:
    _, T, S = log_emit.shape
    is_large = _chunk_elements(log_emit) < T * S * S
    log_emit, log_trans = _only_what_is_read(log_emit, log_trans, target_lengths, state_lengths)
    log_alpha_BS = _only_first_state(log_emit)
    log_to_end_BS = _log_to_end(log_trans, state_lengths)
    nll_B = log_emit.new_full((len(log_emit),), math.inf)
    for t in range(T):
        if is_large:  # even one sequence: compute its matrices again in the backward pass
            log_reach_BS: Tensor = checkpoint(_log_reach, log_alpha_BS, log_trans, use_reentrant=False)
        else:
            log_reach_BS = _log_reach(log_alpha_BS, log_trans)
        log_alpha_BS = log_reach_BS + log_emit[:, t]
        log_likelihood_B = safe_logsumexp(log_alpha_BS + log_to_end_BS, dim=1)
        nll_B = torch.where(target_lengths == t + 1, -log_likelihood_B, nll_B)
    return nll_B


def _log_reach(log_alpha_BS: Tensor, log_trans: Tensor) -> Float[Tensor, "B S"]:
    """Return log of the sum over v of alpha[v] * E[v, u]."""
    return safe_logsumexp(log_alpha_BS[:, :, None] + log_trans, dim=1)


def best_alignment(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int64[Tensor, " B"],
    state_lengths: Int64[Tensor, " B"],
) -> Int64[Tensor, "B T"]:
    """See `api.best_alignment`: the same recursion with a maximum for the sum, then backtracking."""
    log_emit, log_trans = _only_what_is_read(log_emit, log_trans, target_lengths, state_lengths)
    B, T, _ = log_emit.shape
    nodes_BT = torch.full((B, T), -1, dtype=torch.int64, device=log_emit.device)
    log_best_BS = _only_first_state(log_emit)
    log_to_end_BS = _log_to_end(log_trans, state_lengths)
    last_node_B = nodes_BT.new_full((B,), -1)
    came_from: list[Tensor] = []
    for t in range(T):
        log_reach_BS, from_BS = (log_best_BS[:, :, None] + log_trans).max(dim=1)
        came_from.append(from_BS)
        log_best_BS = log_reach_BS + log_emit[:, t]
        log_score_B, node_B = (log_best_BS + log_to_end_BS).max(dim=1)
        last_node_B = torch.where((target_lengths == t + 1) & (log_score_B > -math.inf), node_B, last_node_B)
    node_B = last_node_B
    for t in reversed(range(T)):
        node_B = node_B.where(target_lengths != t + 1, last_node_B)
        nodes_BT[:, t] = node_B.where(target_lengths > t, -1)
        before_B = came_from[t].gather(1, node_B.clamp(min=0)[:, None])[:, 0]
        node_B = before_B.where(node_B >= 0, -1)
    return nodes_BT


def _only_what_is_read(
    log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Return both with `-inf` at entries that are never read; these, even NaN, get gradient zero."""
    _, T, S = log_emit.shape
    state_S = torch.arange(S, device=log_emit.device)
    is_target_BT = torch.arange(T, device=log_emit.device) < target_lengths[:, None]
    is_inner_BS: Bool[Tensor, "B S"] = (state_S > 0) & (state_S < state_lengths[:, None] - 1)
    is_edge_BSS = (state_S[:, None] < state_S) & (state_S < state_lengths[:, None, None])
    log_emit = log_emit.where(is_target_BT[:, :, None] & is_inner_BS[:, None, :], -math.inf)
    return log_emit, log_trans.where(is_edge_BSS, -math.inf)


def _only_first_state(log_emit: Tensor) -> Tensor:
    """Return log alpha[0]: all mass on the first state."""
    B, _, S = log_emit.shape
    log_alpha_BS = log_emit.new_full((B, S), -math.inf)
    log_alpha_BS[:, :1] = 0.0
    return log_alpha_BS


def _log_to_end(log_trans: Tensor, state_lengths: Tensor) -> Tensor:
    """Return log E[v, end] (B, S); a sequence without states takes the first column, which holds no edge."""
    end_BS1 = (state_lengths - 1).clamp(min=0)[:, None, None].expand(-1, log_trans.shape[1], 1)
    return log_trans.gather(2, end_BS1)[:, :, 0]


def safe_logsumexp(log_terms: Float[Tensor, "*axes"], dim: int) -> Float[Tensor, "*reduced"]:
    """Return `torch.logsumexp` with gradient zero instead of NaN where a whole slice is `-inf`."""
    peak = log_terms.detach().amax(dim, keepdim=True)
    is_dead = peak == -math.inf
    total = (log_terms - peak.masked_fill(is_dead, 0.0)).exp().sum(dim, keepdim=True)
    return (total.masked_fill(is_dead, 1.0).log() + peak).squeeze(dim)
