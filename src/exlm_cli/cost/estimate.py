"""Cost of a pre-training before it begins: its size, hours and memory on GPUs, the steps of an MLM of equal FLOPs.

A step takes at least the larger of two times: its FLOPs at a share of the peak that none exceeded, and the time of each
position in each layer that was measured on small models, whose products do not fill a GPU. `count_memory` counts
training in 16 bits with float32 weights, without the context of CUDA, the buffers of NCCL, temporary results of one
layer and the allocator's gaps. Most symbols are those of `counts`.
"""

import math
from dataclasses import dataclass

from exlm_cli.config.base import Recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import CHAIN_EDGE_WIDTH, HEAD_CHUNK_ROWS, PAIRS_PER_POSITION
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.cost.counts import count_parameters, recipe_step_flops, tokens_per_step
from exlm_cli.cost.gpus import GPUS
from exlm_cli.errors import ConfigError
from exlm_cli.files import JsonModel
from exlm_cli.format import format_bytes, format_count, format_large, format_parameters, format_span

UTILISATION = 0.25
"""Share of the peak, unless one is given: steps of width 768 reached 20 and 22 % on an H100, the paper's 10 to 24 %."""
SECONDS_PER_POSITION_AND_LAYER = 1.05e-7
"""Floor: 107 and 106 ns on an H200 in `smiles-medium` and `text-medium`, width 256 (docs/lab_notes/gpu.md)."""
LONG_RUN_FLOPS = 1.5e14
"""Cost from which a run tells it beforehand: about half an hour of two cores (16 minutes of `smiles-small`, 39 of
`text-small`, whose `purpose` tells the time)."""
_UNIT_TOKENS = 1e8
"""Tokens for which a time is given where the recipe does not say how many it trains on."""
_LEFT_OUT_BYTES = 2e9


@dataclass(frozen=True)
class RecipeSize:
    """Size and cost of the pre-training in a recipe; None for what the recipe alone does not determine.

    Attributes:
        objective: `exlm` or `mlm`; for a sweep, that of the recipe which its variants share.
        parameters, tokens_per_step: For a sweep, also those of the shared recipe.
        flops_per_step: Forward and backward over full sequences; None for a sweep.
        flops: Whole pre-training, over all variants and seeds of a sweep; None where the data decide its length.
    """

    objective: str | None = None
    parameters: int | None = None
    tokens_per_step: int | None = None
    flops_per_step: float | None = None
    flops: float | None = None


def recipe_size(recipe: Recipe) -> RecipeSize:
    """Return the size and cost of a recipe of any kind; a fine-tuning recipe has none."""
    common = recipe.pretrain if isinstance(recipe, SweepRecipe) else recipe
    if not isinstance(common, PretrainRecipe):
        return RecipeSize()
    runs = [plan.pretrain for plan in recipe.plan()] if isinstance(recipe, SweepRecipe) else [common]
    flops = [steps * recipe_step_flops(run).total for run in runs if (steps := run.train.known_steps) is not None]
    return RecipeSize(
        objective=common.objective,
        parameters=count_parameters(common),
        tokens_per_step=tokens_per_step(common),
        flops_per_step=recipe_step_flops(common).total if common is recipe else None,
        flops=sum(flops) if len(flops) == len(runs) else None,
    )


def describe_size(recipe: Recipe) -> dict[str, str]:
    """Return size and cost of a recipe as people read them, by name; nothing for a recipe without pre-training."""
    size = recipe_size(recipe)
    pairs = {
        "parameters": None if size.parameters is None else format_parameters(size.parameters),
        "tokens per step": None if size.tokens_per_step is None else format_count(size.tokens_per_step),
        "FLOPs per step": None if size.flops_per_step is None else _format_flops(size.flops_per_step),
        "FLOPs of the whole pre-training": None if size.flops is None else _format_flops(size.flops),
    }
    return {name: value for name, value in pairs.items() if value is not None}


def describe_long_run(recipe: PretrainRecipe) -> str | None:
    """Return tokens and FLOPs of a run that takes long, in a sentence; None for a short one, or of unknown length."""
    steps = recipe.train.known_steps
    flops = 0.0 if steps is None else steps * recipe_step_flops(recipe).total
    if steps is None or flops < LONG_RUN_FLOPS:
        return None
    shown = f"{format_large(steps * tokens_per_step(recipe))} tokens, {_format_flops(flops, 1)} FLOPs"
    return f"cost: {shown}; `exlm recipes` with `--gpu` and the same recipe estimates the hours"


