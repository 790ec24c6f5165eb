"""Chains against the dense op on the same states, which is tested by enumeration, and finite differences."""

import pytest
import torch

from exlm_cli.ops.alignment import alignment_edge_posterior, alignment_posterior, best_alignment, states_alignment_nll
from exlm_cli.ops.chain import Chain, best_chain, chain_nll, chain_posterior, share_imbalance

K = 3
LENGTHS = [4, 2, 1, 0]


@pytest.fixture
def chain():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    size, masks = len(LENGTHS), max(LENGTHS)
    shares, edges = draw(size, masks, K).log_softmax(-1), draw(size, masks - 1, K, K).log_softmax(-1)
    return Chain(shares, edges, draw(size, masks, K), torch.tensor(LENGTHS))


def _dense(chain, row):
    """Return the arguments of the dense op for one sequence: -inf at every edge that a chain does not have."""
    masks = LENGTHS[row]
    nodes = masks * K + 2
    log_trans = torch.full((1, nodes, nodes), -torch.inf, dtype=torch.float64)
    log_emit = torch.full((1, masks, nodes), -torch.inf, dtype=torch.float64)
    log_trans[0, 0, 1 : K + 1] = chain.log_share[row, 0]
    log_trans[0, -1 - K : -1, -1] = 0.0
    for t in range(masks):
        own = slice(1 + t * K, 1 + (t + 1) * K)
        log_emit[0, t, own] = chain.log_emit[row, t]
        if t + 1 < masks:
            log_trans[0, own, 1 + (t + 1) * K : 1 + (t + 2) * K] = chain.log_next[row, t]
    return log_emit, log_trans, [masks], [nodes]


@pytest.mark.parametrize("row", range(3))
def test_a_chain_is_the_dense_op_without_its_other_edges(chain, row):
    dense, masks = _dense(chain, row), LENGTHS[row]
    states, edges = chain_posterior(chain)
    torch.testing.assert_close(chain_nll(chain)[row], states_alignment_nll(*dense)[0])
    nodes = alignment_posterior(*dense)[0, :, 1:-1].view(masks, masks, K)
    torch.testing.assert_close(states[row, :masks], nodes[range(masks), range(masks)])
    of_dense = alignment_edge_posterior(*dense)[0, 1:-1, 1:-1].view(masks, K, masks, K)
    for t in range(masks - 1):
        torch.testing.assert_close(edges[row, t], of_dense[t, :, t + 1])
    path = best_alignment(*dense)[0]
    assert best_chain(chain)[row, :masks].tolist() == ((path - 1) % K).tolist()


def test_nothing_beyond_a_sequence_is_read(chain):
    states, edges = chain_posterior(chain)
    for row, masks in enumerate(LENGTHS):
        assert not states[row, masks:].any()
        assert not edges[row, max(0, masks - 1) :].any()
        assert (best_chain(chain)[row, masks:] == -1).all()
    assert chain_nll(chain)[LENGTHS.index(0)] == 0


def test_gradients_are_those_of_finite_differences(chain):
    weights = torch.tensor([0.5, -1.0, 2.0, 3.0], dtype=torch.float64)
    inputs = [tensor.requires_grad_() for tensor in chain[:3]]

    def weighted(*tensors):
        return (weights * chain_nll(Chain(*tensors, chain.target_lengths))).sum()

    assert torch.autograd.gradcheck(weighted, inputs)


def test_long_chains_of_small_probabilities_stay_finite():
    """2,000 tokens of probability e^-30 each: far below the smallest float32 as a product."""
    masks = 2000
    uniform = torch.full((1, masks - 1, K, K), -torch.tensor(float(K)).log().item())
    chain = Chain(uniform[:, :1, 0], uniform, torch.full((1, masks, K), -30.0), torch.tensor([masks]))
    assert float(chain_nll(chain)) == pytest.approx(30.0 * masks, rel=1e-5)
    assert float(chain_posterior(chain).states.sum()) == pytest.approx(masks, rel=1e-2)


def test_imbalance_is_the_divergence_of_the_mean_shares(chain):
    from_share = chain.log_share.exp()
    for row, masks in enumerate(LENGTHS[:3]):
        mean = from_share[row, :masks].mean(0)
        expected = (torch.tensor(1 / K) * (1 / (K * mean)).log()).sum()
        assert float(share_imbalance(chain)[row]) == pytest.approx(float(expected), rel=1e-6)
    assert share_imbalance(chain)[LENGTHS.index(0)] == 0
    even = chain._replace(log_share=torch.full_like(chain.log_share, -torch.tensor(float(K)).log().item()))
    assert share_imbalance(even).abs().max() < 1e-6
