"""The backends against a float64 loop, on DAGs made to break them, and the host kernels against themselves.

Bounds are the project's: loss 5e-6 relative, gradients (posteriors) 5e-5 absolute.
"""

import ctypes
import math

import pytest
import torch

from exlm_cli.ops.alignment import best_alignment
from exlm_cli.ops.alignment.library import HostLibrary, host_library
from tests.unit.ops.alignment import dags
from tests.unit.ops.alignment.dags import CASES, assert_near, assert_same_bits, nll_and_gradients


def gradients(dag, weights=None):
    return nll_and_gradients(dag, "native", weights)


@pytest.mark.parametrize(
    ("backend", "dtype", "bounds"),
    [
        ("native", torch.float32, (5e-6, 5e-6)),
        # a float64 loop in logarithms rounds too: the evidence of "scores of thousands" has an ulp of 1e-11
        ("native", torch.float64, (1e-14, 1e-10)),
        ("reference", torch.float64, (1e-14, 1e-10)),
    ],
    ids=["native float32", "native float64", "reference"],
)
@pytest.mark.parametrize("case", CASES)
def test_results_equal_a_float64_loop(case, backend, dtype, bounds):
    dag = CASES[case](dtype=dtype)
    truth = dags.truth_of(case, dtype)
    assert_near(nll_and_gradients(dag, backend), truth, *bounds)
    nodes = best_alignment(*dag, backend=backend)
    # float64 sums of float32 values, in another order
    torch.testing.assert_close(dags.score_of(dag, nodes), truth.best_score, rtol=1e-12, atol=1e-9)
    is_beyond = torch.arange(nodes.shape[1]) >= dag.target_lengths[:, None]
    assert (nodes[is_beyond] == -1).all()


@pytest.mark.parametrize(
    ("max_targets", "max_states"), [(0, 1), (1, 2), (7, 16), (8, 63), (15, 310), (16, 618), (40, 63), (308, 618)]
)
def test_the_saved_block_is_as_large_as_the_kernels_take_it_to_be(max_targets, max_states):
    words = ctypes.CDLL(str(host_library().path)).states_alignment_saved_words_cpu
    words.restype = ctypes.c_int64
    expected = words(ctypes.c_int64(max_targets), ctypes.c_int64(max_states))
    assert math.prod(HostLibrary.saved_shape(3, max_targets, max_states)) == 3 * expected


def test_of_equal_paths_the_one_whose_last_differing_node_is_lowest_is_best():
    log_emit, log_trans = torch.zeros(1, 2, 6), torch.zeros(1, 6, 6)
    nodes = best_alignment(log_emit, log_trans, torch.tensor([2]), torch.tensor([6]), backend="native")
    assert nodes.tolist() == [[1, 2]]


def test_gradients_are_weighted_by_sequence_and_infinite_losses_pass_no_weight_on():
    dag = CASES["257 sequences"]()
    nll, grad_emit, grad_trans = gradients(dag)
    weights = torch.linspace(-2, 3, len(nll)).masked_fill(nll.isinf(), torch.nan)
    _, weighted_emit, weighted_trans = gradients(dag, weights)
    scale = weights.nan_to_num(0)[:, None, None]
    torch.testing.assert_close(weighted_emit, grad_emit * scale, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(weighted_trans, grad_trans * scale, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("weight", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_shows_in_both_gradients(weight):
    dag = dags.make(3, 8, 40, is_ragged=False)
    _, *gradients_of_dag = gradients(dag, torch.tensor([1.0, weight, 1.0]))
    for gradient in gradients_of_dag:
        assert not gradient[1].isfinite().all()
        assert gradient[[0, 2]].isfinite().all()


@pytest.mark.parametrize("floor", [torch.finfo(torch.float32).min, -1e9, -2e6])
def test_huge_negative_scores_forbid_an_edge_as_minus_infinity_does(floor):
    dag = dags.make(4, 8, 40, missing_edges=0.5)
    floored = dag._replace(log_trans=dag.log_trans.masked_fill(dag.log_trans == -torch.inf, floor))
    assert_same_bits(gradients(floored), gradients(dag))
    assert torch.equal(best_alignment(*floored, backend="native"), best_alignment(*dag, backend="native"))


@pytest.mark.parametrize("case", ["257 sequences", "text", "emissions of std 30"])
def test_results_are_bitwise_the_same_in_every_run_and_on_any_number_of_threads(case):
    dag = CASES[case]()
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = (*gradients(dag), best_alignment(*dag, backend="native"))
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert_same_bits((*gradients(dag), best_alignment(*dag, backend="native")), first)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.slow
def test_the_longest_dag_of_the_paper_agrees_with_the_kernels_in_float64():
    # 512 masks of 8 states; the float64 kernels are judged by the loop above, which would take minutes here
    dag = dags.make(1, 512, 4098, is_ragged=False)
    exact = gradients(dag._replace(log_emit=dag.log_emit.double(), log_trans=dag.log_trans.double()))
    for actual, expected, rtol, atol in zip(gradients(dag), exact, (5e-6, 0, 0), (0, 5e-5, 5e-5), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)