def describe_time(recipe: PretrainRecipe, gpu: str) -> str:
    """Return the least time of a pre-training on one of `GPUS`, and what decides it.

    Like `at least 3.5 hours, by …`, for each 100 M tokens where the recipe does not determine how many there are. It is
    `at most` where a step has a number of sequences, and these may be shorter than the recipe allows.
    """
    step_s, by = step_time(recipe, gpu)
    steps = recipe.train.known_steps
    is_shorter = recipe.data.kind == "smiles" or recipe.data.sample_break == "line"
    bound = "at most" if steps is not None and recipe.train.batch_sequences is not None and is_shorter else "at least"
    span = format_span(step_s * (_UNIT_TOKENS / tokens_per_step(recipe) if steps is None else steps))
    unit = f" for each {format_large(_UNIT_TOKENS)} tokens" if steps is None else ""
    return f"{bound} {span}{unit}, by {by}"


class CostEstimate(JsonModel):
    """Cost of a pre-training on some GPUs.

    Attributes:
        utilisation: Share of the peak that was given; None: times are bounds, "at least".
        time_by: What decides the time.
        steps, hours: Of the run; None where `train.max_epochs` limits it.
        mlm_steps: Steps that an MLM of the same encoder takes with the same FLOPs; None for an MLM.
        memory_bytes: Of each GPU.
    """

    gpu: str
    gpus: int
    utilisation: float | None
    time_by: str
    parameters: int
    tokens_per_step: int
    microbatch_sequences: int
    flops_per_step: float
    seconds_per_step: float
    steps: int | None
    hours: float | None
    mlm_steps: int | None
    memory_bytes: float


