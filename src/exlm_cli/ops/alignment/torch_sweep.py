"""Sweep of the torch backend over the states of a DAG, forward for alpha and backward for beta and the posteriors.

The recursion runs over blocks of states, all targets at once. Edges from solved states into a block are one
(states x states) (states x targets) product per sequence. Then the states of the block are solved one after the other,
each added to the sums of the later ones. So exponentials cost O(S^2 + T S), not O(T S^2), and no loop runs T times. The
backward pass is the same sweep from the other end; one more product per block gives the posteriors of its edges.

Underflow. The probabilities of slot i are stored relative to a reference, `ref[i]`. It is at most e200 below the
largest of them so far, so it seldom changes. A slot has a guessed reference until a block reaches it. Values below
e-708 are lost. A sum of at least `_MIN_SUM` (times the largest probability of its block, if that is above 1)
loses nothing that matters; a smaller sum may, unless no path leads to it. If a sequence has such a sum in a block, or a
probability above `_LARGEST_PROB`, the block is solved again in log space, and so are its doubtful sums over solved
states. If no edge is below e-460, none of these sums is doubtful, because each contains the edge from the peak. Edge
posteriors are at most 1, so their loss is below rounding unless a reference is e437 above all paths because edges are
missing; such posteriors are computed again as well. The bounds hold for edges up to e200. If a sequence has a larger
one, all its edges are divided by the largest, which scales all its paths alike: they have the same number of edges.

A state has emitted at most as many targets as there are states before it, and leaves at most as many targets as there
are states after it. Only these slots of a block are computed, three quarters of all at k = 4.

Axes: B sequences, T targets, S states, I = T + 2 slots, v and u the two ends of an edge; step i is an edge out of slot
i. alpha[u, i] is the probability of reaching u with i targets emitted; slot 0 holds the start, and the end node emits
one more target, of probability 1. beta[u, i] is the probability of finishing from there, emission of u included, so
that alpha and beta mirror each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64  # annotations only: the op needs torch and nothing else

_MIN_SUM = 1e-200
_LARGEST_PROB = 1e300
_LARGEST_GAIN = 1e190  # still finite times e200, the largest probability
_LARGEST_LOG_EDGE = 200.0
_LOG_RISE = 200.0  # how far a peak may exceed its reference before the reference is raised
_LEAST_BLOCK_STATES, _MAX_BLOCK_STATES = 24, 48
_CHUNK_ELEMENTS = 1 << 23  # of (B, S, I) or of the edges of a block at a time; temporaries then stay near the cache
_GATHER_ELEMENTS = 1 << 21


class Dag(NamedTuple):
    """Some sequences of the batch, laid out by state; `start` and `end` index (B, S, I)."""

    log_emit: Float64[Tensor, "B S I"]
    log_trans: Float[Tensor, "B S S"]  # less `log_scale`
    log_scale: Float64[Tensor, " B"]  # 0 where no edge is above e200
    is_state: Bool[Tensor, "B S"]
    is_padded: bool
    max_skipped: int  # largest number of states that a path can skip, over all sequences
    start: tuple[Tensor, ...]
    end: tuple[Tensor, ...]

    @property
    def log_paths_scale(self) -> Float64[Tensor, " B"]:
        """The log of what every path has been divided by; a path has one edge more than targets."""
        return self.log_scale * self.end[2]

    def steps(self, first_target: int, last_source: int) -> slice:
        """Return the steps at which an edge between these states can lie on a complete path.

        The edge leaves `last_source` or an earlier state and enters `first_target` or a later one. The slice is empty
        if the states are padding in every sequence.
        """
        stop = min(last_source + 1, self.log_emit.shape[2] - 1)
        return slice(min(max(0, first_target - 1 - self.max_skipped), stop), stop)

    def log_edges(self, sources: slice, targets: slice) -> Float[Tensor, "B sources targets"]:
        """Return the scores of edges into later states; `-inf` beyond the last state."""
        log_edges = self.log_trans[:, sources, targets]
        return log_edges.masked_fill(~self.is_state[:, None, targets], -math.inf) if self.is_padded else log_edges


def chunks(log_emit: Tensor) -> Iterator[slice]:
    """Yield the rows of the batch that are worked on together, so that temporaries stay near the cache."""
    B, T, S = log_emit.shape
    num_rows = max(1, _CHUNK_ELEMENTS // (S * max(_MAX_BLOCK_STATES, T + 2)))
    for row in range(0, B, num_rows):
        yield slice(row, row + num_rows)


def count_skipped(target_lengths: Tensor, state_lengths: Tensor) -> int:
    """Return `Dag.max_skipped`. It is one number for the whole batch, so that each chunk of it rounds alike."""
    return max(0, int((state_lengths - 2 - target_lengths).amax())) if len(target_lengths) else 0


def read_dag(
    log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor, max_skipped: int
) -> Dag:
    """Return the DAG with emissions by state, slots for start and end, and `-inf` at entries that are never read."""
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
    # a sequence without targets does not reach the end, even over an edge from the start
    log_emit_BSI[end] = torch.zeros(B, dtype=torch.float64, device=device).where(target_lengths > 0, -math.inf)
    log_trans, log_scale_B = _limit_edges(log_trans, state_lengths)
    return Dag(log_emit_BSI, log_trans, log_scale_B, is_state, is_padded, max_skipped, (row_B, zero_B, zero_B), end)


def _limit_edges(log_trans: Tensor, state_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the edges divided by a scale, and its log: the largest edge of a sequence with one above e200, else 1."""
    log_scale_B = torch.zeros(len(log_trans), dtype=torch.float64, device=log_trans.device)
    if log_trans.numel() == 0 or bool(log_trans.amax() <= _LARGEST_LOG_EDGE):
        return log_trans, log_scale_B
    # entries that are never read may be NaN or large
    node = torch.arange(log_trans.shape[1], device=log_trans.device)
    is_edge_BSS = (node[:, None] < node) & (node < state_lengths[:, None, None])
    log_largest_B = log_trans.double().masked_fill(~is_edge_BSS, -math.inf).amax((1, 2))
    is_large = (log_largest_B > _LARGEST_LOG_EDGE) & log_largest_B.isfinite()
    log_scale_B = log_largest_B.where(is_large, log_scale_B)
    return (log_trans - log_scale_B[:, None, None] if bool(is_large.any()) else log_trans), log_scale_B


