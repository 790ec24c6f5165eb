"""What only the `torch` backend can get wrong: sums lost to underflow, pieces of a batch, the order of its sweep.

Expected values are those of a float64 loop. How often the slow way is taken is counted, as speed rests on it.
"""

import math

import pytest
import torch

from exlm_cli.ops.alignment import alignment_edge_posterior, best_alignment, torch_sweep
from tests.unit.ops.alignment import dags
from tests.unit.ops.alignment.dags import Dag, assert_near, assert_same_bits, make_dag, nll_and_gradients


@pytest.fixture
def sums_taken_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of doubtful sums at each call that looks at them again."""
    counts: list[int] = []
    sum_again = torch_sweep._sum_again

    def count(log_reach: torch.Tensor, is_doubtful: torch.Tensor, *others: torch.Tensor) -> None:
        counts.append(int(is_doubtful.sum()))
        sum_again(log_reach, is_doubtful, *others)

    monkeypatch.setattr(torch_sweep, "_sum_again", count)
    return counts


@pytest.fixture
def rows_in_log_space(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Sequences of which a block was solved in log space."""
    sequences: set[int] = set()
    solve_in_log_space = torch_sweep.Sweep._solve_in_log_space

    def note(sweep: torch_sweep.Sweep, block: torch_sweep._Block, rows: torch.Tensor) -> torch.Tensor:
        sequences.update(rows.tolist())
        return solve_in_log_space(sweep, block, rows)

    monkeypatch.setattr(torch_sweep.Sweep, "_solve_in_log_space", note)
    return sequences


def assert_equals_truth(dag: Dag) -> None:
    assert_near(nll_and_gradients(dag, "torch"), dags.truth(dag), 1e-10, 1e-10)


@pytest.mark.parametrize("emission_std", [1.0, 10.0])
@pytest.mark.parametrize("slope", [-0.7, 0.0, 0.7])
def test_probabilities_that_rise_from_block_to_block_need_no_logarithms(slope, emission_std, rows_in_log_space):
    # a path of 12 targets gains up to e200 a block of 24 states, in one of the two directions
    dag = make_dag(12, 200, num_sequences=3, emission_std=emission_std)
    dag.log_emit.add_(slope * torch.arange(200))
    dag = dag._replace(target_lengths=torch.tensor([12, 7, 1]), state_lengths=torch.tensor([200, 90, 30]))
    assert_equals_truth(dag)
    assert not rows_in_log_space


@pytest.mark.parametrize("slope", [-50.0, 50.0])
def test_a_block_beyond_the_range_of_float64_is_solved_in_log_space(slope, rows_in_log_space):
    dag = make_dag(12, 80, num_sequences=3)
    dag.log_emit[1].add_(slope * torch.arange(80))
    assert_equals_truth(dag)
    assert rows_in_log_space == {1}
    # its neighbours keep their bits
    alone, beside = (nll_and_gradients(each, "torch") for each in (make_dag(12, 80, num_sequences=3), dag))
    assert_same_bits((part[::2] for part in alone), (part[::2] for part in beside))


def test_a_sum_that_is_lost_among_the_states_of_a_block_is_taken_in_log_space(rows_in_log_space):
    # only states 1..9 lead to 10..19, and beside these they have next to no probability
    dag = make_dag(3, 22, num_sequences=2)
    dag.log_trans[1, 0, 1:10] = -900.0
    dag.log_trans[1, 10:20, 20:21] = -math.inf
    dag.log_trans[1, 1:10, 21] = -math.inf
    assert_equals_truth(dag)
    assert rows_in_log_space == {1}


