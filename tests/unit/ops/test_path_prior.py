"""What transitions alone imply, against all paths written out and against closed forms."""

import math

import pytest
import torch

from exlm_cli.ops.path_prior import expected_visits, own_mask_share, path_length_nll, state_imbalance, token_nll
from tests.oracles import enumerate_nll, enumerate_posteriors, scored_paths

NUM_MASKS, K = 3, 2
TARGETS, STATES = torch.tensor([3, 2]), torch.tensor([8, 6])
NODE_MASK = torch.tensor([[-1, 0, 0, 1, 1, 2, 2, -1], [-1, 0, 0, 1, 1, -1, -1, -1]])


def _log_trans():
    scores = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    is_edge = torch.ones(2, 8, 8, dtype=torch.bool).triu(1)
    is_edge[1, :, 6:] = False
    return scores.masked_fill(~is_edge, -math.inf).log_softmax(-1).nan_to_num(-math.inf)


def test_share_and_length_have_the_probabilities_of_the_enumerated_paths(backend):
    log_trans = _log_trans()
    emissions = torch.zeros(2, NUM_MASKS, 8, dtype=torch.float64)
    posterior, _ = enumerate_posteriors(emissions, log_trans, TARGETS, STATES)
    expected = [
        sum(float(posterior[b, t, NODE_MASK[b] == t].sum()) for t in range(num_targets)) / num_targets
        for b, num_targets in enumerate(TARGETS.tolist())
    ]
    share = own_mask_share(log_trans, NODE_MASK, TARGETS, STATES, backend=backend)
    assert share.tolist() == pytest.approx(expected, rel=1e-6)
    nll = path_length_nll(log_trans, TARGETS, STATES, backend=backend)
    torch.testing.assert_close(nll, enumerate_nll(emissions, log_trans, TARGETS, STATES))
    assert own_mask_share(log_trans, NODE_MASK, torch.tensor([0, 2]), STATES, backend=backend)[0] == 0
    assert path_length_nll(log_trans, torch.tensor([0, 2]), STATES, backend=backend)[0] == math.inf


def test_expected_visits_are_those_of_the_enumerated_paths_of_every_length():
    log_trans = _log_trans()
    expected = torch.zeros(2, 8, dtype=torch.float64)
    expected[:, 0] = 1
    expected[[0, 1], STATES - 1] = 1  # every path ends there
    for num_targets in range(1, 7):
        paths_of = scored_paths(torch.zeros(2, 6, 8), log_trans, torch.tensor([num_targets] * 2), STATES)
        for visits, paths in zip(expected, paths_of, strict=True):
            for path, score in paths.items():
                visits[list(path)] += math.exp(score)
    assert torch.allclose(expected_visits(log_trans), expected)


def test_imbalance_is_the_divergence_of_the_visits_by_clone():
    log_trans = _log_trans()
    visits = expected_visits(log_trans)
    for b, nodes_of_clones in enumerate((([1, 3, 5], [2, 4, 6]), ([1, 3], [2, 4]))):
        by_clone = torch.stack([visits[b, nodes].sum() for nodes in nodes_of_clones])
        expected = -(by_clone / by_clone.sum() * K).log().mean()
        assert float(state_imbalance(log_trans, K)[b]) == pytest.approx(float(expected))


@pytest.mark.parametrize("share", [0.5, 1e-3, 1e-30])
def test_imbalance_grows_without_bound_as_a_lane_vanishes(share):
    """Two lanes, begun with these odds and never left: -log(4 p (1 - p)) / 2."""
    lanes = torch.full((1, 6, 6), -math.inf, dtype=torch.float64)
    lanes[0, 0, [1, 2]] = torch.tensor([1 - share, share], dtype=torch.float64).log()
    lanes[0, [1, 2, 3, 4], [3, 4, 5, 5]] = 0.0
    expected = -math.log(4 * share * (1 - share)) / 2
    assert float(state_imbalance(lanes, K)) == pytest.approx(expected, abs=1e-12)


def test_the_gradient_of_imbalance_is_that_of_finite_differences_and_finite_where_a_state_is_given_up():
    is_edge = _log_trans() > -math.inf
    weights = torch.randn(int(is_edge.sum()), dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def imbalance(values):
        filled = torch.full((2, 8, 8), -math.inf, dtype=torch.float64).masked_scatter(is_edge, values)
        return state_imbalance(filled.log_softmax(-1).nan_to_num(-math.inf), K)

    assert torch.autograd.gradcheck(imbalance, weights.requires_grad_())
    given_up = torch.full((1, 6, 6), -math.inf)
    given_up[0, [0, 1, 3], [1, 3, 5]] = 0.0
    given_up.requires_grad_()
    state_imbalance(given_up, K).sum().backward()
    assert given_up.grad is not None
    assert given_up.grad.isfinite().all()


def test_what_no_path_reads_does_not_count_one_by_one():
    """Emissions of the first node, the last one and padding, and of a node that no path of that length visits."""
    log_emit = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = token_nll(log_emit, _log_trans(), TARGETS, STATES)
    assert expected.isfinite().all()
    for number in (math.nan, math.inf):
        odd = log_emit.clone()
        odd[:, :, 0] = odd[0, :, int(STATES[0]) - 1] = odd[1, :, int(STATES[1]) - 1 :] = number
        assert token_nll(odd, _log_trans(), TARGETS, STATES).equal(expected)
    # two targets and one node that emits
    without_a_path = token_nll(log_emit, _log_trans(), torch.tensor([2, 2]), torch.tensor([3, 6]))
    assert without_a_path[0].tolist() == [math.inf, math.inf, 0.0]
