"""The device kernels without a device: compiled by g++ and run thread by thread by `cuda_ext/tests/simt.h`.

This shows their arithmetic, indices and barriers, not their speed. Where nvcc exists, they are compiled for every
target, warnings being errors. Expected values: a float64 loop, the host kernels, torch's own conversions.
"""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from exlm_cli.ops.alignment import best_alignment, build, library, native, states_alignment_nll
from exlm_cli.ops.alignment.build import BuildError
from exlm_cli.ops.alignment.library import Dag, DeviceKernels, DeviceLibrary
from tests.unit.ops.alignment import dags
from tests.unit.ops.alignment.dags import (
    CASES,
    assert_near,
    assert_only_the_second_sequence_is_nan,
    assert_same_bits,
    nll_and_gradients,
)  # fmt: skip
from tests.unit.ops.alignment.test_native_op import assert_operators_keep_their_promises
from tests.unit.ops.simulation import ORDERS, SOURCES, compile_for_host, simulator


@pytest.fixture
def simulated_backend(simulated, monkeypatch):
    """The native backend takes every tensor for one on a device."""
    monkeypatch.setattr(native, "_kernels", lambda tensor: simulated.on(0, 0))
    monkeypatch.setattr(native, "_has_device_kernels", lambda tensor: True)


def run(simulated, dag, order=0):
    """Loss, both gradients of the summed losses, best nodes; every output starts as garbage."""
    B, T, S = dag.log_emit.shape
    dtype = dag.log_emit.dtype
    simulator(simulated).simt_set_order(order)
    kernels, laid_out = simulated.on(0, 0), Dag.of(*dag)
    nll, nodes = torch.full((B,), torch.nan), torch.full((B, T), -7)
    saved = torch.full(DeviceKernels.saved_shape(B, T, S), 0x7FC00000, dtype=torch.int32)
    grad_emit, grad_trans = torch.full((B, T, S), torch.nan, dtype=dtype), torch.full((B, S, S), torch.nan, dtype=dtype)
    kernels.forward(laid_out, nll, saved)
    kernels.backward(laid_out, saved, torch.ones(B), grad_emit, grad_trans)
    kernels.best(laid_out, nodes)
    return nll, grad_emit, grad_trans, nodes


@pytest.mark.parametrize("case", CASES)
def test_results_equal_a_float64_loop_in_any_order_of_threads(case, simulated):
    dag = dags.Dag(*(tensor[:6] for tensor in CASES[case]()))
    truth = dags.Truth(*(tensor[:6] for tensor in dags.truth_of(case)))
    results = run(simulated, dag)
    assert_near(results, truth, 5e-6, 5e-6)
    torch.testing.assert_close(dags.score_of(dag, results[3]), truth.best_score, rtol=1e-12, atol=1e-9)
    for order in ORDERS[1:]:
        assert_same_bits(run(simulated, dag, order), results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_16_bit_inputs_are_widened_and_gradients_rounded(dtype, simulated):
    dag = dags.make(4, 20, 90, missing_edges=0.3, dtype=dtype)
    wide = dag._replace(log_emit=dag.log_emit.float(), log_trans=dag.log_trans.float())
    expected_nll, *expected_gradients, expected_nodes = run(simulated, wide)
    expected = (expected_nll, *(gradient.to(dtype) for gradient in expected_gradients), expected_nodes)
    assert_same_bits(run(simulated, dag), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_16_bit_conversions_are_those_of_torch(dtype, tmp_path_factory):
    name = str(dtype).removeprefix("torch.")
    check = ctypes.CDLL(str(compile_for_host(tmp_path_factory, "tests/element_check.cpp")))
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    wide = torch.empty(len(every))
    getattr(check, f"widen_{name}")(ctypes.c_int64(len(every)), *map(library.pointer, (every, wide)))
    expected = every.view(dtype).float()
    assert torch.equal(wide.nan_to_num(12345.0), expected.nan_to_num(12345.0))
    # every value, every tie between two of them, and the nearest float32 on both sides of each
    finite = expected[expected.isfinite()].unique()
    middles = (finite[1:].double() + finite[:-1].double()).div(2).float()
    exact = torch.cat(
        [finite, middles, torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 65519.0, 65520.0])]
    )
    up, down = (exact.nextafter(torch.tensor(limit)) for limit in (torch.inf, -torch.inf))
    floats = torch.cat([exact, up, down])
    narrow = torch.empty(len(floats), dtype=torch.int16)
    getattr(check, f"narrow_{name}")(ctypes.c_int64(len(floats)), *map(library.pointer, (floats, narrow)))
    rounded, expected = narrow.view(dtype), floats.to(dtype)
    assert torch.equal(rounded.isnan(), expected.isnan())
    assert torch.equal(rounded.nan_to_num(1.0).view(torch.int16), expected.nan_to_num(1.0).view(torch.int16))


@pytest.mark.parametrize(
    ("size", "tensor", "bad"),
    [((8, 40), "log_emit", torch.nan), ((150, 302), "log_trans", torch.inf)],
    ids=["one group of slots", "in the first of two"],
)
def test_a_nan_that_is_read_makes_only_its_sequence_nan(size, tensor, bad, simulated):
    dag = dags.make(3, *size, is_ragged=False)
    getattr(dag, tensor)[1, 2, 20] = bad
    assert_only_the_second_sequence_is_nan(run(simulated, dag))


