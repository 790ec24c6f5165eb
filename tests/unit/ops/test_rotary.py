"""2D RoPE against its definition written as complex rotations, and the property it is there for: relative positions."""

import pytest
import torch

from exlm_cli.ops.rotary import rotate, rotate_half_order, rotation_at
from tests.oracles import turned


@pytest.mark.parametrize("widths", [(8,), (4, 4), (6, 2)])
def test_rotation_is_the_definition(widths):
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 200, (2, 5, len(widths)), generator=generator) / 4
    x = torch.randn(2, 3, 5, 8, generator=generator)
    rotated = rotate(x, rotation_at(positions, widths, 10000.0))
    for b in range(2):
        for head in range(3):
            for place in range(5):
                expected = turned(x[b, head, place], positions[b, place].tolist(), widths)
                torch.testing.assert_close(rotated[b, head, place], expected, atol=1e-5, rtol=1e-5)


def test_scores_depend_on_differences_of_both_coordinates():
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(1))

    def score(where_q: tuple[int, int], where_k: tuple[int, int]) -> float:
        rotations = [rotation_at(torch.tensor([[where]]), (8, 8), 10000.0) for where in (where_q, where_k)]
        return float((rotate(q, rotations[0]) * rotate(k, rotations[1])).sum())

    assert score((5, 2), (3, 1)) == pytest.approx(score((25, 3), (23, 2)), abs=1e-4)
    assert score((5, 2), (3, 1)) != pytest.approx(score((5, 3), (3, 1)), abs=1e-3)
    assert score((5, 2), (3, 1)) != pytest.approx(score((6, 2), (3, 1)), abs=1e-3)


def test_half_precision_is_rotated_in_float32():
    x = torch.randn(1, 1, 3, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    rotation = rotation_at(torch.tensor([[[500], [501], [502]]]), (8,), 10000.0)
    rotated = rotate(x, rotation)
    assert rotated.dtype == torch.bfloat16
    torch.testing.assert_close(rotated, rotate(x.float(), rotation).bfloat16())


@pytest.mark.parametrize("widths", [(8,), (4, 4), (2, 6)])
def test_gradients_turn_back(widths):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    positions = torch.randint(0, 50, (2, 5, len(widths)), generator=generator)
    rotation = rotation_at(positions, widths, 1e4).to(torch.complex128)
    assert torch.autograd.gradcheck(lambda y: rotate(y, rotation), x)


def test_the_formula_that_compiles_is_the_same():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 3, 5, 8, generator=generator, requires_grad=True)
    rotation = rotation_at(torch.randint(0, 50, (2, 5, 1), generator=generator), (8,), 1e4)
    weights = torch.randn(2, 3, 5, 8, generator=generator)
    eager = rotate(x, rotation)
    compiled = rotate(x, torch.view_as_real(rotation))
    torch.testing.assert_close(compiled, eager)
    gradients = [torch.autograd.grad((rotated * weights).sum(), x)[0] for rotated in (eager, compiled)]
    torch.testing.assert_close(*gradients)


def test_heads_stay_side_by_side_in_memory():
    """So that neither attention nor the projection of its result copies them."""
    heads = torch.randn(2, 5, 3, 8).transpose(1, 2)
    assert rotate(heads, rotation_at(torch.zeros(1, 5, 1), (8,), 1e4)).stride() == heads.stride()


def test_the_order_of_roformer_puts_partners_half_a_head_apart():
    assert rotate_half_order(6).tolist() == [0, 2, 4, 1, 3, 5]
