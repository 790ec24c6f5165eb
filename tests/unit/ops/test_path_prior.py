"""What transitions alone imply, against all paths written out and against closed forms."""

import math

import pytest
import torch

from exlm_cli.ops.path_prior import own_mask_share, path_length_nll
from tests.oracles import enumerate_posteriors, scored_paths

NUM_MASKS, K = 3, 2
TARGETS, STATES = torch.tensor([3, 2]), torch.tensor([8, 6])
NODE_MASK = torch.tensor([[-1, 0, 0, 1, 1, 2, 2, -1], [-1, 0, 0, 1, 1, -1, -1, -1]])


def _log_trans() -> torch.Tensor:
    scores = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    is_edge = torch.ones(2, 8, 8, dtype=torch.bool).triu(1)
    is_edge[1, :, 6:] = False
    return scores.masked_fill(~is_edge, -math.inf).log_softmax(-1).nan_to_num(-math.inf)


def _uniform(num_masks: int, k: int) -> torch.Tensor:
    """Return log E of one sequence whose rows are uniform over all later nodes."""
    size = num_masks * k + 2
    is_edge = torch.ones(1, size, size, dtype=torch.bool).triu(1)
    return torch.zeros(1, size, size).masked_fill(~is_edge, -math.inf).log_softmax(-1).nan_to_num(-math.inf)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_share_is_that_of_the_enumerated_paths(backend) -> None:
    log_trans = _log_trans()
    emissions = torch.zeros(2, NUM_MASKS, 8, dtype=torch.float64)
    posterior, _ = enumerate_posteriors(emissions, log_trans, TARGETS, STATES)
    expected = [
        sum(float(posterior[b, t, NODE_MASK[b] == t].sum()) for t in range(num_targets)) / num_targets
        for b, num_targets in enumerate(TARGETS.tolist())
    ]
    share = own_mask_share(log_trans, NODE_MASK, TARGETS, STATES, backend=backend)
    assert share.tolist() == pytest.approx(expected, rel=1e-6)


def test_the_length_of_a_path_has_the_probability_of_the_enumerated_paths() -> None:
    log_trans = _log_trans()
    emissions = torch.zeros(2, NUM_MASKS, 8, dtype=torch.float64)
    paths = scored_paths(emissions, log_trans, TARGETS, STATES)
    expected = [-math.log(sum(math.exp(score) for score in scores.values())) for scores in paths]
    nll = path_length_nll(log_trans, TARGETS, STATES, backend="reference")
    assert nll.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("num_masks", "k", "share"), [(6, 2, 0.44), (19, 4, 0.093), (77, 4, 0.021)])
def test_uniform_edges_are_off_their_targets(num_masks: int, k: int, share: float) -> None:
    """The table of the design, which was worked out apart from this program."""
    node_mask = torch.tensor([[-1, *(m for m in range(num_masks) for _ in range(k)), -1]])
    lengths = torch.tensor([num_masks]), torch.tensor([num_masks * k + 2])
    got = own_mask_share(_uniform(num_masks, k), node_mask, *lengths)
    assert float(got) == pytest.approx(share, abs=0.005 if share > 0.1 else 0.0005)


def test_a_chain_is_centred_and_has_one_length() -> None:
    chain = torch.full((1, 5, 5), -math.inf)
    chain[0].diagonal(1).zero_()
    lengths = torch.tensor([3]), torch.tensor([5])
    assert float(own_mask_share(chain, torch.tensor([[-1, 0, 1, 2, -1]]), *lengths)) == pytest.approx(1)
    assert float(path_length_nll(chain, *lengths)) == pytest.approx(0)


def test_sequences_without_targets_have_no_share() -> None:
    assert own_mask_share(_log_trans(), NODE_MASK, torch.tensor([0, 2]), STATES)[0] == 0
    assert path_length_nll(_log_trans(), torch.tensor([0, 2]), STATES)[0] == math.inf
