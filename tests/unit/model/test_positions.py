"""Schemes of rotary positions: scores against the places that each scheme is written to give."""

import math

import pytest
import torch

from exlm_cli.model.positions import RotaryPositions
from exlm_cli.ops.rotary import rotate
from tests.tiny import tiny_recipe

INDEX = torch.tensor([[0, 1, 1, 1, 2]])
CLONE = torch.tensor([[0, 1, 2, 3, 0]])
EXPANDED = torch.arange(5)[None]


def _score(first: int, second: int, **model) -> complex:
    """Return q-bar k of two vectors of one pair, as a complex number whose angle is the difference of their places."""
    positions = RotaryPositions(tiny_recipe(model=model).model, 3, 2)
    one, turned = (
        rotate(torch.tensor(pair, dtype=torch.float32).expand(1, 1, 5, 2), positions(INDEX, CLONE, EXPANDED))[0, 0]
        for pair in ((1, 0), (0, 1))
    )
    return complex(float(one[first] @ one[second]), float(turned[first] @ one[second]))


@pytest.mark.parametrize(
    ("rope", "places"),
    [
        # three clones of token 1, thirds of a token apart around it
        ("fractional", [0, 2 / 3, 1, 4 / 3, 2]),
        ("1d", [0, 1, 2, 3, 4]),
    ],
)
def test_one_axis_turns_by_the_difference_of_places(rope, places):
    for v, a in enumerate(places):
        for u, b in enumerate(places):
            expected = complex(math.cos(b - a), math.sin(b - a))
            assert _score(v, u, rope=rope) == pytest.approx(expected, abs=1e-5)


def test_each_of_two_axes_has_half_of_a_head():
    rotation = RotaryPositions(tiny_recipe().model, 3, 8)(INDEX, CLONE, EXPANDED)
    assert rotation.shape == (1, 1, 5, 4)
    # the first pair of an axis turns by the position itself
    assert rotation.real[0, 0, :, 0].tolist() == pytest.approx([math.cos(i) for i in INDEX[0].tolist()])
    assert rotation.real[0, 0, :, 2].tolist() == pytest.approx([math.cos(c) for c in CLONE[0].tolist()])


def test_one_clone_stands_where_its_token_does():
    """With k = 1, fractional positions are those of an MLM."""
    config = tiny_recipe(model={"rope": "fractional"}).model
    clone = (CLONE > 0).long()
    fractional = RotaryPositions(config, 1, 4)(EXPANDED, clone, EXPANDED)
    one_axis = RotaryPositions(config.model_copy(update={"rope": "1d"}), 1, 4)(EXPANDED, clone, EXPANDED)
    assert torch.equal(fractional, one_axis)
