"""The recursion of `reference` as matrix products in float64, with analytic gradients: the default without a build.

The recursion runs over states, all targets at once. A range of states is split in halves: the first is solved, its sum
over all edges into the second is one (states x states) (states x targets) product per sequence, the second is solved.
Ranges of a few states are solved in log space. So exponentials cost O(S^2 + T S log S), not O(T S^2), every edge is
exponentiated once and nothing runs T times.

Sums are kept relative to `peak[i]`, the largest alpha of slot i so far. Exponentials below e-708 are lost; a sum that
comes out below `_LEAST_SUM` may miss them, and is taken again in log space. Where no edge is worse than the best into
its state by e-645 no sum does, since the peak's own edge is in it. Edge posteriors come from products as well; they
are at most 1, so all that is lost in them is far below rounding, unless peak and target are apart as above.

Axes: B sequences, T targets, S states, v and u for an edge's two ends, I = T + 2 slots. alpha[u, i] is the probability
of reaching u with i targets emitted; slot 0 holds the start, and the end node emits one more target, of probability 1.
So beta is alpha of the DAG read backwards, and one sweep serves both.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

_LEAST_SUM = 1e-280  # e-645: what is lost, S terms of e-708, is below its rounding
_LARGEST_LOG = 640.0
_LEAF_STATES = 12
_CHUNK_ELEMENTS = 1 << 23  # of (B, S, S) or (B, S, I) at a time, so that temporaries stay near the cache
_GATHER_ELEMENTS = 1 << 21


def states_alignment_nll(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int64[Tensor, " B"],
    state_lengths: Int64[Tensor, " B"],
) -> Float[Tensor, " B"]:
    """See `api.states_alignment_nll`; float32 or float64 in and out, float64 between."""
    # torch types the result of Function.apply as Any
    nll: Tensor = _StatesAlignmentNll.apply(  # type: ignore[no-untyped-call]
        log_emit, log_trans, target_lengths, state_lengths
    )
    return nll


class _StatesAlignmentNll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor) -> Tensor:
        nll = torch.empty(len(log_emit), dtype=torch.float64, device=log_emit.device)
        kept: list[Tensor] = []
        for rows in _chunks(log_emit):
            dag = _read(log_emit[rows], log_trans[rows], target_lengths[rows], state_lengths[rows])
            log_alpha = _sweep(dag.log_emit, dag.log_trans, dag.start)
            nll[rows] = -log_alpha[dag.end]
            if any(ctx.needs_input_grad):
                kept.append(log_alpha)
        ctx.save_for_backward(log_emit, log_trans, target_lengths, state_lengths, *kept)
        return nll.to(log_emit.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nll: Tensor) -> tuple[Tensor | None, ...]:
        log_emit, log_trans, target_lengths, state_lengths, *kept = ctx.saved_tensors
        wants_emit, wants_trans, *_ = ctx.needs_input_grad
        grad_emit = torch.empty_like(log_emit) if wants_emit else None
        grad_trans = torch.zeros_like(log_trans) if wants_trans else None
        for rows, log_alpha in zip(_chunks(log_emit), kept, strict=True):
            dag = _read(log_emit[rows], log_trans[rows], target_lengths[rows], state_lengths[rows])
            log_beta = _sweep(
                dag.log_emit.flip(1, 2), dag.log_trans.flip(1, 2).transpose(1, 2), _flipped(dag.end, log_alpha)
            ).flip(1, 2)
            log_evidence = log_alpha[dag.end][:, None, None]
            # nothing is alive in an infeasible sequence, whatever it is divided by
            log_alpha = log_alpha - log_evidence.masked_fill(log_evidence == -math.inf, 0.0)
            scale = -grad_nll[rows, None, None].double()
            if grad_emit is not None:
                log_post = (log_alpha + log_beta - dag.log_emit).where(dag.log_emit > -math.inf, -math.inf)
                log_post[dag.end] = -math.inf  # its slot is that of a target in longer sequences
                grad_emit[rows] = (log_post.exp_() * scale)[:, :, 1:-1].transpose(1, 2)
            if grad_trans is not None:
                _add_edge_posterior(grad_trans[rows], log_alpha, log_beta, dag.log_trans, scale)
        return grad_emit, grad_trans, None, None


class _Dag(NamedTuple):
    """Some sequences with `-inf` wherever nothing may be read; `start` and `end` index (B, S, I)."""

    log_emit: Float64[Tensor, "B S I"]
    log_trans: Float[Tensor, "B S S"]
    start: tuple[Tensor, ...]
    end: tuple[Tensor, ...]


def _chunks(log_emit: Tensor) -> Iterator[slice]:
    B, T, S = log_emit.shape
    num_rows = max(1, _CHUNK_ELEMENTS // (S * max(S, T + 2)))
    for row in range(0, B, num_rows):
        yield slice(row, row + num_rows)


def _read(log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor) -> _Dag:
    """Lay out emissions by state, with slots for start and end, and leave out what must not be read."""
    B, T, S = log_emit.shape
    device = log_emit.device
    state_S, row_B = torch.arange(S, device=device), torch.arange(B, device=device)
    is_target_BT = torch.arange(T, device=device) < target_lengths[:, None]
    is_inner_BS = (state_S > 0) & (state_S < state_lengths[:, None] - 1)
    is_edge_BSS = (state_S[:, None] < state_S) & (state_S < state_lengths[:, None, None])
    log_emit_BSI = torch.full((B, S, T + 2), -math.inf, dtype=torch.float64, device=device)
    is_read_BST = is_inner_BS[:, :, None] & is_target_BT[:, None, :]
    log_emit_BSI[:, :, 1:-1] = log_emit.transpose(1, 2).where(is_read_BST, -math.inf)
    start = (row_B, torch.zeros_like(row_B), torch.zeros_like(row_B))
    end = (row_B, (state_lengths - 1).clamp(min=0), target_lengths + 1)
    log_emit_BSI[start] = 0.0
    log_emit_BSI[end] = torch.zeros(B, dtype=torch.float64, device=device).where(target_lengths > 0, -math.inf)
    return _Dag(log_emit_BSI, log_trans.where(is_edge_BSS, -math.inf), start, end)


def _flipped(index: tuple[Tensor, ...], like: Tensor) -> tuple[Tensor, ...]:
    """The same entry after states and slots are reversed."""
    row_B, state_B, slot_B = index
    return row_B, like.shape[1] - 1 - state_B, like.shape[2] - 1 - slot_B


def _schedule(first: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Order of work: solve first..stop where middle = stop, else carry sums from first..middle to middle..stop."""
    if stop - first <= _LEAF_STATES:
        yield first, stop, stop
        return
    middle = (first + stop) // 2
    yield from _schedule(first, middle)
    yield first, middle, stop
    yield from _schedule(middle, stop)


