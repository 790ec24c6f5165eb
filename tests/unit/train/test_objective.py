"""The loss against plain formulas: cross-entropy for MLM, path enumeration for the DAG, ctc_loss otherwise."""

import math

import pytest
import torch
import torch.nn.functional as F

from exlm_cli.data.batch import expand
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.ops.path_prior import state_imbalance
from exlm_cli.train.evaluation import evaluate_batch, summarise
from exlm_cli.train.objective import Objective
from tests.oracles import enumerate_nll
from tests.tiny import CHAIN, SPECIAL, masked_by_hand, tiny_batch, tiny_recipe

OBJECTIVE = Objective(unk_id=4, num_repeats=1, backend="reference")


def _setup(lengths=(9, 4, 12), **sections):
    recipe = tiny_recipe(**({"model": {"init_std": 0.3}} | sections))
    torch.manual_seed(0)
    model = ExlmModel(recipe, SPECIAL.vocab_size).eval()
    return model, tiny_batch(recipe, lengths)


def test_mlm_loss_is_the_mean_cross_entropy_of_each_sequence():
    model, batch = _setup(objective="mlm")
    nodes = model.node_states(batch)
    log_probs = model.node_log_probs(nodes)
    for b, loss in enumerate(OBJECTIVE.sequence_nll(model, batch)):
        num_targets = int(batch.target_lengths[b])
        rows = log_probs[b, 1 : num_targets + 1]
        torch.testing.assert_close(loss, F.nll_loss(rows, batch.target_ids[b, :num_targets]))


@torch.no_grad()
def test_dag_loss_is_the_sum_over_enumerated_paths():
    model, batch = _setup(lengths=(9, 4), masking={"mask_ratio": 0.3, "num_states_per_mask": 3})
    nodes = model.node_states(batch)
    scores = model.log_emissions(nodes, batch), model.log_transitions(nodes, batch)
    expected = enumerate_nll(*scores, batch.target_lengths, batch.state_lengths) / batch.target_lengths
    torch.testing.assert_close(OBJECTIVE.sequence_nll(model, batch).double(), expected, rtol=1e-5, atol=0)


def test_without_transitions_every_mask_is_a_ctc_of_its_own():
    model, batch = _setup(model={"alignment": "independent", "init_std": 0.3})
    nodes = model.node_states(batch)
    log_probs = model.node_log_probs(nodes)
    for b, loss in enumerate(OBJECTIVE.sequence_nll(model, batch)):
        num_targets = int(batch.target_lengths[b])
        frames = log_probs[b, 1 : 3 * num_targets + 1].unflatten(0, (num_targets, 3)).transpose(0, 1)
        expected = F.ctc_loss(
            frames, batch.target_ids[b, :num_targets, None], torch.full((num_targets,), 3),
            torch.ones(num_targets, dtype=torch.long), blank=4, reduction="mean",
        )  # fmt: skip
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    "sections", [{}, {"objective": "mlm"}, {"model": {"alignment": "independent"}}, {"model": CHAIN}]
)
def test_a_sequence_without_masks_is_infinite_and_beside_it_every_parameter_gets_a_finite_gradient(sections):
    model, _ = _setup(**sections)
    k = model.num_states_per_mask
    batch = expand(
        masked_by_hand([[1, 9, 2], [1, 3, 2]], [9]), k, expands_input=model.expands_input, pad_id=SPECIAL.pad_id
    )
    losses = OBJECTIVE.sequence_nll(model, batch)
    assert losses[0] == math.inf
    losses[1].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    row = summarise([evaluate_batch(model, OBJECTIVE, batch)])
    assert row["num_infeasible"] == 1
    assert row["loss"] == pytest.approx(float(losses[1].detach()), rel=1e-5)
    if model.transition is None:  # no path whose length could cost anything
        assert row["loss_given_length"] == row["loss"]
    without = expand(masked_by_hand([[1, 9, 2]], [9]), k, expands_input=model.expands_input, pad_id=SPECIAL.pad_id)
    of_nothing = summarise([evaluate_batch(model, OBJECTIVE, without)])
    assert {name: value for name, value in of_nothing.items() if not math.isnan(value)} == {
        "num_sequences": 0.0,
        "num_infeasible": 1.0,
    }


@pytest.mark.parametrize(("share_done", "weight"), [(0.0, 0.5), (0.35, 0.25), (0.7, 0.0)])
def test_balance_adds_its_penalty_to_the_gradient_and_leaves_the_value(share_done, weight):
    """The gradient of the loss is that of likelihood plus weight times divergence; the value is the likelihood."""
    sections = {"init_std": 0.3, "dropout": 0.0, "attention_dropout": 0.0}
    plain, batch = _setup(model=sections)
    balanced, _ = _setup(model=sections | {"transition": {"balance": 0.5}})
    balanced.transition.fade_balance(share_done)
    plain.train(), balanced.train()
    loss = OBJECTIVE.sequence_nll(balanced, batch)
    expected = OBJECTIVE.sequence_nll(plain, batch)
    torch.testing.assert_close(loss, expected)
    log_trans = plain.log_transitions(plain.node_states(batch), batch)
    (expected + weight * state_imbalance(log_trans, plain.num_states_per_mask)).sum().backward()
    loss.sum().backward()
    for (name, got), wanted in zip(balanced.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-4, atol=1e-5, msg=name)
