"""Checks, dispatch and the log line of the alignment op's entry points; what they compute is in the backends' tests."""

import re
import types

import pytest
import torch

from exlm_cli.errors import BackendError, ShapeError
from exlm_cli.ops import alignment
from exlm_cli.ops.alignment import (
    alignment_edge_posterior,
    alignment_posterior,
    api,
    best_alignment,
    states_alignment_nll,
)
from tests.unit.ops.alignment.dags import Dag, make

ENTRY_POINTS = [states_alignment_nll, best_alignment, alignment_posterior, alignment_edge_posterior]


@pytest.fixture(params=ENTRY_POINTS, ids=lambda entry_point: entry_point.__name__)
def entry_point(request):
    return request.param


@pytest.fixture
def dag():
    return make(2, 3, 8, is_ragged=False)


@pytest.fixture
def native_stand_in(monkeypatch):
    """A native backend that takes float32 on the CPU and answers with the loss -1."""
    stand_in = types.SimpleNamespace(
        obstacle=lambda dtype, device: "" if dtype == torch.float32 else f"it does not take {dtype}",
        device_obstacle=lambda dtype, device: "",
        states_alignment_nll=lambda log_emit, *_: -log_emit.new_ones(len(log_emit)),
    )
    monkeypatch.setattr(alignment, "native", stand_in, raising=False)
    api._warn_once.cache_clear()
    return stand_in


WRONG = [
    ("log_emit", torch.zeros(3, 8), ShapeError, "", "(B, T, S)"),
    ("log_trans", torch.zeros(2, 8, 9), ShapeError, "", "(B, S, S) = (2, 8, 8)"),
    ("target_lengths", torch.tensor([3]), ShapeError, "", "(B,) = (2,)"),
    ("target_lengths", torch.tensor([3, 4]), ShapeError, "", "0 to T = 3"),
    ("state_lengths", torch.tensor([-1, 9]), ShapeError, "holds -1", "0 to S = 8"),
    ("log_trans", torch.zeros(2, 8, 8, dtype=torch.float64), ValueError, "is float64", "float32"),
    ("state_lengths", torch.tensor([8.0, 8.0]), ValueError, "is float32", "an integer dtype"),
    ("log_trans", torch.zeros(2, 8, 8, device="meta"), ValueError, "is on meta", "cpu"),
    ("state_lengths", torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "is on meta", "cpu"),
]


@pytest.mark.parametrize(("name", "wrong", "error", "given", "expected"), WRONG)
def test_axes_dtypes_and_devices_that_disagree_are_named(name, wrong, error, given, expected, entry_point, dag):
    with pytest.raises(error, match=rf"^`{name}` {given}.*expected .*{re.escape(expected)}"):
        entry_point(*dag._replace(**{name: wrong}))


@pytest.mark.parametrize(
    ("backend", "dtype"), [("auto", torch.bfloat16), ("reference", torch.float16), ("native", torch.bfloat16)]
)
def test_sixteen_bits_are_refused_on_the_cpu(backend, dtype, entry_point):
    with pytest.raises(ValueError, match=f"^`log_emit` is {str(dtype)[6:]} on cpu; .*`{backend}`"):
        entry_point(*make(2, 3, 8, dtype=dtype), backend=backend)


def test_an_unknown_backend_is_refused(entry_point, dag):
    with pytest.raises(ValueError, match=r"^`backend` is 'cuda', expected 'auto'"):
        entry_point(*dag, backend="cuda")


def test_native_that_is_not_available_is_an_error_with_the_reason(entry_point, dag, native_stand_in):
    native_stand_in.obstacle = lambda dtype, device: "no compiler was found"
    with pytest.raises(BackendError, match=r"`native`.*: no compiler was found$") as caught:
        entry_point(*dag, backend="native")
    assert "`exlm doctor --build`" in caught.value.hint


@pytest.mark.parametrize(
    ("obstacle", "lines"),
    [("", []), ("no compiler", ["note: the loss of the DAG is computed without compiled kernels: no compiler"])],
)
def test_auto_takes_native_where_it_serves_else_the_reference_and_says_so_once(
    obstacle, lines, dag, native_stand_in, caplog
):
    native_stand_in.obstacle = lambda dtype, device: obstacle
    expected = states_alignment_nll(*dag, backend="reference") if obstacle else -torch.ones(2)
    for _ in range(2):
        assert states_alignment_nll(*dag).equal(expected)
    assert [message[: len(line)] for message, line in zip(caplog.messages, lines, strict=True)] == lines
    assert all("`exlm doctor --build`" in message for message in caplog.messages)


def test_tensors_of_a_device_without_kernels_go_through_the_host_and_it_is_said_once(dag, native_stand_in, caplog):
    native_stand_in.device_obstacle = lambda dtype, device: "no nvcc found"
    for backend in ("auto", "native"):
        assert states_alignment_nll(*dag, backend=backend).equal(-torch.ones(2))
    assert caplog.messages == ["the alignment of cpu tensors runs on the host, with copies: no nvcc found"]


def test_posteriors_work_in_inference_mode_and_leave_gradients_alone(dag, backend):
    expected = alignment_posterior(*dag, backend=backend)
    with torch.inference_mode():
        for arguments in (dag, Dag(*(x.clone() for x in dag))):
            assert alignment_posterior(*arguments, backend=backend).equal(expected)
    leaves = dag.log_emit.requires_grad_(), dag.log_trans.requires_grad_()
    for posterior in (alignment_posterior, alignment_edge_posterior):
        assert not posterior(*dag, backend=backend).requires_grad
    assert [leaf.grad for leaf in leaves] == [None, None]


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_one_gradient_is_available_without_the_other(wanted, dag, backend):
    both = tuple(x.clone().requires_grad_() for x in dag[:2])
    inputs = tuple(x.clone().requires_grad_(is_wanted) for x, is_wanted in zip(dag[:2], wanted, strict=True))
    for leaves in (both, inputs):
        states_alignment_nll(*leaves, *dag[2:], backend=backend).sum().backward()
    for alone, expected, is_wanted in zip(inputs, both, wanted, strict=True):
        assert torch.equal(alone.grad, expected.grad) if is_wanted else alone.grad is None
    assert not states_alignment_nll(*dag, backend=backend).requires_grad


def test_lengths_may_be_lists(entry_point, dag, backend):
    """torch makes float32 of an empty list."""
    for some in (dag, Dag(*(x[:0] for x in dag))):
        lists = (some.target_lengths.tolist(), some.state_lengths.tolist())
        assert torch.equal(entry_point(*some[:2], *lists, backend=backend), entry_point(*some, backend=backend))
