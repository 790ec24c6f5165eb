"""Cost of a pre-training: activations against the bytes that torch saves for the backward pass, the rest by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exlm_cli.config.describe import recipe_step_flops
from exlm_cli.config.load import load_recipe
from exlm_cli.data.batch import Batch
from exlm_cli.format import format_bytes, format_large
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.report.cost import count_memory, describe_cost, estimate_cost, memory_table
from exlm_cli.train.objective import Objective
from tests.tiny import OUTPUT, SPECIAL, tiny_batch, tiny_recipe

NUM_SEQUENCES = 5
LONG: dict[str, Any] = {  # 50 tokens with 15 masks: nothing is rounded
    "data": {"sequence_length": 52},
    "tokenizer": {"vocab_size": SPECIAL.vocab_size},
    "model": {"num_layers": 3, "max_length": 512, "dropout": 0.0, "attention_dropout": 0.0},
    "train": {"microbatch_tokens": 4096},
}


def long_recipe(**sections: dict[str, Any] | str) -> Any:
    merged = {key: {**value, **sections.get(key, {})} for key, value in LONG.items()}  # type: ignore[dict-item]
    return tiny_recipe(**{**sections, **merged})


def full_batch(recipe: Any) -> Batch:
    return tiny_batch(recipe, (50,) * NUM_SEQUENCES)


def bytes_saved_for_backward(run: Callable[[], Tensor], known: list[Tensor]) -> int:
    """Storages that autograd keeps, each once, without those that exist anyway."""
    exists = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in exists:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()  # its graph keeps the storages alive, so that no address is used twice
    del result
    return sum(kept.values())


def saved_in_training(recipe: Any) -> int:
    """Bytes that a bf16 forward pass of the real model and loss keeps, without the bf16 weights."""
    model, batch = ExlmModel(recipe, SPECIAL.vocab_size), full_batch(recipe)
    objective = Objective(SPECIAL.vocab_size - 1, 1, "native")
    known = [*model.parameters(), *(value for value in vars(batch).values() if isinstance(value, Tensor))]
    with torch.autocast("cpu", torch.bfloat16):
        saved = bytes_saved_for_backward(lambda: objective.sequence_nll(model, batch).sum(), known)
    return saved - sum(2 * module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


@pytest.mark.parametrize(
    "sections",
    [
        {"masking": {"mask_ratio": 0.3, "num_states_per_mask": 4}},
        {"masking": {"mask_ratio": 0.6, "num_states_per_mask": 8}},
        {"objective": "mlm"},
        {"model": {"alignment": "independent"}},
        {"model": {"num_layers": 1}},
        {"model": OUTPUT},
        {"model": OUTPUT, "masking": {"mask_ratio": 0.6, "num_states_per_mask": 8}},
        {"model": OUTPUT | {"num_layers": 1}},
        {"model": OUTPUT | {"alignment": "independent"}},
        {"model": {"width": 32, "ffn_width": 96, "num_heads": 4}},
    ],
)
def test_activations_are_the_bytes_that_autograd_keeps(sections):
    """Half of the logits' bytes are the log-probabilities that are kept; the other half exists while they are made."""
    recipe = long_recipe(**sections)
    memory = count_memory(recipe, NUM_SEQUENCES)
    expected = memory.activations + memory.nodes + memory.logits / 2
    assert saved_in_training(recipe) == pytest.approx(expected, rel=0.02)


def test_where_masks_expand_costs_an_mlm_no_memory():
    """The key has no effect there, and the model keeps the same bytes."""
    plain, late = (long_recipe(objective="mlm", model=model) for model in ({"rope": "1d"}, OUTPUT))
    assert count_memory(late, NUM_SEQUENCES) == count_memory(plain, NUM_SEQUENCES)
    assert saved_in_training(late) == saved_in_training(plain)


