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

from exlm_cli.ops.alignment import best_alignment, states_alignment_nll
from exlm_cli.ops.alignment.library import HostLibrary, host_library
from tests.unit.ops import nasty_dags
from tests.unit.ops.nasty_dags import Dag

CASES = {
    "one target": {"num_sequences": 3, "num_targets": 1, "num_states": 3, "is_ragged": False},
    "two nodes, no path": {"num_sequences": 2, "num_targets": 1, "num_states": 2},
    "as many nodes as targets": {"num_sequences": 2, "num_targets": 63, "num_states": 65, "is_ragged": False},
    "one sequence": {"num_sequences": 1, "num_targets": 9, "num_states": 40},
    "257 sequences": {"num_sequences": 257, "num_targets": 7, "num_states": 16},
    "text": {"num_sequences": 3, "num_targets": 77, "num_states": 310},
    "tall": {"num_sequences": 2, "num_targets": 150, "num_states": 302},
    "wide": {"num_sequences": 1, "num_targets": 3, "num_states": 1026, "is_ragged": False},
    "emissions of std 3": {"num_sequences": 4, "num_targets": 77, "num_states": 310, "emission_std": 3.0},
    "emissions of std 30": {"num_sequences": 4, "num_targets": 77, "num_states": 310, "emission_std": 30.0},
    # the seeds are those of random searches that found what a kernel got wrong
    "few states to spare": {
        "num_sequences": 3,
        "num_targets": 48,
        "num_states": 72,
        "emission_std": 5.0,
        "transition_std": 0.1,
        "seed": 566,
    },
    "transitions of std 30": {
        "num_sequences": 3,
        "num_targets": 42,
        "num_states": 130,
        "emission_std": 5.0,
        "transition_std": 30.0,
        "seed": 50489,
    },
    "all of std 30": {
        "num_sequences": 6,
        "num_targets": 30,
        "num_states": 100,
        "emission_std": 30.0,
        "transition_std": 30.0,
    },
    "one-hot transitions": {"num_sequences": 6, "num_targets": 20, "num_states": 90, "one_hot": True},
    "one-hot transitions, std 30": {
        "num_sequences": 6,
        "num_targets": 20,
        "num_states": 90,
        "one_hot": True,
        "emission_std": 30.0,
    },
    "missing edges": {"num_sequences": 6, "num_targets": 20, "num_states": 90, "missing_edges": 0.6},
    "missing edges, std 30": {
        "num_sequences": 6,
        "num_targets": 20,
        "num_states": 90,
        "missing_edges": 0.7,
        "emission_std": 30.0,
        "transition_std": 30.0,
    },
    "hardly any edge": {"num_sequences": 20, "num_targets": 3, "num_states": 40, "missing_edges": 0.9},
    "missing emissions": {"num_sequences": 6, "num_targets": 20, "num_states": 90, "missing_emissions": 0.5},
    "scores that are no probabilities": {
        "num_sequences": 6,
        "num_targets": 20,
        "num_states": 90,
        "is_normalised": False,
        "transition_std": 100.0,
    },
    "scores of thousands": {
        "num_sequences": 6,
        "num_targets": 20,
        "num_states": 90,
        "is_normalised": False,
        "transition_std": 1000.0,
    },
}


