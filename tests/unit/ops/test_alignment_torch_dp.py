"""What only the `torch` backend can get wrong: sums lost to underflow, pieces of a batch, the order of its sweep.

Expected values are the float64 reference's. How often the slow way is taken is counted, as speed rests on it.
"""

import math

import pytest
import torch

from exlm_cli.ops.alignment import alignment_edge_posterior, best_alignment, states_alignment_nll, torch_dp
from tests.conftest import Dag, MakeDag


@pytest.fixture
def sums_taken_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of doubtful sums at each call that looks at them again."""
    counts: list[int] = []
    sum_again = torch_dp._sum_again

    def count(log_reach: torch.Tensor, is_doubtful: torch.Tensor, *others: torch.Tensor) -> None:
        counts.append(int(is_doubtful.sum()))
        sum_again(log_reach, is_doubtful, *others)

    monkeypatch.setattr(torch_dp, "_sum_again", count)
    return counts


def gradients(dag: Dag, backend: str) -> tuple[torch.Tensor, ...]:
    inputs = tuple(x.double().requires_grad_() for x in dag[:2])
    nll = states_alignment_nll(*inputs, *dag[2:], backend=backend)
    return nll.detach(), *torch.autograd.grad(nll.sum(), inputs)


def assert_equals_reference(dag: Dag) -> None:
    torch.testing.assert_close(gradients(dag, "torch"), gradients(dag, "reference"), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("emission_std", [1.0, 30.0, 1000.0])
def test_a_dag_with_all_its_edges_never_sums_twice(
    emission_std: float, make_dag: MakeDag, sums_taken_again: list[int]
) -> None:
    assert_equals_reference(make_dag(25, 102, emission_std=emission_std))
    assert not sums_taken_again


def test_a_range_of_weak_edges_is_no_reason_to_sum_twice(make_dag: MakeDag, sums_taken_again: list[int]) -> None:
    dag = make_dag(12, 60)
    dag.log_trans[:, :, 30:] -= 400.0
    assert_equals_reference(dag)
    assert not sums_taken_again


def test_sums_that_are_lost_are_taken_again(make_dag: MakeDag, sums_taken_again: list[int]) -> None:
    dag = make_dag(6, 60)
    dag.log_emit[:, :, 20:] -= 2000.0
    dag.log_trans[:, 1:20, 20:] = -math.inf
    assert_equals_reference(dag)
    assert sum(sums_taken_again) > 0


@pytest.mark.parametrize("gather_elements", [1, 100])
def test_lost_sums_may_be_taken_again_in_parts(
    gather_elements: int, make_dag: MakeDag, sums_taken_again: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_dp, "_GATHER_ELEMENTS", gather_elements)
    dag = make_dag(5, 40)
    dag.log_trans[:, 0, 1:] = -3000.0 - torch.arange(39.0).double()
    dag.log_trans[:, :20, 20:] -= 1000.0
    dag.log_trans[:, :20, 21] += 1000.0
    assert_equals_reference(dag)
    assert sum(sums_taken_again) > 0


def test_an_edge_is_not_lost_beside_a_likelier_state_that_lacks_it(make_dag: MakeDag) -> None:
    # the first target is e900 likelier at states 1..9 than at 10..19, and only the latter lead to the second target
    dag = make_dag(2, 42)
    dag.log_trans[:, 0, 20:] = -math.inf
    dag.log_emit[:, 0, 1:10] += 900.0
    dag.log_emit[:, 1, 30:40] += 1500.0
    dag.log_trans[:, 1:10, 30:40] = -math.inf
    assert_equals_reference(dag)
    taken = alignment_edge_posterior(*dag, backend="torch")[:, 10:20, 30:40].sum((1, 2))
    torch.testing.assert_close(taken, torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("chunk_elements", [1, 4000])
def test_pieces_of_a_batch_give_the_same_bits_as_the_whole(
    chunk_elements: int, make_dag: MakeDag, monkeypatch: pytest.MonkeyPatch
) -> None:
    dag = make_dag(7, 30, num_sequences=11)
    dag = dag._replace(target_lengths=torch.arange(11) % 8, state_lengths=torch.arange(11) + 20)
    whole, whole_best = gradients(dag, "torch"), best_alignment(*dag, backend="torch")
    monkeypatch.setattr(torch_dp, "_CHUNK_ELEMENTS", chunk_elements)
    pieces = gradients(dag, "torch")
    assert all(piece.equal(part) for piece, part in zip(pieces, whole, strict=True))
    assert best_alignment(*dag, backend="torch").equal(whole_best)


@pytest.mark.parametrize("num_states", [1, 2, 11, 12, 13, 25, 77, 310])
def test_the_schedule_sends_every_edge_once_and_after_its_source_is_solved(num_states: int) -> None:
    sent = torch.zeros(num_states, num_states, dtype=torch.int64)
    is_solved = torch.zeros(num_states, dtype=torch.bool)
    for first, middle, stop in torch_dp._schedule(0, num_states):
        if middle == stop:
            assert sent[:first, first:stop].eq(1).all()
            sent[first:stop, first:stop] += torch.ones(stop - first, stop - first, dtype=torch.int64).triu(1)
            is_solved[first:stop] = True
        else:
            assert is_solved[first:middle].all()
            assert not is_solved[middle:stop].any()
            sent[first:middle, middle:stop] += 1
    assert sent.equal(torch.ones_like(sent).triu(1))
