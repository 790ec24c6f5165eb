"""Fixtures that several test files share; every random number comes from a seed."""

import socket
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from torch import Tensor

from exlm_cli.errors import BackendError
from exlm_cli.ops.alignment import Backend, choose_backend


class Dag(NamedTuple):
    """Arguments of the alignment op, in order."""

    log_emit: Tensor
    log_trans: Tensor
    target_lengths: Tensor
    state_lengths: Tensor


class MakeDag(Protocol):
    """How `make_dag` is called."""

    def __call__(
        self,
        num_targets: int,
        num_states: int,
        *,
        num_sequences: int = 2,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        emission_std: float = 1.0,
    ) -> Dag: ...


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every connection that leaves this machine."""
    connect = socket.socket.connect

    def connect_locally(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test reached for the network: {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_locally)


@pytest.fixture
def make_dag() -> MakeDag:
    """Normal emissions and softmax transitions over all later states, full lengths; seeded."""

    def build(
        num_targets: int,
        num_states: int,
        *,
        num_sequences: int = 2,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        emission_std: float = 1.0,
    ) -> Dag:
        generator = torch.Generator().manual_seed(seed)
        shape = (num_sequences, num_targets, num_states)
        log_emit = torch.randn(shape, generator=generator, dtype=torch.float64) * emission_std - 3
        logits = torch.randn(num_sequences, num_states, num_states, generator=generator, dtype=torch.float64)
        is_edge = torch.ones(num_states, num_states, dtype=torch.bool).triu(1)
        is_edge[-1, -1] = True  # the last row has no edge; this one keeps its softmax finite
        log_trans = logits.masked_fill(~is_edge, -torch.inf).log_softmax(-1)
        log_trans[:, -1, -1] = -torch.inf
        target_lengths = torch.full((num_sequences,), num_targets)
        state_lengths = torch.full((num_sequences,), num_states)
        return Dag(log_emit.to(dtype), log_trans.to(dtype), target_lengths, state_lengths)

    return build


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Both dtypes of the alignment op."""
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(params=["reference", "torch", "native"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every alignment backend that this machine has; takes the test's `dtype` where it names one."""
    dtype = request.getfixturevalue("dtype") if "dtype" in request.fixturenames else torch.float32
    try:
        return choose_backend(request.param, dtype)
    except BackendError as error:
        pytest.skip(error.message)
