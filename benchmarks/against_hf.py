"""Training steps of Hugging Face transformers: BERT and ModernBERT of a recipe's size, on the batches of our MLM.

Layers, heads, widths, vocabulary, dropout, attention (SDPA), fused AdamW, clipping, precision and `train.compile` are
those of the recipe. ModernBERT's GeGLU makes its feed-forward layers half as large again.
"""

from collections.abc import Callable

import torch
from torch import nn

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.batch import Batch
from exlm_cli.ops.precision import autocast, precision_on
from exlm_cli.train.optim import build_optimizer

IGNORED = -100
"""Label of a position without a target, in transformers."""


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


def assert_same_targets(batches: list[Batch], mask_id: int) -> None:
    """Check that each mask has a label and nothing else has one."""
    for batch in batches:
        inputs = inputs_of(batch)
        assert torch.equal(inputs["labels"] != IGNORED, inputs["input_ids"] == mask_id), "labels are not at the masks"
        assert int((inputs["labels"] != IGNORED).sum()) == int(batch.target_lengths.sum()), "targets are missing"
