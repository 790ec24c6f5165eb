"""What every alignment backend must return, float32 and float64.

Expected values come from enumerating all paths (`oracles`), from closed forms (a chain, equal paths, CTC is in
`test_ctc`) and from the rules of probability; where paths are too many to list, `test_native_numbers` has a
float64 loop. The bounds for float32 are those of the project: 5e-6 of the loss, 5e-5 of gradients.
"""

import math

import pytest
import torch
from torch import Tensor

from exlm_cli.ops.alignment import (
    Backend,
    alignment_edge_posterior,
    alignment_posterior,
    best_alignment,
    states_alignment_nll,
)
from exlm_cli.ops.alignment.reference import safe_logsumexp
from tests import oracles
from tests.unit.ops.alignment.dags import (
    Dag,
    assert_only_the_second_sequence_is_nan,
    assert_same_bits,
    make,
    make_dag,
    nll_and_gradients,
)  # fmt: skip

SHAPES = [(1, 3), (2, 5), (4, 6), (5, 9), (3, 15)]


def assert_equals(actual: Tensor, expected: Tensor, *, is_loss: bool) -> None:
    """The project's bounds in float32; close to rounding in float64."""
    if actual.dtype == torch.float64:
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    elif is_loss:
        torch.testing.assert_close(actual.double(), expected, rtol=5e-6, atol=1e-6)
    else:
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=5e-5)


