"""Rotary positions of an MLM as a case of fractional ones; `test_transition.py` has every scheme, turned by hand."""

import torch

from exlm_cli.model.positions import RotaryPositions
from tests.tiny import tiny_recipe

CLONE = torch.tensor([[0, 1, 2, 3, 0]])
EXPANDED = torch.arange(5)[None]


def test_one_clone_stands_where_its_token_does():
    """With k = 1, fractional positions are those of an MLM."""
    config = tiny_recipe(model={"rope": "fractional"}).model
    clone = (CLONE > 0).long()
    fractional = RotaryPositions(config, 1, 4)(EXPANDED, clone, EXPANDED)
    one_axis = RotaryPositions(config.model_copy(update={"rope": "1d"}), 1, 4)(EXPANDED, clone, EXPANDED)
    assert torch.equal(fractional, one_axis)
