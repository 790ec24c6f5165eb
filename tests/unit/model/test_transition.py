"""The transition head against the paper's formula written out per row (section 4.2), and its zeros."""

import math

import pytest
import torch

from exlm_cli.model.transition import TransitionHead, allowed_edges
from tests.tiny import tiny_batch, tiny_recipe


def _head(**model):
    torch.manual_seed(0)
    return TransitionHead(tiny_recipe(model=model).model, 3).double()


def _log_softmax_of_scores(query, key, batch):
    """Return the log-probabilities of edges and where edges are allowed."""
    scores = query.double() @ key.double().mT / math.sqrt(query.shape[-1])
    allowed = allowed_edges(batch.node_mask, batch.state_lengths, is_sparse=False)
    return scores.masked_fill(~allowed, -math.inf).log_softmax(-1), allowed


@pytest.fixture
def batch():
    return tiny_batch(tiny_recipe())


@pytest.fixture
def states(batch):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*batch.node_mask.shape, 16, dtype=torch.float64, generator=generator, requires_grad=True)


def test_one_head_is_the_formula_of_the_paper(batch, states) -> None:
    head = _head()
    log_trans = head(states, batch.node_mask, batch.state_lengths)
    query, key = head.query(states), head.key(states)
    for b, num_nodes in enumerate(batch.state_lengths.tolist()):
        for v in range(num_nodes - 1):
            scores = query[b, v] @ key[b, v + 1 : num_nodes].t() / math.sqrt(16)
            torch.testing.assert_close(
                log_trans[b, v, v + 1 : num_nodes].double(), scores.log_softmax(-1), atol=1e-6, rtol=1e-5
            )


def test_scores_are_not_rounded_to_16_bits(batch, states) -> None:
    head = _head().float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        query, key = head.query(states.float()), head.key(states.float())
        log_trans = head(states.float(), batch.node_mask, batch.state_lengths)
    assert query.dtype == key.dtype == torch.bfloat16
    expected, allowed = _log_softmax_of_scores(query, key, batch)
    torch.testing.assert_close(log_trans[allowed].double(), expected[allowed], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"transition": {"heads": 4}},
        {"transition": {"heads": 2, "position_features": True, "max_nodes": 64}},
        {"alignment": "sparse_dag"},
        {"transition": {"lane_bias": 3.0, "heads": 2}},
    ],
)
def test_rows_are_distributions_over_allowed_edges(batch, states, model) -> None:
    head = _head(**model)
    log_trans = head(states, batch.node_mask, batch.state_lengths)
    allowed = allowed_edges(batch.node_mask, batch.state_lengths, is_sparse=head.is_sparse)
    assert (log_trans.isfinite() == allowed).all()
    has_edge = allowed.any(-1)
    torch.testing.assert_close(log_trans.exp().sum(-1)[has_edge], torch.ones(int(has_edge.sum())))
    assert log_trans.dtype == torch.float32


@pytest.mark.parametrize("heads", [1, 4])
def test_gradients_are_finite_where_rows_are_dead(batch, states, heads: int) -> None:
    head = _head(transition={"heads": heads})
    log_trans = head(states, batch.node_mask, batch.state_lengths)
    torch.where(log_trans.isfinite(), log_trans, 0.0).exp().square().sum().backward()
    assert states.grad is not None
    assert states.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())


def test_edges_go_forward_between_real_nodes(batch) -> None:
    allowed = allowed_edges(batch.node_mask, batch.state_lengths, is_sparse=False)
    for b, num_nodes in enumerate(batch.state_lengths.tolist()):
        expected = torch.zeros_like(allowed[b])
        expected[:num_nodes, :num_nodes] = torch.ones(num_nodes, num_nodes, dtype=torch.bool).triu(1)
        assert (allowed[b] == expected).all()


def test_a_sparse_dag_has_no_edge_inside_a_mask(batch) -> None:
    dense = allowed_edges(batch.node_mask, batch.state_lengths, is_sparse=False)
    sparse = allowed_edges(batch.node_mask, batch.state_lengths, is_sparse=True)
    for b, v, u in dense.nonzero().tolist():
        is_inside = batch.node_mask[b, v] == batch.node_mask[b, u] >= 0
        assert sparse[b, v, u] == (not is_inside)


def test_a_mixture_of_equal_heads_is_one_head(batch, states) -> None:
    head = _head(transition={"heads": 2})
    with torch.no_grad():
        for linear in (head.query, head.key):
            linear.weight[8:] = linear.weight[:8]
            linear.bias[8:] = linear.bias[:8]
    log_trans = head(states, batch.node_mask, batch.state_lengths)
    expected, allowed = _log_softmax_of_scores(head.query(states)[..., :8], head.key(states)[..., :8], batch)
    torch.testing.assert_close(log_trans[allowed].double(), expected[allowed], atol=1e-5, rtol=1e-5)


def test_lanes_raise_edges_to_the_next_mask_and_more_to_the_same_clone(batch, states) -> None:
    head, plain = _head(transition={"lane_bias": 2.0}), _head()
    plain.load_state_dict(head.state_dict(), strict=False)
    difference = head(states, batch.node_mask, batch.state_lengths) - plain(
        states, batch.node_mask, batch.state_lengths
    )
    num_masks, end = int(batch.target_lengths[0]), int(batch.state_lengths[0]) - 1
    place = [(-1, -1), *((m, c) for m in range(num_masks) for c in range(3)), (num_masks, -1)]
    for v in range(end):
        bonus = [
            2.0 * (place[u][0] == place[v][0] + 1)
            + 2.0 * (place[u][0] == place[v][0] + 1 and place[u][1] == place[v][1] >= 0)
            for u in range(v + 1, end + 1)
        ]
        # adding a bonus to the scores of a softmax shifts log-probabilities by it, up to one constant a row
        given = difference[0, v, v + 1 : end + 1].detach() - torch.tensor(bonus)
        torch.testing.assert_close(given, given[:1].expand_as(given), atol=1e-5, rtol=0)


@pytest.mark.parametrize("detach", [False, True])
def test_detached_states_get_no_gradient_and_the_head_still_does(batch, states, detach: bool) -> None:
    head = _head(transition={"detach_states": detach})
    log_trans = head(states, batch.node_mask, batch.state_lengths)
    torch.where(log_trans.isfinite(), log_trans, 0.0).square().sum().backward()
    assert (states.grad is None) == detach
    assert head.query.weight.grad is not None
