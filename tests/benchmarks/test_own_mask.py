"""The study of the DAG's starts: the formula's shares as worked out apart from this program, and what centred means."""

import importlib
from typing import Any

import pytest
import torch


@pytest.fixture
def study() -> Any:
    return importlib.import_module("own_mask")


def test_the_formula_is_off_its_targets_and_a_start_at_the_next_mask_is_not(study) -> None:
    shares = {(start, masks, k): float(share) for start, masks, k, share, _ in study.rows((6, 19), (2, 4))}
    assert shares["formula", 6, 2] == pytest.approx(0.44, abs=0.005)
    assert shares["formula", 19, 4] == pytest.approx(0.093, abs=0.0005)
    assert all(share > 0.99 for (start, *_), share in shares.items() if start in ("next_mask", "lanes"))


def test_every_target_falls_on_one_mask(study) -> None:
    for start in study.STARTS:
        torch.testing.assert_close(study.mask_posterior(start, 5, 3).sum(-1), torch.ones(5))


def test_a_hazard_draws_nodes_whatever_their_masks(study) -> None:
    """By hand, T = 2, k = 2: of the six pairs of four nodes, the first is of mask 1 in all but one."""
    assert study.mask_posterior("hazard", 2, 2).tolist()[0] == pytest.approx([5 / 6, 1 / 6])
