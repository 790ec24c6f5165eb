"""Compiled kernels as Python functions: loads a native library and calls its C interface.

`cuda_ext/include/states_alignment.h` defines the interface. Tensors arrive checked and leave as pointers and strides.
"""

import ctypes
import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from exlm_cli.ops.alignment import build

_ABI = 3
_OK = 0
_ROW_PAD = 16
_Argument = ctypes.c_void_p | ctypes.c_int32

DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""Numbers of dtypes in the interface."""


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


class Arguments(Protocol):
    """Tensors of a call, as the C struct that a function of the library takes."""

    def as_struct(self) -> ctypes.Structure:
        """Return the C struct of the tensors; valid while they live."""


@dataclass(frozen=True)
class Dag:
    """Arguments of the op in the layout that the kernels read: last axis of stride 1, contiguous lengths."""

    log_emit: Tensor
    log_trans: Tensor
    target_lengths: Tensor
    state_lengths: Tensor

    @classmethod
    def of(cls, log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor) -> "Dag":
        """Return the arguments in this layout; copies only tensors of another layout."""
        return cls(_rows(log_emit), _rows(log_trans), target_lengths.contiguous(), state_lengths.contiguous())

    def as_struct(self) -> _Batch:
        """Return the C struct of the tensors; valid while they live."""
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
            DTYPES[self.log_emit.dtype],
        )


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class Kernels(ABC):
    """Kernels of the host library or of a device stream; the caller allocates the results."""

    def forward(self, dag: Dag, nll: Tensor, saved: Tensor | None) -> None:
        """Fill `nll` (B,) and, for a backward pass, `saved`."""
        self.call("forward", dag, pointer(nll), pointer(saved))

    def backward(
        self, dag: Dag, saved: Tensor, grad_nll: Tensor, grad_emit: Tensor | None, grad_trans: Tensor | None
    ) -> None:
        """Fill every element of the gradients that are not None."""
        self.call("backward", dag, *map(pointer, (saved, grad_nll, grad_emit, grad_trans)))

    def best(self, dag: Dag, nodes: Tensor) -> None:
        """Fill `nodes` (B, T), int64."""
        self.call("best", dag, pointer(nodes))

    @abstractmethod
    def call(self, operation: str, dag: Dag, *arguments: _Argument) -> None:
        """Call a function of the library."""


class HostLibrary(Kernels):
    """Kernels for the CPU; they run on as many threads as torch does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = _load(path)

    @staticmethod
    def saved_shape(batch: int, max_targets: int, max_states: int) -> tuple[int, ...]:
        """Return the shape of what `forward` keeps: mantissa and exponent of alpha for each state and slot."""
        slots = _padded_slots(max_targets)
        # equals `states_alignment_saved_words_cpu`, and takes the symbolic sizes of torch.compile
        is_short = 2 * slots <= max_states + 46
        most = slots * (max_states - slots + 46) if is_short else (max_states + 46) ** 2 // 4
        return batch, 2, torch.sym_min(slots * ((max_states + 7) // 8 * 8 + 1), most)

    def call(self, operation: str, dag: Dag, *arguments: _Argument) -> None:
        """See `Kernels`."""
        num_threads = ctypes.c_int32(torch.get_num_threads())
        _call(self._library, f"states_alignment_{operation}_cpu", dag, *arguments, num_threads)


class HostCopies:
    """Host kernels for tensors of a device without kernels: copied to the host and back, which waits for the device.

    16 bits are widened to float32 there. The methods are those of `Kernels`.
    """

    def __init__(self, library: HostLibrary) -> None:
        self._library = library

    def forward(self, dag: Dag, nll: Tensor, saved: Tensor | None) -> None:
        """See `Kernels`."""
        self._call("forward", dag, (), (nll, saved))

    def backward(
        self, dag: Dag, saved: Tensor, grad_nll: Tensor, grad_emit: Tensor | None, grad_trans: Tensor | None
    ) -> None:
        """See `Kernels`."""
        self._call("backward", dag, (saved, grad_nll), (grad_emit, grad_trans))

    def best(self, dag: Dag, nodes: Tensor) -> None:
        """See `Kernels`."""
        self._call("best", dag, (), (nodes,))

    def _call(self, operation: str, dag: Dag, inputs: tuple[Tensor, ...], outputs: tuple[Tensor | None, ...]) -> None:
        on_host = Dag(*(_empty_on_host(tensor).copy_(tensor) for tensor in vars(dag).values()))
        copies = [_empty_on_host(tensor).copy_(tensor) for tensor in inputs]
        results = [None if tensor is None else _empty_on_host(tensor) for tensor in outputs]
        getattr(self._library, operation)(on_host, *copies, *results)
        for tensor, result in zip(outputs, results, strict=True):
            if tensor is not None and result is not None:
                tensor.copy_(result)


def _empty_on_host(tensor: Tensor) -> Tensor:
    """Return contiguous memory for a copy, which a CUDA device reads and writes at full speed."""
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)


class DeviceLibrary:
    """Kernels for CUDA devices."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = _load(path)

    def on(self, device: int, stream: int) -> "DeviceKernels":
        """Return the kernels on a stream (a `cudaStream_t`) of a device."""
        return DeviceKernels(self._library, device, stream)

    def runs_on(self, device: int) -> bool:
        """Return whether the library holds code that runs on a device with its driver."""
        return self._status(device) == _OK

    def check(self, device: int) -> None:
        """Check that the library runs on a device.

        Raises:
            BuildError: The driver is too old, or the kernels were built for other devices.
        """
        status = self._status(device)
        if status != _OK:
            raise build.BuildError(f"{self.path} does not run on cuda:{device}: {_message(self._library, status)}")

    def _status(self, device: int) -> int:
        return int(self._library.states_alignment_check_cuda(ctypes.c_int32(device)))


@dataclass(frozen=True)
class DeviceKernels(Kernels):
    """Kernels of one stream; they enqueue their work and return at once."""

    _library: ctypes.CDLL
    _device: int
    _stream: int

    @staticmethod
    def saved_shape(batch: int, max_targets: int, max_states: int, num_sweeps: int = 2) -> tuple[int, ...]:
        """Return the shape of what `forward` keeps: both sweeps, each with a row for its progress."""
        return batch, num_sweeps, 2 * max_states + 1, _padded_slots(max_targets)

    def forward(self, dag: Dag, nll: Tensor, saved: Tensor | None) -> None:
        """See `Kernels`."""
        if saved is None:
            # the kernel may outlive the tensor: torch reuses freed memory only for later work on this stream
            B, T, S = dag.log_emit.shape
            saved = nll.new_empty(self.saved_shape(B, T, S, num_sweeps=1), dtype=torch.int32)
        self.call("forward", dag, pointer(nll), pointer(saved), ctypes.c_int32(saved.shape[1]))

    def best(self, dag: Dag, nodes: Tensor) -> None:
        """See `Kernels`."""
        B, T, S = dag.log_emit.shape
        # a float64 score and an int32 node for every state and slot
        scratch = nodes.new_empty((B * S * _padded_slots(T) * 12 + 7) // 8)
        self.call("best", dag, pointer(scratch), pointer(nodes))

    def call(self, operation: str, batch: Arguments, *arguments: _Argument) -> None:
        """Call a function of the library with its struct, what follows it, and this stream."""
        where = (ctypes.c_int32(self._device), ctypes.c_void_p(self._stream))
        _call(self._library, f"states_alignment_{operation}_cuda", batch, *arguments, *where)


@functools.cache
def host_library() -> HostLibrary:
    """Return the library for the CPU, built first if it is missing.

    Raises:
        BuildError: It is missing and cannot be built, or does not load.
    """
    return HostLibrary(build.find_library("cpu") or build.build_library("cpu"))


@functools.cache
def device_library(device: int) -> DeviceLibrary:
    """Return the library for one CUDA device, built for that device if it is missing; touches no other device.

    Raises:
        BuildError: It is missing and cannot be built, or does not run on the device.
    """
    library = find_device_library(device)
    if library is None:
        library = DeviceLibrary(build.build_library("cuda", architectures=_architectures(device)))
        library.check(device)
    return library


def find_device_library(device: int) -> DeviceLibrary | None:
    """Return a library that exists: one for all architectures that runs on the device, else one for it alone; or None.

    Raises:
        BuildError: None exists and none can be built, or the one for this device does not run on it.
    """
    shared = build.find_library("cuda")
    if shared is not None and (library := DeviceLibrary(shared)).runs_on(device):
        return library
    own = build.find_library("cuda", architectures=_architectures(device))
    if own is None:
        return None
    library = DeviceLibrary(own)
    library.check(device)
    return library


def _architectures(device: int) -> tuple[str, ...]:
    major, minor = torch.cuda.get_device_capability(device)
    return (f"{major}{minor}",)


def _load(path: Path) -> ctypes.CDLL:
    """Open a library and check that it has this module's version of the interface."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise build.BuildError(f"{path} cannot be loaded: {error}") from error
    library.states_alignment_message.restype = ctypes.c_char_p
    abi = int(library.states_alignment_abi())
    if abi != _ABI:
        raise build.BuildError(f"{path} has interface version {abi}, expected {_ABI}")
    return library


def _call(library: ctypes.CDLL, function: str, batch: Arguments, *arguments: _Argument) -> None:
    status = getattr(library, function)(ctypes.byref(batch.as_struct()), *arguments)
    if status != _OK:
        raise RuntimeError(f"{function}: {_message(library, status)}")


def _message(library: ctypes.CDLL, status: int) -> str:
    return str(library.states_alignment_message(ctypes.c_int32(status)).decode())


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Return the address of a tensor's data; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _padded_slots(max_targets: int) -> int:
    """Return the number of slots of a state, one for each of 0 to T targets, rounded up to whole vectors."""
    return (max_targets + _ROW_PAD) // _ROW_PAD * _ROW_PAD
