"""Entry points of the states-alignment op: they check the arguments and choose the backend.

Axes: B sequences, T targets, S states (DAG nodes). Node 0 starts every path, node `state_lengths - 1` ends it; both
emit nothing. A path visits exactly `target_lengths` inner nodes, each of which emits one target:

    alpha[0, 0] = 1,   alpha[t, u] = P_u(y_t) * sum over v < u of alpha[t - 1, v] * E[v, u],
    likelihood  = sum over v of alpha[T, v] * E[v, end]

Source: ExLM (arXiv 2501.13397), section 4.3, App. H and I.1. A posterior is minus a gradient of the loss (App. I.2), so
backends implement the loss and the best alignment only.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from exlm_cli.errors import BackendError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int, Int64  # annotations only: the op needs torch and nothing else

Backend = Literal["auto", "reference", "native"]

_logger = logging.getLogger("exlm_cli")

_CPU = torch.device("cpu")
_COST = (
    "small models train up to 1.4 times as long on a CPU; "
    "with g++ (for a GPU also nvcc) installed, `exlm doctor --build` compiles them"
)


class _Dag(NamedTuple):
    """Checked arguments: lengths are int64, all on one device."""

    log_emit: Tensor
    log_trans: Tensor
    target_lengths: Tensor
    state_lengths: Tensor


class _Implementation(Protocol):
    """Interface of a backend module. Lengths on a device arrive unchecked, since a check would wait for the device."""

    def states_alignment_nll(
        self, log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor
    ) -> Tensor: ...

    def best_alignment(
        self, log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor
    ) -> Tensor: ...


def states_alignment_nll(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int[Tensor, " B"] | Sequence[int],
    state_lengths: Int[Tensor, " B"] | Sequence[int],
    *,
    backend: Backend = "auto",
) -> Float[Tensor, " B"]:
    """Return the negative log-likelihood of each target sequence, summed over all paths through the state DAG.

    Differentiable once in `log_emit` and `log_trans`; gradients are minus posteriors, exactly zero wherever the log
    probability is `-inf`, where no alignment exists, and at entries that are never read: those beyond the lengths, the
    emission columns of the first and last node, and transitions at and below the diagonal. No entry that is read may be
    NaN.

    Args:
        log_emit: log p(target t | state s), nats; float32 or float64 (16 bits only on CUDA with the native backend).
        log_trans: log p(next state | state), nats, the dtype of `log_emit`; `-inf` forbids an edge.
        target_lengths: Targets of each sequence, 0 to T; a tensor or a list.
        state_lengths: Nodes of each sequence, 0 to S; the last of them ends every path. A tensor or a list.
        backend: "reference", "native", or "auto" (native if available, else reference).

    Returns:
        Nats per sequence (not divided by its targets), dtype of `log_emit` (float32 for 16 bits); `inf` where no
        alignment exists, an empty sequence included. Count those and mask them before any mean.

    Raises:
        ShapeError: Axes disagree, or a length (checked on the CPU only) exceeds its axis.
        ValueError: Dtypes or devices do not match, lengths are not integers, or the backend is unknown or does not take
            the dtype.
        BackendError: "native" was requested and is not available.
    """
    return _nll(_check(log_emit, log_trans, target_lengths, state_lengths), backend)


def best_alignment(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int[Tensor, " B"] | Sequence[int],
    state_lengths: Int[Tensor, " B"] | Sequence[int],
    *,
    backend: Backend = "auto",
) -> Int64[Tensor, "B T"]:
    """Return the node that emits each target on the most probable path (Viterbi).

    It is -1 beyond the length of a sequence and where no path exists.

    Arguments and errors are those of `states_alignment_nll`. Among equally probable paths any may be returned.
    """
    dag = _check(log_emit, log_trans, target_lengths, state_lengths)
    implementation = _implementation(backend, dag)
    if 0 in log_emit.shape:
        return torch.full(log_emit.shape[:2], -1, dtype=torch.int64, device=log_emit.device)
    with torch.no_grad():
        return implementation.best_alignment(*dag)


def alignment_posterior(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int[Tensor, " B"] | Sequence[int],
    state_lengths: Int[Tensor, " B"] | Sequence[int],
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "B T S"]:
    """Return the probability that state s emits target t, given the targets; not differentiable.

    Arguments and errors are those of `states_alignment_nll`.

    Returns:
        Rows sum to 1 for the targets of feasible sequences and are 0 elsewhere; dtype of `log_emit`.
    """
    dag = _check(log_emit, log_trans, target_lengths, state_lengths)
    return _minus_gradient(dag, backend, of="log_emit")


def alignment_edge_posterior(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int[Tensor, " B"] | Sequence[int],
    state_lengths: Int[Tensor, " B"] | Sequence[int],
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "B S S"]:
    """Return the probability that a path takes edge (v, u), given the targets; not differentiable.

    Arguments and errors are those of `states_alignment_nll`.

    Returns:
        Sums to `target_lengths + 1` for feasible sequences; 0 for all others; dtype of `log_trans`.
    """
    dag = _check(log_emit, log_trans, target_lengths, state_lengths)
    return _minus_gradient(dag, backend, of="log_trans")


def choose_backend(
    backend: Backend, dtype: torch.dtype = torch.float32, device: torch.device = _CPU
) -> Literal["reference", "native"]:
    """Return the backend that a call with such tensors uses; warns once if it is not the fastest of their device.

    It compiles the native library if that is missing: seconds for a CPU, a minute for CUDA.

    Raises:
        ValueError: The backend is unknown, or does not take this dtype on this device.
        BackendError: "native" was requested and is not available.
    """
    if backend not in ("auto", "reference", "native"):
        raise ValueError(f"`backend` is {backend!r}, expected 'auto', 'reference' or 'native'")
    takes_dtype = dtype in (torch.float32, torch.float64)
    if backend in ("auto", "native") and (takes_dtype or device.type != "cpu"):
        from exlm_cli.ops.alignment import native  # finds, compiles and loads a shared library

        obstacle = native.obstacle(dtype, device)
        if not obstacle:
            if reason := native.device_obstacle(dtype, device):
                _warn_once(f"the alignment of {device.type} tensors runs on the host, with copies: {reason}")
            return "native"
        if backend == "native":
            raise BackendError(
                f"alignment backend `native` is not available: {obstacle}",
                "run `exlm doctor --build` to build it and to see the compiler's message",
            )
        _warn_once(f"note: the loss of the DAG is computed without compiled kernels: {obstacle}; {_COST}")
    if not takes_dtype:
        raise ValueError(
            f"`log_emit` is {_name(dtype)} on {device.type}; alignment backend `{backend}` takes float32 and float64 "
            "there (sums over paths lose mass in 16 bits)"
        )
    return "reference"


# what `torch.compiler.assume_constant_result` does, which would import the compiler, a second of every command
choose_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _warn_once(message: str) -> None:
    _logger.warning(message)


def _implementation(backend: Backend, dag: _Dag) -> _Implementation:
    choice = choose_backend(backend, dag.log_emit.dtype, dag.log_emit.device)
    if choice == "reference":
        from exlm_cli.ops.alignment import reference

        return reference
    from exlm_cli.ops.alignment import native

    return native


def _nll(dag: _Dag, backend: Backend) -> Tensor:
    implementation = _implementation(backend, dag)
    if 0 in dag.log_emit.shape:
        # no sequence, target or state, so no path; empty sums tie the result to the arguments, whose gradient is zero
        empty = dag.log_emit[:, :0].sum((1, 2)) + dag.log_trans[:, :0].sum((1, 2))
        return torch.inf - empty.to(torch.promote_types(empty.dtype, torch.float32))
    return implementation.states_alignment_nll(*dag)


def _minus_gradient(dag: _Dag, backend: Backend, *, of: Literal["log_emit", "log_trans"]) -> Tensor:
    """Return minus the gradient of the summed losses: the posterior, zero where a loss is infinite."""
    with torch.inference_mode(False), torch.enable_grad():
        # a tensor made in inference mode cannot be saved for a backward pass; its clone can
        detached = _Dag(*(x.clone() if x.is_inference() else x.detach() for x in dag))
        wanted = getattr(detached, of).requires_grad_()
        gradient: Tensor = torch.autograd.grad(_nll(detached, backend).sum(), wanted)[0]
    return -gradient


def _check(
    log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor | Sequence[int], state_lengths: Tensor | Sequence[int]
) -> _Dag:
    if not isinstance(target_lengths, Tensor):
        target_lengths = torch.tensor(target_lengths, device=log_emit.device)
    if not isinstance(state_lengths, Tensor):
        state_lengths = torch.tensor(state_lengths, device=log_emit.device)
    if log_emit.ndim != 3:
        raise ShapeError(f"`log_emit` has shape {tuple(log_emit.shape)}, expected three axes (B, T, S)")
    B, T, S = log_emit.shape
    _check_shape("log_trans", log_trans, "(B, S, S)", (B, S, S))
    _check_shape("target_lengths", target_lengths, "(B,)", (B,))
    _check_shape("state_lengths", state_lengths, "(B,)", (B,))
    if log_trans.dtype != log_emit.dtype:
        raise ValueError(
            f"`log_trans` is {_name(log_trans.dtype)}, expected {_name(log_emit.dtype)}, the dtype of `log_emit`"
        )
    for name, tensor in (
        ("log_trans", log_trans),
        ("target_lengths", target_lengths),
        ("state_lengths", state_lengths),
    ):
        if tensor.device != log_emit.device:
            raise ValueError(f"`{name}` is on {tensor.device}, expected {log_emit.device}, where `log_emit` is")
    _check_lengths("target_lengths", target_lengths, "T", T)
    _check_lengths("state_lengths", state_lengths, "S", S)
    return _Dag(log_emit, log_trans, target_lengths.long(), state_lengths.long())


def _check_shape(name: str, tensor: Tensor, axes: str, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise ShapeError(f"`{name}` has shape {tuple(tensor.shape)}, expected {axes} = {expected}")


def _check_lengths(name: str, lengths: Tensor, axis: str, size: int) -> None:
    if lengths.numel() == 0:  # an empty list becomes float32
        return
    if lengths.is_floating_point():
        raise ValueError(f"`{name}` is {_name(lengths.dtype)}, expected an integer dtype")
    # reading the values would stall a device and cut a compiled graph in two
    if lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return
    values = lengths.tolist()
    smallest, largest = min(values), max(values)
    if smallest < 0 or largest > size:
        raise ShapeError(f"`{name}` holds {smallest if smallest < 0 else largest}, expected 0 to {axis} = {size}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
