"""The network: parameter counts by closed form, padding that changes nothing, heads that read nodes alone."""

import itertools

import pytest
import torch

from exlm_cli.cost.counts import count_parameters
from exlm_cli.data.batch import expand
from exlm_cli.model.exlm import ExlmModel
from tests.tiny import CHAIN, SPECIAL, masked_by_hand, tiny_batch, tiny_recipe

VARIANTS = [
    {},
    {"objective": "mlm"},
    {"objective": "mlm", "model": {"rope": "1d"}},
    {"model": {"rope": "1d"}},
    {"model": {"transition": {"rope": "nodes", "start": "next_mask"}}},
    {"model": {"rope": "none", "learned_positions": True}},
    {"model": {"alignment": "sparse_dag"}},
    {"model": {"alignment": "independent"}},
    {"model": {"alignment": "sparse_dag", "transition": {"rope": "nodes"}}, "masking": {"num_states_per_mask": 1}},
    {"model": {"transition": {"heads": 2, "position_features": True, "max_nodes": 64}}},
]


def _model(**sections):
    torch.manual_seed(0)
    return ExlmModel(tiny_recipe(**sections), SPECIAL.vocab_size).eval()


@pytest.mark.parametrize("sections", [*VARIANTS, {"model": CHAIN}])
def test_parameters_number_what_the_closed_form_says(sections):
    model = _model(**sections)
    recipe = tiny_recipe(**sections).changed({"tokenizer.vocab_size": SPECIAL.vocab_size})
    assert sum(p.numel() for p in model.parameters()) == count_parameters(recipe)


@pytest.mark.parametrize(
    "masked",
    [
        [([1, 10, 3, 11, 3, 2], (20, 21)), ([1, 3, 8, 2], (22,)), ([1, 7, 3, 8, 3, 9, 12, 3, 2], (23, 24, 25))],
        [([1, 10, 3, 11, 3, 2], (20, 21)), ([1, 8, 8, 8, 8, 8, 3, 2], (22,))],  # ten positions each, once expanded
    ],
)
@pytest.mark.parametrize("sections", VARIANTS)
def test_padding_changes_nothing(sections, masked):
    recipe, model = tiny_recipe(**sections), _model(**sections)

    def batch_of(*sequences):
        rows, targets = zip(*sequences, strict=True)
        by_hand = masked_by_hand(rows, itertools.chain(*targets))
        k = recipe.masking.num_states_per_mask
        return expand(by_hand, k, expands_input=recipe.expands_input, pad_id=SPECIAL.pad_id)

    together = batch_of(*masked)
    nodes = model.node_states(together)
    emit = model.log_emissions(nodes, together)
    for b, sequence in enumerate(masked):
        alone = batch_of(sequence)
        nodes_alone = model.node_states(alone)
        emit_alone = model.log_emissions(nodes_alone, alone)[0]
        num_targets, num_nodes = emit_alone.shape
        torch.testing.assert_close(nodes.states[b, :num_nodes], nodes_alone.states[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(emit[b, :num_targets, :num_nodes], emit_alone, atol=1e-5, rtol=1e-5)


RATES = {"dropout": 0.5, "attention_dropout": 0.125, "activation_dropout": 0.25}


@pytest.mark.parametrize("is_training", [False, True])
def test_dropout_falls_on_the_embeddings_the_activation_and_both_outputs_of_a_block(is_training):
    """Shares of zeros, and of sums with zero, beside the rates; none in evaluation."""
    model = _model(model={"width": 256, "ffn_width": 256, **RATES}).train(is_training)
    first = model.encoder.blocks[0]
    seen = {}
    for name, part in {"input": first, "between": first.ffn_norm, "activation": first.ffn_out}.items():
        part.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0]}))
    first.register_forward_hook(lambda _, inputs, output: seen.update(output=output))
    torch.manual_seed(0)
    model.encode(tiny_batch(tiny_recipe()))
    places = {
        "dropout": (seen["input"], seen["between"] - seen["input"], seen["output"] - seen["between"]),
        "activation_dropout": (seen["activation"],),
    }
    for name, values in places.items():
        rate = RATES[name] if is_training else 0.0
        for value in values:
            share = float((value == 0).double().mean())
            assert abs(share - rate) <= 5 * (rate * (1 - rate) / value.numel()) ** 0.5 + 1e-4


@pytest.mark.parametrize("lengths", [(9, 4, 12), (10, 10)])
@pytest.mark.parametrize("sections", [*VARIANTS, {"model": CHAIN}])
def test_states_of_nodes_are_those_of_an_encoder_that_computes_every_position(sections, lengths):
    """The last block runs at the nodes alone; states and gradients of the whole encoder in float64."""
    recipe = tiny_recipe(**{**sections, "model": {"init_std": 0.3, **sections.get("model", {})}})
    torch.manual_seed(0)
    model, batch = ExlmModel(recipe, SPECIAL.vocab_size).double().eval(), tiny_batch(recipe, lengths)
    is_node = torch.arange(batch.node_index.shape[1]) < batch.state_lengths[:, None]
    whole_BLD = model.encode(batch)
    expected = torch.stack([states[index] for states, index in zip(whole_BLD, batch.node_index, strict=True)])
    found = []
    for states in (model.node_states(batch).states, expected):
        model.zero_grad()
        (states[is_node] * torch.linspace(-1, 1, states.shape[-1])).sum().backward()
        found.append([states[is_node], *(p.grad for p in model.encoder.parameters() if p.grad is not None)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)  # angles of rotations are float32
