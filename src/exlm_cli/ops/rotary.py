"""Rotary position embedding over one or two position axes (section 4.2; Su et al. 2021).

Axes: B batch, N attention heads, L position, H head width, A position axes (1 or 2).
"""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def rotary_tables(
    positions: Int64[Tensor, "B L A"], head_width: int, base: float
) -> tuple[Float[Tensor, "B 1 L A 2 half"], Float[Tensor, "B 1 L A 2 half"]]:
    """Return the cosines and sines that rotate a head, float32, for both halves of each axis; the first half has -sin.

    The A position axes share the head width evenly; within the H/A entries of one axis, pair p of the H/(2A)
    pairs turns by position * base^(-2p / (H/A)). With A = 2 the first half follows the token index and the second the
    clone index, so two clones of one [MASK] differ in the second half alone.

    Args:
        positions: Integer positions; (token index, clone index) for A = 2.
        head_width: H, divisible by 2A.
        base: 10000 in the paper.
    """
    num_axes = positions.shape[-1]
    axis_width = head_width // num_axes
    exponents = torch.arange(0, axis_width, 2, device=positions.device, dtype=torch.float32) / axis_width
    angles = positions[:, None, :, :, None].float() * base**-exponents
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([cos, cos], dim=-2), torch.stack([-sin, sin], dim=-2)


def rotate(
    x: Float[Tensor, "B N L H"], cos: Float[Tensor, "B 1 L A 2 half"], sin: Float[Tensor, "B 1 L A 2 half"]
) -> Float[Tensor, "B N L H"]:
    """Rotate every pair (p, p + H/(2A)) of each axis' entries; computed in float32, returned in the dtype of `x`."""
    result: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return result


class _Rotate(torch.autograd.Function):
    """Rotation that keeps no activations: its backward pass turns the gradient back by the same angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Return heads times cosines, plus heads with the halves of each axis exchanged times the signed sines."""
    num_axes, _, half = cos.shape[-3:]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # over whole heads: an inner loop over half an axis, 8 or 16 entries, takes four times as long on a CPU
    halves = wide.split(half, dim=-1)
    exchanged = torch.cat([halves[i ^ 1] for i in range(2 * num_axes)], dim=-1)
    turned = torch.addcmul(wide * cos.flatten(-3), exchanged, sin.flatten(-3), value=direction)
    return turned.to(x.dtype)
