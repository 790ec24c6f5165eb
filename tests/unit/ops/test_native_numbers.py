"""The host kernels against a float64 loop, on DAGs made to break them, and against themselves.

Bounds are the project's: loss 5e-6 relative, gradients (posteriors) 5e-5 absolute.
"""

import ctypes
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exlm_cli.ops.alignment import best_alignment
from exlm_cli.ops.alignment.library import HostLibrary, host_library
from tests.unit.ops import dags
from tests.unit.ops.dags import Dag, assert_near, nll_and_gradients

MIDDLE = {"num_sequences": 6, "num_targets": 20, "num_states": 90}
TEXT = {"num_sequences": 4, "num_targets": 77, "num_states": 310}
CASES = {
    "one target": {"num_sequences": 3, "num_targets": 1, "num_states": 3, "is_ragged": False},
    "two nodes, no path": {"num_sequences": 2, "num_targets": 1, "num_states": 2},
    "as many nodes as targets": {"num_sequences": 2, "num_targets": 63, "num_states": 65, "is_ragged": False},
    "one sequence": {"num_sequences": 1, "num_targets": 9, "num_states": 40},
    "257 sequences": {"num_sequences": 257, "num_targets": 7, "num_states": 16},
    "text": TEXT,
    "tall": {"num_sequences": 2, "num_targets": 150, "num_states": 302},
    "wide": {"num_sequences": 1, "num_targets": 3, "num_states": 1026, "is_ragged": False},
    "emissions of std 3": TEXT | {"emission_std": 3.0},
    "emissions of std 30": TEXT | {"emission_std": 30.0},
    # the seeds are those of random searches that found what a kernel got wrong
    "few states to spare": {
        "num_sequences": 3, "num_targets": 48, "num_states": 72, "emission_std": 5.0, "transition_std": 0.1,
        "seed": 566,
    },
    "transitions of std 30": {
        "num_sequences": 3, "num_targets": 42, "num_states": 130, "emission_std": 5.0, "transition_std": 30.0,
        "seed": 50489,
    },
    "all of std 30": {
        "num_sequences": 6, "num_targets": 30, "num_states": 100, "emission_std": 30.0, "transition_std": 30.0,
    },
    "one-hot transitions": MIDDLE | {"one_hot": True},
    "one-hot transitions, std 30": MIDDLE | {"one_hot": True, "emission_std": 30.0},
    "missing edges": MIDDLE | {"missing_edges": 0.6},
    "missing edges, std 30": MIDDLE | {"missing_edges": 0.7, "emission_std": 30.0, "transition_std": 30.0},
    "hardly any edge": {"num_sequences": 20, "num_targets": 3, "num_states": 40, "missing_edges": 0.9},
    "missing emissions": MIDDLE | {"missing_emissions": 0.5},
    "scores that are no probabilities": MIDDLE | {"is_normalised": False, "transition_std": 100.0},
    "scores of thousands": MIDDLE | {"is_normalised": False, "transition_std": 1000.0},
}  # fmt: skip


