"""What every alignment backend must return, float32 and float64.

Expected values come from enumerating all paths (`oracles`) and from closed forms (a chain, equal paths; CTC is in
`test_ctc`); where paths are too many to list, `test_native_numbers` has a float64 loop. What must not be read is NaN in
every DAG. The bounds for float32 are those of the project: 5e-6 of the loss, 5e-5 of gradients.
"""

import math

import pytest
import torch

from exlm_cli.ops.alignment import (
    alignment_edge_posterior,
    alignment_posterior,
    best_alignment,
    states_alignment_nll,
)
from tests import oracles
from tests.unit.ops.alignment.dags import (
    Dag,
    assert_only_the_second_sequence_is_nan,
    assert_same_bits,
    make,
    nll_and_gradients,
)


def assert_equals(actual, expected, *, is_loss):
    """The project's bounds in float32; close to rounding in float64."""
    if actual.dtype == torch.float64:
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    elif is_loss:
        torch.testing.assert_close(actual.double(), expected, rtol=5e-6, atol=1e-6)
    else:
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=5e-5)


def assert_all_equal(actual, expected):
    for given, wanted, is_loss in zip(actual, expected, (True, False, False), strict=True):
        assert_equals(given, wanted.double(), is_loss=is_loss)


def assert_equals_enumeration(dag, backend):
    """Compare loss, gradients and best path with those of the enumerated paths; return the loss and the gradients."""
    results = nll_and_gradients(dag, backend)
    nodes, edges = oracles.enumerate_posteriors(*dag)
    assert_all_equal(results, (oracles.enumerate_nll(*dag), -nodes, -edges))
    posteriors = (entry_point(*dag, backend=backend) for entry_point in (alignment_posterior, alignment_edge_posterior))
    assert_all_equal((results[0], *posteriors), (results[0], nodes, edges))
    assert best_alignment(*dag, backend=backend).equal(oracles.enumerate_best(*dag))
    return results


@pytest.mark.parametrize(("num_targets", "num_states"), [(1, 3), (2, 5), (4, 6), (5, 9), (3, 15)])
def test_loss_posteriors_and_best_path_equal_those_of_enumerated_paths(num_targets, num_states, backend, dtype):
    assert_equals_enumeration(make(5, num_targets, num_states, is_ragged=False, dtype=dtype), backend)


def test_forbidden_edges_and_emissions_carry_nothing(backend, dtype):
    dag = make(40, 3, 10, missing_edges=0.5, missing_emissions=0.4, is_ragged=False, dtype=dtype)
    nll, grad_emit, grad_trans = assert_equals_enumeration(dag, backend)
    assert 0 < nll.isinf().sum() < 40
    assert (grad_emit[dag.log_emit == -math.inf] == 0).all()
    assert (grad_trans[dag.log_trans == -math.inf] == 0).all()


@pytest.mark.parametrize(("num_targets", "num_states"), [(20, 82), (13, 131)])
def test_equal_scores_count_the_paths(num_targets, num_states, backend, dtype):
    scores = (torch.zeros(1, rows, num_states, dtype=dtype) for rows in (num_targets, num_states))
    nll = states_alignment_nll(*scores, torch.tensor([num_targets]), torch.tensor([num_states]), backend=backend)
    expected = torch.tensor([-math.log(math.comb(num_states - 2, num_targets))], dtype=torch.float64)
    assert_equals(nll, expected, is_loss=True)


def test_a_chain_gives_the_plain_sum(backend, dtype):
    num_targets = 37
    dag = make(2, num_targets, num_targets + 2, is_ragged=False, dtype=dtype)
    chain = torch.arange(1, num_targets + 1)
    emitted = dag.log_emit[:, chain - 1, chain].double().sum(1)
    walked = dag.log_trans.diagonal(1, 1, 2).double().sum(1)
    assert_equals(states_alignment_nll(*dag, backend=backend), -(emitted + walked), is_loss=True)
    assert best_alignment(*dag, backend=backend).equal(chain.expand(2, -1))


