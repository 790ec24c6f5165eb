"""2D RoPE against its definition written as complex rotations, and the property it is there for: relative positions."""

import math

import pytest
import torch

from exlm_cli.ops.rotary import rotary_tables, rotate


def _by_definition(x: torch.Tensor, position: list[int], base: float) -> torch.Tensor:
    """Rotate one head vector: for each axis, pair (p, p + w/2) of its w entries turns by position * base^(-2p/w)."""
    out = x.clone()
    width = len(x) // len(position)
    for axis, where in enumerate(position):
        for pair in range(width // 2):
            first, second = axis * width + pair, axis * width + pair + width // 2
            turned = complex(x[first], x[second]) * complex(
                math.cos(angle := where * base ** (-2 * pair / width)), math.sin(angle)
            )
            out[first], out[second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("num_axes", [1, 2])
def test_rotation_is_the_definition(num_axes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 50, (2, 5, num_axes), generator=generator)
    x = torch.randn(2, 3, 5, 8, generator=generator)
    rotated = rotate(x, *rotary_tables(positions, 8, 10000.0))
    for b in range(2):
        for head in range(3):
            for place in range(5):
                expected = _by_definition(x[b, head, place], positions[b, place].tolist(), 10000.0)
                torch.testing.assert_close(rotated[b, head, place], expected, atol=1e-5, rtol=1e-5)


def test_scores_depend_on_differences_of_both_coordinates() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(1))

    def score(where_q: tuple[int, int], where_k: tuple[int, int]) -> float:
        tables = [rotary_tables(torch.tensor([[where]]), 16, 10000.0) for where in (where_q, where_k)]
        return float((rotate(q, *tables[0]) * rotate(k, *tables[1])).sum())

    assert score((5, 2), (3, 1)) == pytest.approx(score((25, 3), (23, 2)), abs=1e-4)
    assert score((5, 2), (3, 1)) != pytest.approx(score((5, 3), (3, 1)), abs=1e-3)
    assert score((5, 2), (3, 1)) != pytest.approx(score((6, 2), (3, 1)), abs=1e-3)


def test_half_precision_is_rotated_in_float32() -> None:
    x = torch.randn(1, 1, 3, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    tables = rotary_tables(torch.tensor([[[500], [501], [502]]]), 8, 10000.0)
    rotated = rotate(x, *tables)
    assert rotated.dtype == torch.bfloat16
    torch.testing.assert_close(rotated, rotate(x.float(), *tables).bfloat16())


@pytest.mark.parametrize("num_axes", [1, 2])
def test_gradients_turn_back(num_axes: int) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    tables = [t.double() for t in rotary_tables(torch.randint(0, 50, (2, 5, num_axes), generator=generator), 8, 1e4)]
    assert torch.autograd.gradcheck(lambda y: rotate(y, *tables), x)
