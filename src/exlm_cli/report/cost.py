"""Cost estimate of a pre-training: memory of each GPU, hours, traffic, and the steps of an MLM of equal FLOPs.

FLOPs and parameters are those of `config/describe.py`. Let G be the number of GPUs, P the parameters, P_block those of
a block and P_root those outside the blocks, M the sequences of a microbatch, A the microbatches of a GPU in a step, L
the positions of the encoder, n the layers of width D, feed-forward width F and N heads of width H, T the masks of a
sequence, k T its emitting nodes, S = k T + 2, V the vocabulary.

Training in bf16 with float32 weights then holds, in bytes on each GPU, where FSDP gathers the weights of blocks in bf16
and the others in float32, and reduces all gradients in float32:

                   whole (DDP)   sharded (FSDP)
    weights        4 P           4 P / G
    gradients      4 P           4 P / G, and if A > 1 also 4 P: they are whole until the step's one reduction
    moments        8 P           8 P / G
    used weights   2 P           6 P_root + 4 P_block: what lies outside the blocks, this block and the next one
    activations    n - 1 blocks of M L (12 D + 8) + M L B, B = 12 D + 4 F + 4 N + 8 and one for each element that
                   dropout draws; the last block, of which nodes alone are read, M L (12 D + 8) + M S B (with
                   `expand: output` T + 2 for S, here and beside the blocks);
                   beside the blocks L 4 H + M S (8 D + 4 H + 8), with dropout also M L D; where the input has clones
                   and `rope: 2d`, rotations differ between sequences, M L 4 H in place of L 4 H
      with gradient checkpointing  M L 4 n D in place of all blocks but the largest
    nodes          M k T (8 D + 8 + 8 t),  t = T for a DAG, 2 for `alignment: independent`, 1 for an MLM;
                   of a DAG also M (12 S D + 8 S^2 + 12 S T) + 2 S^2
    logits         8 r V with r = min(`train.head_chunk_rows`, M k T)

Norms keep their input in float32 (4 D each) and two statistics, linear layers and GELU their input in bf16, attention
its bf16 query, key, value and output and a float32 sum per head. The context of CUDA, the buffers of NCCL, temporary
results of one layer and the allocator's gaps are not counted.

FSDP keeps the input of a block in bf16; this saving is not deducted.

A GPU sends 2 (G - 1) / G * 4 P bytes a step to reduce the gradients of DDP in a ring. With FSDP it sends
(G - 1) / G (A + 1) 4 P: in each microbatch the weights of blocks are gathered for the forward and again for the
backward pass, the others once, and the gradients are scattered once a step.
"""

import math
from dataclasses import dataclass

from exlm_cli.config.describe import count_parameters, recipe_step_flops, tokens_per_step
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.errors import ConfigError
from exlm_cli.files import JsonModel
from exlm_cli.format import format_bytes, format_count, format_large, format_parameters
from exlm_cli.report.tables import ReportTable

UTILISATION = 0.25
"""Share of the peak that training reaches, unless one is given: the 24 hours of `smiles-base` on two RTX 3090 (App. J)
come to 24 %, those of Table 12 on two A100 to 10 and 11 %. This code has not been measured on a GPU yet."""

_LEFT_OUT_BYTES = 2e9


@dataclass(frozen=True)
class Gpu:
    """Figures of a GPU from its vendor's data sheet.

    Attributes:
        title: Product and variant.
        peak_flops: Dense products of bf16 matrices with float32 sums, FLOP/s.
    """

    title: str
    peak_flops: float
    memory_bytes: float


GPUS = {
    "a100": Gpu("A100 SXM, 80 GB", 312e12, 80e9),
    "a100-40gb": Gpu("A100 SXM, 40 GB", 312e12, 40e9),
    "b200": Gpu("B200 SXM, 180 GB", 2250e12, 180e9),
    "h100": Gpu("H100 SXM, 80 GB", 989e12, 80e9),
    "h200": Gpu("H200 SXM, 141 GB", 989e12, 141e9),
    "l40s": Gpu("L40S, 48 GB", 362e12, 48e9),
    "rtx3090": Gpu("GeForce RTX 3090, 24 GB", 71e12, 24e9),
    "rtx4090": Gpu("GeForce RTX 4090, 24 GB", 165e12, 24e9),
    "rtx5090": Gpu("GeForce RTX 5090, 32 GB", 209.5e12, 32e9),
}


