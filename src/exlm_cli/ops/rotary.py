"""Rotary position embedding over one or two position axes (section 4.2; Su et al. 2021).

Axes: B batch, N attention heads, L position, H head width, P = H/2 pairs of entries, A position axes (1 or 2).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64, Real
from torch import Tensor


def rotation_at(positions: Real[Tensor, "B L A"], axis_widths: Sequence[int], base: float) -> Tensor:
    """Return a factor e^(i angle) for each pair of entries of a head at every position, (B, 1, L, P) complex64.

    While `torch.compile` traces, it is (B, 1, L, P, 2) cosines and sines: its code generator has no complex numbers.

    Of the W entries of one axis, pair p of the W/2 pairs turns by position * base^(-2p / W). With A = 2 the first
    entries follow the token index and the last ones the clone index, so two clones of one [MASK] differ in the last
    ones alone.

    Args:
        positions: Integers or fractions; (token index, clone index) for A = 2.
        axis_widths: Entries of each axis, even numbers that sum to H.
        base: 10000 in the paper.
    """
    angles = []
    for axis, width in enumerate(axis_widths):
        exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
        angles.append(positions[:, None, :, axis, None].float() * base**-exponents)
    angles_BLP = torch.cat(angles, dim=-1)
    pairs = torch.stack([angles_BLP.cos(), angles_BLP.sin()], dim=-1)
    return pairs if torch.compiler.is_compiling() else torch.view_as_complex(pairs)


def rotate_half_order(head_width: int) -> Int64[Tensor, " H"]:
    """Return the order of a head's entries, first of each pair in front, so that p turns with p + H/2 (RoFormer)."""
    return torch.arange(head_width).view(-1, 2).t().flatten()


def rotate(x: Float[Tensor, "B N L H"], rotation: Tensor) -> Float[Tensor, "B N L H"]:
    """Rotate every pair (2p, 2p + 1) of entries; computed in float32 at least, returned in the dtype of `x`.

    The result has the memory order of `x`, and autograd keeps no activations.

    Args:
        x: Heads.
        rotation: Result of `rotation_at`, complex or real.
    """
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    if rotation.is_complex():
        turned = torch.view_as_real(torch.view_as_complex(pairs) * rotation)
    else:
        (a, b), (cos, sin) = pairs.unbind(-1), rotation.unbind(-1)
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)