def test_dropout_keeps_a_byte_for_each_element_it_draws():
    """A CPU keeps them in the dtype of the input, which is bf16 inside a block and float32 at the embeddings."""
    dropout = {"dropout": 0.1, "activation_dropout": 0.1}
    model = LONG["model"] | dropout
    plain, dropped = long_recipe(), tiny_recipe(**{**LONG, "model": model})
    width, ffn_width, positions, nodes = 16, 32, NUM_SEQUENCES * (52 + 2 * 15), NUM_SEQUENCES * (3 * 15 + 2)
    in_blocks = (2 * positions + nodes) * (2 * width + ffn_width)  # nodes alone pass the last of three
    assert saved_in_training(dropped) - saved_in_training(plain) == 2 * in_blocks + 4 * positions * width
    counted = [count_memory(recipe, NUM_SEQUENCES).activations for recipe in (plain, dropped)]
    assert counted[1] - counted[0] == in_blocks + positions * width


def test_checkpointing_keeps_the_input_of_each_block_and_one_block_whole():
    model = LONG["model"]
    kept, lean = [], []
    for layers in (3, 4):
        memory = count_memory(tiny_recipe(**{**LONG, "model": {**model, "num_layers": layers}}), NUM_SEQUENCES)
        kept.append(memory.activations)
        lean.append(memory.checkpointed_activations)
    positions, nodes = NUM_SEQUENCES * (52 + 2 * 15), NUM_SEQUENCES * (3 * 15 + 2)
    assert lean[1] - lean[0] == positions * 4 * 16
    block = kept[1] - kept[0]
    last_block = block - (positions - nodes) * (12 * 16 + 4 * 32 + 4 * 2 + 8)  # as a query and after attention
    assert kept[0] - lean[0] == block + last_block - 3 * positions * 4 * 16


def test_training_holds_18_bytes_a_parameter_besides_what_grows_with_the_batch():
    recipe = long_recipe()
    parameters = sum(parameter.numel() for parameter in ExlmModel(recipe, SPECIAL.vocab_size).parameters())
    memory = count_memory(recipe, NUM_SEQUENCES)
    assert (memory.weights, memory.gradients, memory.moments) == (4 * parameters, 4 * parameters, 8 * parameters)
    assert memory.used_weights == 2 * parameters
    assert memory.total - memory.total_checkpointed == memory.activations - memory.checkpointed_activations
    assert memory.total == 18 * parameters + memory.nodes + memory.logits + memory.activations


@pytest.mark.parametrize(
    ("name", "gpu", "hours", "utilisation"),
    [
        ("smiles-base", "rtx3090", 24, 0.24),
        ("ablation-exlm", "a100", 104.2, 0.10),
        ("ablation-mlm", "a100", 54.7, 0.11),
    ],
)
def test_the_hours_of_the_paper_come_to_a_tenth_to_a_quarter_of_the_peak(name, gpu, hours, utilisation):
    """App. J and Table 12, each on two GPUs; the utilisation that is assumed is the best of them."""
    estimate = estimate_cost(load_recipe(name), gpu, 2, utilisation=1.0)
    assert estimate.hours is not None
    assert estimate.hours / hours == pytest.approx(utilisation, abs=0.005)


def test_the_cost_of_text_base_by_hand():
    recipe = load_recipe("text-base")
    estimate = estimate_cost(recipe, "h100", 8, utilisation=0.5)
    assert (estimate.microbatches, estimate.microbatch_sequences) == (4, 66)  # 49,152 // 743; 256 sequences a GPU
    assert estimate.tokens == 125_000 * 2048 * 512
    assert estimate.seconds_per_step == pytest.approx(estimate.flops_per_step / (8 * 989e12 * 0.5))
    assert estimate.hours == pytest.approx(125_000 * estimate.seconds_per_step / 3600)
    twin = recipe_step_flops(load_recipe("text-base-mlm")).total
    assert estimate.mlm_flops_per_step == twin
    assert estimate.flops is not None
    assert estimate.mlm_steps is not None
    assert abs(estimate.mlm_steps * twin - estimate.flops) <= twin / 2
    # a step of ExLM costs as much as so many of its twin
    assert f" ({format_large(estimate.mlm_steps * 2048 * 512)} tokens, " in describe_cost(estimate)["as MLM"]
    assert describe_cost(estimate)["as MLM"].endswith(f" {estimate.flops_per_step / twin:.2f} x)")
    # a ring of eight: seven phases that add and seven that copy, each sends an eighth of the float32 gradients
    assert estimate.bytes_sent == pytest.approx((7 + 7) * 4 * estimate.parameters / 8)