def _sweep(
    log_emit_BSI: Float64[Tensor, "B S I"], log_trans_BSS: Float[Tensor, "B S S"], start: tuple[Tensor, ...]
) -> Float64[Tensor, "B S I"]:
    """log alpha of every state and slot; all mass begins at `start`."""
    B, S, num_slots = log_emit_BSI.shape
    log_alpha_BSI = torch.full_like(log_emit_BSI, -math.inf)
    log_alpha_BSI[start] = 0.0
    # edges are kept relative to the best into each state: a state with no edge above e-1000 is as good as any
    log_best_edge_BS = log_trans_BSS.amax(1).double()
    # sum over v of alpha[v, i - 1] E[v, u], relative to the best edge into u and to the peak of what was summed
    sums_BSI = log_emit_BSI.new_zeros(B, S, num_slots - 1)
    log_peaks = {0: log_emit_BSI.new_full((B, 1, num_slots - 1), -math.inf)}
    for first, middle, stop in _schedule(0, S):
        if middle == stop:
            states = slice(first, stop)
            log_reach = _log_reach(log_alpha_BSI, log_trans_BSS, log_best_edge_BS, sums_BSI, log_peaks[first], states)
            _solve_leaf(log_alpha_BSI, log_trans_BSS, log_emit_BSI, log_reach, states)
            continue
        log_source = log_alpha_BSI[:, first:middle, :-1]
        log_peak = torch.maximum(log_peaks[first], log_source.amax(1, keepdim=True))
        log_scale = _finite(log_peak)
        log_edge = log_trans_BSS[:, first:middle, middle:stop] - _finite(log_best_edge_BS)[:, None, middle:stop]
        arrived = log_edge.exp_().transpose(1, 2) @ (log_source - log_scale).exp_()
        sums = sums_BSI[:, middle:stop]
        torch.addcmul(arrived, sums, (log_peaks[first] - log_scale).exp_(), out=sums)
        log_peaks[middle] = log_peak
    return log_alpha_BSI


def _finite(log_x: Tensor) -> Tensor:
    """Zero for `-inf`, so that it can be subtracted."""
    return log_x.masked_fill(log_x == -math.inf, 0.0)


def _log_reach(
    log_alpha_BSI: Tensor,
    log_trans_BSS: Tensor,
    log_best_edge_BS: Tensor,
    sums_BSI: Tensor,
    log_peak: Tensor,
    states: slice,
) -> Tensor:
    """Sum over all edges into `states` from the states before them."""
    sums, log_best_edge = sums_BSI[:, states], log_best_edge_BS[:, states, None]
    log_reach = sums.log() + _finite(log_peak) + _finite(log_best_edge)
    is_doubtful = (sums < _LEAST_SUM) & (log_peak > -math.inf) & (log_best_edge > -math.inf)
    if is_doubtful.any():
        before = slice(0, states.start)
        _sum_again(log_reach, is_doubtful, log_alpha_BSI[:, before, :-1], log_trans_BSS[:, before, states])
    return log_reach


