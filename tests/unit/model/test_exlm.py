"""The network: parameter counts by closed form, padding that changes nothing, heads that read nodes alone."""

from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F

from exlm_cli.config.describe import count_parameters
from exlm_cli.data.batch import Batch, expand, pack
from exlm_cli.model.encoder import Layout
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.model.positions import visible_positions
from tests.tiny import FIRST, LAST, LATE, SPECIAL, masked_by_hand, tiny_batch, tiny_recipe

VARIANTS = [
    {},
    {"objective": "mlm"},
    {"model": {"rope": "1d"}},
    {"model": {"rope": "fractional", "transition": {"rope": "nodes"}}},
    {"model": {"transition": {"rope": "nodes", "start": "next_mask"}}},
    {"model": {"transition": {"start": "lanes"}}},
    {"model": {"rope": "none", "learned_positions": True}},
    {"model": {"alignment": "sparse_dag"}},
    {"model": {"alignment": "independent"}},
    {"model": FIRST},
    {"model": LATE},
    {"model": LAST},
    {"model": {"clone_embedding": "nodes"}},
    {"model": {"transition": {"heads": 2, "position_features": True, "max_nodes": 64}}},
]


def _model(**sections) -> ExlmModel:
    torch.manual_seed(0)
    return ExlmModel(tiny_recipe(**sections), SPECIAL.vocab_size).eval()


@pytest.mark.parametrize("sections", VARIANTS)
def test_parameters_number_what_the_closed_form_says(sections):
    model = _model(**sections)
    recipe = tiny_recipe(**sections).changed({"tokenizer.vocab_size": SPECIAL.vocab_size})
    assert sum(p.numel() for p in model.parameters()) == count_parameters(recipe)


