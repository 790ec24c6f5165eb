"""From a model and a sentence to its DAG: against the model's own loss, and every refusal.

The loss of a sequence is the alignment op's; the probability of a filling must be the same number.
"""

import math

import numpy as np
import pytest
import torch

from exlm_cli.dag.build import build_dag
from exlm_cli.dag.fillings import n_best_fillings
from exlm_cli.dag.graph import Dag
from exlm_cli.dag.read import MAX_INNER_NODES
from exlm_cli.data.batch import expand
from exlm_cli.errors import DataError
from exlm_cli.train.objective import Objective
from exlm_cli.train.pretrained import Pretrained
from tests.tiny import CHAIN, masked_by_hand, word_level
from tests.unit.fill.models import pretrained, sentence_tokenizer

SENTENCE = "This is [MASK], and I'm very [MASK] to see this."
LARGE = {"init_std": 0.3}


def _loss_of(model: Pretrained, dag: Dag, tokens: list[int]) -> float:
    """Negative log-likelihood of one token for each mask, by the training objective."""
    tokenizer, recipe = model.tokenizer, model.recipe
    masked = masked_by_hand([dag.input_ids], tokens, tokenizer.mask_id)
    batch = expand(
        masked, recipe.masking.num_states_per_mask, expands_input=recipe.expands_input, pad_id=tokenizer.pad_id
    )
    objective = Objective(unk_id=tokenizer.unk_id, num_repeats=1, backend="reference")
    with torch.no_grad():
        return float(objective.sequence_nll(model.model, batch)[0]) * len(tokens)


@pytest.mark.parametrize(
    "sections",
    [
        {"model": LARGE},
        {"model": CHAIN | LARGE},
        {"model": {"alignment": "sparse_dag"} | LARGE},
        {"objective": "mlm", "model": LARGE},
    ],
)
def test_the_probability_of_a_filling_is_the_models_likelihood(sections):
    model = pretrained(sentence_tokenizer(), **sections)
    dag = build_dag(model, SENTENCE)
    for filling in n_best_fillings(dag, 3).fillings:
        loss = _loss_of(model, dag, [token for (token,) in filling.tokens_by_mask])
        assert filling.log_prob == pytest.approx(-loss, rel=1e-5)


def test_states_without_transitions_become_one_node_a_mask():
    """CTC with k states and one target, by enumeration of all frame strings that collapse to the target."""
    tokenizer = word_level(["C", "N", "O"])
    model = pretrained(tokenizer, data={"kind": "smiles"}, model={"alignment": "independent"} | LARGE)
    dag = build_dag(model, "C[MASK]O")
    assert not dag.has_transitions
    assert dag.num_nodes == 3
    np.testing.assert_allclose(np.exp(dag.node_log_probs[1]).sum(), 1, rtol=1e-9)
    assert np.isneginf(dag.node_log_probs[1, tokenizer.unk_id])

    best = n_best_fillings(dag, 1).fillings[0]
    yields = {y: math.exp(-_loss_of(model, dag, [y])) for y in range(tokenizer.vocab_size)}
    del yields[tokenizer.unk_id]
    assert math.exp(best.log_prob) == pytest.approx(yields[best.tokens_by_mask[0][0]] / sum(yields.values()), rel=1e-4)


def test_smiles_are_inspected_as_smiles_with_map_numbers_for_a_model_of_smiles_as_written_alone():
    tokenizer = word_level(["C", "O", "[CH2]", "[CH2:3]"])
    for is_canonical, text in ((True, "C[CH2][MASK]O"), (False, "C[CH2:3][MASK]O")):
        model = pretrained(tokenizer, data={"kind": "smiles", "canonical_smiles": is_canonical})
        dag = build_dag(model, "C[CH2:3][MASK]O")
        assert (dag.kind, dag.text) == ("smiles", text)
    assert all(f.is_valid_smiles is not None for f in n_best_fillings(dag, 2).fillings)


@pytest.mark.parametrize(
    ("sections", "sentence", "numbers", "hint"),
    [
        ({}, "[MASK]" * 10_000, f"10000 masks of 3 states, 30,000 nodes; .* {MAX_INNER_NODES}", "shorten it"),
        ({"model": {"max_length": 256}}, "[MASK]" * 180, "180 masks of 3 states, 540 nodes", "at most 37 tokens"),
        ({}, "see this " * 40 + "[MASK]", "84 tokens, 86 with .* 64", "shorten it"),
        ({"model": {"transition": {"position_features": True, "max_nodes": 9}}, "data": {"sequence_length": 6}},
         "[MASK] is [MASK] or [MASK]", "9 nodes; .* 7", "at most 2 tokens"),
        ({"objective": "mlm", "masking": {"num_repeats": 2}}, SENTENCE, "`masking.num_repeats` 2", "`--checkpoint "),
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_inspected_are_refused_with_numbers(sections, sentence, numbers, hint):
    with pytest.raises(DataError, match=numbers) as caught:
        build_dag(pretrained(sentence_tokenizer(), **sections), sentence)
    assert hint in caught.value.hint
