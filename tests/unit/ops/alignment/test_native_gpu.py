"""The device kernels on a real device. Without one, `test_native_device.py` runs the same kernels in a simulator."""

import pytest
import torch

from exlm_cli.ops.alignment import best_alignment, native, states_alignment_nll
from tests.unit.ops.alignment import dags
from tests.unit.ops.alignment.dags import CASES, Dag, assert_near, assert_same_bits, nll_and_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_device(dag, device="cuda"):
    return Dag(*(x.to(device) for x in dag))


def results(dag):
    return *nll_and_gradients(dag, "native"), best_alignment(*dag, backend="native")


@pytest.mark.parametrize("case", CASES)
def test_results_equal_a_float64_loop_and_are_bitwise_the_same_again(case):
    dag = CASES[case]()
    truth = dags.truth(dag)
    first = results(on_device(dag))
    assert_near(first, truth, 5e-6, 5e-5)
    torch.testing.assert_close(dags.score_of(dag, first[3].cpu()), truth.best_score, rtol=1e-12, atol=1e-9)
    assert_same_bits(first, results(on_device(dag)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_where_the_device_has_no_kernels_the_host_serves_its_tensors(dtype, monkeypatch):
    dag = dags.make(8, 40, 170, dtype=dtype)
    monkeypatch.setattr(native, "_has_device_kernels", lambda tensor: False)
    assert_same_bits((result.cpu() for result in results(on_device(dag))), results(dag))


def test_work_goes_to_the_current_stream():
    dag = dags.make(8, 40, 170)
    expected = results(on_device(dag))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # the copies are enqueued on this stream alone: kernels on another would read what is not there yet
        actual = results(on_device(dag))
    stream.synchronize()
    assert_same_bits(actual, expected)


def test_a_cuda_graph_replays_the_loss_and_its_gradients():
    dag, other = (on_device(dags.make(8, 40, 170, seed=seed)) for seed in (0, 1))
    expected = results(other)[:3]
    leaves = [dag.log_emit.clone().requires_grad_(), dag.log_trans.clone().requires_grad_()]
    lengths = [x.clone() for x in dag[2:]]

    def step():
        nll = states_alignment_nll(*leaves, *lengths, backend="native")
        return nll, *torch.autograd.grad(nll, leaves, torch.ones_like(nll))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for target, source in zip([*leaves, *lengths], other, strict=True):
            target.copy_(source)
    graph.replay()
    assert_same_bits(captured, expected)