def test_an_mlm_has_no_mlm_beside_it_and_epochs_have_no_hours():
    estimate = estimate_cost(load_recipe("text-base-mlm"), "h100", 1)
    assert (estimate.mlm_steps, estimate.bytes_sent) == (None, 0)
    assert "as MLM" not in describe_cost(estimate)
    endless = estimate_cost(tiny_recipe(train={"max_steps": None, "max_epochs": 3}), "h100", 1)
    assert (endless.hours, endless.flops, endless.mlm_steps) == (None, None, None)
    assert describe_cost(endless)["steps"].endswith("`train.max_epochs` limits the run")


@pytest.mark.parametrize(
    ("name", "changes", "gpu", "num_gpus", "verdict"),
    [
        ("text-base", [], "h100", 8, ": it fits"),
        ("text-large", [], "rtx4090", 1, ": it fits with gradient checkpointing"),
        ("text-large", [], "l40s", 1, ": it fits"),
        ("text-large", ["train.microbatch_tokens=400000"], "rtx4090", 1, "`train.microbatch_tokens` is lower"),
    ],
)
def test_the_table_says_what_fits(name, changes, gpu, num_gpus, verdict):
    table = memory_table(estimate_cost(load_recipe(name, changes), gpu, num_gpus))
    assert table.notes[0].endswith(verdict)


@pytest.mark.parametrize(
    ("total", "lean", "verdict"),
    [
        (22.0e9, 3e9, "it fits"),
        (22.1e9, 22.0e9, "it fits with gradient checkpointing"),
        (30e9, 22.1e9, "it does not fit unless `train.microbatch_tokens` is lower"),
    ],
)
def test_two_gigabytes_of_a_gpu_are_left_to_what_is_not_counted(total, lean, verdict):
    """A RTX 3090 has 24 GB."""
    estimate = estimate_cost(load_recipe("text-base"), "rtx3090", 1)
    memory = estimate.memory.model_copy(update={"total": total, "total_checkpointed": lean})
    table = memory_table(estimate.model_copy(update={"memory": memory}))
    assert table.notes[0].endswith(f": {verdict}")


def test_every_part_of_the_memory_has_a_row():
    """A GPU of eight sends 2 (7 / 8) 4 P bytes."""
    estimate = estimate_cost(load_recipe("text-base"), "h100", 8)
    parts, totals = (dict(group) for group in memory_table(estimate).groups)
    memory = estimate.memory
    assert parts["weights"] == format_bytes(4 * estimate.parameters)
    assert parts["gradients"] == format_bytes(memory.gradients)
    assert parts["moments of AdamW"] == format_bytes(memory.moments)
    assert parts["weights in use"] == format_bytes(memory.used_weights)
    assert parts["logits"] == format_bytes(memory.logits)
    assert parts["activations"] == format_bytes(memory.activations)
    assert parts["  with gradient checkpointing"] == format_bytes(memory.checkpointed_activations)
    assert totals["all"] == format_bytes(memory.total)
    assert describe_cost(estimate)["sent per GPU and step"] == format_bytes(2 * 7 / 8 * 4 * estimate.parameters)


@pytest.mark.parametrize(
    ("num_gpus", "microbatches", "at_once"),
    [
        (8, 4, 66),  # 256 sequences
        (2048, 1, 1),  # one sequence each: a microbatch holds no more than there are
        (1000, 1, 3),  # 2,048 / 1,000 are 2 or 3 sequences
    ],
)
def test_a_microbatch_holds_no_more_sequences_than_a_gpu_has(num_gpus, microbatches, at_once):
    """A step has 2,048 sequences, and 49,152 tokens hold 66 of them."""
    estimate = estimate_cost(load_recipe("text-base"), "h100", num_gpus)
    assert (estimate.microbatches, estimate.microbatch_sequences) == (microbatches, at_once)
    shown = describe_cost(estimate)["microbatches per GPU"]
    assert shown == f"{microbatches}, of up to {at_once} sequences"
