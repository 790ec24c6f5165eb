"""A training step of Hugging Face transformers beside ours: BERT and ModernBERT of a recipe's size, on the same masks.

Layers, heads, widths, vocabulary, dropout, attention (SDPA), fused AdamW, clipping, precision and `train.compile` are
those of the recipe; both libraries train on the very batches of our MLM, microbatch by microbatch. In every round all
models do one step, turn by turn; on a GPU the elapsed time ends when the device is done. A ratio is theirs over ours
within a round, above 1 where ours is faster. On a busy machine, read the processor time. ModernBERT's GeGLU makes its
feed-forward layers half as large again.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.batch import Batch
from exlm_cli.ops.precision import autocast, precision_on
from exlm_cli.train.optim import build_optimizer
from harness import Spread
from step_measurements import paired_ratio

IGNORED = -100
"""Label of a position without a target, in transformers."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of each round of one model: of its processor, and elapsed."""

    processor: list[float] = field(default_factory=list)
    elapsed: list[float] = field(default_factory=list)


def build_theirs(recipe: PretrainRecipe, vocab_size: int) -> dict[str, nn.Module]:
    """Return the models of transformers in the size of a recipe, by name."""
    from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertForMaskedLM

    model = recipe.model
    size = {
        "vocab_size": vocab_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.ffn_width,
        "max_position_embeddings": model.max_length,
        "attn_implementation": "sdpa",
        **{f"{name}_token_id": index for name, index in (("pad", 0), ("bos", 1), ("cls", 1), ("eos", 2), ("sep", 2))},
    }
    bert = BertConfig(**size, hidden_dropout_prob=model.dropout, attention_probs_dropout_prob=model.attention_dropout)
    dropout = {"embedding_dropout": model.dropout, "mlp_dropout": model.dropout}
    modern = ModernBertConfig(**size, **dropout, attention_dropout=model.attention_dropout, reference_compile=False)
    return {"BERT": BertForMaskedLM(bert).train(), "ModernBERT": ModernBertForMaskedLM(modern).train()}


def theirs_step(model: nn.Module, recipe: PretrainRecipe) -> Callable[[list[Batch]], None]:
    """Return one optimiser step of a model of transformers, on its device, on the batches of our MLM."""
    optimizer = build_optimizer(model, recipe.optim)
    device = next(model.parameters()).device
    precision = precision_on(device, recipe.train.precision)
    losses = torch.compile(model) if recipe.train.compile else model

    def step(batches: list[Batch]) -> None:
        optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            with autocast(device, precision):
                loss = losses(**inputs_of(batch)).loss
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.optim.clip_norm or float("inf"))
        optimizer.step()

    return step


def inputs_of(batch: Batch) -> dict[str, torch.Tensor]:
    """Return a batch of our MLM as transformers takes it: labels at the masks, an attention mask if it is padded."""
    labels = torch.full_like(batch.token_ids, IGNORED)
    nodes = batch.node_index.flatten()[batch.inner_index]  # no mask, which would make the host wait for a device
    labels[batch.inner_index // batch.node_index.shape[1], nodes] = batch.target_ids.flatten()[batch.target_index]
    inputs = {"input_ids": batch.token_ids, "labels": labels}
    if batch.is_padded:
        position = torch.arange(labels.shape[1], device=labels.device)
        inputs["attention_mask"] = (position < batch.lengths[:, None]).long()
    return inputs


def measure_turns(
    steps: Mapping[str, Callable[[], object]], num_rounds: int, num_warmup: int, finish: Callable[[], object]
) -> dict[str, Times]:
    """Measure one step of each model in every round; every other round has the reverse order.

    Args:
        steps: One step of each model.
        num_rounds, num_warmup: Rounds measured, and rounds before those.
        finish: Waits until the device has done what it was given.
    """
    times = {name: Times() for name in steps}
    for index in range(num_warmup + num_rounds):
        for name in list(steps)[:: -1 if index % 2 else 1]:
            processor_s, elapsed_s = time.process_time(), time.perf_counter()
            steps[name]()
            finish()
            if index >= num_warmup:
                times[name].processor.append(1000 * (time.process_time() - processor_s))
                times[name].elapsed.append(1000 * (time.perf_counter() - elapsed_s))
    return times


def rows_of(
    times: Mapping[str, Times], recipe: PretrainRecipe, num_tokens: int, exlm_floor: float
) -> list[dict[str, Any]]:
    """Return one row for each pair of models, with the ratios of the first one's times to the second's.

    Args:
        times: Times of BERT, ModernBERT, MLM and ExLM.
        recipe: Recipe of the ExLM.
        num_tokens: Tokens of a step.
        exlm_floor: FLOPs of the ExLM over those of the MLM.
    """
    rows = []
    pairs = [(theirs, ours) for theirs in ("BERT", "ModernBERT") for ours in ("MLM", "ExLM")]
    for first, second in (*pairs, ("ExLM", "MLM")):
        row: dict[str, Any] = {"recipe": recipe.name, "model": first, "over": second}
        for kind in ("processor", "elapsed"):
            first_ms, second_ms = getattr(times[first], kind), getattr(times[second], kind)
            row[f"{kind}_ms"] = round(Spread.of(first_ms).median_ms, 1)
            row[f"over_{kind}_ms"] = round(Spread.of(second_ms).median_ms, 1)
            ratio = paired_ratio(first_ms, second_ms)
            row[f"{kind}_ratio"] = round(ratio.median_ms, 3)
            row |= {f"{kind}_ratio_p20": round(ratio.p20_ms, 3), f"{kind}_ratio_p80": round(ratio.p80_ms, 3)}
        floor = round(exlm_floor, 3) if first == "ExLM" else ""
        rows.append({**row, "floor": floor, "rounds": len(times[first].processor), "tokens": num_tokens})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print times and ratios."""
    print(f"\n{rows[0]['recipe']}: {rows[0]['tokens']:,} tokens a step, {rows[0]['rounds']} rounds")
    print(f"{'':<19}{'processor ms':>14}{'ratio, p20 to p80':>22}{'elapsed ms':>14}{'ratio, p20 to p80':>22}")
    for row in rows:
        cells = ""
        for kind in ("processor", "elapsed"):
            ratio = f"{row[f'{kind}_ratio']:.2f}  {row[f'{kind}_ratio_p20']:.2f} to {row[f'{kind}_ratio_p80']:.2f}"
            cells += f"{row[f'{kind}_ms']:>7.0f}{row[f'over_{kind}_ms']:>7.0f}{ratio:>22}"
        print(f"{row['model']:<10} / {row['over']:<6}{cells}" + (f"  floor {row['floor']}" if row["floor"] else ""))
