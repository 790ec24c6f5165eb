"""The compiled kernels as Python functions: loads a shared library and speaks its C interface.

`cuda_ext/include/states_alignment.h` is the contract. Tensors come in checked; here they become pointers and strides.
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from exlm_cli.ops.alignment import build

_ABI = 1
_OK = 0
ROW_PAD = 16
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


class _Batch(ctypes.Structure):
    """`states_alignment_batch`."""

    _fields_ = (
        ("log_emit", ctypes.c_void_p),
        ("log_trans", ctypes.c_void_p),
        ("target_lengths", ctypes.c_void_p),
        ("state_lengths", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("max_targets", ctypes.c_int64),
        ("max_states", ctypes.c_int64),
        ("emit_batch_stride", ctypes.c_int64),
        ("emit_row_stride", ctypes.c_int64),
        ("trans_batch_stride", ctypes.c_int64),
        ("trans_row_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Dag:
    """Arguments of the op, laid out as the kernels read them: the last axis has stride 1, lengths are contiguous."""

    log_emit: Tensor
    log_trans: Tensor
    target_lengths: Tensor
    state_lengths: Tensor

    @classmethod
    def of(cls, log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor) -> "Dag":
        """Copy what is not laid out so."""
        return cls(_rows(log_emit), _rows(log_trans), target_lengths.contiguous(), state_lengths.contiguous())

    def _as_struct(self) -> _Batch:
        B, T, S = self.log_emit.shape
        return _Batch(
            self.log_emit.data_ptr(),
            self.log_trans.data_ptr(),
            self.target_lengths.data_ptr(),
            self.state_lengths.data_ptr(),
            B,
            T,
            S,
            *self.log_emit.stride()[:2],
            *self.log_trans.stride()[:2],
            _DTYPES[self.log_emit.dtype],
        )


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class HostLibrary:
    """The kernels for the CPU; they run on as many threads as torch does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = _load(path)

    def forward(self, dag: Dag, nll: Tensor, saved: Tensor | None) -> None:
        """Fill `nll` (B,) and, for a backward pass, `saved`."""
        saved_pointer = None if saved is None else _pointer(saved)
        self._call("states_alignment_forward_cpu", dag, _pointer(nll), saved_pointer)

    def backward(
        self, dag: Dag, saved: Tensor, grad_nll: Tensor, grad_emit: Tensor | None, grad_trans: Tensor | None
    ) -> None:
        """Fill the gradients that are wanted, every element of them."""
        gradients = [None if gradient is None else _pointer(gradient) for gradient in (grad_emit, grad_trans)]
        self._call("states_alignment_backward_cpu", dag, _pointer(saved), _pointer(grad_nll), *gradients)

    def best(self, dag: Dag, nodes: Tensor) -> None:
        """Fill `nodes` (B, T), int64."""
        self._call("states_alignment_best_cpu", dag, _pointer(nodes))

    def _call(self, function: str, dag: Dag, *arguments: ctypes.c_void_p | None) -> None:
        struct = dag._as_struct()
        num_threads = ctypes.c_int32(torch.get_num_threads())
        status = getattr(self._library, function)(ctypes.byref(struct), *arguments, num_threads)
        if status != _OK:
            raise RuntimeError(f"{function}: {self._library.states_alignment_message(status).decode()}")


@functools.cache
def host_library() -> HostLibrary:
    """The library for the CPU, compiled now if it never was.

    Raises:
        BuildError: There is none, and why.
    """
    if prebuilt := build.prebuilt_library("cpu"):
        return HostLibrary(prebuilt)
    return HostLibrary(build.build_library("cpu"))


def _load(path: Path) -> ctypes.CDLL:
    """Open a library and check that it speaks this module's version of the interface."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise build.BuildError(f"{path} cannot be loaded: {error}") from error
    library.states_alignment_message.restype = ctypes.c_char_p
    abi = int(library.states_alignment_abi())
    if abi != _ABI:
        raise build.BuildError(f"{path} has interface version {abi}, expected {_ABI}")
    return library


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
