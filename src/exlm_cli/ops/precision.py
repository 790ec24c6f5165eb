"""Precision of the model's products: which one a device takes, autocast, and regions without it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]

_DTYPES: Mapping[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_WITH_BF16 = (8, 0)
"""Compute capability, `sm_80`. Older cards run bf16 too, but without their tensor cores."""


def choose_precision(wanted: Literal["auto"] | Precision, capability: tuple[int, int] | None) -> Precision:
    """Return the precision of a device.

    Args:
        wanted: `train.precision`.
        capability: Compute capability of a CUDA device; None: a CPU.
    """
    if wanted != "auto":
        return wanted
    if capability is None:
        return "fp32"
    return "bf16" if capability >= _FIRST_WITH_BF16 else "fp16"


def precision_on(device: torch.device, wanted: Literal["auto"] | Precision) -> Precision:
    """Return the precision of a device; `wanted` as for `choose_precision`."""
    return choose_precision(wanted, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the context in which a model runs with a precision."""
    return torch.autocast(device.type, _DTYPES.get(precision), enabled=precision in _DTYPES)


def matmul_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of a product with `tensor`: autocast's where it is on, else that of `tensor`."""
    kind = tensor.device.type
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a region without autocast on the device of a tensor; tensors without data (`meta`) never have it."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


def _has_autocast(kind: str) -> bool:
    # torch 2.11 cannot compile `torch.amp.is_autocast_available`
    return kind != "meta"