@pytest.mark.parametrize("is_even_once_expanded", [False, True])
@pytest.mark.parametrize("sections", VARIANTS)
def test_padding_changes_nothing(sections, is_even_once_expanded):
    recipe = tiny_recipe(**sections)
    model = _model(**sections)
    together = tiny_batch(recipe, (9, 4, 12))
    if is_even_once_expanded:  # ten positions each
        masked = masked_by_hand([[1, 10, 3, 11, 3, 2], [1, 8, 8, 8, 8, 8, 3, 2]], (20, 21, 22))
        together = expand(masked, recipe.masking.num_states_per_mask, recipe.objective, pad_id=SPECIAL.pad_id)
    nodes = model.node_states(together)
    emit = model.log_emissions(nodes, together)
    for b in range(len(together.lengths)):
        alone = _row(together, b)
        nodes_alone = model.node_states(alone)
        num_targets, num_nodes = int(alone.target_lengths), int(alone.state_lengths)
        torch.testing.assert_close(nodes.states[b, :num_nodes], nodes_alone.states[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            emit[b, :num_targets, :num_nodes], model.log_emissions(nodes_alone, alone)[0], atol=1e-5, rtol=1e-5
        )


def test_with_first_states_alone_the_context_reads_what_it_reads_with_one_state():
    """All states but the further ones of each mask are those of the same weights with k = 1."""
    states = {}
    for k, attention in ((1, "all"), (3, "first"), (3, "all")):
        sections = {"model": {"mask_attention": attention, "init_std": 0.3}, "masking": {"num_states_per_mask": k}}
        batch = tiny_batch(tiny_recipe(**sections), (9, 4, 12))
        is_read = (batch.positions[..., 1] <= 1) & (torch.arange(batch.token_ids.shape[1]) < batch.lengths[:, None])
        states[k, attention] = _model(**sections).encode(batch)[is_read]
    torch.testing.assert_close(states[3, "first"], states[1, "all"], atol=1e-5, rtol=1e-5)
    assert (states[3, "all"] - states[1, "all"]).abs().max() > 0.1


def test_a_further_state_sees_its_own_mask_and_no_further_states_of_others():
    """Changing a further state's input vector changes the states of its mask beyond the first, and nothing else."""
    sections = {"model": {"mask_attention": "first", "init_std": 0.3}}
    model, batch = _model(**sections), tiny_batch(tiny_recipe(**sections), (9,))
    embedded = model.token_embedding(batch.token_ids).detach()
    visible = visible_positions(batch, hides_further_states=True)
    before = model.encoder(embedded, batch.positions, visible)[0]
    changed = int(batch.node_index[0, 2])  # the second state of the first mask
    embedded[0, changed] += torch.randn(embedded.shape[-1])
    after = model.encoder(embedded, batch.positions, visible)[0]
    differs = set(((after - before).abs().amax(-1) > 1e-6).nonzero()[:, 0].tolist())
    k = model.num_states_per_mask
    assert differs == set(batch.node_index[0, 2 : k + 1].tolist())


def test_masks_expanded_after_a_block_begin_as_their_first_state():
    """All other states are those of masks expanded at the input; a further state goes on from that of its first."""
    model = {"mask_attention": "first", "rope": "fractional", "init_std": 0.3}
    late, batch = _model(model=model | {"expand_after": 1}), tiny_batch(tiny_recipe(), (9, 4, 12))
    early = _model(model=model)
    clone_BX = batch.positions[..., 1]
    is_other_BX = (clone_BX <= 1) & (torch.arange(clone_BX.shape[1]) < batch.lengths[:, None])
    states_BXD = late.encode(batch)
    torch.testing.assert_close(states_BXD[is_other_BX], early.encode(batch)[is_other_BX])

    visible = visible_positions(batch, hides_further_states=True)
    embedded_BXD = late.token_embedding(batch.token_ids)
    rotation = late.encoder.rotation_of(*batch.positions.unbind(-1), torch.arange(clone_BX.shape[1])[None])
    layout = Layout(rotation, rotation, visible[:, None], 0, None)
    hidden_BXD = late.encoder.blocks[0](embedded_BXD, layout).detach()
    for sequence, nodes, num_nodes in zip(hidden_BXD, batch.node_index, batch.state_lengths, strict=True):
        for first, second, third in nodes[1 : num_nodes - 1].unflatten(0, (-1, 3)).tolist():
            sequence[second] = sequence[third] = sequence[first]
    expected_BXD = late.encoder.final_norm(late.encoder.blocks[1](hidden_BXD, layout))
    is_further_BX = clone_BX > 1
    torch.testing.assert_close(states_BXD[is_further_BX], expected_BXD[is_further_BX])
    assert (states_BXD - early.encode(batch))[is_further_BX].abs().max() > 0.1


@pytest.mark.parametrize("lengths", [(9, 4, 12), (10, 10)])
def test_states_of_masks_expanded_after_all_blocks_are_those_of_one_state_with_a_clone_vector_each(lengths):
    """The same weights with k = 1 give the state of each mask; float64."""
    model = FIRST | {"init_std": 0.3}
    recipe = tiny_recipe(model=model | LAST | {"clone_init_std": 1.0})
    torch.manual_seed(0)
    last = ExlmModel(recipe, SPECIAL.vocab_size).double().eval()
    one_recipe = tiny_recipe(model=model, masking={"num_states_per_mask": 1})
    one = ExlmModel(one_recipe, SPECIAL.vocab_size).double().eval()
    one.load_state_dict({n: w for n, w in last.state_dict().items() if n != "clone_embedding.weight"})
    k = recipe.masking.num_states_per_mask
    batch, one_batch = tiny_batch(recipe, lengths), tiny_batch(one_recipe, lengths)
    found_BSD, of_masks_BRD = last.node_states(batch).states, one.node_states(one_batch).states
    for found, of_masks, num_targets in zip(found_BSD, of_masks_BRD, batch.target_lengths.tolist(), strict=True):
        inner = of_masks[1 : num_targets + 1, None] + last.clone_embedding.weight
        ends = of_masks[[0]], of_masks[[num_targets + 1]]
        expected = torch.cat([ends[0], inner.flatten(0, 1), ends[1]])
        torch.testing.assert_close(found[: k * num_targets + 2], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "model",
    [
        {"rope": "2d"},
        {"rope": "1d", "clone_embedding": "nodes"},
        {"rope": "fractional", "clone_embedding": "nodes", "transition": {"rope": "nodes"}},
        {"rope": "none", "learned_positions": True},
        {"rope": "fractional", "expand_after": 1, "num_layers": 3},
        {"rope": "1d", "expand_after": 1, "learned_positions": True},
    ],
)
@pytest.mark.parametrize(
    "masking",
    [
        {"num_states_per_mask": 2},
        {"num_states_per_mask": 4},
        {"num_states_per_mask": 3, "scheme": "bernoulli", "mask_ratio": 0.35},
    ],
)
def test_attention_of_the_context_first_is_attention_under_one_mask(model, masking):
    """States, edges and gradients of a batch with as many tokens each, beside those under the whole (X, X) mask."""
    sections = {"model": {"mask_attention": "first", "init_std": 0.3, **model}, "masking": masking}
    even = tiny_batch(tiny_recipe(**sections), (10, 10, 10))
    assert even.has_even_context
    assert even.is_even == (not even.is_padded) == ("scheme" not in masking)
    found = []
    for batch in (even, replace(even, has_even_context=False, is_even=False)):
        network = _model(**sections).double()
        nodes = network.node_states(batch)
        results = nodes.states, network.log_transitions(nodes, batch).exp()
        sum((result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum() for result in results).backward()
        found.append([*results, *(p.grad for p in network.parameters() if p.grad is not None)])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9 if got.dtype == torch.float64 else 1e-6)


def test_sequences_with_other_numbers_of_masks_are_not_alike():
    recipe = tiny_recipe()
    assert tiny_batch(recipe, (10, 10)).is_even
    assert not tiny_batch(recipe, (10, 12)).has_even_context


def _row(batch, b: int):
    """The b-th sequence of a batch as a batch of its own, without padding."""
    length, nodes, targets = int(batch.lengths[b]), int(batch.state_lengths[b]), int(batch.target_lengths[b])
    num_tokens = int(batch.positions[b, length - 1, 0]) + 1
    sizes = {"token_ids": length, "positions": length, "first_index": num_tokens, "node_index": nodes,
             "node_mask": nodes, "target_ids": targets, "target_source": targets}  # fmt: skip
    flat = {"inner_index": (batch.node_mask[b, :nodes] >= 0).nonzero()[:, 0], "target_index": torch.arange(targets)}
    row = {
        f.name: getattr(batch, f.name)[b : b + 1]
        for f in fields(batch)
        if f.name not in (*flat, "is_padded", "has_even_context", "is_even", "num_tokens", "packing")
    }
    cut = {name: tensor[:, : sizes[name]] if name in sizes else tensor for name, tensor in row.items()}
    return Batch(**cut, **flat, is_padded=False, has_even_context=targets > 0, is_even=targets > 0, num_tokens=0)


def test_emissions_are_the_node_distributions_at_the_targets():
    model, batch = _model(), tiny_batch(tiny_recipe())
    nodes = model.node_states(batch)
    full_BSV = model.node_log_probs(nodes)
    emit_BTS = model.log_emissions(nodes, batch)
    for b, num_targets in enumerate(batch.target_lengths.tolist()):
        inner = nodes.is_inner[b]
        expected = full_BSV[b][inner][:, batch.target_ids[b, :num_targets]].t()
        torch.testing.assert_close(emit_BTS[b, :num_targets][:, inner], expected)
    torch.testing.assert_close(full_BSV.exp().sum(-1)[nodes.is_inner], torch.ones(int(nodes.is_inner.sum())))
    assert full_BSV[~nodes.is_inner].isneginf().all()


def test_clones_differ_by_2d_positions_alone():
    model, batch = _model(model={"init_std": 0.5}), tiny_batch(tiny_recipe())
    states = model.node_states(batch).states
    assert not torch.allclose(states[0, 1], states[0, 2], atol=1e-3)
    batch.positions[..., 1] = 0
    states = model.node_states(batch).states
    torch.testing.assert_close(states[0, 1], states[0, 2])


def test_clone_vectors_are_added_to_clones_alone():
    """The states of the same model without vectors are the others; BOS, EOS and padding keep theirs."""
    model, batch = _model(model={"clone_embedding": "nodes", "clone_init_std": 1.0}), tiny_batch(tiny_recipe(), (9, 4))
    added = model.node_states(batch).states
    vectors = model.clone_embedding.weight.detach().clone()
    model.clone_embedding.weight.data.zero_()
    expected = torch.cat([torch.zeros(1, vectors.shape[1]), vectors])[batch.node_clone]
    torch.testing.assert_close(added - model.node_states(batch).states, expected)


def test_weights_start_as_bert_does_and_clone_vectors_with_their_own_spread():
    model = _model(
        masking={"num_states_per_mask": 64, "mask_ratio": 0.05},
        model={"width": 64, "ffn_width": 256, "clone_embedding": "nodes", "clone_init_std": 1.0, "max_length": 256},
        train={"microbatch_tokens": 512},
    )
    clones = {"clone_embedding.weight"}
    matrices = [p.detach().flatten() for n, p in model.named_parameters() if p.ndim == 2 and n not in clones]
    for weights, std in ((torch.cat(matrices), 0.02), (model.clone_embedding.weight.detach().flatten(), 1.0)):
        assert abs(float(weights.std()) - std) < 5 * std / (2 * len(weights)) ** 0.5
    assert all(p.eq(0).all() for n, p in model.named_parameters() if n.endswith("bias"))


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


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("model", [{}, FIRST, LATE])
def test_weights_of_attention_are_dropped_in_training_alone(monkeypatch, model, is_packed):
    """In each of its calls: of the context, and of the further states."""
    rates = []
    attend = F.scaled_dot_product_attention

    def record(*args, dropout_p=0.0, **rest):
        rates.append(dropout_p)
        return attend(*args, dropout_p=dropout_p, **rest)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    network, batch = _model(model={**model, **RATES}), tiny_batch(tiny_recipe(), (9, 9))
    if is_packed:
        batch = pack(batch, hides_further_states=bool(model))
    for is_training, rate in ((True, 0.125), (False, 0.0)):
        rates.clear()
        network.train(is_training).node_states(batch)
        assert set(rates) == {rate}
        assert len(rates) == 2 * (1 + bool(model)) - (model == LATE)


@pytest.mark.parametrize(
    "sections",
    [
        {"objective": "mlm"},
        {"objective": "mlm", "model": {"rope": "none", "learned_positions": True}},
        {"model": {"mask_attention": "all"}},
        {"model": FIRST | {"rope": "1d"}},
        {"model": LATE | {"learned_positions": True}},
        {"model": LAST | {"learned_positions": True}},
        {"model": FIRST | {"clone_embedding": "nodes"}, "masking": {"num_states_per_mask": 2}},
    ],
)
@pytest.mark.parametrize("recomputes", [False, True])
def test_sequences_without_padding_have_the_states_and_gradients_of_padded_ones(sections, recomputes):
    """The padded path with its masks is the definition; float64."""
    recipe = tiny_recipe(
        **{**sections, "model": {"dropout": 0.0, "attention_dropout": 0.0, **sections.get("model", {})}}
    )
    torch.manual_seed(0)
    model = ExlmModel(recipe, SPECIAL.vocab_size).double()
    model.encoder.recomputes = recomputes
    padded = tiny_batch(recipe, (9, 4, 12, 3))
    assert padded.is_padded
    packed = pack(padded, hides_further_states=recipe.model.mask_attention == "first")
    assert packed.packing is not None
    assert len(packed.packing.source) == int(padded.lengths.sum())
    states, gradients = [], []
    for batch in (padded, packed):
        model.zero_grad()
        states.append(model.node_states(batch).states)
        (states[-1] * torch.arange(states[-1].numel()).view_as(states[-1]).sin()).sum().backward()
        gradients.append([p.grad for p in model.encoder.parameters() if p.grad is not None])
    torch.testing.assert_close(states[1], states[0])
    for mine, theirs in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("lengths", [(9, 4, 12), (10, 10)])
@pytest.mark.parametrize("sections", VARIANTS)
def test_states_of_nodes_are_those_of_an_encoder_that_computes_every_position(sections, lengths):
    """The last block runs at the nodes alone; states and gradients of the whole encoder in float64."""
    recipe = tiny_recipe(**{**sections, "model": {"init_std": 0.3, **sections.get("model", {})}})
    torch.manual_seed(0)
    model, batch = ExlmModel(recipe, SPECIAL.vocab_size).double().eval(), tiny_batch(recipe, lengths)
    is_node = torch.arange(batch.node_index.shape[1]) < batch.state_lengths[:, None]
    whole_BLD = model.encode(batch)
    expected = torch.stack([states[index] for states, index in zip(whole_BLD, batch.node_index, strict=True)])
    if model.clone_embedding is not None:
        clone = batch.positions[..., 1].gather(1, batch.node_index)
        expected = expected + model.clone_embedding((clone - 1).clamp(min=0)) * (clone > 0)[..., None]
    found = []
    for states in (model.node_states(batch).states, expected):
        model.zero_grad()
        (states[is_node] * torch.linspace(-1, 1, states.shape[-1])).sum().backward()
        found.append([states[is_node], *(p.grad for p in model.encoder.parameters() if p.grad is not None)])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)  # angles of rotations are float32
