"""Torch backend: the recursion as float64 matrix products, with analytic gradients; the default without a build.

`torch_sweep.py` does the products. Axes: B sequences, T targets, S states.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exlm_cli.ops.alignment.torch_sweep import Gradient, Sweep, chunks, count_skipped, read_dag

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64  # annotations only: the op needs torch and nothing else


def states_alignment_nll(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int64[Tensor, " B"],
    state_lengths: Int64[Tensor, " B"],
) -> Float[Tensor, " B"]:
    """See `api.states_alignment_nll`; float32 or float64 in and out, float64 between."""
    keeps_alpha = torch.is_grad_enabled() and (log_emit.requires_grad or log_trans.requires_grad)
    nll: Tensor
    nll, _ = _forward(log_emit, log_trans, target_lengths, state_lengths, keeps_alpha)
    return nll.to(log_emit.dtype)


# Operators of their own: their loops depend on values, which a compiler or a tensor without data does not have.


@torch.library.custom_op("exlm::torch_alignment_forward", mutates_args=())
def _forward(
    log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor, keeps_alpha: bool
) -> tuple[Tensor, Tensor]:
    nll = torch.empty(len(log_emit), dtype=torch.float64, device=log_emit.device)
    kept: list[Tensor] = []
    max_skipped = count_skipped(target_lengths, state_lengths)
    for rows in chunks(log_emit):
        dag = read_dag(log_emit[rows], log_trans[rows], target_lengths[rows], state_lengths[rows], max_skipped)
        log_alpha = Sweep(dag).run().log_probs()
        nll[rows] = -log_alpha[dag.end] - dag.log_paths_scale
        if keeps_alpha:
            log_alpha[dag.end] = -math.inf  # the end has a slot but no target
            kept.append(log_alpha)
    return nll, torch.cat(kept) if len(kept) > 1 else kept[0] if kept else nll.new_empty(0)


@torch.library.custom_op("exlm::torch_alignment_backward", mutates_args=())
def _backward(
    log_emit: Tensor,
    log_trans: Tensor,
    target_lengths: Tensor,
    state_lengths: Tensor,
    nll: Tensor,
    log_alpha: Tensor,
    grad_nll: Tensor,
    wants_emit: bool,
    wants_trans: bool,
) -> tuple[Tensor, Tensor]:
    grad_emit, grad_trans = _zero_gradients(log_emit, log_trans, wants_emit, wants_trans)
    max_skipped = count_skipped(target_lengths, state_lengths)
    for rows in chunks(log_emit):
        dag = read_dag(log_emit[rows], log_trans[rows], target_lengths[rows], state_lengths[rows], max_skipped)
        gradient = Gradient(
            grad_emit[rows] if wants_emit else None,
            grad_trans[rows] if wants_trans else None,
            log_alpha[rows],
            (nll[rows] + dag.log_paths_scale).masked_fill(nll[rows] == math.inf, -math.inf),
            -grad_nll[rows, None, None],
        )
        Sweep(dag, gradient).run()
    return grad_emit, grad_trans


def _zero_gradients(log_emit: Tensor, log_trans: Tensor, wants_emit: bool, wants_trans: bool) -> tuple[Tensor, Tensor]:
    """Return both gradients; one that is not needed has no elements."""
    return (
        log_emit.new_zeros(log_emit.shape if wants_emit else (0,)),
        log_trans.new_zeros(log_trans.shape if wants_trans else (0,)),
    )


def _empty_results(
    log_emit: Tensor, _trans: Tensor, _targets: Tensor, _states: Tensor, keeps_alpha: bool
) -> tuple[Tensor, Tensor]:
    B, T, S = log_emit.shape
    empty = log_emit.new_empty
    return empty(B, dtype=torch.float64), empty((B, S, T + 2) if keeps_alpha else (0,), dtype=torch.float64)


_forward.register_fake(_empty_results)
_backward.register_fake(lambda log_emit, log_trans, *others: _zero_gradients(log_emit, log_trans, *others[-2:]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # alpha has no gradient: do not allocate zeros for it
    ctx.save_for_backward(*inputs[:4], *output)


def _differentiate(ctx: Any, grad_nll: Tensor | None, _grad_alpha: None) -> tuple[Tensor | None, ...]:
    if grad_nll is None:  # the loss is not part of what is differentiated
        return (None,) * 5
    wants_emit, wants_trans, *_ = ctx.needs_input_grad
    grad_emit, grad_trans = _backward(*ctx.saved_tensors, grad_nll, wants_emit, wants_trans)
    return (grad_emit if wants_emit else None), (grad_trans if wants_trans else None), None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


def best_alignment(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int64[Tensor, " B"],
    state_lengths: Int64[Tensor, " B"],
) -> Int64[Tensor, "B T"]:
    """See `api.best_alignment`; the sums become maxima, and backtracking reads one column a step."""
    B, T, S = log_emit.shape
    state_S = torch.arange(S, device=log_emit.device)
    nodes_BT = torch.full((B, T), -1, dtype=torch.int64, device=log_emit.device)
    max_skipped = count_skipped(target_lengths, state_lengths)
    for rows in chunks(log_emit):
        dag = read_dag(log_emit[rows], log_trans[rows], target_lengths[rows], state_lengths[rows], max_skipped)
        log_best = torch.full_like(dag.log_emit, -math.inf)
        log_best[dag.start] = 0.0
        for state in range(1, S):
            log_edge = dag.log_edges(slice(0, state), slice(state, state + 1))
            log_reach = (log_best[:, :state, :-1] + log_edge).amax(1)
            log_best[:, state, 1:] = log_reach + dag.log_emit[:, state, 1:]
        row, node, slot = dag.end
        is_feasible: Bool[Tensor, " B"] = log_best[dag.end] > -math.inf
        for target in reversed(range(T)):
            log_edge = dag.log_trans[row, :, node].where(state_S < node[:, None], -math.inf)
            log_score = log_best[row, :, target + 1] + log_edge
            is_on_path = is_feasible & (target < slot - 1)
            node = log_score.argmax(1).where(is_on_path, node)
            nodes_BT[rows, target] = node.where(is_on_path, -1)
    return nodes_BT