class Memory(JsonModel):
    """Bytes on each GPU; the formulas are those of this module's docstring.

    Attributes:
        used_weights: Copies in bf16, and what FSDP has gathered.
        activations: Activations of the encoder, all kept.
        checkpointed_activations: The same with gradient checkpointing of every block.
        total, total_checkpointed: Sums of all parts, without and with gradient checkpointing.
    """

    weights: float
    gradients: float
    moments: float
    used_weights: float
    activations: float
    checkpointed_activations: float
    nodes: float
    logits: float
    total: float
    total_checkpointed: float


class CostEstimate(JsonModel):
    """Cost of a pre-training on some GPUs.

    Attributes:
        sequences_per_step: Full sequences of a step, on all GPUs.
        microbatch_sequences, microbatches: Sequences of a microbatch, and microbatches of a step, on one GPU.
        seconds_per_step: At the utilisation.
        steps, tokens, flops, hours: Totals of the run; None where `train.max_epochs` limits it.
        mlm_steps: Steps that an MLM of the same encoder takes with the same FLOPs; None for an MLM.
        mlm_flops_per_step: FLOPs of such a step; None for an MLM.
        ddp, fsdp: Memory with whole and with sharded weights.
        ddp_bytes_sent, fsdp_bytes_sent: By each GPU in a step.
    """

    gpu: str
    gpus: int
    utilisation: float
    parameters: int
    tokens_per_step: int
    sequences_per_step: float
    microbatch_sequences: int
    microbatches: int
    flops_per_step: float
    seconds_per_step: float
    steps: int | None
    tokens: int | None
    flops: float | None
    hours: float | None
    mlm_flops_per_step: float | None
    mlm_steps: int | None
    ddp: Memory
    fsdp: Memory
    ddp_bytes_sent: float
    fsdp_bytes_sent: float


