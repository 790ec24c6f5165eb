"""The recursion of `reference` as matrix products in float64, with analytic gradients: the default without a build.

The recursion runs over states, all targets at once. A range of states is split in halves: the first is solved, its sum
over all edges into the second is one (states x states) (states x targets) product per sequence, the second is solved.
Ranges of a few states are solved in log space. So exponentials cost O(S^2 + T S log S), not O(T S^2), every edge is
exponentiated once a sweep and nothing runs T times. The backward pass is the same sweep from the other end; where it
carries sums from one range to another, it also takes the posterior of the edges between them, one more product.

Sums are kept relative to `peak[i]`, the largest probability of slot i so far. Exponentials below e-708 are lost; a sum
below `_LEAST_SUM` may miss them, and is taken again in log space. Where no edge is worse than e-460 none is, since the
peak's own edge is in the sum. Edge posteriors are at most 1, so what they lose is below rounding unless a peak is e640
likelier than all paths, for want of edges; those are taken again as well. Scores up to e200 keep these bounds.

A state has emitted no more targets than there are states before it, and leaves no more than come after it; only these
slots of a range are computed, three quarters of all at k = 4.

Axes: B sequences, T targets, S states, I = T + 2 slots, v and u the two ends of an edge; step i is an edge out of slot
i. alpha[u, i] is the probability of reaching u with i targets emitted; slot 0 holds the start, and the end node emits
one more target, of probability 1. beta[u, i] is that of finishing from there, emission of u included, so that alpha
and beta mirror each other.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

_LEAST_SUM = 1e-200
_LARGEST_LOG = 640.0
_LEAF_STATES = 10
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
        most_skipped = _most_skipped(target_lengths, state_lengths)
        for rows in _chunks(log_emit):
            dag = _read(log_emit[rows], log_trans[rows], target_lengths[rows], state_lengths[rows], most_skipped)
            log_alpha = _Sweep(dag).run().log_probs
            nll[rows] = -log_alpha[dag.end]
            if any(ctx.needs_input_grad):
                log_alpha[dag.end] = -math.inf  # the end has a slot, but no target
                kept.append(log_alpha)
        ctx.save_for_backward(log_emit, log_trans, target_lengths, state_lengths, nll, *kept)
        return nll.to(log_emit.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nll: Tensor) -> tuple[Tensor | None, ...]:
        log_emit, log_trans, target_lengths, state_lengths, nll, *kept = ctx.saved_tensors
        wants_emit, wants_trans, *_ = ctx.needs_input_grad
        grad_emit = torch.zeros_like(log_emit) if wants_emit else None
        grad_trans = torch.zeros_like(log_trans) if wants_trans else None
        most_skipped = _most_skipped(target_lengths, state_lengths)
        for rows, log_alpha in zip(_chunks(log_emit), kept, strict=True):
            dag = _read(log_emit[rows], log_trans[rows], target_lengths[rows], state_lengths[rows], most_skipped)
            gradient = _Gradient(
                None if grad_emit is None else grad_emit[rows],
                None if grad_trans is None else grad_trans[rows],
                log_alpha,
                # nothing is alive in a sequence without a path, whatever it is divided by
                nll[rows].masked_fill(nll[rows] == math.inf, 0.0),
                -grad_nll[rows, None, None].double(),
            )
            _Sweep(dag, gradient).run()
        return grad_emit, grad_trans, None, None


class _Dag(NamedTuple):
    """Some sequences, laid out by state; `start` and `end` index (B, S, I)."""

    log_emit: Float64[Tensor, "B S I"]
    log_trans: Float[Tensor, "B S S"]
    is_state: Bool[Tensor, "B S"]
    is_padded: bool
    most_skipped: int  # states that a path can pass over, in the sequence that has most to spare
    start: tuple[Tensor, ...]
    end: tuple[Tensor, ...]

    def steps(self, first_target: int, last_source: int) -> slice:
        """Steps that an edge from `last_source` or before to `first_target` or later can be on a whole path.

        None, an empty slice, where the states are padding in every sequence.
        """
        stop = min(last_source + 1, self.log_emit.shape[2] - 1)
        return slice(min(max(0, first_target - 1 - self.most_skipped), stop), stop)

    def log_edges(self, sources: slice, targets: slice) -> Float[Tensor, "B sources targets"]:
        """Scores of edges into later states; `-inf` beyond the last state."""
        log_edges = self.log_trans[:, sources, targets]
        return log_edges.masked_fill(~self.is_state[:, None, targets], -math.inf) if self.is_padded else log_edges


def _chunks(log_emit: Tensor) -> Iterator[slice]:
    B, T, S = log_emit.shape
    num_rows = max(1, _CHUNK_ELEMENTS // (S * max(S, T + 2)))
    for row in range(0, B, num_rows):
        yield slice(row, row + num_rows)


def _most_skipped(target_lengths: Tensor, state_lengths: Tensor) -> int:
    """See `_Dag`. Of the whole batch: pieces of it that worked on other slots would round otherwise."""
    return max(0, int((state_lengths - 2 - target_lengths).amax())) if len(target_lengths) else 0


def _read(
    log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor, most_skipped: int
) -> _Dag:
    """Lay out emissions by state, with slots for start and end, and `-inf` where none may be read."""
    B, T, S = log_emit.shape
    device = log_emit.device
    row_B, zero_B = torch.arange(B, device=device), torch.zeros(B, dtype=torch.int64, device=device)
    last_state = (state_lengths - 1).clamp(min=0)
    is_state = torch.arange(S, device=device) < state_lengths[:, None]
    is_target = torch.arange(T, device=device) < target_lengths[:, None]
    is_padded = not bool(is_state.all())
    log_emit_BSI = torch.empty(B, S, T + 2, dtype=torch.float64, device=device)
    log_emit_BSI[:, :, 1:-1] = log_emit.transpose(1, 2)
    log_emit_BSI[:, :, :: T + 1] = -math.inf
    log_emit_BSI[row_B, 0] = -math.inf
    log_emit_BSI[row_B, last_state] = -math.inf
    if is_padded:
        log_emit_BSI.masked_fill_(~is_state[:, :, None], -math.inf)
    if not is_target.all():
        log_emit_BSI[:, :, 1:-1].masked_fill_(~is_target[:, None], -math.inf)
    end = (row_B, last_state, target_lengths + 1)
    # without targets the end is not reached, though an edge from the start may lead there
    log_emit_BSI[end] = torch.zeros(B, dtype=torch.float64, device=device).where(target_lengths > 0, -math.inf)
    return _Dag(log_emit_BSI, log_trans, is_state, is_padded, most_skipped, (row_B, zero_B, zero_B), end)


def _finite(log_x: Tensor) -> Tensor:
    """Zero for `-inf`, so that it can be subtracted."""
    return log_x.masked_fill(log_x == -math.inf, 0.0)


class _Gradient(NamedTuple):
    """Where the backward sweep writes posteriors; its beta is divided by the likelihood of all paths."""

    grad_emit: Float[Tensor, "B T S"] | None
    grad_trans: Float[Tensor, "B S S"] | None
    log_alpha: Float64[Tensor, "B S I"]  # -inf at the end
    nll: Float64[Tensor, " B"]
    scale: Float64[Tensor, "B 1 1"]

    def write_states(self, states: slice, steps: slice, log_reach: Tensor) -> None:
        """Posterior of emissions, from what follows states at each of the steps; slot 0 has no target."""
        if self.grad_emit is None:
            return
        first = max(1, steps.start)
        posterior = (self.log_alpha[:, states, first : steps.stop] + log_reach[:, :, first - steps.start :]).exp_()
        self.grad_emit[:, first - 1 : steps.stop - 1, states] = posterior.mul_(self.scale).mT

    def write_edges(
        self, sources: slice, targets: slice, steps: slice, log_edge: Tensor, edge: Tensor, log_beta: "_Scaled"
    ) -> None:
        """Posterior of edges sources -> targets, from beta at their targets after each of the steps."""
        if self.grad_trans is None:
            return
        log_source = self.log_alpha[:, sources, steps]
        log_gain = log_source + log_beta.log_peak
        # no good edge joins such a source to the peak, and the targets it leads to may be lost beside the peak
        doubtful_rows = (log_gain.amax((1, 2)) > _LARGEST_LOG).nonzero()[:, 0].tolist()
        posterior = (log_gain.exp_() @ log_beta.probs.mT).mul_(edge)
        for row in doubtful_rows:
            for v, log_source_I in enumerate(log_source[row]):
                posterior[row, v] = ((log_source_I + log_beta.log_probs[row]).logsumexp(1) + log_edge[row, v]).exp()
        self.grad_trans[:, sources, targets] = posterior.mul_(self.scale)


class _Scaled(NamedTuple):
    """Probabilities relative to a peak of each slot."""

    log_probs: Float64[Tensor, "B states slots"]
    log_peak: Float64[Tensor, "B 1 slots"]
    probs: Float64[Tensor, "B states slots"]

    @classmethod
    def of(cls, log_probs: Tensor, log_peak: Tensor) -> "_Scaled":
        return cls(log_probs, log_peak, (log_probs - _finite(log_peak)).exp_())


class _Sweep:
    """Solves all states in order, from the start (alpha) or, backwards and with a gradient to write, the end (beta).

    Attributes:
        log_probs: log alpha or log beta (B, S, I).
    """

    def __init__(self, dag: _Dag, gradient: _Gradient | None = None) -> None:
        B, S, num_slots = dag.log_emit.shape
        self._dag, self._gradient, self._is_backward = dag, gradient, gradient is not None
        self.log_probs = torch.full_like(dag.log_emit, -math.inf)
        if gradient is None:
            self.log_probs[dag.start] = 0.0
        else:
            self.log_probs[dag.end] = gradient.nll
        # sums over edges from solved states, by step
        self._reach = dag.log_emit.new_zeros(B, S, num_slots - 1)
        # peak of the states on the solved side of a border
        self._log_peaks = {S if gradient else 0: dag.log_emit.new_full((B, 1, num_slots - 1), -math.inf)}

    def run(self) -> Self:
        """Solve every state."""
        for first, middle, stop in _schedule(0, self._reach.shape[1], is_backward=self._is_backward):
            if middle == stop:
                self._solve(slice(first, stop))
            else:
                self._carry(first, middle, stop)
        return self

    def _carry(self, first: int, middle: int, stop: int) -> None:
        """Add what one part of a range sends to the other; sums change to the peak of all that is solved by then."""
        low, high = slice(first, middle), slice(middle, stop)
        source, target, border = (high, low, stop) if self._is_backward else (low, high, first)
        steps = self._dag.steps(middle, middle - 1)
        # a later border has no use for the slots that end here
        self._log_peaks[middle] = self._log_peaks[border].clone()
        if steps.start == steps.stop:
            return
        log_source, log_old_peak = self._log_sources(source, steps), self._log_peaks[border][..., steps]
        log_peak = torch.maximum(log_old_peak, log_source.amax(1, keepdim=True))
        self._log_peaks[middle][..., steps] = log_peak
        scaled = _Scaled.of(log_source, log_peak)
        log_edge = self._dag.log_edges(low, high)
        edge = log_edge.to(torch.float64, copy=True).exp_()
        arrived = (edge if self._is_backward else edge.mT) @ scaled.probs
        kept_share = (log_old_peak - _finite(scaled.log_peak)).exp_()
        reach = self._reach[:, target, steps]
        torch.addcmul(arrived, reach, kept_share, out=reach)
        if self._gradient is not None:
            self._gradient.write_edges(low, high, steps, log_edge, edge, scaled)

    def _solve(self, states: slice) -> None:
        """Solve a few states one after the other, in log space, each adding to those still to come."""
        steps = self._dag.steps(states.start, states.stop - 1)
        if steps.start == steps.stop:
            return
        reach = self._log_reach(states, steps)
        is_edge = torch.ones(reach.shape[1], reach.shape[1], dtype=torch.bool, device=reach.device).triu(1)
        log_edge = self._dag.log_edges(states, states).where(is_edge, -math.inf)
        arrival = steps if self._is_backward else _after(steps)
        emit, probs = self._dag.log_emit[:, states, arrival], self.log_probs[:, states, arrival]
        log_sources = self._log_sources(states, steps)
        # where the sweep begins, the probability is there already
        torch.maximum(reach, probs, out=reach)
        for i in range(reach.shape[1])[:: -1 if self._is_backward else 1]:
            torch.add(reach[:, i], emit[:, i], out=probs[:, i])
            later = slice(0, i) if self._is_backward else slice(i + 1, None)
            log_edge_out = log_edge[:, later, i] if self._is_backward else log_edge[:, i, later]
            sent = log_sources[:, i, None] + log_edge_out[:, :, None]
            torch.logaddexp(reach[:, later], sent, out=reach[:, later])
        if self._gradient is not None:
            scaled = _Scaled.of(log_sources, log_sources.amax(1, keepdim=True))
            edge = log_edge.to(torch.float64, copy=True).exp_()
            self._gradient.write_edges(states, states, steps, log_edge, edge, scaled)
            self._gradient.write_states(states, steps, reach)

    def _log_sources(self, states: slice, steps: slice) -> Tensor:
        """log_probs of states (B, states, steps) in the slots from which the steps of this sweep leave."""
        return self.log_probs[:, states, _after(steps) if self._is_backward else steps]

    def _log_reach(self, states: slice, steps: slice) -> Tensor:
        """log of what has been carried to `states`; doubtful sums are taken again, all edges at once."""
        log_peak = self._log_peaks[states.stop if self._is_backward else states.start][..., steps]
        sums = self._reach[:, states, steps]
        log_reach = sums.log().add_(_finite(log_peak))
        if bool(sums.amin() < _LEAST_SUM) and (is_doubtful := (sums < _LEAST_SUM) & (log_peak > -math.inf)).any():
            if self._is_backward:
                solved = slice(states.stop, None)
                log_edge = self._dag.log_edges(states, solved).mT
            else:
                solved = slice(0, states.start)
                log_edge = self._dag.log_edges(solved, states)
            _sum_again(log_reach, is_doubtful, self._log_sources(solved, steps), log_edge)
        return log_reach


def _after(steps: slice) -> slice:
    """The slots that steps lead to."""
    return slice(steps.start + 1, steps.stop + 1)


def _schedule(first: int, stop: int, *, is_backward: bool = False) -> Iterator[tuple[int, int, int]]:
    """Order of work: solve first..stop where middle = stop, else carry sums between first..middle and middle..stop."""
    if stop - first <= _LEAF_STATES:
        yield first, stop, stop
        return
    middle = (first + stop) // 2
    low, high = (first, middle), (middle, stop)
    yield from _schedule(*(high if is_backward else low), is_backward=is_backward)
    yield first, middle, stop
    yield from _schedule(*(low if is_backward else high), is_backward=is_backward)


def _sum_again(log_reach: Tensor, is_doubtful: Tensor, log_source: Tensor, log_edge: Tensor) -> None:
    """Replace doubtful sums by log-sum-exps. Most of them are truly zero: no edge comes from a living state."""
    num_alive = (log_edge > -math.inf).float().mT @ (log_source > -math.inf).float()
    indices = (is_doubtful & (num_alive > 0)).nonzero()
    for part in indices.split(max(1, _GATHER_ELEMENTS // log_source.shape[1])):
        row, state, slot = part.unbind(1)
        log_reach[row, state, slot] = (log_source[row, :, slot] + log_edge[row, :, state]).logsumexp(1)


def best_alignment(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int64[Tensor, " B"],
    state_lengths: Int64[Tensor, " B"],
) -> Int64[Tensor, "B T"]:
    """See `api.best_alignment`; the sums of the sweep become maxima, and the way back looks at one column a step."""
    B, T, S = log_emit.shape
    state_S = torch.arange(S, device=log_emit.device)
    nodes_BT = torch.full((B, T), -1, dtype=torch.int64, device=log_emit.device)
    most_skipped = _most_skipped(target_lengths, state_lengths)
    for rows in _chunks(log_emit):
        dag = _read(log_emit[rows], log_trans[rows], target_lengths[rows], state_lengths[rows], most_skipped)
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