def gradients(dag: Dag, nll_weights: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Loss of each sequence, and both gradients of the weighted sum."""
    inputs = [dag.log_emit.detach().requires_grad_(), dag.log_trans.detach().requires_grad_()]
    nll = states_alignment_nll(*inputs, dag.target_lengths, dag.state_lengths, backend="native")
    weights = torch.ones_like(nll) if nll_weights is None else nll_weights
    return nll.detach(), *torch.autograd.grad(nll, inputs, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_a_float64_loop(case: str, dtype: torch.dtype) -> None:
    dag = nasty_dags.make(**CASES[case], dtype=dtype)
    truth = nasty_dags.truth(dag)
    nll, grad_emit, grad_trans = gradients(dag)
    is_float32 = dtype == torch.float32
    # a float64 loop in logarithms rounds too: the evidence of "scores of thousands" has an ulp of 1e-11
    loss_bound, gradient_bound = (5e-6, 5e-6) if is_float32 else (1e-14, 1e-10)
    torch.testing.assert_close(nll.double(), truth.nll, rtol=loss_bound, atol=loss_bound)
    torch.testing.assert_close(grad_emit.double(), truth.grad_emit, rtol=0, atol=gradient_bound)
    torch.testing.assert_close(grad_trans.double(), truth.grad_trans, rtol=0, atol=gradient_bound)


def test_a_share_that_underflows_beside_a_small_sum_is_not_lost() -> None:
    dag = nasty_dags.with_a_hidden_share()
    truth = nasty_dags.truth(dag)
    nll, grad_emit, grad_trans = gradients(dag)
    torch.testing.assert_close(nll.double(), truth.nll, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad_emit.double(), truth.grad_emit, rtol=0, atol=1e-6)
    torch.testing.assert_close(grad_trans.double(), truth.grad_trans, rtol=0, atol=1e-6)


@pytest.mark.parametrize("max_targets", [0, 1, 7, 8, 15, 16, 40, 77, 154, 200, 308])
@pytest.mark.parametrize("max_states", [1, 2, 16, 63, 310, 618])
def test_the_saved_block_is_as_large_as_the_kernels_take_it_to_be(max_targets: int, max_states: int) -> None:
    words = ctypes.CDLL(str(host_library().path)).states_alignment_saved_words_cpu
    words.restype = ctypes.c_int64
    expected = words(ctypes.c_int64(max_targets), ctypes.c_int64(max_states))
    assert math.prod(HostLibrary.saved_shape(3, max_targets, max_states)) == 3 * expected


def test_the_suite_holds_infeasible_and_empty_sequences_among_feasible_ones() -> None:
    *_, target_lengths, state_lengths = nasty_dags.make(**CASES["257 sequences"])
    is_empty, is_short = target_lengths == 0, (target_lengths > 0) & (state_lengths < target_lengths + 2)
    assert is_empty[1:-1].any()
    assert is_short[1:-1].any()
    assert not (is_empty | is_short)[-10:].all()


@pytest.mark.parametrize("case", CASES)
def test_the_best_path_has_the_best_score(case: str) -> None:
    dag = nasty_dags.make(**CASES[case])
    nodes = best_alignment(*dag, backend="native")
    # float64 sums of float32 values, in another order
    torch.testing.assert_close(nasty_dags.score_of(dag, nodes), nasty_dags.truth(dag).best_score, rtol=1e-12, atol=1e-9)
    is_beyond = torch.arange(nodes.shape[1]) >= dag.target_lengths[:, None]
    assert (nodes[is_beyond] == -1).all()


def test_of_equal_paths_the_one_whose_last_differing_node_is_lowest_is_best() -> None:
    log_emit, log_trans = torch.zeros(1, 2, 6), torch.zeros(1, 6, 6)
    nodes = best_alignment(log_emit, log_trans, torch.tensor([2]), torch.tensor([6]), backend="native")
    assert nodes.tolist() == [[1, 2]]


def test_gradients_are_weighted_by_sequence_and_infinite_losses_pass_no_weight_on() -> None:
    dag = nasty_dags.make(**CASES["257 sequences"])
    nll, grad_emit, grad_trans = gradients(dag)
    weights = torch.linspace(-2, 3, len(nll)).masked_fill(nll.isinf(), torch.nan)
    _, weighted_emit, weighted_trans = gradients(dag, weights)
    scale = weights.nan_to_num(0)[:, None, None]
    torch.testing.assert_close(weighted_emit, grad_emit * scale, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(weighted_trans, grad_trans * scale, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("weight", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_shows_in_both_gradients(weight: float) -> None:
    dag = nasty_dags.make(3, 8, 40, is_ragged=False)
    _, *gradients_of_dag = gradients(dag, torch.tensor([1.0, weight, 1.0]))
    for gradient in gradients_of_dag:
        assert not gradient[1].isfinite().all()
        assert gradient[[0, 2]].isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("tensor", ["log_emit", "log_trans"])
def test_a_nan_that_is_read_makes_only_its_sequence_nan(tensor: str, bad: float) -> None:
    dag = nasty_dags.make(3, 8, 40, is_ragged=False)
    getattr(dag, tensor)[1, 2, 20] = bad
    nll, grad_emit, grad_trans = gradients(dag)
    assert nll.isnan().tolist() == [False, True, False]
    assert grad_emit[1, :, 1:-1].isnan().all()
    assert grad_trans[1].triu(1).isnan().sum() == 40 * 39 / 2
    for gradient in (grad_emit, grad_trans):
        assert gradient[[0, 2]].isfinite().all()


@pytest.mark.parametrize("floor", [torch.finfo(torch.float32).min, -1e9, -2e6])
def test_huge_negative_scores_forbid_an_edge_as_minus_infinity_does(floor: float) -> None:
    dag = nasty_dags.make(4, 8, 40, missing_edges=0.5)
    floored = dag._replace(log_trans=dag.log_trans.masked_fill(dag.log_trans == -torch.inf, floor))
    for result, expected in zip(gradients(floored), gradients(dag), strict=True):
        assert torch.equal(result, expected)
    assert torch.equal(best_alignment(*floored, backend="native"), best_alignment(*dag, backend="native"))


@pytest.mark.parametrize("case", ["257 sequences", "text", "emissions of std 30"])
def test_results_are_bitwise_the_same_in_every_run_and_on_any_number_of_threads(case: str) -> None:
    dag = nasty_dags.make(**CASES[case])
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
    dag = nasty_dags.make(5, 20, 90)
    together = gradients(dag)
    for row in range(5):
        alone = gradients(Dag(*(x[row : row + 1] for x in dag)))
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(together, alone, strict=True))


def test_padding_does_not_change_the_loss() -> None:
    dag = nasty_dags.make(4, 12, 50, is_ragged=False)
    padded = Dag(
        torch.nn.functional.pad(dag.log_emit, (0, 9, 0, 30), value=torch.nan),
        torch.nn.functional.pad(dag.log_trans, (0, 9, 0, 9), value=torch.nan),
        dag.target_lengths,
        dag.state_lengths,
    )
    nll, grad_emit, grad_trans = gradients(dag)
    padded_nll, padded_emit, padded_trans = gradients(padded)
    assert torch.equal(padded_nll, nll)
    assert torch.equal(padded_emit, torch.nn.functional.pad(grad_emit, (0, 9, 0, 30)))
    assert torch.equal(padded_trans, torch.nn.functional.pad(grad_trans, (0, 9, 0, 9)))


@pytest.mark.slow
def test_the_longest_dag_of_the_paper_agrees_with_the_kernels_in_float64() -> None:
    # 512 masks of 8 states; the float64 kernels are judged by the loop above, which would take minutes here
    dag = nasty_dags.make(1, 512, 4098, is_ragged=False)
    nll, grad_emit, grad_trans = gradients(dag)
    wide = dag._replace(log_emit=dag.log_emit.double(), log_trans=dag.log_trans.double())
    exact = gradients(wide)
    torch.testing.assert_close(nll.double(), exact[0], rtol=5e-6, atol=0)
    torch.testing.assert_close(grad_emit.double(), exact[1], rtol=0, atol=5e-5)
    torch.testing.assert_close(grad_trans.double(), exact[2], rtol=0, atol=5e-5)


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
