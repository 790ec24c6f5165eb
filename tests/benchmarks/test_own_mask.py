"""The study of the DAG's starts: the formula's shares as worked out apart from this program, and what centred means."""

import pytest
import torch

import own_mask as study


def test_a_start_at_the_next_mask_is_not_off_its_targets_as_the_formula_is():
    """`tests/unit/ops/test_path_prior.py` has the numbers of the formula."""
    shares = {(start, masks, k): float(share) for start, masks, k, share, *_ in study.rows((6, 19), (2, 4))}
    assert all(share < 0.5 for (start, *_), share in shares.items() if start == "formula")
    assert all(share > 0.99 for (start, *_), share in shares.items() if start in ("next_mask", "lanes"))


def test_every_target_falls_on_one_mask():
    for start in study.STARTS:
        torch.testing.assert_close(study.mask_posterior(start, 5, 3).sum(-1), torch.ones(5))


def test_a_hazard_draws_nodes_whatever_their_masks():
    """By hand, T = 2, k = 2: of the six pairs of four nodes, the first is of mask 1 in all but one."""
    assert study.mask_posterior("hazard", 2, 2).tolist()[0] == pytest.approx([5 / 6, 1 / 6])


def test_the_formula_favours_the_last_clone_and_a_start_at_the_next_mask_does_not():
    """By hand, T = 1, k = 2: BOS goes to either clone with 1/3, the first goes on to EOS with 1/2, the last with 1."""
    assert study.clone_shares("formula", 1, 2).tolist() == pytest.approx([1 / 3, 2 / 3])
    assert study.clone_shares("next_mask", 19, 4).tolist() == pytest.approx([0.25] * 4, abs=1e-3)
