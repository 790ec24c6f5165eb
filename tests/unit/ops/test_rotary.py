"""2D RoPE against its definition written as complex rotations, in each dtype, and its gradients."""

import pytest
import torch

from exlm_cli.ops.rotary import rotate, rotation_at
from tests.oracles import turned


def _rotated(heads, positions, widths):
    """Return heads (..., N, H) rotated at positions (..., A)."""
    return rotate(heads[..., None, :, :], rotation_at(positions, widths, 10000.0, heads.dtype), 1)[0]


@pytest.mark.parametrize("widths", [(8,), (4, 4), (6, 2)])
def test_rotation_is_the_definition(widths):
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 200, (2, 5, len(widths)), generator=generator) / 4
    x = torch.randn(2, 5, 3, 8, generator=generator)
    rotated = _rotated(x, positions, widths)
    for b in range(2):
        for place in range(5):
            for head in range(3):
                expected = turned(x[b, place, head], positions[b, place].tolist(), widths)
                torch.testing.assert_close(rotated[b, place, head], expected, atol=1e-5, rtol=1e-5)


def test_the_first_parts_are_rotated_alike_and_the_others_stay():
    parts = torch.randn(5, 3, 2, 8, generator=torch.Generator().manual_seed(6))
    positions = torch.arange(5)[:, None]
    q, k, v = rotate(parts, rotation_at(positions, (8,), 1e4, torch.float32), 2)
    for rotated, part in ((q, 0), (k, 1)):
        torch.testing.assert_close(rotated, _rotated(parts[:, part], positions, (8,)), rtol=0, atol=0)
    assert torch.equal(v, parts[:, 2])


def test_complex_products_and_real_ones_agree():
    """On a CPU complex numbers need entries in a row; a gradient of ones has them all in one place."""
    generator = torch.Generator().manual_seed(7)
    apart = torch.randn(8, 5, 3, 2, generator=generator).permute(1, 2, 3, 0).requires_grad_()
    in_row = apart.detach().contiguous().requires_grad_()
    rotation = rotation_at(torch.arange(5)[:, None], (8,), 1e4, torch.float32)
    results = [torch.stack(rotate(parts, rotation, 2)) for parts in (apart, in_row)]
    torch.testing.assert_close(*results)
    results[0].sum().backward()
    (results[1] * torch.ones_like(results[1])).sum().backward()
    torch.testing.assert_close(apart.grad, in_row.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_positions_are_exact_and_every_product_and_sum_is_rounded_once(dtype):
    """Of |a cos - b sin| cosines, first product and result are rounded, each by half a unit of its last place."""
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
    positions = torch.tensor([[0], [500], [501], [4097]])  # 16 bits could not tell the last from 4096
    rotated = _rotated(x, positions, (8,))
    exact = _rotated(x.double(), positions, (8,))
    assert rotated.dtype == dtype
    size = x.double().unflatten(-1, (-1, 2)).abs().sum(-1, keepdim=True).expand(-1, -1, -1, 2).flatten(-2)
    assert ((rotated.double() - exact).abs() <= 1.5 * torch.finfo(dtype).eps * size).all()
    assert torch.equal(rotated[0], x[0])


@pytest.mark.parametrize("widths", [(8,), (2, 6)])
def test_gradients_turn_back(widths):
    generator = torch.Generator().manual_seed(4)
    parts = torch.randn(2, 2, 3, 1, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    positions = torch.randint(0, 50, (1, 2, len(widths)), generator=generator)
    rotation = rotation_at(positions, widths, 1e4, torch.float64)
    for num_turned in (1, 2, 3):
        assert torch.autograd.gradcheck(lambda y, n=num_turned: torch.stack(rotate(y, rotation, n)), parts)