@pytest.mark.parametrize("emission_std", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("range_of_edges", [0.0, 400.0])
def test_a_dag_with_all_its_edges_never_sums_twice(range_of_edges, emission_std, sums_taken_again):
    dag = make_dag(25, 102, emission_std=emission_std)
    dag.log_trans[:, :, 30:] -= range_of_edges
    assert_equals_truth(dag)
    assert not sums_taken_again


@pytest.mark.parametrize("gather_elements", [1, 100, torch_sweep._GATHER_ELEMENTS])
def test_lost_sums_are_taken_again_whole_or_in_parts(gather_elements, sums_taken_again, monkeypatch):
    monkeypatch.setattr(torch_sweep, "_GATHER_ELEMENTS", gather_elements)
    dag = make_dag(5, 40)
    dag.log_trans[:, 0, 1:] = -3000.0 - torch.arange(39.0).double()
    dag.log_trans[:, :20, 20:] -= 1000.0
    dag.log_trans[:, :20, 21] += 1000.0
    assert_equals_truth(dag)
    assert sum(sums_taken_again) > 0


def test_an_edge_is_not_lost_beside_a_likelier_state_that_lacks_it():
    # the first target is e900 likelier at states 1..9 than at 10..19, and only the latter lead to the second target
    dag = make_dag(2, 42)
    dag.log_trans[:, 0, 20:] = -math.inf
    dag.log_emit[:, 0, 1:10] += 900.0
    dag.log_emit[:, 1, 30:40] += 1500.0
    dag.log_trans[:, 1:10, 30:40] = -math.inf
    assert_equals_truth(dag)
    taken = alignment_edge_posterior(*dag, backend="torch")[:, 10:20, 30:40].sum((1, 2))
    torch.testing.assert_close(taken, torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("chunk_elements", [1, 4000])
def test_pieces_of_a_batch_give_the_same_bits_as_the_whole(chunk_elements, monkeypatch):
    dag = make_dag(7, 30, num_sequences=11)
    dag = dag._replace(target_lengths=torch.arange(11) % 8, state_lengths=torch.arange(11) + 20)
    whole, whole_best = nll_and_gradients(dag, "torch"), best_alignment(*dag, backend="torch")
    monkeypatch.setattr(torch_sweep, "_CHUNK_ELEMENTS", chunk_elements)
    assert_same_bits(nll_and_gradients(dag, "torch"), whole)
    assert best_alignment(*dag, backend="torch").equal(whole_best)


@pytest.mark.parametrize("num_states", [1, 2, 11, 12, 13, 25, 77, 310])
def test_the_schedule_sends_every_edge_once_and_after_its_source_is_solved(num_states):
    sent = torch.zeros(num_states, num_states, dtype=torch.int64)
    is_solved = torch.zeros(num_states, dtype=torch.bool)
    for first, middle, stop in torch_sweep._schedule(num_states):
        if middle == stop:
            assert sent[:first, first:stop].eq(1).all()
            sent[first:stop, first:stop] += torch.ones(stop - first, stop - first, dtype=torch.int64).triu(1)
            is_solved[first:stop] = True
        else:
            assert is_solved[first:middle].all()
            assert not is_solved[middle:stop].any()
            sent[first:middle, middle:stop] += 1
    assert sent.equal(torch.ones_like(sent).triu(1))


@pytest.mark.parametrize("seed", [139, 406, 517, 558, 610, 686])
@pytest.mark.parametrize("emission_std", [5.0, 300.0])
def test_scores_beyond_every_range_equal_the_truth_beside_each_other(seed, emission_std):
    # sums that overflow to NaN in one sequence and are lost in the next, and gains that reach the largest float64
    for missing, one_hot in ((0.0, -1e4), (0.3, None)):
        dag = dags.make(
            5, 11, 60, emission_std=emission_std, missing_edges=missing, missing_emissions=missing, one_hot=one_hot,
            dtype=torch.float64, seed=seed,
        )  # fmt: skip
        assert_near(nll_and_gradients(dag, "torch"), dags.truth(dag), 1e-10, 1e-9)


@pytest.mark.parametrize("rise", [300.0, 800.0, 1e4])
def test_edges_beyond_the_range_of_float64_have_finite_gradients(rise):
    dag = make_dag(5, 30, num_sequences=4)
    dag.log_trans[0] += rise
    dag.log_trans[1, 3, 4:] += rise
    dag.log_trans[2, 0, 3] += rise
    dag = dag._replace(state_lengths=torch.tensor([30, 28, 6, 30]))
    nll, grad_emit, grad_trans = nll_and_gradients(dag, "torch")
    assert_near((nll, grad_emit, grad_trans), dags.truth(dag), 1e-10, 1e-9)
    assert nll[2] == math.inf
    assert not grad_trans[2].any()
