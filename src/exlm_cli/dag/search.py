"""Search for the most probable token sequences of a DAG, with a proof that none was missed.

A beam over token prefixes. Each prefix has its forward vector over all nodes, so its alignments are summed, not
enumerated. Prefixes are ranked by an upper bound on their best completion. The search records the largest bound that it
cut: if that lies below the n-th best complete sequence, nothing better was missed. Otherwise it starts again with a
wider beam, until its work would exceed a limit; then the result is not proven.

The bound: what follows a token at node u has at most probability

    h(u) = max over tokens y of the sum over v > u of E[u, v] P_v(y) h(v),

because the next token is the same for all v. For fillings of any length, the maximum is also over the run of
neighbouring masks that emits next, and h(u) is at least E[u, EOS], the end. In a large DAG, h(u) looks at fewer tokens
of each node than the beam, and bounds all others by the most probable of them.

Axes: W prefixes, S nodes, C candidate tokens, T masks.
"""

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from exlm_cli.dag.allowed import Allowed
from exlm_cli.dag.graph import Dag, FloatArray
from exlm_cli.data import BoolArray, IntArray

Length = Literal["exact", "any"]
Tokens = tuple[tuple[int, int], ...]
"""(slot, token) pairs in the order of emission. A slot is a mask, or for `any` a run of neighbouring masks, since the
text is the same whichever of them a token is from."""
Scored = tuple[float, Tokens]

MAX_CANDIDATES = 20_000_000
"""Limit on the (prefix, token) pairs in memory: 160 MB."""
MAX_WORK = 8 * 10**10
"""Limit on the multiplications of one search: seconds on one core, so that the same input gives the same answer."""
_FIRST_WIDTH, _FIRST_TOKENS_PER_NODE = 32, 16
_ROUNDING = 1e-9


