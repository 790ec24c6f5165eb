"""The chain head: shares that sum to 1, one mask as an MLM fills it, the dense DAG of the same model, its beginning."""

import numpy as np
import pytest
import torch

from exlm_cli.dag.build import dag_of_tokens
from exlm_cli.data.batch import expand
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.ops.alignment import best_alignment, states_alignment_nll
from exlm_cli.train.evaluation import evaluate_batch, score_sequences, summarise
from exlm_cli.train.objective import Objective
from tests.tiny import CHAIN, SPECIAL, masked_by_hand, tiny_batch, tiny_recipe

OBJECTIVE = Objective(SPECIAL.unk_id, 1, "reference")


@pytest.fixture(name="recipe", scope="module")
def _recipe():
    return tiny_recipe(model=CHAIN)


@pytest.fixture(name="model", scope="module")
def _model(recipe):
    """A network of random weights, edges included, so that states and masks depend on each other."""
    torch.manual_seed(0)
    model = ExlmModel(recipe, SPECIAL.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model.eval()


def _batch(rows, targets):
    return expand(masked_by_hand(rows, targets), 1, expands_input=False, pad_id=SPECIAL.pad_id)


def test_one_mask_is_filled_as_by_an_mlm(model):
    batch = _batch([[1, 10, 3, 2], [1, 3, 8, 9, 2]], (20, 21))
    scores = score_sequences(model, OBJECTIVE, batch)
    alone = OBJECTIVE.mask_nll(model, model.node_states(batch), batch)
    torch.testing.assert_close(scores.joint_nll, alone)
    torch.testing.assert_close(scores.token_nll[:, 0], alone)


def test_padding_changes_nothing(model):
    rows, targets = [[1, 10, 3, 11, 3, 3, 2], [1, 3, 2]], (20, 21, 22, 23)
    together = OBJECTIVE.sequence_nll(model, _batch(rows, targets))
    alone = [
        OBJECTIVE.sequence_nll(model, _batch(rows[:1], targets[:3])),
        OBJECTIVE.sequence_nll(model, _batch(rows[1:], targets[3:])),
    ]
    torch.testing.assert_close(together, torch.cat(alone))


def test_the_states_of_a_filling_are_a_dense_dag_that_gives_its_tokens_the_same_probability(model, recipe):
    row, targets = [1, 10, 3, 11, 3, 3, 12, 3, 2], (20, 21, 22, 23)
    batch = _batch([row], targets)
    chain = dag_of_tokens(model, SPECIAL, recipe, batch.token_ids[0].numpy()).chain
    numbers = chain.numbers(torch.tensor(targets))
    torch.testing.assert_close(numbers.emit.exp().sum(-1), torch.ones(4, 3, dtype=torch.float64))
    log_trans = torch.full((1, 14, 14), -torch.inf, dtype=torch.float64)
    log_trans[0, 0, 1:4], log_trans[0, 10:13, 13] = numbers.start, 0.0
    for mask in range(3):
        log_trans[0, 1 + 3 * mask : 4 + 3 * mask, 4 + 3 * mask : 7 + 3 * mask] = numbers.next[mask]
    log_emit = torch.full((1, 4, 14), -torch.inf, dtype=torch.float64)
    for mask in range(4):
        log_emit[0, mask, 1:-1] = numbers.emit[:, :, targets[mask]].flatten()
    dense = log_emit, log_trans, torch.tensor([4]), torch.tensor([14])
    scores = score_sequences(model, OBJECTIVE, batch)
    torch.testing.assert_close(scores.joint_nll.double(), states_alignment_nll(*dense), rtol=1e-5, atol=1e-5)
    found, path = chain.score(torch.tensor([targets]))
    torch.testing.assert_close(-found, scores.joint_nll.double(), rtol=1e-5, atol=1e-5)
    assert (path[0] + 3 * torch.arange(4) + 1).tolist() == best_alignment(*dense)[0].tolist()
    own = chain.own_log_probs[range(4), list(targets)]
    torch.testing.assert_close(-own, scores.token_nll[0], rtol=1e-5, atol=1e-5)


def test_a_mask_reads_the_target_before_and_no_other(model):
    row = [1, 10, 3, 3, 11, 3, 2]
    one, other = (_batch([row], (first, 21, 22)) for first in (20, 24))
    nodes = model.node_states(one)
    features = [model.chain_output(nodes, batch).features for batch in (one, other)]
    assert features[0].isclose(features[1]).all(-1).tolist() == [True, False, True]


@pytest.mark.parametrize("num_masks", [1, 2, 3])
def test_the_search_finds_what_enumeration_finds(model, recipe, num_masks):
    row = [1, 10, *[3] * num_masks, 11, 2]
    chain = dag_of_tokens(model, SPECIAL, recipe, np.array(row)).chain
    every = torch.cartesian_prod(*[torch.arange(SPECIAL.vocab_size)] * num_masks).view(-1, num_masks)
    log_prob = torch.cat([chain.score(part)[0] for part in every.split(8000)])
    torch.testing.assert_close(log_prob.exp().sum(), torch.tensor(1.0, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    best = log_prob.topk(5)
    found, is_proven = chain.best(5)
    assert is_proven
    assert found == [tuple(tokens) for tokens in every[best.indices].tolist()]


def test_a_search_that_meets_its_limit_says_so(recipe, monkeypatch):
    model = ExlmModel(recipe, SPECIAL.vocab_size).eval()  # untrained, so that all tokens are about as probable
    monkeypatch.setattr("exlm_cli.dag.chain.MAX_CELLS", 1)
    chain = dag_of_tokens(model, SPECIAL, recipe, np.array([1, 10, *[3] * 6, 11, 2])).chain
    found, is_proven = chain.best(3)
    assert len(found) == 3
    assert not is_proven


def test_in_training_one_mask_of_six_reads_nothing(model):
    row, targets = [1, *[3] * 12, 2], tuple(range(20, 32))
    batch = _batch([row], targets)
    nodes = model.node_states(batch)
    alone, with_all = model.lm_head(nodes.gather_inner()), model.chain_output(nodes, batch).features
    model.train()
    trained = model.chain_output(nodes, batch).features
    model.eval()
    is_alone = torch.tensor([index % 6 == 0 for index in range(12)])
    torch.testing.assert_close(trained[is_alone], alone[is_alone])
    torch.testing.assert_close(trained[~is_alone], with_all[~is_alone])


def test_metrics_are_those_of_the_scores(model, recipe):
    batch = tiny_batch(recipe)
    found = summarise([evaluate_batch(model, OBJECTIVE, batch)])
    scores = score_sequences(model, OBJECTIVE, batch)
    assert (
        found["loss"]
        == found["loss_given_length"]
        == pytest.approx(float((scores.joint_nll / batch.target_lengths).mean()))
    )
    independent = scores.token_nll.sum(-1) / batch.target_lengths
    assert found["loss_independent"] == pytest.approx(float(independent.mean()))
    assert 1 <= found["effective_states"] <= 3
    assert 1 <= found["clones_in_use"] <= 3


def test_tokens_with_like_embeddings_begin_in_one_class(recipe):
    model = ExlmModel(recipe, SPECIAL.vocab_size)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 16, generator=generator)
    group = torch.arange(SPECIAL.vocab_size) * 5 // SPECIAL.vocab_size
    embedding = centres[group] + 0.05 * torch.randn(len(group), 16, generator=generator)
    model.chain_head.find_classes(embedding)
    found = model.chain_head.membership(embedding).argmax(-1)
    assert all(len(set(found[group == one].tolist())) == 1 for one in range(5))
    assert len(set(found.tolist())) == 5


def test_until_it_begins_the_loss_is_an_mlms(recipe):
    late = tiny_recipe(
        model=CHAIN | {"dropout": 0.0, "attention_dropout": 0.0, "chain": {"num_classes": 5, "starts_at": 0.5}}
    )
    torch.manual_seed(0)
    model = ExlmModel(late, SPECIAL.vocab_size).train()
    batch = tiny_batch(late)
    model.chain_head.begin_step(0.49, model.decoder_weight)
    alone = OBJECTIVE.mean_mask_nll(OBJECTIVE.mask_nll(model, model.node_states(batch), batch), batch)
    torch.testing.assert_close(OBJECTIVE.sequence_nll(model, batch), alone)
    before = model.chain_head.classes.weight.clone()
    model.chain_head.begin_step(0.5, model.decoder_weight)
    assert not torch.equal(model.chain_head.classes.weight, before)
    joint = score_sequences(model.eval(), OBJECTIVE, batch).joint_nll
    torch.testing.assert_close(OBJECTIVE.sequence_nll(model, batch) * batch.target_lengths, joint)
    assert (joint / batch.target_lengths - alone).abs().max() > 1e-4
