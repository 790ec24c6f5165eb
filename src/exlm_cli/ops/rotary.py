"""Rotary position embedding over one or two position axes (section 4.2; Su et al. 2021).

Axes: N attention heads, H head width, A position axes (1 or 2).
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int64, Real
from torch import Tensor


def rotation_at(
    positions: Real[Tensor, "*rows A"], axis_widths: Sequence[int], base: float, dtype: torch.dtype
) -> Float[Tensor, "*rows 2 H"]:
    """Return what `rotate` reads at every position: cosines, and sines that are negative for the first of each pair.

    Of the W entries of one axis, pair p of the W/2 pairs turns by position * base^(-2p / W). With A = 2 the first
    entries follow the token index and the last ones the clone index, so two clones of one [MASK] differ in the last
    ones alone.

    Args:
        positions: Integers or fractions; (token index, clone index) for A = 2.
        axis_widths: Entries of each axis, even numbers that sum to H.
        base: 10000 in the paper.
        dtype: That of the heads. Angles are float32, whatever it is.
    """
    angles = []
    for axis, width in enumerate(axis_widths):
        exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
        angles.append(positions[..., axis, None].float() * base**-exponents)
    angle = torch.cat(angles, dim=-1)
    sin = angle.sin()
    pairs = angle.new_empty((*angle.shape[:-1], 2, angle.shape[-1], 2), dtype=dtype)
    pairs[..., 0, :, :] = angle.cos()[..., None]
    pairs[..., 1, :, 0] = -sin
    pairs[..., 1, :, 1] = sin
    return pairs.flatten(-2)


def rotate_half_order(head_width: int) -> Int64[Tensor, " H"]:
    """Return the order of a head's entries, first of each pair in front, so that p turns with p + H/2 (RoFormer)."""
    return torch.arange(head_width).view(-1, 2).t().flatten()


def rotate(
    parts: Float[Tensor, "*rows P N H"], rotation: Float[Tensor, "*rows 2 H"], num_turned: int
) -> tuple[Float[Tensor, "*rows N H"], ...]:
    """Rotate every pair (2p, 2p + 1) of entries of the first parts; return all P parts.

    (a, b) becomes (a cos - b sin, b cos + a sin). In 16 bits the cosines and sines, the first product and the sum are
    rounded, each by at most 2^-9 of its size. Autograd keeps the rotation alone.

    Args:
        parts: Heads of the queries, keys and values, as one product of matrices gives them.
        rotation: Result of `rotation_at`, in the dtype of the heads; axes of size 1 are broadcast.
        num_turned: Parts to rotate; the others are views of `parts`.
    """
    return cast(tuple[Tensor, ...], _Rotation.apply(parts, rotation, num_turned))  # type: ignore[no-untyped-call]


class _Rotation(torch.autograd.Function):
    """Autograd's own backward pass would read and write the heads once more."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, rotation: Tensor, num_turned: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rotation)
        ctx.num_turned = num_turned
        cos, sin = rotation[..., None, :, :].split(1, dim=-2)
        turned = _turn(parts[..., :num_turned, :, :], cos, sin)
        return (*turned.unbind(-3), *parts[..., num_turned:, :, :].unbind(-3))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rotation,) = ctx.saved_tensors
        cos, sin = rotation.split(1, dim=-2)
        back = -sin
        parts = [*(_turn(grad, cos, back) for grad in grads[: ctx.num_turned]), *grads[ctx.num_turned :]]
        # to stack one is to copy it
        return parts[0].unsqueeze(-3) if len(parts) == 1 else torch.stack(parts, -3), None, None


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    is_wide = heads.dtype in (torch.float32, torch.float64) and heads.stride(-1) == 1
    if is_wide and heads.device.type == "cpu" and not torch.compiler.is_compiling():
        # one pass of complex products: a fifth of the time that the four passes below take on a CPU
        turned = torch.view_as_complex(heads.unflatten(-1, (-1, 2))) * torch.complex(cos[..., ::2], sin[..., 1::2])
        return torch.view_as_real(turned).flatten(-2)
    # rolling a pair by one exchanges its entries; on a CPU `flip` takes twice as long, and so does arithmetic with
    # every other entry
    partners = heads.unflatten(-1, (-1, 2)).roll(1, -1).flatten(-2)
    return (heads * cos).addcmul_(partners, sin)