class SearchProblem:
    """A DAG prepared for the beam: groups of nodes that emit the same slot, candidate tokens, bounds.

    Args:
        dag: The DAG.
        length: Which fillings count.
        masks: For `exact`, the masks to fill, ascending, whatever tokens the others have; None: all.
        allowed: For `exact`, the allowed tokens; None: all.
    """

    def __init__(
        self, dag: Dag, length: Length, masks: Sequence[int] | None = None, allowed: Allowed | None = None
    ) -> None:
        self.length, self.allowed = length, allowed
        self.log_emit = dag.node_log_probs
        inner = np.flatnonzero(dag.node_mask >= 0)
        # under `exact` the order of emission says which mask is filled, so all nodes compete for one slot
        if length == "exact":
            self.groups = [inner]
            self.masks = list(range(dag.num_masks)) if masks is None else list(masks)
            self.max_tokens = len(self.masks)
            self.hops = hops_between(dag, self.masks)
        else:
            run = dag.mask_run[dag.node_mask[inner]]
            self.groups = [inner[run == number] for number in range(run[-1] + 1)]
            self.max_tokens = len(inner)
            self.hops = [dag.trans] * (self.max_tokens + 1)
        with np.errstate(divide="ignore"):
            logs = {id(hop): np.log(hop) for hop in self.hops}
        self.log_hops = [logs[id(hop)] for hop in self.hops]
        self.num_nodes = dag.num_nodes
        self.work_left = MAX_WORK

    def work_of(self, width: int, tokens_per_node: int) -> int:
        """Return the multiplications of one pass over prefixes, with its bounds."""
        beam = self.max_tokens * width * self._pairs(tokens_per_node)
        return beam + self._work_of_bound(self._tokens_of_bound(tokens_per_node))

    def _pairs(self, tokens_per_node: int) -> int:
        """Return the number of (node, candidate token) pairs, at most."""
        vocab_size = self.log_emit.shape[1]
        return sum(len(nodes) * min(vocab_size, len(nodes) * tokens_per_node) for nodes in self.groups)

    def _work_of_bound(self, tokens_per_node: int) -> int:
        num_steps = self.max_tokens if self.length == "exact" else 1
        return num_steps * self.num_nodes * self._pairs(tokens_per_node)

    def _tokens_of_bound(self, tokens_per_node: int) -> int:
        while tokens_per_node > 1 and self._work_of_bound(tokens_per_node) > MAX_WORK // 4:
            tokens_per_node //= 2
        return tokens_per_node

    def prepare(self, tokens_per_node: int) -> None:
        """Choose the candidates, and bound what follows each node."""
        num_in_bound = self._tokens_of_bound(tokens_per_node)
        self._choose_candidates(num_in_bound)
        self.log_rest = self._bound_what_follows()
        if num_in_bound != tokens_per_node:
            self._choose_candidates(tokens_per_node)

    def _choose_candidates(self, tokens_per_node: int) -> None:
        """Keep the best tokens of every node; all others of a group are bounded together by `floor`."""
        num_tokens = min(tokens_per_node, self.log_emit.shape[1])
        self.candidates: list[IntArray] = []
        self.emit: list[FloatArray] = []
        self.floor: list[FloatArray] = []
        for nodes in self.groups:
            log_emit = self.log_emit[nodes]
            if self.allowed is not None:
                self.candidates.append(self.allowed.tokens)
                self.emit.append(np.exp(log_emit[:, self.allowed.tokens]))
                self.floor.append(np.zeros(len(nodes)))
                continue
            kept = np.argpartition(-log_emit, num_tokens - 1, axis=1)[:, :num_tokens]
            tokens = np.unique(kept)
            self.candidates.append(tokens)
            self.emit.append(np.exp(log_emit[:, tokens]))
            worst_kept = np.exp(np.take_along_axis(log_emit, kept, axis=1).min(axis=1))
            self.floor.append(worst_kept if len(tokens) < log_emit.shape[1] else np.zeros(len(nodes)))
        self.group_of_column = np.repeat(np.arange(len(self.groups)), [len(c) for c in self.candidates])
        self.token_of_column = np.concatenate(self.candidates)

    def bound_children(self, log_weight_WS: FloatArray, position: int) -> tuple[FloatArray, FloatArray]:
        """Return log of a group's sum of weight * P(token): (W, C) for candidates, (W,) for any other token."""
        weights = [log_weight_WS[:, nodes] for nodes in self.groups]
        columns = [log_matmul(w, emit) for w, emit in zip(weights, self.emit, strict=True)]
        others = [log_matmul(w, floor[:, None]) for w, floor in zip(weights, self.floor, strict=True)]
        children_WC = np.concatenate(columns, axis=1)
        if self.allowed is not None:
            children_WC[:, ~self.allowed.at(position)] = -np.inf
        return children_WC, np.concatenate(others, axis=1).max(axis=1)

    def _bound_what_follows(self) -> FloatArray:
        """Return log h, (tokens emitted, S); for fillings of any length, it does not depend on their number."""
        log_end_S = self.log_hops[-1][:, -1]
        if self.length == "exact":
            log_rest = np.full((self.max_tokens + 1, len(log_end_S)), -np.inf)
            log_rest[-1] = log_end_S
            for t in range(self.max_tokens - 1, 0, -1):
                children, others = self.bound_children(self.log_hops[t] + log_rest[t + 1], t)
                log_rest[t] = np.maximum(children.max(axis=1), others)
            return log_rest
        log_rest_S = log_end_S.copy()
        for node in range(len(log_end_S) - 2, 0, -1):
            children, others = self.bound_children((self.log_hops[0][node] + log_rest_S)[None], 0)
            log_rest_S[node] = max(log_end_S[node], children.max(), others[0])
        return np.broadcast_to(log_rest_S, (self.max_tokens + 1, len(log_rest_S)))


def hops_between(dag: Dag, masks: Sequence[int]) -> list[FloatArray]:
    """Return the edges (S, S) to the node of each of some masks from that of the one before, and to the end.

    Others between them may have any tokens: each is one step over the edges.
    """
    steps = np.diff([-1, *masks, dag.num_masks]).tolist()
    powers = {n: dag.trans if n == 1 else np.linalg.matrix_power(dag.trans, n) for n in set(steps)}
    return [powers[n] for n in steps]


def log_matmul(log_weight_WS: FloatArray, matrix_SC: FloatArray) -> FloatArray:
    """Return log(exp(log_weight) @ matrix), (W, C)."""
    peak_W1 = np.maximum(log_weight_WS.max(axis=1, keepdims=True), -1e300)
    with np.errstate(divide="ignore"):
        product: FloatArray = np.log(np.exp(log_weight_WS - peak_W1) @ matrix_SC) + peak_W1
    return product