def estimate_cost(recipe: PretrainRecipe, gpu: str, num_gpus: int, utilisation: float | None = None) -> CostEstimate:
    """Return what a pre-training in 16 bits costs; sequences are taken as full, with their mean number of masks.

    Args:
        gpu: Key of `GPUS`.
        num_gpus: At least 1.
        utilisation: Share of the peak FLOP/s that training reaches, above 0; None: bounds.

    Raises:
        ConfigError: The GPU is unknown, a step has fewer sequences than there are GPUs, or the recipe trains in fp32.
    """
    per_step = tokens_per_step(recipe)
    sequences = per_step / recipe.repeated_length
    if gpu not in GPUS:
        reason = f"the GPU `{gpu}` is unknown; known are {', '.join(GPUS)}"
        raise ConfigError(reason, "choose a similar one with `--gpu NAME`")
    if recipe.train.precision == "fp32":
        reason = f"costs are estimated for 16 bits, but `train.precision` of `{recipe.name}` is fp32"
        raise ConfigError(reason, "estimate them with `--set train.precision=auto`")
    if sequences < num_gpus:
        reason = f"{num_gpus:,} GPUs are too many for `{recipe.name}`: a step has {math.floor(sequences):,} sequences"
        raise ConfigError(reason, "each GPU needs at least one sequence")
    at_once = min(math.ceil(sequences / num_gpus), max(1, recipe.train.microbatch_tokens // recipe.longest_input))
    flops, steps = recipe_step_flops(recipe).total, recipe.train.known_steps
    seconds, time_by = step_time(recipe, gpu, utilisation)
    masking = recipe.masking.model_copy(update={"num_states_per_mask": 1})
    of_mlm = recipe_step_flops(recipe.model_copy(update={"objective": "mlm", "masking": masking})).total
    return CostEstimate(
        gpu=gpu,
        gpus=num_gpus,
        utilisation=utilisation,
        time_by=time_by,
        parameters=count_parameters(recipe),
        tokens_per_step=per_step,
        microbatch_sequences=at_once,
        flops_per_step=flops,
        seconds_per_step=seconds / num_gpus,
        steps=steps,
        hours=None if steps is None else steps * seconds / num_gpus / 3600,
        mlm_steps=None if steps is None or recipe.objective == "mlm" else round(steps * flops / of_mlm),
        memory_bytes=sum(count_memory(recipe, at_once).values()),
    )


def step_time(recipe: PretrainRecipe, gpu: str, utilisation: float | None = None) -> tuple[float, str]:
    """Return the seconds of a step on one of `GPUS`, and what decides them; arguments as `estimate_cost`."""
    share, peak = utilisation or UTILISATION, GPUS[gpu].peak_flops
    of_flops = recipe_step_flops(recipe).total / (share * peak)
    num_positions = tokens_per_step(recipe) / recipe.repeated_length * recipe.num_positions(recipe.mean_masks)
    floor = SECONDS_PER_POSITION_AND_LAYER * recipe.model.num_layers * num_positions
    if utilisation is None and floor > of_flops:
        return floor, "the floor of small models"
    return of_flops, f"{100 * share:g} % of {peak / 1e12:g} TFLOP/s"


def count_memory(recipe: PretrainRecipe, num_sequences: int) -> dict[str, float]:
    """Return the bytes that a GPU holds at the end of a forward pass over M full sequences of L positions, by part.

    They have the mean number of masks of one ratio, and of a range the most that M sequences of a microbatch have.
    """
    model, width, targets = recipe.model, recipe.model.width, _most_masks(recipe, num_sequences)
    inner = recipe.nodes_per_mask * targets
    states, head = inner + 2, 4 * (width // model.num_heads)
    positions = num_sequences * recipe.num_positions(targets)
    read = num_sequences * states  # what the last block computes
    dropped = 2 * width * (model.dropout > 0) + model.ffn_width * (model.activation_dropout > 0)  # a byte each
    of_key, of_query = 12 * width + 8, 12 * width + 4 * model.ffn_width + 4 * model.num_heads + 8 + dropped
    block, last_block = positions * (of_key + of_query), positions * of_key + read * of_query
    beside = positions * head + positions * width * (model.dropout > 0) + read * (8 * width + head + 8)
    # an edge to each target in a DAG, two without transitions, one in an MLM
    scored = targets if recipe.has_transitions else 1 if recipe.objective == "mlm" else 2
    nodes = num_sequences * inner * (8 * width + 8 + 8 * scored)
    if recipe.has_transitions:
        nodes += num_sequences * (12 * states * width + 8 * states**2 + 12 * states * targets) + 2 * states**2
    if recipe.is_chain:
        nodes += _chain_memory(recipe, num_sequences, targets)
    blocks = (model.num_layers - 1) * block + last_block
    if recipe.train.gradient_checkpointing:  # the input of each block, and one block whole
        blocks = model.num_layers * positions * 4 * width + (block if model.num_layers > 1 else last_block)
    return {
        "state": 18 * count_parameters(recipe),  # weights, gradients and two moments, and 16-bit weights in use
        "activations": blocks + beside,
        "nodes": nodes,
        "logits": 8 * min(HEAD_CHUNK_ROWS, num_sequences * inner) * recipe.tokenizer.vocab_size,
    }


def _chain_memory(recipe: PretrainRecipe, num_sequences: int, num_targets: float) -> float:
    """Return the bytes of classes, states and edges beside those of an MLM."""
    num_classes, k, edge_width = recipe.model.chain.num_classes, recipe.masking.num_states_per_mask, CHAIN_EDGE_WIDTH
    of_mask = 8 * num_classes * (k + 1) + 40 * k + 4 * edge_width
    of_pair = 4 * edge_width * (2 * k + 1) + 4 * k**2 + 4 * 6 * recipe.model.width
    of_vocabulary = 8 * num_classes * recipe.tokenizer.vocab_size
    return num_sequences * (num_targets * of_mask + (num_targets - 1) * of_pair) + of_vocabulary


def describe_cost(estimate: CostEstimate) -> dict[str, str]:
    """Return the cost of the run as people read it, by name."""
    size, bound = GPUS[estimate.gpu].memory_bytes, "at least " if estimate.utilisation is None else ""
    fits = estimate.memory_bytes + _LEFT_OUT_BYTES <= size
    hint = "it fits" if fits else "too much: lower `train.microbatch_tokens`, or set `train.gradient_checkpointing`"
    pairs = {
        "parameters": format_parameters(estimate.parameters),
        "memory": f"{format_bytes(estimate.memory_bytes)} of {format_bytes(size)} of each GPU: {hint}",
        "tokens per step": format_count(estimate.tokens_per_step),
        "FLOPs per step": _format_flops(estimate.flops_per_step),
        "seconds per step": f"{bound}{estimate.seconds_per_step:.3g}, by {estimate.time_by}",
    }
    if estimate.steps is None or estimate.hours is None:
        return pairs | {"steps": "not known before the data are read: `train.max_epochs` limits the run"}
    pairs["steps"] = format_count(estimate.steps)
    pairs["hours"] = f"{bound}{estimate.hours:,.3g} ({estimate.gpus * estimate.hours:,.3g} GPU-hours)"
    if estimate.mlm_steps is not None:
        ratio = estimate.mlm_steps / estimate.steps
        pairs["as MLM"] = f"{format_count(estimate.mlm_steps)} steps for the same FLOPs, {ratio:.2f} x"
    return pairs


def _format_flops(flops: float, digits: int = 2) -> str:
    return f"{flops:.{digits}e}".replace("e+", "e")


def _most_masks(recipe: PretrainRecipe, num_sequences: int) -> float:
    """Return T of the microbatch of M full sequences that needs most memory.

    With more masks than fit M sequences, a microbatch has fewer sequences, as many pairs of nodes and less of the rest.
    """
    if not isinstance(recipe.masking.mask_ratio, tuple):
        return recipe.mean_masks
    if not recipe.has_transitions:
        return recipe.max_masks
    num_pairs = PAIRS_PER_POSITION * recipe.train.microbatch_tokens
    num_nodes = math.isqrt(num_pairs // num_sequences)
    fewest = int(recipe.mask_law[0][0])
    return min(recipe.max_masks, max(fewest, (num_nodes - 2) // recipe.masking.num_states_per_mask))
