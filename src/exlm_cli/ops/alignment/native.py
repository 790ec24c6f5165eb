"""Native backend: the compiled kernels as torch operators, with their fake kernels and autograd rules.

Tensors on a CUDA device without kernels, and float64 there, are copied to the host kernels.

A forward pass that needs gradients keeps alpha, on CUDA also beta, in one opaque integer tensor; the backward pass
writes both gradients, on a CPU while it sums beta. `cuda_ext/README.md` explains what the kernels compute and how.

Axes: B sequences, T targets, S states (DAG nodes). Arguments have been checked by `api`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exlm_cli.ops.alignment.build import BuildError
from exlm_cli.ops.alignment.library import (
    Dag,
    DeviceKernels,
    HostCopies,
    HostLibrary,
    Kernels,
    device_library,
    host_library,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int64  # annotations only: the op needs torch and nothing else

_CPU = torch.device("cpu")
_CPU_DTYPES = (torch.float32, torch.float64)
_CUDA_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def obstacle(dtype: torch.dtype, device: torch.device) -> str:
    """Return in one line why there are no kernels for such tensors; empty if there are.

    Those of the host serve CUDA tensors if the device has none. Builds what is missing, once per machine.
    """
    # on `meta` an operator only returns shapes
    dtypes = {"cpu": _CPU_DTYPES, "cuda": _CPU_DTYPES + _CUDA_DTYPES, "meta": _CPU_DTYPES}.get(device.type, ())
    if dtype not in dtypes:
        return f"it does not take {_name(dtype)} on {device.type}"
    if device.type == "meta":
        return ""
    of_device = device_obstacle(dtype, device)
    if device.type == "cuda" and not of_device:
        return ""
    of_host = _missing_library(_CPU)
    return f"{of_device}; on the host: {of_host}" if of_device and of_host else of_host


def device_obstacle(dtype: torch.dtype, device: torch.device) -> str:
    """Return in one line why a CUDA device has no kernels for a dtype; empty if it has, and for other devices."""
    if device.type != "cuda":
        return ""
    if dtype not in _CUDA_DTYPES:
        return f"the CUDA kernels do not take {_name(dtype)}"
    index = torch.cuda.current_device() if device.index is None else device.index
    return _missing_library(torch.device("cuda", index))


@functools.cache
def _missing_library(device: torch.device) -> str:
    try:
        device_library(device.index) if device.type == "cuda" else host_library()
    except BuildError as error:
        return str(error)
    return ""


def states_alignment_nll(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int64[Tensor, " B"],
    state_lengths: Int64[Tensor, " B"],
) -> Float[Tensor, " B"]:
    """See `api.states_alignment_nll`."""
    keeps_alpha = torch.is_grad_enabled() and (log_emit.requires_grad or log_trans.requires_grad)
    nll: Tensor
    nll, _ = _forward_op(log_emit, log_trans, target_lengths, state_lengths, keeps_alpha)
    return nll


def best_alignment(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int64[Tensor, " B"],
    state_lengths: Int64[Tensor, " B"],
) -> Int64[Tensor, "B T"]:
    """See `api.best_alignment`; of equally probable paths it returns the one whose last differing node is lowest."""
    nodes: Tensor = _best(log_emit, log_trans, target_lengths, state_lengths)
    return nodes


@torch.library.custom_op("exlm::states_alignment_forward", mutates_args=())
def _forward_op(
    log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor, keeps_alpha: bool
) -> tuple[Tensor, Tensor]:
    nll, saved = _empty_results(log_emit, keeps_alpha)
    dag = Dag.of(log_emit, log_trans, target_lengths, state_lengths)
    _kernels(log_emit).forward(dag, nll, saved if keeps_alpha else None)
    return nll, saved


@torch.library.custom_op("exlm::states_alignment_backward", mutates_args=())
def _backward_op(
    log_emit: Tensor,
    log_trans: Tensor,
    target_lengths: Tensor,
    state_lengths: Tensor,
    saved: Tensor,
    grad_nll: Tensor,
    wants_emit: bool,
    wants_trans: bool,
) -> tuple[Tensor, Tensor]:
    grad_emit, grad_trans = _empty_gradients(log_emit, log_trans, wants_emit, wants_trans)
    _kernels(log_emit).backward(
        Dag.of(log_emit, log_trans, target_lengths, state_lengths),
        saved.contiguous(),
        grad_nll.contiguous(),
        grad_emit if wants_emit else None,
        grad_trans if wants_trans else None,
    )
    return grad_emit, grad_trans


@torch.library.custom_op("exlm::best_alignment", mutates_args=())
def _best(log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor) -> Tensor:
    nodes = _empty_nodes(log_emit)
    _kernels(log_emit).best(Dag.of(log_emit, log_trans, target_lengths, state_lengths), nodes)
    return nodes


def _kernels(tensor: Tensor) -> Kernels | HostCopies:
    """Return the kernels for a tensor, on a device on the current stream of torch."""
    if _has_device_kernels(tensor):
        return device_kernels(tensor.device)
    return host_library() if tensor.device.type == "cpu" else HostCopies(host_library())


def device_kernels(device: torch.device) -> DeviceKernels:
    """Return the kernels of a CUDA device, on the current stream of torch.

    Raises:
        BuildError: There are none; `device_obstacle` says why.
    """
    stream = torch.cuda.current_stream(device)
    return device_library(stream.device_index).on(stream.device_index, stream.cuda_stream)


def _has_device_kernels(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and not device_obstacle(tensor.dtype, tensor.device)


def _empty_results(log_emit: Tensor, keeps_alpha: bool) -> tuple[Tensor, Tensor]:
    """Return `nll` and the memory for the backward pass: integers, so that it is not read as values."""
    kernels = DeviceKernels if _has_device_kernels(log_emit) else HostLibrary
    is_float64 = log_emit.dtype == torch.float64
    nll = log_emit.new_empty(log_emit.shape[0], dtype=torch.float64 if is_float64 else torch.float32)
    saved_shape = kernels.saved_shape(*log_emit.shape) if keeps_alpha else (0,)
    return nll, log_emit.new_empty(saved_shape, dtype=torch.int64 if is_float64 else torch.int32)


def _empty_gradients(log_emit: Tensor, log_trans: Tensor, wants_emit: bool, wants_trans: bool) -> tuple[Tensor, Tensor]:
    """Return both gradients, contiguous; one that is not needed has no elements."""
    return (
        log_emit.new_empty(log_emit.shape if wants_emit else (0,)),
        log_trans.new_empty(log_trans.shape if wants_trans else (0,)),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _empty_nodes(log_emit: Tensor) -> Tensor:
    return log_emit.new_empty(log_emit.shape[:2], dtype=torch.int64)


# results for tensors without data, while torch.compile traces
_forward_op.register_fake(lambda log_emit, *others: _empty_results(log_emit, others[-1]))
_backward_op.register_fake(lambda log_emit, log_trans, *others: _empty_gradients(log_emit, log_trans, *others[-2:]))
_best.register_fake(lambda log_emit, *_: _empty_nodes(log_emit))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, keeps_alpha = inputs
    ctx.keeps_alpha = keeps_alpha
    ctx.set_materialize_grads(False)  # alpha has no gradient: do not allocate zeros for it
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx: Any, grad_nll: Tensor, _grad_saved: None) -> tuple[Tensor | None, ...]:
    assert ctx.keeps_alpha, "no gradient without alpha"
    wants_emit, wants_trans, *_ = ctx.needs_input_grad
    grad_emit, grad_trans = _backward_op(*ctx.saved_tensors, grad_nll, wants_emit, wants_trans)
    return (grad_emit if wants_emit else None), (grad_trans if wants_trans else None), None, None, None


_forward_op.register_autograd(_backward, setup_context=_setup_context)
