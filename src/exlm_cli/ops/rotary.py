"""Rotary position embedding over one or two position axes (section 4.2; Su et al. 2021).

Axes: B batch, N attention heads, L position, H head width, A position axes (1 or 2).
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def rotary_tables(
    positions: Int64[Tensor, "B L A"], head_width: int, base: float
) -> tuple[Float[Tensor, "B 1 L A half"], Float[Tensor, "B 1 L A half"]]:
    """Return the cosines and sines that rotate a head, float32.

    The head width is split evenly among the A position axes; within the H/A entries of one axis, pair p of the H/(2A)
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
    return angles.cos(), angles.sin()


def rotate(
    x: Float[Tensor, "B N L H"], cos: Float[Tensor, "B 1 L A half"], sin: Float[Tensor, "B 1 L A half"]
) -> Float[Tensor, "B N L H"]:
    """Rotate every pair (p, p + H/(2A)) of each axis' entries; computed in float32, returned in the dtype of `x`."""
    num_axes, half = cos.shape[-2:]
    pairs = x.float().unflatten(-1, (num_axes, 2, half))
    first, second = pairs[..., 0, :], pairs[..., 1, :]
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-2)
    return turned.flatten(-3).to(x.dtype)
