"""The transition head against the paper's formula written out per row (section 4.2), and its zeros."""

import math

import pytest
import torch

from exlm_cli.model.transition import TransitionHead, allowed_edges
from tests.oracles import turned
from tests.tiny import tiny_batch, tiny_recipe


def _head(**model):
    torch.manual_seed(0)
    return TransitionHead(tiny_recipe(model=model).model, 3).double()


@pytest.fixture
def batch():
    return tiny_batch(tiny_recipe())


@pytest.fixture
def states(batch):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*batch.node_mask.shape, 16, dtype=torch.float64, generator=generator, requires_grad=True)


def test_one_head_is_the_formula_of_the_paper(batch, states):
    head = _head()
    log_trans = head(states, batch)
    query, key = head.query(states), head.key(states)
    for b, num_nodes in enumerate(batch.state_lengths.tolist()):
        for v in range(num_nodes - 1):
            scores = query[b, v] @ key[b, v + 1 : num_nodes].t() / math.sqrt(16)
            torch.testing.assert_close(
                log_trans[b, v, v + 1 : num_nodes].double(), scores.log_softmax(-1), atol=1e-6, rtol=1e-5
            )


def test_scores_are_not_rounded_to_16_bits(batch, states):
    head = _head().float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        query, key = head.query(states.float()), head.key(states.float())
        log_trans = head(states.float(), batch)
    assert query.dtype == key.dtype == torch.bfloat16
    scores = query.double() @ key.double().mT / math.sqrt(query.shape[-1])
    allowed = allowed_edges(batch.node_mask, batch.state_lengths, is_sparse=False)
    expected = scores.masked_fill(~allowed, -math.inf).log_softmax(-1)
    torch.testing.assert_close(log_trans[allowed].double(), expected[allowed], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"transition": {"heads": 4}},
        {"transition": {"heads": 2, "position_features": True, "max_nodes": 64}},
        {"alignment": "sparse_dag"},
        {"transition": {"start": "next_mask", "heads": 2}},
        {"alignment": "sparse_dag", "transition": {"start": "next_mask", "start_strength": 3.0}},
        {"transition": {"rope": "nodes", "heads": 4}},
        {"transition": {"rope": "nodes", "position_features": True, "max_nodes": 64}},
    ],
)
def test_rows_are_distributions_over_allowed_edges_and_gradients_are_finite_where_none_is_allowed(batch, states, model):
    head = _head(**model)
    log_trans = head(states, batch)
    allowed = allowed_edges(batch.node_mask, batch.state_lengths, is_sparse=head.is_sparse)
    assert (log_trans.isfinite() == allowed).all()
    has_edge = allowed.any(-1)
    torch.testing.assert_close(log_trans.exp().sum(-1)[has_edge], torch.ones(int(has_edge.sum())))
    assert log_trans.dtype == torch.float32
    torch.where(log_trans.isfinite(), log_trans, 0.0).exp().square().sum().backward()
    assert states.grad is not None
    assert states.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())


def test_a_sparse_dag_has_no_edge_inside_a_mask(batch):
    dense = allowed_edges(batch.node_mask, batch.state_lengths, is_sparse=False)
    sparse = allowed_edges(batch.node_mask, batch.state_lengths, is_sparse=True)
    for b, v, u in dense.nonzero().tolist():
        is_inside = batch.node_mask[b, v] == batch.node_mask[b, u] >= 0
        assert sparse[b, v, u] == (not is_inside)


def test_gated_heads_are_a_mixture_with_weights_by_node_and_position(batch, states):
    """The official code's head: the vector of a node's place beside its state, and one softmax of gates a node."""
    head = _head(transition={"heads": 2, "position_features": True, "max_nodes": 64})
    log_trans = head(states, batch).detach().double()
    for b, num_nodes in enumerate(batch.state_lengths.tolist()):
        features = torch.cat([states[b, :num_nodes], head.node_position.weight[:num_nodes]], dim=1)
        query, key, gate = head.query(features), head.key(features), head.gate(features).softmax(-1)
        for v in range(num_nodes - 1):
            of_heads = [query[v, part] @ key[v + 1 :, part].T / math.sqrt(8) for part in (slice(8), slice(8, 16))]
            edges = sum(gate[v, h] * scores.softmax(-1) for h, scores in enumerate(of_heads))
            torch.testing.assert_close(log_trans[b, v, v + 1 : num_nodes], edges.log(), atol=1e-5, rtol=1e-5)


def _places(batch, b):
    """Return (ordinal of the mask, clone) of every real node of a tiny batch, k = 3."""
    num_masks = int(batch.target_lengths[b])
    return [(0, 0), *((m, c) for m in range(1, num_masks + 1) for c in (1, 2, 3)), (num_masks + 1, 0)]


def test_a_start_gives_the_next_mask_its_odds_whatever_the_number_of_masks(batch):
    """Where Q K' is zero, so that edges are those of the start alone."""
    head = _head(transition={"start": "next_mask", "start_strength": 2.0})
    with torch.no_grad():
        head.query.weight.zero_()
        head.query.bias.zero_()
        edges = head(torch.ones(*batch.node_mask.shape, 16, dtype=torch.float64), batch).exp()
    for b, num_nodes in enumerate(batch.state_lengths.tolist()):
        place = _places(batch, b)
        for v in range(num_nodes - 1):
            later = range(v + 1, num_nodes)
            after = [u for u in later if place[u][0] == place[v][0] + 1]
            others = [u for u in later if u not in after]
            # the next states have e^2 against all the others together
            weight = math.exp(2.0) / len(after) * max(1, len(others))
            total = weight * len(after) + len(others)
            assert edges[b, v, after].tolist() == pytest.approx([weight / total] * len(after), rel=1e-5)
            assert edges[b, v, others].tolist() == pytest.approx([1 / total] * len(others), rel=1e-5)


@pytest.mark.parametrize("rope", ["2d", "1d", "none"])
def test_a_head_that_sees_places_scores_turned_vectors(batch, states, rope):
    """Against rotations of complex numbers by the places of the nodes, whatever the encoder does."""
    head = _head(rope=rope, learned_positions=True, transition={"rope": "nodes"})
    log_trans = head(states, batch)
    query, key = head.query(states).detach(), head.key(states).detach()
    for b, num_nodes in enumerate(batch.state_lengths.tolist()):
        # three clones a mask, a third apart
        places = [mask + ((clone - 2) / 3 if clone else 0) for mask, clone in _places(batch, b)]
        for v in range(num_nodes - 1):
            later = torch.stack([turned(key[b, u], (places[u],), (16,)) for u in range(v + 1, num_nodes)])
            expected = (later @ turned(query[b, v], (places[v],), (16,))).div(4).log_softmax(-1).to(log_trans.dtype)
            torch.testing.assert_close(log_trans[b, v, v + 1 : num_nodes].detach(), expected, atol=1e-4, rtol=1e-4)