@pytest.mark.parametrize(
    ("num_targets", "num_states", "lengths"),
    [(9, 40, [(9, 40), (4, 18), (1, 7)]), (30, 150, [(4, 10), (3, 9)])],
    ids=["the longest fills the batch", "whole blocks are padding in every sequence"],
)
def test_padding_changes_no_sequence_and_gets_no_gradient(num_targets, num_states, lengths, backend, dtype):
    B = len(lengths)
    log_emit = torch.full((B, num_targets, num_states), math.nan, dtype=dtype)
    log_trans = torch.full((B, num_states, num_states), math.nan, dtype=dtype)
    sequences = [make(1, T, S, is_ragged=False, dtype=dtype) for T, S in lengths]
    for row, (T, S) in enumerate(lengths):
        log_emit[row, :T, :S], log_trans[row, :S, :S] = sequences[row].log_emit[0], sequences[row].log_trans[0]
    dag = Dag(log_emit, log_trans, *map(torch.tensor, zip(*lengths, strict=True)))
    nll, grad_emit, grad_trans = nll_and_gradients(dag, backend)
    best = best_alignment(*dag, backend=backend)
    for row, (T, S) in enumerate(lengths):
        rows = slice(row, row + 1)
        inside = nll[rows], grad_emit[rows, :T, :S], grad_trans[rows, :S, :S]
        assert_all_equal(inside, nll_and_gradients(sequences[row], backend))
        assert grad_emit[row].count_nonzero() == T * (S - 1 - T)  # of the nodes that leave room for the others
        assert grad_trans[row].count_nonzero() == inside[2].triu(1).count_nonzero()
        assert best[rows, :T].equal(best_alignment(*sequences[row], backend=backend))


def test_sequences_without_a_path_cost_infinity_and_teach_nothing(backend, dtype):
    dag = make(9, 4, 12, is_ragged=False, dtype=dtype)
    dag = dag._replace(
        # empty, too few states for the targets, no states, one state, and in the last two nothing but -inf
        target_lengths=torch.tensor([4, 0, 4, 4, 1, 4, 2, 4, 4]),
        state_lengths=torch.tensor([12, 12, 5, 0, 1, 6, 2, 12, 12]),
    )
    dag.log_emit[7] = -math.inf
    dag.log_trans[8] = -math.inf
    nll, grad_emit, grad_trans = assert_equals_enumeration(dag, backend)
    is_infeasible = nll == math.inf
    assert is_infeasible.tolist() == [False, True, True, True, True, False, True, True, True]
    assert (grad_emit[is_infeasible] == 0).all()
    assert (grad_trans[is_infeasible] == 0).all()


@pytest.mark.parametrize("shape", [(0, 3, 8), (3, 0, 8), (3, 3, 0), (0, 0, 0)])
def test_empty_axes_give_no_path(shape, backend, dtype):
    B, T, S = shape
    lengths = torch.full((B,), T), torch.full((B,), S)
    dag = Dag(torch.zeros(shape, dtype=dtype), torch.zeros(B, S, S, dtype=dtype), *lengths)
    nll, grad_emit, grad_trans = nll_and_gradients(dag, backend)
    assert nll.equal(torch.full((B,), math.inf, dtype=dtype))
    assert grad_emit.equal(torch.zeros_like(dag.log_emit))
    assert grad_trans.equal(torch.zeros_like(dag.log_trans))
    assert best_alignment(*dag, backend=backend).equal(torch.full((B, T), -1))


@pytest.mark.parametrize(("tensor", "bad"), [("log_emit", math.nan), ("log_trans", math.inf)])
def test_a_nan_that_is_read_makes_only_its_sequence_nan(tensor, bad, backend):
    dag = make(3, 8, 40, is_ragged=False)
    getattr(dag, tensor)[1, 2, 20] = bad
    results = nll_and_gradients(dag, backend)
    assert results[0].isnan().tolist() == [False, True, False]
    if backend == "native":
        assert_only_the_second_sequence_is_nan(results)
    else:  # autograd leaves zeros among the NaNs
        assert all(gradient[1].isnan().any() for gradient in results[1:])
        assert all(gradient[[0, 2]].isfinite().all() for gradient in results[1:])


def test_strided_inputs_and_int32_lengths_give_the_same_bits(backend, dtype):
    dag = make(3, 7, 30, is_ragged=False, dtype=dtype)
    strided = Dag(
        dag.log_emit.transpose(0, 2).contiguous().transpose(0, 2),
        torch.stack([dag.log_trans, dag.log_trans], dim=-1)[..., 1],
        torch.stack([dag.target_lengths, dag.target_lengths], dim=1)[:, 0],
        dag.state_lengths.int()[:1].expand(3),
    )
    assert not any(x.is_contiguous() for x in strided)
    assert_same_bits(nll_and_gradients(strided, backend), nll_and_gradients(dag, backend))
    assert best_alignment(*strided, backend=backend).equal(best_alignment(*dag, backend=backend))
