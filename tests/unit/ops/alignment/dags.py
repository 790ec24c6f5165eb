"""DAGs for tests, some made to break a kernel, and the recursion of App. I.1 as a float64 loop to judge it by."""

import functools
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exlm_cli.ops.alignment import states_alignment_nll


class Dag(NamedTuple):
    """Arguments of the alignment op, in order."""

    log_emit: Tensor
    log_trans: Tensor
    target_lengths: Tensor
    state_lengths: Tensor


class Truth(NamedTuple):
    """Float64 results; gradients are those of the summed losses that are finite."""

    nll: Tensor
    grad_emit: Tensor
    grad_trans: Tensor
    best_score: Tensor


def nll_and_gradients(dag, backend, weights=None):
    """Loss of each sequence, and both gradients of the weighted sum."""
    inputs = [x.detach().requires_grad_() for x in dag[:2]]
    nll = states_alignment_nll(*inputs, *dag[2:], backend=backend)
    return nll.detach(), *torch.autograd.grad(nll, inputs, torch.ones_like(nll) if weights is None else weights)


def assert_near(results, truth, loss_bound, gradient_bound):
    """Compare the loss within a relative and absolute bound, gradients within an absolute one."""
    nll, *gradients = (x.cpu().double() for x in results[:3])
    torch.testing.assert_close(nll, truth.nll, rtol=loss_bound, atol=loss_bound)
    for gradient, expected in zip(gradients, truth[1:3], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=gradient_bound)


def assert_same_bits(results, expected):
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def assert_only_the_second_sequence_is_nan(results):
    """Every gradient at an inner node or at an edge of the second of three sequences, and of no other."""
    nll, grad_emit, grad_trans = results[:3]
    num_states = grad_trans.shape[-1]
    assert nll.isnan().tolist() == [False, True, False]
    assert grad_emit[1, :, 1:-1].isnan().all()
    assert grad_trans[1].triu(1).isnan().sum() == num_states * (num_states - 1) / 2
    assert all(gradient[[0, 2]].isfinite().all() for gradient in (grad_emit, grad_trans))


def make(
    num_sequences,
    num_targets,
    num_states,
    *,
    emission_std=1.0,
    transition_std=1.0,
    missing_edges=0.0,
    missing_emissions=0.0,
    one_hot=None,
    is_normalised=True,
    is_ragged=True,
    dtype=torch.float32,
    seed=0,
):
    """A batch of random DAGs; ragged ones have infeasible and empty sequences among the others.

    Whatever must not be read is NaN: padding, the emission columns of both ends, transitions at and below the diagonal.
    """
    random = np.random.default_rng(seed)
    B, T, S = num_sequences, num_targets, num_states
    log_emit = random.standard_normal((B, T, S)) * emission_std
    log_emit[random.random((B, T, S)) < missing_emissions] = -np.inf
    scores = random.standard_normal((B, S, S)) * transition_std
    if one_hot is not None:  # of every node, one edge has 0 and the others have this score
        scores = np.where(np.arange(S) == random.integers(0, S, (B, S, 1)), 0.0, one_hot)
    is_edge = np.triu(np.ones((S, S), bool), 1) & (random.random((B, S, S)) >= missing_edges)
    scores[~is_edge] = -np.inf
    log_trans = log_softmax(scores) if is_normalised else scores
    state_lengths = random.integers(0, S + 1, B) if is_ragged else np.full(B, S)
    target_lengths = random.integers(0, T + 1, B) if is_ragged else np.full(B, T)
    is_squeezed = random.random(B) < 0.8
    target_lengths[is_squeezed] = np.minimum(target_lengths, np.maximum(state_lengths - 2, 0))[is_squeezed]
    target_lengths[:1], state_lengths[:1] = T, S
    state_S, target_T = np.arange(S), np.arange(T)
    is_inner = (state_S > 0) & (state_S < state_lengths[:, None] - 1)
    log_emit[~((target_T < target_lengths[:, None])[:, :, None] & is_inner[:, None, :])] = np.nan
    log_trans[~((state_S[:, None] < state_S) & (state_S < state_lengths[:, None, None]))] = np.nan
    return Dag(
        torch.from_numpy(log_emit).to(dtype),
        torch.from_numpy(log_trans).to(dtype),
        torch.from_numpy(target_lengths),
        torch.from_numpy(state_lengths),
    )


def with_a_hidden_share(*, dtype=torch.float32):
    """Two paths each, where one of the factors of the lesser share, 0.25 and 0.15 %, underflows beside the other path.

    A node e-88 less likely than the other, over an edge of e41 that makes up for it; and an edge of e-87.5, from a node
    e40 likelier than an earlier one.
    """
    num_states, first, second, last = 40, 1, 20, 38
    log_emit = torch.full((2, 2, num_states), -torch.inf, dtype=dtype)
    log_emit[:, 0, first], log_emit[:, 0, second] = torch.tensor([0.0, -40.0]), torch.tensor([-88.0, 0.0])
    log_emit[:, 1, last] = 0.0
    log_trans = torch.full((2, num_states, num_states), -torch.inf, dtype=dtype)
    log_trans[:, 0, first] = log_trans[:, 0, second] = log_trans[:, last, last + 1] = 0.0
    log_trans[:, first, last], log_trans[:, second, last] = -41.0, torch.tensor([41.0, -87.5])
    return Dag(log_emit, log_trans, torch.tensor([2, 2]), torch.tensor([num_states, num_states]))


def with_a_likely_start_that_leads_nowhere(*, dtype=torch.float32):
    """The first inner nodes are e2000 likelier than the others, which are the only way through."""
    dag = make(2, 6, 60, is_ragged=False, dtype=dtype)
    dag.log_emit[:, :, 20:] -= 2000.0
    dag.log_trans[:, 1:20, 20:] = -torch.inf
    return dag