def _sum_again(log_reach: Tensor, is_doubtful: Tensor, log_source: Tensor, log_edge: Tensor) -> None:
    """Replace doubtful sums by log-sum-exps. Most of them are truly zero: no edge comes from a living state."""
    num_alive = (log_edge > -math.inf).float().transpose(1, 2) @ (log_source > -math.inf).float()
    indices = (is_doubtful & (num_alive > 0)).nonzero()
    for part in indices.split(max(1, _GATHER_ELEMENTS // log_source.shape[1])):
        row, state, slot = part.unbind(1)
        log_reach[row, state, slot] = (log_source[row, :, slot] + log_edge[row, :, state]).logsumexp(1)


def _solve_leaf(
    log_alpha_BSI: Tensor, log_trans_BSS: Tensor, log_emit_BSI: Tensor, log_reach: Tensor, states: slice
) -> None:
    """log alpha of a few states, one after the other; `log_reach` is what comes from before them."""
    B, num_states, _ = log_reach.shape
    # where the sweep starts, alpha is there already
    log_reach = torch.maximum(log_reach, log_alpha_BSI[:, states, 1:])
    terms = log_reach.new_empty(B, num_states, log_reach.shape[2])
    for i in range(num_states):
        state = states.start + i
        within = slice(states.start, state)
        terms[:, 0] = log_reach[:, i]
        torch.add(log_alpha_BSI[:, within, :-1], log_trans_BSS[:, within, state, None], out=terms[:, 1 : i + 1])
        torch.add(terms[:, : i + 1].logsumexp(1), log_emit_BSI[:, state, 1:], out=log_alpha_BSI[:, state, 1:])


def _add_edge_posterior(
    grad_trans_BSS: Tensor, log_alpha_BSI: Tensor, log_beta_BSI: Tensor, log_trans_BSS: Tensor, scale: Tensor
) -> None:
    """Write `scale` times the posterior of every edge; alpha is divided by the likelihood."""
    for first, middle, stop in _schedule(0, log_alpha_BSI.shape[1]):
        after = slice(first if middle == stop else middle, stop)
        log_source, log_target = log_alpha_BSI[:, first:middle, :-1], log_beta_BSI[:, after, 1:]
        log_edge = log_trans_BSS[:, first:middle, after].double()
        log_peak, log_best_edge = log_source.amax(1, keepdim=True), log_edge.amax(1, keepdim=True)
        log_gain = log_target + log_peak + log_best_edge.transpose(1, 2)
        source = (log_source - _finite(log_peak)).exp_()
        posterior = source @ log_gain.clamp(max=_LARGEST_LOG).exp_().transpose(1, 2)
        posterior.mul_((log_edge - _finite(log_best_edge)).exp_())
        # no good edge joins peak and target, and sources that have one may be lost beside the peak
        for row in (log_gain.amax((1, 2)) > _LARGEST_LOG).nonzero()[:, 0].tolist():
            for v, log_source_I in enumerate(log_source[row]):
                posterior[row, v] = ((log_source_I + log_target[row]).logsumexp(1) + log_edge[row, v]).exp()
        grad_trans_BSS[:, first:middle, after] = posterior.mul_(scale)


def best_alignment(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int64[Tensor, " B"],
    state_lengths: Int64[Tensor, " B"],
) -> Int64[Tensor, "B T"]:
    """See `api.best_alignment`; the sums of the sweep become maxima, and the way back looks at one column a step."""
    B, T, _ = log_emit.shape
    nodes_BT = torch.full((B, T), -1, dtype=torch.int64, device=log_emit.device)
    for rows in _chunks(log_emit):
        dag = _read(log_emit[rows], log_trans[rows], target_lengths[rows], state_lengths[rows])
        log_best = torch.full_like(dag.log_emit, -math.inf)
        log_best[dag.start] = 0.0
        for state in range(1, log_best.shape[1]):
            log_reach = (log_best[:, :state, :-1] + dag.log_trans[:, :state, state, None]).amax(1)
            log_best[:, state, 1:] = log_reach + dag.log_emit[:, state, 1:]
        row, node, slot = dag.end
        is_feasible: Bool[Tensor, " B"] = log_best[dag.end] > -math.inf
        for target in reversed(range(T)):
            log_score = log_best[row, :, target + 1] + dag.log_trans[row, :, node]
            is_on_path = is_feasible & (target < slot - 1)
            node = log_score.argmax(1).where(is_on_path, node)
            nodes_BT[rows, target] = node.where(is_on_path, -1)
    return nodes_BT