def estimate_cost(recipe: PretrainRecipe, gpu: str, num_gpus: int, utilisation: float = UTILISATION) -> CostEstimate:
    """Return what a pre-training costs.

    Args:
        recipe: Trains in bf16; sequences are taken as full and with their mean number of masks.
        gpu: Key of `GPUS`.
        num_gpus: G, at least 1.
        utilisation: Share of the peak FLOP/s, above 0.

    Raises:
        ConfigError: The GPU is unknown, a step has fewer sequences than there are GPUs, or the recipe trains in fp32.
    """
    if gpu not in GPUS:
        raise ConfigError(
            f"the GPU `{gpu}` is unknown; known are {', '.join(GPUS)}", "choose a similar one with `gpu=NAME`"
        )
    if recipe.train.precision == "fp32":
        raise ConfigError(
            f"costs are estimated for bf16, but `train.precision` of `{recipe.name}` is fp32",
            "estimate them with `train.precision=bf16`",
        )
    per_step = tokens_per_step(recipe)
    sequences = per_step / recipe.repeated_length
    if sequences < num_gpus:
        raise ConfigError(
            f"{num_gpus:,} GPUs are too many for `{recipe.name}`: a step has {math.floor(sequences):,} sequences",
            "each GPU needs at least one sequence",
        )
    own = math.ceil(sequences / num_gpus)
    at_once = min(own, max(1, recipe.train.microbatch_tokens // recipe.longest_input))
    microbatches = math.ceil(own / at_once)
    flops, steps = recipe_step_flops(recipe).total, recipe.train.known_steps
    seconds = flops / (num_gpus * GPUS[gpu].peak_flops * utilisation)
    mlm_flops = recipe_step_flops(_mlm_of(recipe)).total if recipe.objective == "exlm" else None
    parameters = count_parameters(recipe)
    others = (num_gpus - 1) / num_gpus
    return CostEstimate(
        gpu=gpu,
        gpus=num_gpus,
        utilisation=utilisation,
        parameters=parameters,
        tokens_per_step=per_step,
        sequences_per_step=sequences,
        microbatch_sequences=at_once,
        microbatches=microbatches,
        flops_per_step=flops,
        seconds_per_step=seconds,
        steps=steps,
        tokens=None if steps is None else steps * per_step,
        flops=None if steps is None else steps * flops,
        hours=None if steps is None else steps * seconds / 3600,
        mlm_flops_per_step=mlm_flops,
        mlm_steps=None if steps is None or mlm_flops is None else round(steps * flops / mlm_flops),
        ddp=count_memory(recipe, at_once),
        fsdp=count_memory(recipe, at_once, num_shards=num_gpus, microbatches=microbatches),
        ddp_bytes_sent=2 * others * 4 * parameters,
        fsdp_bytes_sent=others * (microbatches + 1) * 4 * parameters,
    )


def count_memory(
    recipe: PretrainRecipe, num_sequences: int, *, num_shards: int | None = None, microbatches: int = 1
) -> Memory:
    """Return the bytes that a GPU holds at the end of a forward pass.

    Args:
        recipe: Its `model`, `masking` and `objective` decide the architecture.
        num_sequences: M, full ones.
        num_shards: G of FSDP; None: every GPU holds the whole model (DDP).
        microbatches: A; it matters to FSDP alone.
    """
    model, masking = recipe.model, recipe.masking
    width, vocab = model.width, recipe.tokenizer.vocab_size
    targets = recipe.mean_masks
    inner = masking.num_states_per_mask * targets
    states = inner + 2
    further = inner - targets if recipe.expands_input else 0
    positions = num_sequences * (recipe.repeated_length + further)
    read = num_sequences * (states if recipe.expands_input else targets + 2)
    dropped = 2 * width * (model.dropout > 0) + model.ffn_width * (model.activation_dropout > 0)
    of_key = 12 * width + 8
    of_query = 12 * width + 4 * model.ffn_width + 4 * model.num_heads + 8 + dropped
    last_block = positions * of_key + read * of_query
    rotation = 4 * (width // model.num_heads)
    rotations = positions if recipe.expands_input and model.rope == "2d" else positions / num_sequences
    ends = rotations * rotation + positions * width * (model.dropout > 0) + read * (8 * width + rotation + 8)
    has_dag = recipe.has_transitions
    scored = targets if has_dag else 1 if recipe.objective == "mlm" else 2
    nodes = num_sequences * inner * (8 * width + 8 + 8 * scored)
    if has_dag:
        nodes += num_sequences * (12 * states * width + 8 * states**2 + 12 * states * targets) + 2 * states**2
    parameters = count_parameters(recipe)
    one_more = recipe.model_copy(update={"model": model.model_copy(update={"num_layers": model.num_layers + 1})})
    per_block = count_parameters(one_more) - parameters
    outside_blocks = parameters - model.num_layers * per_block
    shard = parameters / (num_shards or 1)
    always = {
        "weights": 4 * shard,
        "gradients": 4 * shard + (4 * parameters if num_shards and microbatches > 1 else 0),
        "moments": 8 * shard,
        "used_weights": 2 * parameters if num_shards is None else 6 * outside_blocks + 4 * per_block,
        "nodes": nodes,
        "logits": 8 * min(recipe.train.head_chunk_rows, num_sequences * inner) * vocab,
    }
    whole_block = positions * (of_key + of_query)
    others = model.num_layers - 1
    kept = others * whole_block + last_block + ends
    # blocks are computed again one by one, and the largest counts
    largest = whole_block if others else last_block
    checkpointed = model.num_layers * positions * 4 * width + largest + ends
    whatever_kept = sum(always.values())
    return Memory(
        **always,
        activations=kept,
        checkpointed_activations=checkpointed,
        total=whatever_kept + kept,
        total_checkpointed=whatever_kept + checkpointed,
    )


def describe_cost(estimate: CostEstimate) -> dict[str, str]:
    """Return the cost of the run as people read it, by name."""
    pairs = {
        "parameters": format_parameters(estimate.parameters),
        "tokens per step": format_count(estimate.tokens_per_step),
        "microbatches per GPU": f"{estimate.microbatches}, of up to {estimate.microbatch_sequences} sequences",
        "FLOPs per step": _format_flops(estimate.flops_per_step),
        "seconds per step": f"{estimate.seconds_per_step:.3g}",
    }
    if estimate.gpus > 1:
        sent = f"{format_bytes(estimate.ddp_bytes_sent)} with DDP, {format_bytes(estimate.fsdp_bytes_sent)} with FSDP"
        pairs["sent per GPU and step"] = sent
    if estimate.steps is None or estimate.tokens is None or estimate.flops is None or estimate.hours is None:
        return pairs | {"steps": "not known before the data are read: `train.max_epochs` limits the run"}
    pairs |= {
        "steps": format_count(estimate.steps),
        "tokens": format_large(estimate.tokens),
        "FLOPs": _format_flops(estimate.flops),
        "hours": f"{estimate.hours:,.1f} ({estimate.gpus * estimate.hours:,.1f} GPU-hours)",
    }
    if estimate.mlm_steps is not None:
        tokens = format_large(estimate.mlm_steps * estimate.tokens_per_step)
        ratio = estimate.mlm_steps / estimate.steps
        pairs["as MLM"] = (
            f"{format_count(estimate.mlm_steps)} steps for the same FLOPs ({tokens} tokens, {ratio:.2f} x)"
        )
    return pairs


def memory_table(estimate: CostEstimate) -> ReportTable:
    """Return the memory of each GPU by its parts."""
    plans = {"DDP": estimate.ddp, "FSDP": estimate.fsdp} if estimate.gpus > 1 else {"one GPU": estimate.ddp}
    parts = {
        "weights": "weights",
        "gradients": "gradients",
        "moments": "moments of AdamW",
        "used_weights": "weights in use",
        "nodes": "nodes, transitions, alignment",
        "logits": "logits",
        "activations": "activations",
        "checkpointed_activations": "  with gradient checkpointing",
    }
    totals = {"total": "all", "total_checkpointed": "  with gradient checkpointing"}
    groups = tuple(
        tuple(
            (label, *(format_bytes(getattr(memory, key)) for memory in plans.values())) for key, label in rows.items()
        )
        for rows in (parts, totals)
    )
    return ReportTable("memory", "Memory of each GPU", ("", *plans), groups, (_describe_fit(estimate, plans),))


def _describe_fit(estimate: CostEstimate, plans: dict[str, Memory]) -> str:
    """Return which plans fit, with room for what the formulas leave out."""
    room = GPUS[estimate.gpu].memory_bytes
    verdicts = []
    for plan, memory in plans.items():
        name = plan if estimate.gpus > 1 else "it"
        if memory.total + _LEFT_OUT_BYTES <= room:
            verdicts.append(f"{name} fits")
        elif memory.total_checkpointed + _LEFT_OUT_BYTES <= room:
            verdicts.append(f"{name} fits with gradient checkpointing")
        else:
            verdicts.append(f"{name} does not fit unless `train.microbatch_tokens` is lower")
    return f"{format_bytes(_LEFT_OUT_BYTES)} of {format_bytes(room)} go to CUDA and buffers: {', '.join(verdicts)}"


def _format_flops(flops: float) -> str:
    return f"{flops:.2e}".replace("e+", "e")


def _mlm_of(recipe: PretrainRecipe) -> PretrainRecipe:
    """Return the recipe as MLM, as far as its cost goes."""
    masking = recipe.masking.model_copy(update={"num_states_per_mask": 1})
    return recipe.model_copy(update={"objective": "mlm", "masking": masking})