def _finite(log_x: Tensor) -> Tensor:
    """Return `log_x` with zero for `-inf`, so that it can be subtracted."""
    return log_x.masked_fill(log_x == -math.inf, 0.0)


class Gradient(NamedTuple):
    """Inputs and outputs of the backward sweep; its beta is divided by the likelihood of all paths."""

    grad_emit: Float[Tensor, "B T S"] | None
    grad_trans: Float[Tensor, "B S S"] | None
    log_alpha: Float64[Tensor, "B S I"]  # -inf at the end
    log_begin: Float64[Tensor, " B"]  # log beta of the end, -inf in a sequence without a path
    scale: Float64[Tensor, "B 1 1"]


class _Block(NamedTuple):
    """States that are solved together, with the edges into them in the direction of the sweep."""

    states: slice
    solved: slice  # earlier states that share paths with them
    steps: slice  # steps by which the sweep reaches them
    log_edge: Float[Tensor, "B states others"]  # `others`: `solved` and `states`; undefined against the sweep
    edge: Float64[Tensor, "B states others"]
    sums: Float64[Tensor, "B states steps"]  # over `edge`, relative to the references of the source slots

    @property
    def others(self) -> slice:
        return slice(min(self.solved.start, self.states.start), max(self.solved.stop, self.states.stop))

    def within_others(self, states: slice) -> slice:
        """Return the place of some of `others` on the last axis of `edge`."""
        return slice(states.start - self.others.start, states.stop - self.others.start)


