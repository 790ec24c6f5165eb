"""Autocast inside the model: whether it is on, and regions without it."""

from contextlib import AbstractContextManager, nullcontext

import torch


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
