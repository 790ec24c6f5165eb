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
_LARGEST_GAIN = 1e278
_LARGEST_PEAK = 1e250
_LARGEST_LOG_RISE = 400.0
_BLOCK_STATES = 24
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
            log_alpha = _Sweep(dag).run().log_probs()
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
                nll[rows].masked_fill(nll[rows] == math.inf, -math.inf),
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


class _Block(NamedTuple):
    """Some states that are solved together, and the edges they share with states solved before and with each other."""

    states: slice
    solved: slice  # those solved before that share a path with them
    steps: slice  # those by which the sweep comes to them
    log_edge: Float[Tensor, "B states others"]  # others: `solved` and `states`, in the order of the DAG
    edge: Float64[Tensor, "B states others"]
    sums: Float64[Tensor, "B states steps"]  # over edges from `solved`, relative to the slots they come from

    @property
    def others(self) -> slice:
        return slice(min(self.solved.start, self.states.start), max(self.solved.stop, self.states.stop))

    def among_others(self, states: slice) -> slice:
        return slice(states.start - self.others.start, states.stop - self.others.start)


class _Sweep:
    """Solves all states in order, from the start (alpha) or, backwards and with a gradient to write, the end (beta)."""

    def __init__(self, dag: _Dag, gradient: _Gradient | None = None) -> None:
        B, S, num_slots = dag.log_emit.shape
        self._dag, self._gradient, self._is_backward = dag, gradient, gradient is not None
        begin, log_begin = (dag.start, dag.log_emit.new_zeros(B)) if gradient is None else (dag.end, gradient.nll)
        row_B, _, slot_B = begin
        self._log_ref = dag.log_emit.new_full((B, 1, num_slots), -math.inf)
        self._log_ref[row_B, 0, slot_B] = log_begin
        self._probs = torch.zeros_like(dag.log_emit)
        self._probs[begin] = (log_begin != -math.inf).double()
        self._is_alive: Bool[Tensor, "B 1 1"] = (log_begin != -math.inf)[:, None, None]
        self._log_probs = torch.full_like(dag.log_emit, -math.inf)
        self._log_probs[begin] = log_begin
        # where `_log_probs` is still to be taken from sums: states, slots, the sums and their reference
        self._unlogged: list[tuple[slice, slice, Tensor, Tensor]] = []

    def run(self) -> Self:
        """Solve every state."""
        block = None
        num_states = self._probs.shape[1]
        for first, middle, stop in _schedule(0, num_states):
            if middle == stop:
                if block is not None:
                    self._solve(block)
            elif self._is_backward:
                block = self._carry(
                    slice(num_states - middle, num_states - first), slice(num_states - stop, num_states - middle)
                )
            else:
                block = self._carry(slice(first, middle), slice(middle, stop))
        return self

    def log_probs(self) -> Tensor:
        """log alpha or log beta of all states solved so far (B, S, I)."""
        for states, slots, sums, log_ref in self._unlogged:
            self._log(states, slots, sums.log().add_(log_ref))
        self._unlogged.clear()
        return self._log_probs

    def _log(self, states: slice, slots: slice, log_reach: Tensor) -> None:
        log_probs = self._log_probs[:, states, slots]
        # where the sweep begins, the probability is there already
        torch.maximum(log_reach + self._dag.log_emit[:, states, slots], log_probs, out=log_probs)

    def _carry(self, solved: slice, states: slice) -> _Block | None:
        """Sum what solved states send to others; None where no path comes there."""
        steps = self._dag.steps(states.start, states.stop - 1)
        if steps.start == steps.stop:
            return None
        if self._is_backward:
            solved = slice(solved.start, max(solved.start, min(solved.stop, steps.stop + self._dag.most_skipped + 1)))
            log_edge = self._dag.log_edges(states, slice(states.start, solved.stop))
            edge = log_edge.to(torch.float64, copy=True).exp_()
        else:
            solved = slice(min(steps.start, solved.stop), solved.stop)
            log_edge = self._dag.log_edges(slice(solved.start, states.stop), states).mT
            edge = log_edge.to(torch.float64, copy=True).exp_()
        block = _Block(states, solved, steps, log_edge, edge, edge[:0])
        return block._replace(sums=self._sum(block))

    def _sum(self, block: _Block, rows: Tensor | slice = slice(None)) -> Tensor:
        probs = self._probs[rows, block.solved, self._slots_before(block.steps)]
        return block.edge[rows, :, block.among_others(block.solved)] @ probs

    def _solve(self, block: _Block) -> None:
        """Solve a few states one after the other, each adding to those still to come."""
        states, steps, sums = block.states, block.steps, block.sums
        before, after = self._slots_before(steps), self._slots_after(steps)
        log_emit = self._dag.log_emit[:, states, after]
        log_ref_before, log_ref_after = self._guess_refs(steps, log_emit)
        emit = (log_emit + (log_ref_before - log_ref_after)).exp_()
        edge = block.edge[:, :, block.among_others(states)]
        sources, probs = self._probs[:, states, before], self._probs[:, states, after]
        for i, later in self._in_order(block):
            probs[:, i].addcmul_(sums[:, i], emit[:, i])
            sums[:, later].addcmul_(sources[:, i, None], edge[:, later, i, None])
        peak = probs.amax(1, keepdim=True)
        log_peak = peak.log().add_(log_ref_after)
        rows = self._doubtful_rows(block, peak)
        if len(rows):
            log_reach_rows = self._solve_in_log_space(block, rows)
            log_reach = sums.log().add_(log_ref_before)
            log_reach[rows] = log_reach_rows
            self._log(states, after, log_reach)
            log_peak[rows] = self._log_probs[rows, states, after].amax(1, keepdim=True)
            self._raise_refs(states, after, log_ref_after, log_peak)
            log_ref = self._log_ref[rows, :, after]
            self._probs[rows, states, after] = (self._log_probs[rows, states, after] - _finite(log_ref)).exp_()
        else:
            self._unlogged.append((states, after, sums, log_ref_before))
            self._raise_refs(states, after, log_ref_after, log_peak)
            log_reach = None
        if self._gradient is not None:
            self._write_posteriors(self._gradient, block, log_ref_before, rows, log_reach)

    def _in_order(self, block: _Block) -> Iterator[tuple[int, slice]]:
        """Each state of a block and those after it in the order of the sweep."""
        num_states = block.states.stop - block.states.start
        for i in range(num_states):
            yield (num_states - 1 - i, slice(0, num_states - 1 - i)) if self._is_backward else (i, slice(i + 1, None))

    def _write_posteriors(
        self, gradient: _Gradient, block: _Block, log_ref: Tensor, rows: Tensor, log_reach: Tensor | None
    ) -> None:
        """Write posteriors of a block's emissions and of the edges that leave it."""
        states, steps = block.states, block.steps
        slots, others = self._slots_before(steps), block.others
        log_source = gradient.log_alpha[:, states, steps]
        gain = (log_source + self._log_ref[..., slots]).exp_()
        # no good edge joins such a source to the peak, and the targets it leads to may be lost beside the peak
        is_extreme = gain.amax((1, 2)) > _LARGEST_GAIN
        extreme = is_extreme.nonzero()[:, 0]
        gain *= gradient.scale
        if gradient.grad_trans is not None:
            grad = gradient.grad_trans[:, states, others]
            grad.copy_((gain @ self._probs[:, others, slots].mT).mul_(block.edge))
            for row in extreme.tolist():
                log_probs = self.log_probs()[row, others, slots]
                for v, log_source_I in enumerate(log_source[row]):
                    grad[row, v] = (
                        (log_source_I + log_probs).logsumexp(1) + block.log_edge[row, v]
                    ).exp() * gradient.scale[row, 0]
            grad[:, :, block.among_others(states)].triu_(1)
        if gradient.grad_emit is not None:
            first = max(1, steps.start)
            log_new_ref = self._log_ref[..., slots]
            change = (log_ref - log_new_ref).exp_().masked_fill_(log_new_ref == -math.inf, 0.0)
            posterior = gain.mul_(change).mul_(block.sums)
            if log_reach is not None or len(extreme):
                if log_reach is None:
                    log_reach = block.sums.log() + log_ref
                is_extreme[rows] = True
                rows = is_extreme.nonzero()[:, 0]
                posterior[rows] = (log_source[rows] + log_reach[rows]).exp_() * gradient.scale[rows]
            # slot 0 has no target
            gradient.grad_emit[:, first - 1 : steps.stop - 1, states] = posterior[:, :, first - steps.start :].mT

    def _guess_refs(self, steps: slice, log_emit: Tensor) -> tuple[Tensor, Tensor]:
        """References of the slots before and after steps; of those not reached yet, what emissions suggest."""
        log_ref = self._log_ref[..., steps.start : steps.stop + 1].clone()
        is_new = log_ref == -math.inf
        if is_new.any():
            known = log_ref.masked_fill(is_new, 0.0)
            mean = _finite(log_emit).mean(1, keepdim=True)
            change = known.clone()
            if self._is_backward:
                change[..., :-1] -= known[..., 1:]
                change[..., :-1] = mean.where(is_new[..., :-1], change[..., :-1])
                guess = change.flip(-1).cumsum(-1).flip(-1)
            else:
                change[..., 1:] -= known[..., :-1]
                change[..., 1:] = mean.where(is_new[..., 1:], change[..., 1:])
                guess = change.cumsum(-1)
            log_ref = guess.where(is_new, log_ref)
        return (log_ref[..., 1:], log_ref[..., :-1]) if self._is_backward else (log_ref[..., :-1], log_ref[..., 1:])

    def _doubtful_rows(self, block: _Block, peak: Tensor) -> Tensor:
        """Sequences whose sums in a block may have lost something, or are too large."""
        is_doubtful = ~(peak.amax((1, 2)) < _LARGEST_PEAK)
        if bool(block.sums.amin() < _LEAST_SUM):
            is_doubtful |= ((block.sums < _LEAST_SUM) & self._is_reachable(block)).any(2).any(1)
        return is_doubtful.nonzero()[:, 0]

    def _is_reachable(self, block: _Block) -> Tensor:
        """Whether there are states enough for the targets between where the sweep begins and a block, by step."""
        device = self._probs.device
        state = torch.arange(block.states.start, block.states.stop, device=device)[:, None]
        step = torch.arange(block.steps.start, block.steps.stop, device=device)
        _, last_state, last_slot = (x[:, None, None] for x in self._dag.end)
        if self._is_backward:
            return self._is_alive & (step < last_slot) & (state - step <= last_state - last_slot)
        return (step < last_slot) & (step < state) & (state <= last_state)

    def _raise_refs(self, states: slice, slots: slice, log_ref_used: Tensor, log_peak: Tensor) -> None:
        """Raise references to peaks far above them; probabilities so far follow, those of states from `log_ref_used`."""
        log_ref = self._log_ref[..., slots].clone()
        is_raised = log_peak > log_ref + _LARGEST_LOG_RISE
        if not is_raised.any():
            return
        log_new_ref = log_peak.where(is_raised, log_ref)
        self._log_ref[..., slots] = log_new_ref
        self._probs[:, states, slots] *= (
            (log_ref_used - _finite(log_new_ref)).exp_().where(log_new_ref > -math.inf, 1.0)
        )
        changed = (is_raised & (log_ref > -math.inf)).any(0)[0].nonzero()[:, 0].tolist()
        if changed:
            changed_slots = slice(slots.start + changed[0], slots.start + changed[-1] + 1)
            solved = slice(states.stop, None) if self._is_backward else slice(0, states.start)
            share = (log_ref - _finite(log_new_ref)).exp_()
            self._probs[:, solved, changed_slots] *= share[..., changed[0] : changed[-1] + 1]

    def _solve_in_log_space(self, block: _Block, rows: Tensor) -> Tensor:
        """log of what arrives at a block in some sequences (rows, states, steps), whatever its range."""
        after = self._slots_after(block.steps)
        log_reach = self._log_reach(block, rows)
        log_edge = block.log_edge[rows, :, block.among_others(block.states)]
        log_emit = self._dag.log_emit[rows, block.states, after]
        log_probs_RSI = self._log_probs[rows, block.states]
        log_probs, log_sources = log_probs_RSI[..., after], log_probs_RSI[..., self._slots_before(block.steps)]
        for i, later in self._in_order(block):
            torch.maximum(log_reach[:, i] + log_emit[:, i], log_probs[:, i], out=log_probs[:, i])
            sent = log_sources[:, i, None] + log_edge[:, later, i, None]
            torch.logaddexp(log_reach[:, later], sent, out=log_reach[:, later])
        return log_reach

    def _log_reach(self, block: _Block, rows: Tensor) -> Tensor:
        """log of what has been carried to a block; doubtful sums are taken again, all edges at once."""
        before = self._slots_before(block.steps)
        sums, log_ref = self._sum(block, rows), self._log_ref[rows, :, before]
        log_reach = sums.log().add_(_finite(log_ref))
        is_doubtful = (sums < _LEAST_SUM) & (log_ref > -math.inf) & self._is_reachable(block)[rows]
        if block.solved.start < block.solved.stop and is_doubtful.any():
            log_edge = block.log_edge[rows, :, block.among_others(block.solved)].mT
            _sum_again(log_reach, is_doubtful, self.log_probs()[rows, block.solved, before], log_edge)
        return log_reach

    def _slots_before(self, steps: slice) -> slice:
        """The slots that steps of this sweep leave."""
        return _after(steps) if self._is_backward else steps

    def _slots_after(self, steps: slice) -> slice:
        """The slots that steps of this sweep lead to."""
        return steps if self._is_backward else _after(steps)


def _after(steps: slice) -> slice:
    """The slots that steps lead to."""
    return slice(steps.start + 1, steps.stop + 1)


def _schedule(first: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Order of work: solve first..stop where middle = stop, else carry sums from first..middle to middle..stop."""
    for begin in range(first, stop, _BLOCK_STATES):
        end = min(begin + _BLOCK_STATES, stop)
        yield first, begin, end
        yield begin, end, end


def _sum_again(log_reach: Tensor, is_doubtful: Tensor, log_source: Tensor, log_edge: Tensor) -> None:
    """Replace doubtful sums by log-sum-exps. Most of them are truly zero: no edge comes from a living state."""
    num_alive = (log_edge > -math.inf).float().mT @ (log_source > -math.inf).float()
    indices = (is_doubtful & (num_alive > 0)).nonzero()
    for part in indices.split(max(1, _GATHER_ELEMENTS // max(1, log_source.shape[1]))):
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
