"""The compiled kernels as torch operators: custom op, fake and autograd rules.

A forward pass that will be differentiated keeps alpha in one opaque integer tensor; the backward pass sums beta and
writes both gradients. What the kernels compute, and how, is in `cuda_ext/README.md`.

Axes: B sequences, T targets, S states (DAG nodes). Arguments have been checked by `api`.
"""

import functools
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from exlm_cli.ops.alignment.build import BuildError
from exlm_cli.ops.alignment.library import Dag, HostLibrary, host_library

_CPU_DTYPES = (torch.float32, torch.float64)


def is_available() -> bool:
    """Whether the host kernels are there; compiles them, once for a machine, where they are not."""
    return not unavailable_reason()


@functools.cache
def unavailable_reason() -> str:
    """Why the host kernels cannot be had, in one line; empty where they can."""
    try:
        host_library()
    except BuildError as error:
        return str(error)
    return ""


def supports(dtype: torch.dtype, device_type: str) -> bool:
    """Whether kernels for such tensors are there."""
    return device_type == "cpu" and dtype in _CPU_DTYPES and is_available()


def states_alignment_nll(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int64[Tensor, " B"],
    state_lengths: Int64[Tensor, " B"],
) -> Float[Tensor, " B"]:
    """See `api.states_alignment_nll`."""
    keeps_alpha = torch.is_grad_enabled() and (log_emit.requires_grad or log_trans.requires_grad)
    nll: Tensor
    nll, _ = _forward(log_emit, log_trans, target_lengths, state_lengths, keeps_alpha)
    return nll


def best_alignment(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int64[Tensor, " B"],
    state_lengths: Int64[Tensor, " B"],
) -> Int64[Tensor, "B T"]:
    """See `api.best_alignment`; among equally probable paths, the one whose last differing node is lowest."""
    nodes: Tensor = _best(log_emit, log_trans, target_lengths, state_lengths)
    return nodes


@torch.library.custom_op("exlm::states_alignment_forward", mutates_args=())
def _forward(
    log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor, keeps_alpha: bool
) -> tuple[Tensor, Tensor]:
    nll, saved = _empty_results(log_emit, keeps_alpha)
    dag = Dag.of(log_emit, log_trans, target_lengths, state_lengths)
    host_library().forward(dag, nll, saved if keeps_alpha else None)
    return nll, saved


@torch.library.custom_op("exlm::states_alignment_backward", mutates_args=())
def _backward(
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
    host_library().backward(
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
    host_library().best(Dag.of(log_emit, log_trans, target_lengths, state_lengths), nodes)
    return nodes


def _empty_results(log_emit: Tensor, keeps_alpha: bool) -> tuple[Tensor, Tensor]:
    """`nll` and the memory for alpha: a plane of mantissas and one of exponents, (S, slots) each."""
    B, T, S = log_emit.shape
    saved_shape = HostLibrary.saved_shape(B, T, S) if keeps_alpha else (0,)
    word = torch.int64 if log_emit.dtype == torch.float64 else torch.int32
    return log_emit.new_empty(B), log_emit.new_empty(saved_shape, dtype=word)


def _empty_gradients(log_emit: Tensor, log_trans: Tensor, wants_emit: bool, wants_trans: bool) -> tuple[Tensor, Tensor]:
    """Both gradients, contiguous; one that is not wanted has no elements."""
    return (
        log_emit.new_empty(log_emit.shape if wants_emit else (0,)),
        log_trans.new_empty(log_trans.shape if wants_trans else (0,)),
    )


def _empty_nodes(log_emit: Tensor) -> Tensor:
    return log_emit.new_empty(log_emit.shape[:2], dtype=torch.int64)


# what the operators return for tensors without data, while torch.compile traces
_forward.register_fake(lambda log_emit, *others: _empty_results(log_emit, others[-1]))
_backward.register_fake(lambda log_emit, log_trans, *others: _empty_gradients(log_emit, log_trans, *others[-2:]))
_best.register_fake(lambda log_emit, *_: _empty_nodes(log_emit))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, keeps_alpha = inputs
    ctx.keeps_alpha = keeps_alpha
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx: Any, grad_nll: Tensor, _grad_saved: None) -> tuple[Tensor | None, ...]:
    if not ctx.keeps_alpha:
        raise RuntimeError("exlm::states_alignment_forward has no gradient where `keeps_alpha` is False")
    wants_emit, wants_trans, *_ = ctx.needs_input_grad
    grad_emit, grad_trans = _backward(*ctx.saved_tensors, grad_nll, wants_emit, wants_trans)
    return (grad_emit if wants_emit else None), (grad_trans if wants_trans else None), None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