def assert_all_equal(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for given, wanted, is_loss in zip(actual, expected, (True, False, False), strict=True):
        assert_equals(given, wanted.double(), is_loss=is_loss)


def assert_equals_enumeration(dag: Dag, backend: Backend) -> tuple[Tensor, ...]:
    """Compare loss, gradients and best path with those of the enumerated paths; return the loss and the gradients."""
    results = nll_and_gradients(dag, backend)
    nodes, edges = oracles.enumerate_posteriors(*dag)
    assert_all_equal(results, (oracles.enumerate_nll(*dag), -nodes, -edges))
    posteriors = (entry_point(*dag, backend=backend) for entry_point in (alignment_posterior, alignment_edge_posterior))
    assert_all_equal((results[0], *posteriors), (results[0], nodes, edges))
    assert best_alignment(*dag, backend=backend).equal(oracles.enumerate_best(*dag))
    return results


@pytest.mark.parametrize(("num_targets", "num_states"), SHAPES)
def test_loss_posteriors_and_best_path_equal_those_of_enumerated_paths(num_targets, num_states, backend, dtype):
    assert_equals_enumeration(make_dag(num_targets, num_states, dtype=dtype, num_sequences=5), backend)


@pytest.mark.parametrize("sparsity", [0.3, 0.5])
def test_forbidden_edges_and_emissions_carry_nothing(sparsity, backend, dtype):
    dag = make_dag(3, 10, dtype=dtype, num_sequences=40)
    generator = torch.Generator().manual_seed(3)
    for log_prob in (dag.log_emit, dag.log_trans):
        log_prob[torch.rand(log_prob.shape, generator=generator) < sparsity] = -math.inf
    expected = oracles.enumerate_nll(*dag)
    assert 0 < expected.isinf().sum() < 40
    _, grad_emit, grad_trans = assert_equals_enumeration(dag, backend)
    assert (grad_emit[dag.log_emit == -math.inf] == 0).all()
    assert (grad_trans[dag.log_trans == -math.inf] == 0).all()


def test_a_chain_gives_the_plain_sum(backend, dtype):
    num_targets = 37
    dag = make_dag(num_targets, num_targets + 2, dtype=dtype)
    chain = torch.arange(1, num_targets + 1)
    emitted = dag.log_emit[:, chain - 1, chain].double().sum(1)
    walked = dag.log_trans.diagonal(1, 1, 2).double().sum(1)
    assert_equals(states_alignment_nll(*dag, backend=backend), -(emitted + walked), is_loss=True)
    assert best_alignment(*dag, backend=backend).equal(chain.expand(2, -1))


@pytest.mark.parametrize(("num_targets", "num_states"), [(1, 3), (20, 82), (13, 131)])
def test_equal_scores_count_the_paths(num_targets, num_states, backend, dtype):
    scores = (torch.zeros(1, rows, num_states, dtype=dtype) for rows in (num_targets, num_states))
    nll = states_alignment_nll(*scores, torch.tensor([num_targets]), torch.tensor([num_states]), backend=backend)
    expected = torch.tensor([-math.log(math.comb(num_states - 2, num_targets))], dtype=torch.float64)
    assert_equals(nll, expected, is_loss=True)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nothing_unread_changes_anything(poison, backend, dtype):
    dag = make_dag(6, 19, dtype=dtype, num_sequences=4)
    dag = dag._replace(target_lengths=torch.tensor([6, 2, 5, 1]), state_lengths=torch.tensor([19, 9, 14, 3]))
    state, target = torch.arange(19), torch.arange(6)
    is_inner = (state > 0) & (state < dag.state_lengths[:, None] - 1)
    is_emission = is_inner[:, None] & (target < dag.target_lengths[:, None])[:, :, None]
    is_edge = (state[:, None] < state) & (state < dag.state_lengths[:, None, None])
    clean = dag._replace(log_emit=dag.log_emit.where(is_emission, 0.0), log_trans=dag.log_trans.where(is_edge, 0.0))
    poisoned = dag._replace(
        log_emit=dag.log_emit.where(is_emission, poison), log_trans=dag.log_trans.where(is_edge, poison)
    )
    nll, grad_emit, grad_trans = nll_and_gradients(poisoned, backend)
    assert_same_bits((nll, grad_emit, grad_trans), nll_and_gradients(clean, backend))
    assert (grad_emit[~is_emission] == 0).all()
    assert (grad_trans[~is_edge] == 0).all()
    assert best_alignment(*poisoned, backend=backend).equal(oracles.enumerate_best(*clean))


@pytest.mark.parametrize(
    ("num_targets", "num_states", "lengths"),
    [(9, 40, [(9, 40), (4, 18), (1, 7)]), (30, 150, [(4, 10), (3, 9)])],
    ids=["the longest fills the batch", "whole blocks are padding in every sequence"],
)
def test_padding_changes_no_sequence(num_targets, num_states, lengths, backend, dtype):
    dag = make_dag(num_targets, num_states, dtype=dtype, num_sequences=len(lengths))
    target_lengths, state_lengths = map(torch.tensor, zip(*lengths, strict=True))
    dag = dag._replace(target_lengths=target_lengths, state_lengths=state_lengths)
    nll, grad_emit, grad_trans = nll_and_gradients(dag, backend)
    best = best_alignment(*dag, backend=backend)
    for row, (T, S) in enumerate(lengths):
        rows = slice(row, row + 1)
        alone = Dag(dag.log_emit[rows, :T, :S], dag.log_trans[rows, :S, :S], *(x[rows] for x in dag[2:]))
        inside = nll[rows], grad_emit[rows, :T, :S], grad_trans[rows, :S, :S]
        assert_all_equal(inside, nll_and_gradients(alone, backend))
        assert grad_emit[rows].count_nonzero() == inside[1].count_nonzero()
        assert grad_trans[rows].count_nonzero() == inside[2].count_nonzero()
        assert best[rows, :T].equal(best_alignment(*alone, backend=backend))


def test_sequences_without_a_path_cost_infinity_and_teach_nothing(backend, dtype):
    dag = make_dag(4, 12, dtype=dtype, num_sequences=9)
    dag = dag._replace(
        # empty, too few states for the targets, no states, one state, and in the last two nothing but -inf
        target_lengths=torch.tensor([4, 0, 4, 4, 1, 4, 2, 4, 4]),
        state_lengths=torch.tensor([12, 12, 5, 0, 1, 6, 2, 12, 12]),
    )
    dag.log_emit[7] = -math.inf
    dag.log_trans[8] = -math.inf
    nll, grad_emit, grad_trans = assert_equals_enumeration(dag, backend)
    assert nll.isfinite().tolist() == [True, False, False, False, False, True, False, False, False]
    is_infeasible = nll == math.inf
    assert (grad_emit[is_infeasible] == 0).all()
    assert (grad_trans[is_infeasible] == 0).all()
    assert (best_alignment(*dag, backend=backend)[is_infeasible] == -1).all()


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
    dag = make_dag(7, 30, dtype=dtype, num_sequences=3)
    strided = Dag(
        dag.log_emit.transpose(0, 2).contiguous().transpose(0, 2),
        torch.stack([dag.log_trans, dag.log_trans], dim=-1)[..., 1],
        torch.stack([dag.target_lengths, dag.target_lengths], dim=1)[:, 0],
        dag.state_lengths.int()[:1].expand(3),
    )
    assert not any(x.is_contiguous() for x in strided)
    assert_same_bits(nll_and_gradients(strided, backend), nll_and_gradients(dag, backend))
    assert best_alignment(*strided, backend=backend).equal(best_alignment(*dag, backend=backend))


def test_safe_logsumexp_is_that_of_torch_where_something_is_alive():
    log_terms = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 300
    log_terms[1, :4, 2] = -math.inf
    for dim in (0, 1, 2, -1):
        torch.testing.assert_close(safe_logsumexp(log_terms, dim), log_terms.logsumexp(dim))


def test_the_gradient_of_safe_logsumexp_is_the_softmax_and_zero_where_all_is_dead():
    """There `torch.logsumexp` has a NaN gradient."""
    log_terms = torch.tensor([[0.5, -math.inf, 2.0], [-math.inf] * 3], requires_grad=True)
    total = safe_logsumexp(log_terms, dim=1)
    assert total[1] == -math.inf
    (gradient,) = torch.autograd.grad(total.sum(), log_terms)
    torch.testing.assert_close(gradient, torch.stack([log_terms[0].detach().softmax(0), torch.zeros(3)]))
