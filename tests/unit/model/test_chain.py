"""The chain head: shares that sum to 1, one mask as an MLM fills it, the dense DAG of the same model, its beginning."""

import copy

import pytest
import torch

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.dag.build import dag_of_tokens
from exlm_cli.data.batch import Batch, expand
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.ops.alignment import states_alignment_nll
from exlm_cli.ops.path_prior import token_nll
from exlm_cli.train.evaluation import evaluate_batch, score_sequences, summarise
from exlm_cli.train.objective import Objective
from tests.tiny import CHAIN, SPECIAL, masked_by_hand, tiny_batch, tiny_recipe

OBJECTIVE = Objective(SPECIAL.unk_id, 1, "reference")


@pytest.fixture(name="recipe", scope="module")
def _recipe() -> PretrainRecipe:
    return tiny_recipe(model=CHAIN)


@pytest.fixture(name="model", scope="module")
def _model(recipe: PretrainRecipe) -> ExlmModel:
    """A network of random weights, edges included, so that states and masks depend on each other."""
    torch.manual_seed(0)
    model = ExlmModel(recipe, SPECIAL.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model.eval()


def _batch(rows: list[list[int]], targets: tuple[int, ...]) -> Batch:
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


def test_the_dense_dag_of_a_text_gives_its_targets_the_same_probabilities(model, recipe):
    row, targets = [1, 10, 3, 11, 3, 3, 12, 3, 2], (20, 21, 22, 23)
    batch = _batch([row], targets)
    dag = dag_of_tokens(model, SPECIAL, recipe, batch.token_ids[0].numpy())
    log_emit = torch.from_numpy(dag.node_log_probs)[:, list(targets)].t()[None]
    dense = log_emit, torch.from_numpy(dag.log_trans)[None], [4], [4 * 3 + 2]
    scores = score_sequences(model, OBJECTIVE, batch)
    torch.testing.assert_close(scores.joint_nll.double(), states_alignment_nll(*dense), rtol=1e-5, atol=1e-5)
    lengths = (torch.tensor([4]), torch.tensor([14]))
    torch.testing.assert_close(scores.token_nll.double(), token_nll(*dense[:2], *lengths), rtol=1e-5, atol=1e-5)
    assert (scores.joint_nll - scores.token_nll.sum(-1)).abs() > 1e-3


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
    torch.testing.assert_close(
        OBJECTIVE.sequence_nll(model, batch) * batch.target_lengths, score_sequences(model, OBJECTIVE, batch).joint_nll
    )


def test_classes_are_found_once_also_by_a_run_that_is_resumed(recipe):
    model = ExlmModel(recipe, SPECIAL.vocab_size)
    model.chain_head.begin_step(0.9, model.decoder_weight)
    with torch.no_grad():
        model.chain_head.classes.weight.add_(1.0)
    resumed = ExlmModel(recipe, SPECIAL.vocab_size)
    resumed.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.chain_head.begin_step(0.95, resumed.decoder_weight)
    assert torch.equal(resumed.chain_head.classes.weight, model.chain_head.classes.weight)