def gradients(dag: Dag, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    return nll_and_gradients(dag, "native", weights)


def assert_only_the_second_sequence_is_nan(results: tuple[torch.Tensor, ...]) -> None:
    """Every gradient at an inner node or at an edge of the second of three sequences, and of no other."""
    nll, grad_emit, grad_trans = results[:3]
    assert nll.isnan().tolist() == [False, True, False]
    assert grad_emit[1, :, 1:-1].isnan().all()
    assert grad_trans[1].triu(1).isnan().sum() == 40 * 39 / 2
    assert all(gradient[[0, 2]].isfinite().all() for gradient in (grad_emit, grad_trans))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_a_float64_loop(case: str, dtype: torch.dtype) -> None:
    dag = dags.make(**CASES[case], dtype=dtype)
    # a float64 loop in logarithms rounds too: the evidence of "scores of thousands" has an ulp of 1e-11
    bounds = (5e-6, 5e-6) if dtype == torch.float32 else (1e-14, 1e-10)
    assert_near(gradients(dag), dags.truth(dag), *bounds)


def test_a_share_that_underflows_beside_a_small_sum_is_not_lost() -> None:
    dag = dags.with_a_hidden_share()
    assert_near(gradients(dag), dags.truth(dag), 9e-7, 1e-6)


@pytest.mark.parametrize("max_targets", [0, 1, 7, 8, 15, 16, 40, 77, 154, 200, 308])
@pytest.mark.parametrize("max_states", [1, 2, 16, 63, 310, 618])
def test_the_saved_block_is_as_large_as_the_kernels_take_it_to_be(max_targets: int, max_states: int) -> None:
    words = ctypes.CDLL(str(host_library().path)).states_alignment_saved_words_cpu
    words.restype = ctypes.c_int64
    expected = words(ctypes.c_int64(max_targets), ctypes.c_int64(max_states))
    assert math.prod(HostLibrary.saved_shape(3, max_targets, max_states)) == 3 * expected


@pytest.mark.parametrize("case", CASES)
def test_the_best_path_has_the_best_score(case: str) -> None:
    dag = dags.make(**CASES[case])
    nodes = best_alignment(*dag, backend="native")
    # float64 sums of float32 values, in another order
    torch.testing.assert_close(dags.score_of(dag, nodes), dags.truth(dag).best_score, rtol=1e-12, atol=1e-9)
    is_beyond = torch.arange(nodes.shape[1]) >= dag.target_lengths[:, None]
    assert (nodes[is_beyond] == -1).all()


def test_of_equal_paths_the_one_whose_last_differing_node_is_lowest_is_best() -> None:
    log_emit, log_trans = torch.zeros(1, 2, 6), torch.zeros(1, 6, 6)
    nodes = best_alignment(log_emit, log_trans, torch.tensor([2]), torch.tensor([6]), backend="native")
    assert nodes.tolist() == [[1, 2]]


def test_gradients_are_weighted_by_sequence_and_infinite_losses_pass_no_weight_on() -> None:
    dag = dags.make(**CASES["257 sequences"])
    nll, grad_emit, grad_trans = gradients(dag)
    weights = torch.linspace(-2, 3, len(nll)).masked_fill(nll.isinf(), torch.nan)
    _, weighted_emit, weighted_trans = gradients(dag, weights)
    scale = weights.nan_to_num(0)[:, None, None]
    torch.testing.assert_close(weighted_emit, grad_emit * scale, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(weighted_trans, grad_trans * scale, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("weight", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_shows_in_both_gradients(weight: float) -> None:
    dag = dags.make(3, 8, 40, is_ragged=False)
    _, *gradients_of_dag = gradients(dag, torch.tensor([1.0, weight, 1.0]))
    for gradient in gradients_of_dag:
        assert not gradient[1].isfinite().all()
        assert gradient[[0, 2]].isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("tensor", ["log_emit", "log_trans"])
def test_a_nan_that_is_read_makes_only_its_sequence_nan(tensor: str, bad: float) -> None:
    dag = dags.make(3, 8, 40, is_ragged=False)
    getattr(dag, tensor)[1, 2, 20] = bad
    assert_only_the_second_sequence_is_nan(gradients(dag))


@pytest.mark.parametrize("floor", [torch.finfo(torch.float32).min, -1e9, -2e6])
def test_huge_negative_scores_forbid_an_edge_as_minus_infinity_does(floor: float) -> None:
    dag = dags.make(4, 8, 40, missing_edges=0.5)
    floored = dag._replace(log_trans=dag.log_trans.masked_fill(dag.log_trans == -torch.inf, floor))
    for result, expected in zip(gradients(floored), gradients(dag), strict=True):
        assert torch.equal(result, expected)
    assert torch.equal(best_alignment(*floored, backend="native"), best_alignment(*dag, backend="native"))


@pytest.mark.parametrize("case", ["257 sequences", "text", "emissions of std 30"])
def test_results_are_bitwise_the_same_in_every_run_and_on_any_number_of_threads(case: str) -> None:
    dag = dags.make(**CASES[case])
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = (*gradients(dag), best_alignment(*dag, backend="native"))
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            again = (*gradients(dag), best_alignment(*dag, backend="native"))
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.set_num_threads(num_threads)


def test_a_sequence_does_not_depend_on_the_rest_of_its_batch() -> None:
    dag = dags.make(5, 20, 90)
    together = gradients(dag)
    for row in range(5):
        alone = gradients(Dag(*(x[row : row + 1] for x in dag)))
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.slow
def test_the_longest_dag_of_the_paper_agrees_with_the_kernels_in_float64() -> None:
    # 512 masks of 8 states; the float64 kernels are judged by the loop above, which would take minutes here
    dag = dags.make(1, 512, 4098, is_ragged=False)
    exact = gradients(dag._replace(log_emit=dag.log_emit.double(), log_trans=dag.log_trans.double()))
    for actual, expected, rtol, atol in zip(gradients(dag), exact, (5e-6, 0, 0), (0, 5e-5, 5e-5), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


MEASURE_MEMORY = """
import ctypes, pathlib, torch
from exlm_cli.ops.alignment.library import Dag, host_library

def memory_kib(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

B, T, S = 16, 154, 618
generator = torch.Generator().manual_seed(0)
log_emit = torch.randn(B, T, S, generator=generator)
log_trans = torch.randn(B, S, S, generator=generator).sub_(6)
dag = Dag.of(log_emit, log_trans, torch.full((B,), T), torch.full((B,), S))
nll, grad_nll = torch.full((B,), 1.0), torch.full((B,), 1.0)
grad_emit, grad_trans = torch.full((B, T, S), 1.0), torch.full((B, S, S), 1.0)
torch.set_num_threads(2)
library = host_library()
ctypes.CDLL(None).malloc_trim(0)
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
before = memory_kib("VmRSS")
saved = torch.empty(B, 2, S, 160, dtype=torch.int32)
library.forward(dag, nll, saved)
library.backward(dag, saved, grad_nll, grad_emit, grad_trans)
print(memory_kib("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_extra_memory_stays_within_alpha_beta_and_a_tile_a_thread() -> None:
    host_library()  # compiled before, so that no compiler counts
    # in a process of its own, where no allocator hands out what earlier tests gave back
    done = subprocess.run([sys.executable, "-c", MEASURE_MEMORY], capture_output=True, text=True, check=True)
    B, T, S, num_threads = 16, 154, 618, 2
    alpha_and_beta, tiles = 2 * 4 * B * T * S, num_threads * 4 * S * S
    assert 0.9 * alpha_and_beta < int(done.stdout) * 1024 <= alpha_and_beta + tiles
