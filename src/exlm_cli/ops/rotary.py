"""Rotary position embedding over one or two position axes (section 4.2; Su et al. 2021).

Axes: B batch, N attention heads, L position, H head width, A position axes (1 or 2).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64, Real
from torch import Tensor


class Rotation(NamedTuple):
    """Angles that rotate the heads of every position.

    Attributes:
        cos: (B, 1, L, H) float32.
        sin: (B, 1, L, H) float32, negated in the first half of each axis' entries.
        axis_widths: Entries of a head that each position axis rotates; they sum to H.
    """

    cos: Float[Tensor, "B 1 L H"]
    sin: Float[Tensor, "B 1 L H"]
    axis_widths: tuple[int, ...]


def rotation_at(positions: Real[Tensor, "B L A"], axis_widths: Sequence[int], base: float) -> Rotation:
    """Return the rotation of heads at the given positions.

    Of the W entries of one axis, pair p of the W/2 pairs turns by position * base^(-2p / W). With A = 2 the first
    entries follow the token index and the last ones the clone index, so two clones of one [MASK] differ in the last
    ones alone.

    Args:
        positions: Integers or fractions; (token index, clone index) for A = 2.
        axis_widths: Entries of each axis, even numbers.
        base: 10000 in the paper.
    """
    cos, sin = [], []
    for axis, width in enumerate(axis_widths):
        exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
        angles = positions[:, None, :, axis, None].float() * base**-exponents
        cos += [angles.cos()] * 2
        sin += [-angles.sin(), angles.sin()]
    return Rotation(torch.cat(cos, dim=-1), torch.cat(sin, dim=-1), tuple(axis_widths))


def rotate_half_order(axis_widths: Sequence[int]) -> Int64[Tensor, " H"]:
    """Return the entries of a head with the first halves of all axes first, so that p turns with p + H/2 (RoFormer)."""
    halves = torch.arange(sum(axis_widths)).split([width // 2 for width in axis_widths for _ in range(2)])
    return torch.cat([*halves[0::2], *halves[1::2]])


def rotate(x: Float[Tensor, "B N L H"], rotation: Rotation) -> Float[Tensor, "B N L H"]:
    """Rotate every pair (p, p + W/2) of each axis' W entries; computed in float32, returned in the dtype of `x`."""
    result: Tensor = _Rotate.apply(x, *rotation)  # type: ignore[no-untyped-call]
    return result


class _Rotate(torch.autograd.Function):
    """Rotation that keeps no activations: its backward pass turns the gradient back by the same angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, axis_widths: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.axis_widths = axis_widths
        # in the memory order of x, which attention gives its result: heads side by side need no copy to be projected
        return torch.empty_like(x).copy_(_turn(x, cos, sin, axis_widths, 1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, ctx.axis_widths, -1).to(grad.dtype), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, axis_widths: tuple[int, ...], direction: int) -> Tensor:
    """Return heads times cosines, plus heads with the halves of each axis exchanged times the signed sines, wide."""
    # contiguous (L, H) make one inner loop; over whole heads, since one over half an axis takes four times as long
    wide = x.to(torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format)
    halves = wide.split([width // 2 for width in axis_widths for _ in range(2)], dim=-1)
    exchanged = torch.cat([halves[i ^ 1] for i in range(len(halves))], dim=-1)
    return exchanged.mul_(direction * sin).addcmul_(wide, cos)