@pytest.mark.usefixtures("simulated_backend")
def test_the_operators_keep_their_promises_on_a_device():
    # what is saved has words that nobody writes, so runs are compared by their gradients below
    assert_operators_keep_their_promises(torch.float32)


@pytest.mark.usefixtures("simulated_backend")
def test_the_backend_gives_on_a_device_what_it_gives_on_the_host(monkeypatch):
    dag = dags.make(2, 7, 30)

    def results():
        without_grad = states_alignment_nll(*dag, backend="native")
        return *nll_and_gradients(dag, "native"), without_grad, best_alignment(*dag, backend="native")

    on_device = results()
    monkeypatch.undo()
    for device, host in zip(on_device, results(), strict=True):
        torch.testing.assert_close(device, host, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_without_device_kernels_the_host_gives_its_results_through_copies(dtype, monkeypatch):
    """As on a device: gradients are rounded to the dtype of the inputs, and strides do not matter."""
    dag = dags.make(5, 20, 90, dtype=dtype)
    wide_dtype = torch.promote_types(dtype, torch.float32)
    wide = dag._replace(log_emit=dag.log_emit.to(wide_dtype), log_trans=dag.log_trans.to(wide_dtype))
    nll, *gradients = nll_and_gradients(wide, "native")
    nodes = best_alignment(*wide, backend="native")
    monkeypatch.setattr(native, "_kernels", lambda tensor: library.HostCopies(library.host_library()))
    leaves = [dag.log_emit, torch.stack([dag.log_trans, dag.log_trans], dim=-1)[..., 1]]
    assert native.states_alignment_nll(*leaves, *dag[2:]).equal(nll)
    copied = native.states_alignment_nll(*(leaf.requires_grad_() for leaf in leaves), *dag[2:])
    assert_same_bits(torch.autograd.grad(copied.sum(), leaves), (gradient.to(dtype) for gradient in gradients))
    assert native.best_alignment(*leaves, *dag[2:]).equal(nodes)


def test_errors_of_the_device_are_raised_with_its_message(simulated):
    dag = Dag.of(*dags.make(2, 3, 8))
    simulator(simulated).simt_fail()
    with pytest.raises(RuntimeError, match=r"^states_alignment_forward_cuda: invalid value$"):
        simulated.on(0, 0).forward(dag, torch.empty(2), None)
    simulator(simulated).simt_fail()
    with pytest.raises(BuildError, match=f"^{re.escape(str(simulated.path))} does not run on cuda:0: invalid value$"):
        simulated.check(0)
    simulated.check(0)
    with pytest.raises(RuntimeError, match=r"^states_alignment_forward_cuda: invalid value$"):
        simulated.on(99, 0).forward(dag, torch.empty(2), None)
    assert not simulated.runs_on(99)
    simulated.on(0, 0).forward(dag, torch.empty(2), None)
    float64 = Dag.of(*dags.make(2, 3, 8, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"^states_alignment_forward_cuda: these kernels do not take this dtype$"):
        simulated.on(0, 0).forward(float64, torch.empty(2), None)


def test_the_simulator_shows_a_missing_barrier(tmp_path_factory):
    simt = ("-include", str(SOURCES / "tests" / "simt.h"))
    check = ctypes.CDLL(str(compile_for_host(tmp_path_factory, "tests/simt_check.cpp", *simt)))
    numbers = torch.arange(64, dtype=torch.int32)
    sums = {}
    for has_barrier in (0, 1):
        for order in ORDERS:
            check.simt_set_order(order)
            result = torch.empty(64, dtype=torch.int32)
            check.run_sum_neighbours(library.pointer(numbers), library.pointer(result), has_barrier)
            sums[has_barrier, order] = result
    expected = numbers + numbers.roll(-1)
    assert all(torch.equal(sums[1, order], expected) for order in ORDERS)
    assert not torch.equal(sums[0, 0], sums[0, 1])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_compiles_the_oldest_and_the_newest_target_without_a_warning(tmp_path):
    """No source asks for the target it is compiled for, so those between them warn of nothing else.

    Both are optimised: a loop that cannot be unrolled is found then, and without it the code is so long that its
    assembly takes five times as long.
    """
    path, (oldest, *_, newest) = tmp_path / "device.so", build.CUDA_ARCHITECTURES
    command = [*build.plan("cuda", architectures=(oldest, newest)).command, "-Werror=all-warnings"]
    subprocess.run([*command, "-Xcompiler=-Wall,-Wextra", "-o", str(path)], check=True)
    compiled = DeviceLibrary(path)
    if not torch.cuda.is_available():
        # a device is asked for and none is there: the library says so and does not crash
        with pytest.raises(BuildError, match=rf"^{re.escape(str(path))} does not run on cuda:0: "):
            compiled.check(0)
        with pytest.raises(RuntimeError, match=r"^states_alignment_forward_cuda: "):
            compiled.on(0, 0).forward(Dag.of(*dags.make(2, 3, 8)), torch.empty(2), None)
