"""The native backend as a torch operator: schema, autograd, compilation, layouts, errors.

Expected values come from the `reference` backend in the same dtype, or from torch's own checkers.
"""

from unittest.mock import Mock

import pytest
import torch

from exlm_cli.ops.alignment import build, choose_backend, library, native, states_alignment_nll
from exlm_cli.ops.alignment.build import BuildError
from tests.unit.ops.alignment import dags
from tests.unit.ops.alignment.dags import nll_and_gradients

CPU = torch.device("cpu")
CACHES = (library.host_library, native._missing_library)


@pytest.fixture
def forget_library():
    """Look for the library anew in this test, and again after it."""
    for cached in CACHES:
        cached.cache_clear()
    yield
    for cached in CACHES:
        cached.cache_clear()


def assert_operators_keep_their_promises(dtype):
    """Ask torch of each operator of the native backend; that it stays whole in a graph is tested below."""
    dag = dags.make(2, 4, 9, is_ragged=False, dtype=dtype)
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in dag]
    detached = tuple(x.detach() for x in dag)
    ops = torch.ops.exlm
    with torch.no_grad():
        _, saved = ops.states_alignment_forward(*inputs, True)
    calls = [
        (ops.states_alignment_forward.default, (*inputs, True)),
        (ops.states_alignment_backward.default, (*detached, saved, torch.ones(2, dtype=dtype), True, True)),
        (ops.best_alignment.default, detached),
    ]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for operator, arguments in calls:
        assert set(torch.library.opcheck(operator, arguments, test_utils=checks).values()) == {"SUCCESS"}


# torch 2.14's own check reads gradients that are not there
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_operators_keep_the_promises_of_their_schemas():
    assert_operators_keep_their_promises(torch.float64)


def test_a_compiled_graph_holds_the_operator_whole():
    def loss(*dag):
        return states_alignment_nll(*dag, backend="native").mul(2).sum()

    compiled_loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for num_targets, num_states in ((3, 9), (5, 14)):
        gradients = []
        for loss_of in (loss, compiled_loss):
            log_emit, log_trans, *lengths = dags.make(2, num_targets, num_states, is_ragged=False)
            loss_of(log_emit.requires_grad_(), log_trans.requires_grad_(), *lengths).backward()
            gradients.append((log_emit.grad, log_trans.grad))
        assert all(torch.equal(eager, compiled) for eager, compiled in zip(*gradients, strict=True))


@pytest.mark.parametrize("case", [{}, {"emission_std": 3.0}, {"emission_std": 30.0}], ids=["std 1", "std 3", "std 30"])
def test_float32_errors_are_at_most_twice_those_of_the_reference(case):
    dag = dags.make(4, 30, 100, **case)
    truth = dags.truth(dag)
    errors = {}
    for backend in ("native", "reference"):
        nll, *gradients = nll_and_gradients(dag, backend)
        worst = [(g - t).abs().max() for g, t in zip(gradients, (truth.grad_emit, truth.grad_trans), strict=True)]
        is_finite = truth.nll.isfinite()
        errors[backend] = torch.stack([*worst, ((nll - truth.nll) / truth.nll)[is_finite].abs().max()])
    # one float32 rounding of the result is granted to both
    assert (errors["native"] <= 2 * errors["reference"] + 1.2e-7).all()


@pytest.mark.parametrize(
    ("dtype", "device_type", "obstacle"),
    [
        (torch.float64, "cpu", ""),
        (torch.bfloat16, "cpu", "it does not take bfloat16 on cpu"),
        (torch.float32, "mps", "it does not take float32 on mps"),
    ],
)
def test_dtypes_that_the_kernels_take(dtype, device_type, obstacle):
    assert native.obstacle(dtype, torch.device(device_type)) == obstacle


@pytest.mark.usefixtures("forget_library")
def test_a_missing_library_of_devices_is_an_obstacle_for_devices_alone(monkeypatch):
    device = torch.device("cuda", 1)
    monkeypatch.setattr(native, "device_library", Mock(side_effect=BuildError("no nvcc found")))
    assert native.device_obstacle(torch.bfloat16, device) == "no nvcc found"
    assert native.device_obstacle(torch.float64, device) == "the CUDA kernels do not take float64"
    assert native.device_obstacle(torch.float32, CPU) == ""
    for dtype in (torch.bfloat16, torch.float64):
        assert native.obstacle(dtype, device) == ""  # the host serves it
    native._missing_library.cache_clear()
    monkeypatch.setattr(native, "host_library", Mock(side_effect=BuildError("no g++ found")))
    assert native.obstacle(torch.float32, device) == "no nvcc found; on the host: no g++ found"
    assert choose_backend("auto") == "reference"


@pytest.mark.usefixtures("forget_library")
def test_a_library_with_another_interface_is_refused(monkeypatch):
    path, version = build.build_library("cpu"), library._ABI
    monkeypatch.setattr(library, "_ABI", 99)
    assert native.obstacle(torch.float32, CPU) == f"{path} has interface version {version}, expected 99"
