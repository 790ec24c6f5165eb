"""Cost of a pre-training: activations against the bytes that torch saves for the backward pass, the rest by hand."""

import pytest
import torch
from torch import Tensor, nn

from exlm_cli.config.load import load_recipe
from exlm_cli.cost.counts import recipe_step_flops
from exlm_cli.cost.estimate import (
    count_memory,
    describe_cost,
    describe_time,
    estimate_cost,
    step_time,
)
from exlm_cli.cost.gpus import GPUS
from exlm_cli.format import format_span
from exlm_cli.model.chain import ChainHead
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.train.objective import Objective
from tests.tiny import CHAIN, SPECIAL, tiny_batch, tiny_recipe

NUM_SEQUENCES = 5
LONG = {  # 50 tokens with 15 masks: nothing is rounded
    "data": {"sequence_length": 52},
    "tokenizer": {"vocab_size": SPECIAL.vocab_size},
    "model": {"num_layers": 3, "max_length": 512, "dropout": 0.0, "attention_dropout": 0.0},
    "train": {"microbatch_tokens": 4096},
}


def long_recipe(**sections):
    merged = {key: {**value, **sections.get(key, {})} for key, value in LONG.items()}
    return tiny_recipe(**{**sections, **merged})


def saved_in_training(recipe):
    """Bytes that a bf16 forward pass of the real model and loss keeps, each storage once, without the bf16 weights."""
    model, batch = ExlmModel(recipe, SPECIAL.vocab_size), tiny_batch(recipe, (50,) * NUM_SEQUENCES)
    objective = Objective(SPECIAL.vocab_size - 1, 1, "native")
    known = [*model.parameters(), *(value for value in vars(batch).values() if isinstance(value, Tensor))]
    exists = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in exists:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        result = objective.sequence_nll(model, batch).sum()  # its graph keeps them, so no address is used twice
    weights = sum(2 * module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    del result
    return sum(kept.values()) - weights


@pytest.mark.parametrize(
    "sections",
    [
        {"masking": {"mask_ratio": 0.3, "num_states_per_mask": 4}},
        {"masking": {"mask_ratio": 0.6, "num_states_per_mask": 8}},
        {"objective": "mlm"},
        {"model": {"alignment": "independent"}},
        {"model": {"width": 32, "ffn_width": 96, "num_heads": 4}},
        {"model": CHAIN, "masking": {"mask_ratio": 0.6, "num_states_per_mask": 8}},
    ],
)
def test_activations_are_the_bytes_that_autograd_keeps(sections, monkeypatch):
    """Half of the logits' bytes are the log-probabilities that are kept; the other half exists while they are made.

    A chain keeps none. Training holds 18 bytes a parameter besides.
    """
    monkeypatch.setattr(ChainHead, "is_learning", True)
    recipe = long_recipe(**sections)
    memory = count_memory(recipe, NUM_SEQUENCES)
    expected = memory["activations"] + memory["nodes"] + (0 if recipe.is_chain else memory["logits"] / 2)
    assert saved_in_training(recipe) == pytest.approx(expected, rel=0.02)
    assert memory["state"] == 18 * sum(p.numel() for p in ExlmModel(recipe, SPECIAL.vocab_size).parameters())


@pytest.mark.parametrize("sections", [{}, {"objective": "mlm"}])
def test_a_range_needs_the_memory_of_the_most_masks_that_a_microbatch_can_have(sections):
    """15 masks of 50 tokens, unless 5 sequences of 3 T + 2 nodes would have more pairs than 512 for each position."""
    ranged, most = (
        long_recipe(**sections, masking={"mask_ratio": ratio, "num_states_per_mask": 3}) for ratio in ([0, 0.3], 0.3)
    )
    assert count_memory(ranged, NUM_SEQUENCES) == count_memory(most, NUM_SEQUENCES)
    tight = ranged.changed({"train.microbatch_tokens": 82})  # 41,984 pairs, 5 * 91.6^2, of 29 masks
    assert count_memory(tight, NUM_SEQUENCES) == count_memory(most, NUM_SEQUENCES)
    of_many, of_few = count_memory(tight, 40), count_memory(most.changed({"masking.mask_ratio": 0.2}), 40)
    assert (of_many == of_few) == ranged.has_transitions  # 40 * 32.4^2: 10 masks of 3 states


def test_dropout_keeps_a_byte_for_each_element_it_draws():
    """A CPU keeps them in the dtype of the input, which is bf16 inside a block and float32 at the embeddings."""
    dropout = {"dropout": 0.1, "activation_dropout": 0.1}
    model = LONG["model"] | dropout
    plain, dropped = long_recipe(), tiny_recipe(**{**LONG, "model": model})
    width, ffn_width, positions, nodes = 16, 32, NUM_SEQUENCES * (52 + 2 * 15), NUM_SEQUENCES * (3 * 15 + 2)
    in_blocks = (2 * positions + nodes) * (2 * width + ffn_width)  # nodes alone pass the last of three
    assert saved_in_training(dropped) - saved_in_training(plain) == 2 * in_blocks + 4 * positions * width
    counted = [count_memory(recipe, NUM_SEQUENCES)["activations"] for recipe in (plain, dropped)]
    assert counted[1] - counted[0] == in_blocks + positions * width


@pytest.mark.parametrize(
    ("name", "changes", "gpu", "hours", "utilisation"),
    [
        ("smiles-base", [], "rtx3090", 24, 0.24),
        ("ablation-exlm", [], "a100", 104.2, 0.10),
        ("ablation-exlm", ["objective=mlm", "masking.num_states_per_mask=1", "model.rope=1d"], "a100", 54.7, 0.11),
    ],
)
def test_the_hours_of_the_paper_come_to_a_tenth_to_a_quarter_of_the_peak(name, changes, gpu, hours, utilisation):
    """App. J and Table 12, each on two GPUs; the utilisation that is assumed is the best of them."""
    estimate = estimate_cost(load_recipe(name, changes), gpu, 2, utilisation=1.0)
    assert estimate.hours / hours == pytest.approx(utilisation, abs=0.005)


def test_the_cost_of_text_base_by_hand():
    recipe = load_recipe("text-base")
    estimate = estimate_cost(recipe, "h100", 8, utilisation=0.5)
    assert estimate.microbatch_sequences == 66  # 49,152 // 743
    assert estimate.memory_bytes == sum(count_memory(recipe, 66).values())
    assert estimate.tokens_per_step == 2048 * 512
    assert estimate.seconds_per_step == pytest.approx(estimate.flops_per_step / (8 * 989e12 * 0.5))
    assert estimate.hours == pytest.approx(125_000 * estimate.seconds_per_step / 3600)
    twin = recipe_step_flops(load_recipe("text-base-mlm")).total
    assert abs(estimate.mlm_steps * twin - 125_000 * estimate.flops_per_step) <= twin / 2
    # a step of ExLM costs as much as so many of its twin
    assert describe_cost(estimate)["as MLM"].endswith(f" {estimate.flops_per_step / twin:.2f} x")


MEASURED_MS = {  # docs/lab_notes/gpu.md; steps of 65,536 tokens
    ("smiles-medium", "h200"): 42.0,
    ("text-medium", "h200"): 27.8,
    ("text-base", "h100"): 318.0,
    ("text-base-mlm", "h100"): 172.0,
}


@pytest.mark.parametrize(("name", "gpu"), MEASURED_MS)
def test_no_measured_step_was_faster_than_its_bound_nor_much_slower(name, gpu):
    tokens = ["train.batch_sequences=null"] if load_recipe(name).train.batch_sequences else []
    recipe = load_recipe(name, [*tokens, "train.batch_tokens=65536"])
    seconds, _ = step_time(recipe, gpu)
    assert 0.75 < seconds / (MEASURED_MS[name, gpu] / 1000) <= 1.0


def test_the_cost_says_what_fits():
    """Two gigabytes of a GPU are left to what is not counted."""
    saving = "train.gradient_checkpointing=true"
    for changes, gpu, fits in (
        ([], "l40s", True),
        ([], "rtx4090", False),
        ([saving], "rtx4090", True),
        ([saving, "train.microbatch_tokens=400000"], "rtx4090", False),
    ):
        estimate = estimate_cost(load_recipe("text-large", changes), gpu, 1)
        assert (estimate.memory_bytes + 2e9 <= GPUS[gpu].memory_bytes) == fits
        assert describe_cost(estimate)["memory"].endswith(": it fits") == fits


def test_a_time_is_told_for_the_run_or_for_some_of_its_tokens():
    """It is an upper bound where eight sequences a step may be shorter than 16 tokens."""
    whole = {"sample_break": "none"}
    for sections, steps, unit, bound in (
        ({}, 6, "", "at most"),
        ({"data": whole}, 6, "", "at least"),
        ({"train": {"max_steps": None, "max_epochs": 2}}, 1e8 / (8 * 16), " for each 100 M tokens", "at least"),
    ):
        recipe = tiny_recipe(**sections)
        step_s, by = step_time(recipe, "a100")
        assert describe_time(recipe, "a100") == f"{bound} {format_span(steps * step_s)}{unit}, by {by}"