def best_sequences(problem: SearchProblem, wanted: int) -> tuple[list[Scored], bool]:
    """Return the `wanted` most probable token sequences, or all if there are fewer, and whether that is proven.

    Each has its log-probability, nats, summed over all its paths. All calls for one problem share a limit on the work.
    If not even the first pass fits, it uses fewer tokens and then fewer prefixes, and the result may be shorter.
    """
    width, tokens_per_node = max(_FIRST_WIDTH, 2 * wanted), max(_FIRST_TOKENS_PER_NODE, wanted + 1)
    while tokens_per_node > 1 and problem.work_of(width, tokens_per_node) > problem.work_left:
        tokens_per_node //= 2
    while width > _FIRST_WIDTH and problem.work_of(width, tokens_per_node) > problem.work_left:
        width //= 2
    log_known = -np.inf
    while True:
        problem.work_left -= problem.work_of(width, tokens_per_node)
        problem.prepare(tokens_per_node)
        found, log_cut = _beam(problem, width, wanted, log_known)
        found = found[:wanted]
        log_known = found[-1][0] if len(found) == wanted else -np.inf
        is_proven = log_cut <= log_known + _ROUNDING
        is_memory_full = 16 * width * len(problem.token_of_column) > MAX_CANDIDATES
        if is_proven or is_memory_full or problem.work_of(4 * width, 4 * tokens_per_node) > problem.work_left:
            return found, is_proven
        width, tokens_per_node = 4 * width, 4 * tokens_per_node


def _beam(problem: SearchProblem, width: int, wanted: int, log_known: float) -> tuple[list[Scored], float]:
    """Return complete sequences, best first, and the largest bound among cut prefixes that might reach `log_known`.

    At least `wanted` sequences have log-probability `log_known` or more, so prefixes with a lower bound are dropped.
    """
    log_alpha_WS = np.full((1, problem.num_nodes), -np.inf)
    log_alpha_WS[0, 0] = 0.0
    prefixes: list[Tokens] = [()]
    states = [None if problem.allowed is None else problem.allowed.start]
    done: list[Scored] = []
    log_cut = -np.inf
    for num_tokens in range(problem.max_tokens + 1):
        log_reach_WS = log_matmul(log_alpha_WS, problem.hops[num_tokens])
        if problem.length == "any" or num_tokens == problem.max_tokens:
            done += [(float(p), prefix) for p, prefix in zip(log_reach_WS[:, -1], prefixes, strict=True) if p > -np.inf]
            done = sorted(done, key=lambda item: (-item[0], item[1]))[:wanted]
            if len(done) == wanted:
                log_known = max(log_known, done[-1][0])
        if num_tokens == problem.max_tokens:
            break
        children_WC, others_W = problem.bound_children(log_reach_WS + problem.log_rest[num_tokens + 1], num_tokens)
        if problem.allowed is not None:
            children_WC[~_allowed_after(problem.allowed, states, num_tokens)] = -np.inf
        log_cut = max(log_cut, float(others_W.max()))
        row, column, log_lost = _keep_best(children_WC, width, log_known - _ROUNDING)
        log_cut = max(log_cut, log_lost)
        if len(row) == 0:
            break
        group, token = problem.group_of_column[column], problem.token_of_column[column]
        log_alpha_WS = np.full((len(row), problem.num_nodes), -np.inf)
        for g, nodes in enumerate(problem.groups):
            mine = np.flatnonzero(group == g)
            emitted = problem.log_emit[np.ix_(nodes, token[mine])].T
            log_alpha_WS[np.ix_(mine, nodes)] = log_reach_WS[np.ix_(row[mine], nodes)] + emitted
        if problem.allowed is not None:
            states = [problem.allowed.step(states[r], num_tokens, c) for r, c in zip(row, column, strict=True)]
        slot = group if problem.length == "any" else np.full(len(row), problem.masks[num_tokens])
        prefixes = [(*prefixes[r], (int(m), int(y))) for r, m, y in zip(row, slot, token, strict=True)]
    return done, log_cut


def _allowed_after(allowed: Allowed, states: list[Hashable], position: int) -> BoolArray:
    """Return (W, C) the tokens that may follow each prefix."""
    rows = {state: allowed.after(state, position) for state in set(states)}
    return np.stack([rows[state] for state in states])


def _keep_best(bounds_WC: FloatArray, width: int, log_known: float) -> tuple[IntArray, IntArray, float]:
    """Return rows and columns of the `width` largest bounds that reach `log_known`, and the largest one beyond them."""
    flat = bounds_WC.ravel()
    kept, log_lost = np.arange(len(flat)), -np.inf
    if len(flat) > width:
        order = np.argpartition(-flat, width)
        kept, log_lost = order[:width], float(flat[order[width]])
    kept = kept[(flat[kept] >= log_known) & (flat[kept] > -np.inf)]
    row, column = np.unravel_index(np.sort(kept), bounds_WC.shape)
    return row, column, log_lost