_MIDDLE = partial(make, 6, 20, 90)
_TEXT = partial(make, 2, 77, 310)
# the seeds are those of random searches that found what a kernel got wrong
CASES = {
    "one target": partial(make, 3, 1, 3, is_ragged=False),
    "two nodes, no path": partial(make, 2, 1, 2),
    "as many nodes as targets": partial(make, 2, 63, 65, is_ragged=False),
    "one sequence": partial(make, 1, 9, 40),
    "257 sequences": partial(make, 257, 7, 16),
    "text": _TEXT,
    "tall": partial(make, 2, 150, 302),
    "three groups of slots": partial(make, 1, 200, 260, emission_std=30.0),
    "wide": partial(make, 1, 3, 1026, is_ragged=False),
    "emissions of std 30": partial(_TEXT, emission_std=30.0),
    "few states to spare": partial(make, 3, 48, 72, emission_std=5.0, transition_std=0.1, seed=566),
    "transitions of std 30": partial(make, 3, 42, 130, emission_std=5.0, transition_std=30.0, seed=50489),
    "all of std 30": partial(make, 6, 30, 100, emission_std=30.0, transition_std=30.0),
    "one edge of e60": partial(_MIDDLE, one_hot=-60.0),
    "one edge of e1000": partial(_MIDDLE, one_hot=-1000.0, emission_std=30.0),
    "one-hot transitions": partial(_MIDDLE, one_hot=-1e4),
    "one-hot transitions, std 30": partial(_MIDDLE, one_hot=-1e4, emission_std=30.0),
    "missing edges": partial(_MIDDLE, missing_edges=0.6),
    "missing edges, std 30": partial(_MIDDLE, missing_edges=0.7, emission_std=30.0, transition_std=30.0),
    "hardly any edge": partial(make, 20, 3, 40, missing_edges=0.9),
    "missing emissions": partial(_MIDDLE, missing_emissions=0.5),
    "scores that are no probabilities": partial(_MIDDLE, is_normalised=False, transition_std=100.0),
    "scores of thousands": partial(_MIDDLE, is_normalised=False, transition_std=1000.0),
    "a hidden share": with_a_hidden_share,
    "a likely start that leads nowhere": with_a_likely_start_that_leads_nowhere,
}


def truth(dag):
    """The recursion, sequence by sequence and target by target."""
    log_emit, log_trans = dag.log_emit.double().numpy(), dag.log_trans.double().numpy()
    B = len(log_emit)
    nll, best = np.full(B, np.inf), np.full(B, -np.inf)
    grad_emit, grad_trans = np.zeros_like(log_emit), np.zeros_like(log_trans)
    lengths = zip(dag.target_lengths.tolist(), dag.state_lengths.tolist(), strict=True)
    for row, (T, S) in enumerate(lengths):
        if T < 1 or S - 2 < T:
            continue
        edges = np.full((S, S), -np.inf)
        upper = np.triu_indices(S, 1)
        edges[upper] = log_trans[row, :S, :S][upper]
        emission = np.full((T, S), -np.inf)
        emission[:, 1:-1] = log_emit[row, :T, 1 : S - 1]
        alpha, beta = np.full((T + 1, S), -np.inf), np.full((T + 1, S), -np.inf)
        alpha[0, 0] = 0.0
        score = alpha[0]
        for t in range(T):
            alpha[t + 1] = np.logaddexp.reduce(alpha[t][:, None] + edges, axis=0) + emission[t]
            score = np.max(score[:, None] + edges, axis=0) + emission[t]
        best[row] = np.max(score + edges[:, -1])
        evidence = np.logaddexp.reduce(alpha[T] + edges[:, -1])
        nll[row] = -evidence
        if evidence == -np.inf:
            continue
        beta[T] = edges[:, -1]
        for t in reversed(range(T)):
            into = emission[t] + beta[t + 1]
            beta[t] = np.logaddexp.reduce(edges + into, axis=1)
            grad_emit[row, t, :S] = -np.exp(alpha[t + 1] + beta[t + 1] - evidence)
            grad_trans[row, :S, :S] -= np.exp(alpha[t][:, None] + edges + into - evidence)
        grad_trans[row, :S, S - 1] -= np.exp(alpha[T] + edges[:, -1] - evidence)
    return Truth(*(torch.from_numpy(x) for x in (nll, grad_emit, grad_trans, best)))


@functools.cache
def truth_of(case, dtype=torch.float32):
    """The truth of a case, for all tests that ask for it: the loop takes seconds on the large ones."""
    return truth(CASES[case](dtype=dtype))


def score_of(dag, nodes):
    """Log probability of one path of each sequence, -inf where `nodes` holds none."""
    scores = torch.full((len(nodes),), -torch.inf, dtype=torch.float64)
    lengths = zip(dag.target_lengths.tolist(), dag.state_lengths.tolist(), strict=True)
    for row, (T, S) in enumerate(lengths):
        if T == 0 or nodes[row, 0] < 0:
            continue
        inner = nodes[row, :T]
        path = torch.tensor([0, *inner.tolist(), S - 1])
        edges = dag.log_trans[row, path[:-1], path[1:]].double()
        scores[row] = edges.sum() + dag.log_emit[row, torch.arange(T), inner].double().sum()
    return scores


def log_softmax(scores):
    """Rows of -inf stay."""
    peak = scores.max(-1, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    total = np.exp(scores - peak).sum(-1, keepdims=True)
    return scores - peak - np.log(np.where(total == 0, 1.0, total))