class Sweep:
    """Sweep over all states: from the start for alpha, or from the end for beta if it has a gradient to write."""

    def __init__(self, dag: Dag, gradient: Gradient | None = None) -> None:
        B, num_slots = len(dag.log_emit), dag.log_emit.shape[2]
        self._dag, self._gradient, self._is_backward = dag, gradient, gradient is not None
        begin, log_begin = (dag.start, dag.log_emit.new_zeros(B)) if gradient is None else (dag.end, gradient.log_begin)
        row_B, _, slot_B = begin
        self._is_alive: Bool[Tensor, "B 1 1"] = (log_begin != -math.inf)[:, None, None]
        self._log_ref = dag.log_emit.new_full((B, 1, num_slots), -math.inf)
        self._log_ref[row_B, 0, slot_B] = log_begin
        self._probs = torch.zeros_like(dag.log_emit)
        self._probs[begin] = self._is_alive[:, 0, 0].double()
        self._log_probs = torch.full_like(dag.log_emit, -math.inf)
        self._log_probs[begin] = log_begin
        # results not yet in `_log_probs`: states, slots, sums and their reference
        self._unlogged: list[tuple[slice, slice, Tensor, Tensor]] = []

    def run(self) -> Self:
        """Solve every state."""
        S = self._probs.shape[1]
        block = None
        for first, middle, stop in _schedule(S):
            if middle < stop:
                solved, states = slice(first, middle), slice(middle, stop)
                if self._is_backward:
                    solved, states = slice(S - middle, S - first), slice(S - stop, S - middle)
                block = self._carry(solved, states)
            elif block is not None:
                self._solve(block)
        return self

    def log_probs(self) -> Tensor:
        """Return log alpha or log beta of all states solved so far (B, S, I)."""
        for states, slots, sums, log_ref in self._unlogged:
            self._write_log_probs(states, slots, sums.log().add_(log_ref))
        self._unlogged.clear()
        return self._log_probs

    def _carry(self, solved: slice, states: slice) -> _Block | None:
        """Return a block with its sums over edges from solved states; None if no path reaches it."""
        steps = self._dag.steps(states.start, states.stop - 1)
        if steps.start == steps.stop:
            return None
        # solved states that share no slot with these steps are zeros
        if self._is_backward:
            stop = min(solved.stop, steps.stop + self._dag.max_skipped + 1)
            solved = slice(solved.start, max(solved.start, stop))
            log_edge = self._dag.log_edges(states, slice(states.start, solved.stop))
        else:
            solved = slice(min(steps.start, solved.stop), solved.stop)
            log_edge = self._dag.log_edges(slice(solved.start, states.stop), states).mT
        edge = log_edge.to(torch.float64, copy=True).exp_()
        block = _Block(states, solved, steps, log_edge, edge, edge)
        return block._replace(sums=self._sums_from_solved(block, slice(None)))

    def _sums_from_solved(self, block: _Block, rows: Tensor | slice) -> Tensor:
        probs = self._probs[rows, block.solved, self._slots_before(block.steps)]
        return block.edge[rows, :, block.within_others(block.solved)] @ probs

    def _solve(self, block: _Block) -> None:
        """Solve the states of a block one after the other; each adds to the sums of the later ones."""
        states, sums = block.states, block.sums
        before, after = self._slots_before(block.steps), self._slots_after(block.steps)
        log_emit = self._dag.log_emit[:, states, after]
        log_ref, log_ref_after = self._guess_refs(block, log_emit)
        emit = (log_emit + (log_ref - log_ref_after)).exp_()
        edge = block.edge[:, :, block.within_others(states)]
        sources, probs = self._probs[:, states, before], self._probs[:, states, after]
        for i, later in self._in_order(states):
            # the state where the sweep begins has its probability already
            probs[:, i].addcmul_(sums[:, i], emit[:, i])
            sums[:, later].addcmul_(sources[:, i, None], edge[:, later, i, None])
        peak = probs.amax(1, keepdim=True)
        log_peak = peak.log().add_(log_ref_after)
        rows = self._doubtful_rows(block, peak, log_emit)
        if len(rows):
            log_reach_rows = self._solve_in_log_space(block, rows)
            log_reach = sums.log().add_(log_ref)
            log_reach[rows] = log_reach_rows
            self._write_log_probs(states, after, log_reach)
            log_peak[rows] = self._log_probs[rows, states, after].amax(1, keepdim=True)
        else:
            log_reach = None
            self._unlogged.append((states, after, sums, log_ref))
        self._raise_refs(states, after, log_ref_after, log_peak)
        if len(rows):
            log_probs = self._log_probs[rows, states, after]
            self._probs[rows, states, after] = (log_probs - _finite(self._log_ref[rows, :, after])).exp_()
        if self._gradient is not None:
            self._write_posteriors(self._gradient, block, log_ref, rows, log_reach)

    def _write_log_probs(self, states: slice, slots: slice, log_reach: Tensor) -> None:
        log_probs = self._log_probs[:, states, slots]
        # as in `_solve`: the state where the sweep begins has its probability already
        torch.maximum(log_reach + self._dag.log_emit[:, states, slots], log_probs, out=log_probs)

    def _in_order(self, states: slice) -> Iterator[tuple[int, slice]]:
        """Yield each state of a block with the states that the sweep reaches after it."""
        num_states = states.stop - states.start
        for i in range(num_states):
            yield (num_states - 1 - i, slice(0, num_states - 1 - i)) if self._is_backward else (i, slice(i + 1, None))

    def _write_posteriors(
        self, gradient: Gradient, block: _Block, log_ref: Tensor, rows: Tensor, log_reach: Tensor | None
    ) -> None:
        """Write posteriors of a block's emissions and of its edges.

        The sums of the block are relative to `log_ref`; `log_reach` is their logarithm, None if no row is doubtful.
        """
        states, steps, others = block.states, block.steps, block.others
        before = self._slots_before(steps)
        log_source, log_new_ref = gradient.log_alpha[:, states, steps], self._log_ref[..., before]
        gain = (log_source + log_new_ref).exp_()
        extreme = rows[:0]
        if not bool(gain.amax() <= _LARGEST_GAIN):
            gain.masked_fill_(~self._is_reachable(block), 0.0)
            # no likely edge joins such a source to the peak, so its successors may be lost beside the peak
            extreme = (gain.amax((1, 2)) > _LARGEST_GAIN).nonzero()[:, 0]
        gain *= gradient.scale
        if gradient.grad_trans is not None:
            grad_trans = gradient.grad_trans[:, states, others]
            grad_trans.copy_((gain @ self._probs[:, others, before].mT).mul_(block.edge))
            for row in extreme.tolist():
                log_probs = self.log_probs()[row, others, before]
                for v, log_source_I in enumerate(log_source[row]):
                    posterior = ((log_source_I + log_probs).logsumexp(1) + block.log_edge[row, v]).exp()
                    grad_trans[row, v] = posterior * gradient.scale[row, 0]
            grad_trans[:, :, block.within_others(states)].triu_(1)
        if gradient.grad_emit is not None:
            change = (log_ref - log_new_ref).exp_().masked_fill_(log_new_ref == -math.inf, 0.0)
            posterior = (block.sums * change).mul_(gain)
            if log_reach is not None or len(extreme):
                log_reach = block.sums.log() + log_ref if log_reach is None else log_reach
                rows = torch.cat([rows, extreme])
                posterior[rows] = (log_source[rows] + log_reach[rows]).exp_() * gradient.scale[rows]
            first = max(1, steps.start)  # slot 0 has no target
            gradient.grad_emit[:, first - 1 : steps.stop - 1, states] = posterior[:, :, first - steps.start :].mT

    def _guess_refs(self, block: _Block, log_emit: Tensor) -> tuple[Tensor, Tensor]:
        """Return the references of the slots before and after steps; for a new slot add one typical emission."""
        log_ref = self._log_ref[..., block.steps.start : block.steps.stop + 1]
        log_ref = log_ref.flip(-1) if self._is_backward else log_ref.clone()
        is_new = log_ref == -math.inf
        if is_new.any():
            # any state with emissions will do: the first, the last and padding have none
            row, last_state, _ = self._dag.end
            state = (last_state - 1 - block.states.start).clamp(min=0, max=log_emit.shape[1] // 2)
            typical = _finite(log_emit[row, state, None])
            known = log_ref.masked_fill(is_new, 0.0)
            change = known.diff().where(~is_new[..., 1:], typical.flip(-1) if self._is_backward else typical)
            guess = torch.cat([known[..., :1], change], dim=-1).cumsum(-1)
            log_ref = guess.where(is_new, log_ref)
        before, after = log_ref[..., :-1], log_ref[..., 1:]
        return (before.flip(-1), after.flip(-1)) if self._is_backward else (before, after)

    def _doubtful_rows(self, block: _Block, peak: Tensor, log_emit: Tensor) -> Tensor:
        """Return the sequences with a sum that may have lost terms, or a probability that is too large or NaN."""
        highest = peak.amax((1, 2))[:, None, None]
        is_doubtful = ~(highest < _LARGEST_PROB)[:, 0, 0]
        # a lost edge may come from a state of this block that is above its reference
        is_small = block.sums < _MIN_SUM * highest.clamp(min=1.0)
        if is_small.any():
            is_doubtful |= (is_small & self._is_reachable(block)).any(2).any(1)
        # a slot whose guess is far too high looks as if no path reached it
        slots = self._slots_after(block.steps)
        slot = torch.arange(slots.start, slots.stop, device=peak.device)
        is_inner = (slot > 0) & (slot < self._dag.end[2][:, None, None])
        is_lost = is_inner & (self._log_ref[..., slots] == -math.inf) & (peak < _MIN_SUM)
        if is_lost.any():
            is_doubtful |= (is_lost & self._is_reachable(block) & (log_emit > -math.inf)).any(2).any(1)
        return is_doubtful.nonzero()[:, 0]

    def _is_reachable(self, block: _Block) -> Bool[Tensor, "B states steps"]:
        """Return where the states between the start of the sweep and the block suffice for the targets."""
        device = self._probs.device
        state = torch.arange(block.states.start, block.states.stop, device=device)[:, None]
        step = torch.arange(block.steps.start, block.steps.stop, device=device)
        _, last_state, last_slot = (x[:, None, None] for x in self._dag.end)
        if self._is_backward:
            return self._is_alive & (step < last_slot) & (state - step <= last_state - last_slot)
        return (step < last_slot) & (step < state) & (state <= last_state)

    def _raise_refs(self, states: slice, slots: slice, log_ref_used: Tensor, log_peak: Tensor) -> None:
        """Raise each slot's reference to the block's peak and rescale the stored probabilities.

        The block itself is relative to `log_ref_used`.
        """
        log_ref = self._log_ref[..., slots].clone()
        is_raised = log_peak > log_ref + _LOG_RISE
        if not is_raised.any():
            return
        log_new_ref = log_peak.where(is_raised, log_ref)
        self._log_ref[..., slots] = log_new_ref
        self._probs[:, states, slots] *= (log_ref_used - log_new_ref).exp_().where(log_new_ref > -math.inf, 1.0)
        changed = (is_raised & (log_ref > -math.inf)).any(0)[0].nonzero()[:, 0].tolist()
        if changed:
            solved = slice(states.stop, None) if self._is_backward else slice(0, states.start)
            share = (log_ref - _finite(log_new_ref)).exp_()[..., changed[0] : changed[-1] + 1]
            self._probs[:, solved, slots.start + changed[0] : slots.start + changed[-1] + 1] *= share

    def _solve_in_log_space(self, block: _Block, rows: Tensor) -> Float64[Tensor, "rows states steps"]:
        """Solve a block of some sequences in log space and return the log of its sums."""
        states, before, after = block.states, self._slots_before(block.steps), self._slots_after(block.steps)
        log_reach = self._log_sums_from_solved(block, rows)
        log_edge = block.log_edge[rows, :, block.within_others(states)]
        log_emit = self._dag.log_emit[rows, states, after]
        log_probs_RSI = self._log_probs[rows, states]
        log_probs, log_sources = log_probs_RSI[..., after], log_probs_RSI[..., before]
        for i, later in self._in_order(states):
            torch.maximum(log_reach[:, i] + log_emit[:, i], log_probs[:, i], out=log_probs[:, i])
            sent = log_sources[:, i, None] + log_edge[:, later, i, None]
            torch.logaddexp(log_reach[:, later], sent, out=log_reach[:, later])
        return log_reach

    def _log_sums_from_solved(self, block: _Block, rows: Tensor) -> Float64[Tensor, "rows states steps"]:
        """Return the log of a block's sums over solved states; doubtful sums are computed again over all edges."""
        before = self._slots_before(block.steps)
        sums, log_ref = self._sums_from_solved(block, rows), self._log_ref[rows, :, before]
        log_sums = sums.log().add_(_finite(log_ref))
        is_doubtful = (sums < _MIN_SUM) & (log_ref > -math.inf) & self._is_reachable(block)[rows]
        if block.solved.start < block.solved.stop and is_doubtful.any():
            log_edge = block.log_edge[rows, :, block.within_others(block.solved)].mT
            _sum_again(log_sums, is_doubtful, self.log_probs()[rows, block.solved, before], log_edge)
        return log_sums

    def _slots_before(self, steps: slice) -> slice:
        """Return the slots that steps of this sweep leave."""
        return _after(steps) if self._is_backward else steps

    def _slots_after(self, steps: slice) -> slice:
        """Return the slots that steps of this sweep lead to."""
        return steps if self._is_backward else _after(steps)


def _after(steps: slice) -> slice:
    """Return the slots that steps lead to."""
    return slice(steps.start + 1, steps.stop + 1)


def _schedule(stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the order of work: solve first..stop if middle = stop, else sum from first..middle into middle..stop."""
    # a larger block has faster products but needs more additions
    num_states = min(max(_LEAST_BLOCK_STATES, math.isqrt(stop)), _MAX_BLOCK_STATES)
    for begin in range(0, stop, num_states):
        end = min(begin + num_states, stop)
        yield 0, begin, end
        yield begin, end, end


def _sum_again(log_reach: Tensor, is_doubtful: Tensor, log_source: Tensor, log_edge: Tensor) -> None:
    """Replace doubtful sums by log-sum-exps. Most are truly zero: no edge comes from a state that is reached."""
    num_alive = (log_edge > -math.inf).float().mT @ (log_source > -math.inf).float()
    indices = (is_doubtful & (num_alive > 0)).nonzero()
    for part in indices.split(max(1, _GATHER_ELEMENTS // log_source.shape[1])):
        row, state, slot = part.unbind(1)
        log_reach[row, state, slot] = (log_source[row, :, slot] + log_edge[row, :, state]).logsumexp(1)
