"""Conversion of weights, config and tokenizer to the classes of transformers.

An encoder of transformers goes back to its family under the names of `model.backbones`. An encoder of our own is that
of ESM under other names. ESM rotates entry p of a head with entry p + H/2, this package entry 2p with 2p + 1; so the
rows of the query and key projections are reordered. ESM has one position axis. `rope: 2d` rotates the last entries by
the clone index, which is 0 for all that ESM reads, so these entries get frequency 0.

Axes: D width, H head width, V vocabulary, C outputs.
"""

import json
from typing import Any

import tokenizers
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from exlm_cli.config.sections import ModelConfig
from exlm_cli.data.tokenizer import MASK, Tokenizer
from exlm_cli.errors import ConfigError
from exlm_cli.export.source import Source
from exlm_cli.model.backbones import FAMILIES, names_in_masked_lm, to_masked_lm
from exlm_cli.model.heads import SequenceHead, TaskModel
from exlm_cli.ops.rotary import rotate_half_order

_BLOCK = {
    "attention_norm": "attention.LayerNorm",
    "attention_out": "attention.output.dense",
    "ffn_norm": "LayerNorm",
    "ffn_in": "intermediate.dense",
    "ffn_out": "output.dense",
}
_SEQUENCE_HEADS = {
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "esm": ("classifier.dense", "classifier.out_proj"),
}
"""Names of the dense layer, which a tanh follows, and of the output layer in the family's classifier of sequences."""


def refuse_inexpressible(source: Source, *, needs_class: bool) -> None:
    """Refuse a model that the export cannot write.

    Args:
        source: The model.
        needs_class: A class of transformers must have its head.

    Raises:
        ConfigError: Every token is repeated, our own encoder has learned positions, or the family's classes have
            another head, or one that reads another state.
    """
    recipe, family, model = source.recipe, source.family, source.model
    reason = None
    if recipe.masking.num_repeats > 1:
        reason = (
            f"`masking.num_repeats: {recipe.masking.num_repeats}`: the model reads every token several times, which no "
            "tokenizer of transformers writes"
        )
    elif recipe.model.learned_positions and not source.is_foreign:
        reason = (
            "`model.learned_positions: true`: ESM's classes have rotary or learned positions, never both, and the "
            "export writes rotary ones alone; only the recipes of Repeated MLM learn positions"
        )
    elif (
        needs_class
        and isinstance(model, TaskModel)
        and (family == "modernbert" or (isinstance(model.head, SequenceHead) and family not in _SEQUENCE_HEADS))
    ):
        reason = (
            f"a fine-tuned {family} cannot be exported: the head of this run is a tanh between two layers, or a layer, "
            "and the classes of the family have other heads"
        )
    elif isinstance(model, TaskModel) and model.pooled in (("mean", "means") if needs_class else ("means",)):
        reason = (
            "the head of this run reads the mean of a text's states (`task.pooling`), and the classes of transformers "
            "read the state at [CLS]"
        )
    if reason is not None:
        raise ConfigError(reason, "`exlm predict` and `exlm embed` use the run as it is")


def config_of(source: Source) -> dict[str, Any]:
    """Return the content of `config.json`."""
    recipe, tokenizer = source.recipe, source.tokenizer
    backbone = recipe.model.backbone
    config = {
        "model_type": source.family,
        "dtype": "float32",
        "torch_dtype": "float32",  # the name of `dtype` in transformers 4
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.cls_id,
        "eos_token_id": tokenizer.sep_id,
        "architectures": [source.class_name],
        **source.label_config(),
    }
    if not source.is_foreign:
        return config | _esm_config(recipe.model, tokenizer)
    config |= backbone.hf_config
    config |= {name: getattr(recipe.model, key) for name, key in FAMILIES[source.family].dropouts.items()}
    return config


def _esm_config(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "vocab_size": tokenizer.vocab_size,
        "mask_token_id": tokenizer.mask_id,
        "hidden_size": model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.ffn_width,
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "initializer_range": model.init_std,
        "layer_norm_eps": 1e-5,
        "emb_layer_norm_before": False,
        "token_dropout": False,
        "position_embedding_type": "rotary",
        "rope_theta": model.rope_base,
        "max_position_embeddings": model.max_length,
    }


def tokenizer_files(tokenizer: Tokenizer, *, max_length: int, has_mask: bool, has_segments: bool) -> dict[str, str]:
    """Return the content of `tokenizer.json`, which frames texts and pairs, and `tokenizer_config.json` by name.

    Args:
        tokenizer: Tokenizer of the run.
        max_length: Tokens of the longest sequence, [CLS] and [SEP] included.
        has_mask: Whether the exported model predicts [MASK]s; `fill-mask` refuses a tokenizer without a mask token.
        has_segments: Whether the model reads which text of a pair a token is of.
    """
    definition = json.loads(tokenizer.to_json())
    pad, cls, sep, mask, unk = tokenizer.special_tokens
    if tokenizer.kind == "text" and not tokenizer.is_foreign:
        # a masked word of text includes the blank before it, as in `Tokenizer.encode_with_masks`; `lstrip` also takes
        # line ends and further blanks, but a normalizer of the user's own may change a [MASK] that it sees
        is_free = definition["normalizer"] is None
        for token in definition["added_tokens"]:
            if token["content"] == MASK:
                token |= {"lstrip": not is_free, "normalized": is_free}
        if is_free:
            definition["normalizer"] = {"type": "Replace", "pattern": {"String": f" {MASK}"}, "content": MASK}
    backend = tokenizers.Tokenizer.from_str(json.dumps(definition))
    second = ":1" if tokenizer.has_segments else ""
    backend.post_processor = TemplateProcessing(
        single=[cls, "$A", sep],
        pair=[cls, "$A", *[sep] * len(tokenizer.pair_ids), f"$B{second}", f"{sep}{second}"],
        special_tokens=[(cls, tokenizer.cls_id), (sep, tokenizer.sep_id)],
    )
    names = {"pad_token": pad, "cls_token": cls, "sep_token": sep, "unk_token": unk}
    if has_mask:
        names["mask_token"] = mask
    config: dict[str, Any] = {
        # a class that transformers 4 and 5 both have
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", *["token_type_ids"] * has_segments, "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **names,
    }
    written = json.dumps(json.loads(backend.to_str()), ensure_ascii=False, indent=1)
    return {"tokenizer.json": f"{written}\n", "tokenizer_config.json": f"{json.dumps(config, indent=1)}\n"}


def tensors_of(source: Source) -> dict[str, Tensor]:
    """Return the weights under the names of the class of transformers."""
    model, family, state = source.model, source.family, source.model.state_dict()
    if source.is_foreign:
        tensors = to_masked_lm(state, source.recipe.model)
    else:
        tensors = {f"esm.{name}": tensor for name, tensor in _esm_encoder(source.recipe.model, state).items()}
    if isinstance(model, TaskModel):
        return tensors | _task_head(model, *_SEQUENCE_HEADS.get(family, ("", "")))
    if source.fills_masks and not source.is_foreign:
        tensors |= {theirs: state[name] for name, theirs in names_in_masked_lm(state, family).items()}
    return tensors


def _esm_encoder(config: ModelConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    esm = {"embeddings.word_embeddings.weight": state["encoder.token_embedding.weight"]}
    for kind in ("weight", "bias"):
        esm[f"encoder.emb_layer_norm_after.{kind}"] = state[f"encoder.final_norm.{kind}"]
        for layer in range(config.num_layers):
            ours, theirs = f"encoder.blocks.{layer}", f"encoder.layer.{layer}"
            for our_name, their_name in _BLOCK.items():
                esm[f"{theirs}.{their_name}.{kind}"] = state[f"{ours}.{our_name}.{kind}"]
            query, key, value = state[f"{ours}.qkv.{kind}"].chunk(3)
            esm[f"{theirs}.attention.self.query.{kind}"] = _in_esm_order(config, query)
            esm[f"{theirs}.attention.self.key.{kind}"] = _in_esm_order(config, key)
            esm[f"{theirs}.attention.self.value.{kind}"] = value
    # transformers 4 reads them from every layer, and 5 moves those of the first layer to where it has them
    for layer in range(config.num_layers):
        esm[f"encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"] = _frequencies(config)
    # ESM's predictor of contacts in proteins: always part of the model, never trained here
    esm["contact_head.regression.weight"] = torch.zeros(1, config.num_layers * config.num_heads)
    esm["contact_head.regression.bias"] = torch.zeros(1)
    return esm


def _in_esm_order(config: ModelConfig, rows: Tensor) -> Tensor:
    """Return the (D, ...) rows of a projection so that each head has the first entries of its pairs in front."""
    order = rotate_half_order(config.width // config.num_heads)
    heads: Tensor = rows.unflatten(0, (config.num_heads, -1))
    return heads[:, order].flatten(0, 1)


def _frequencies(config: ModelConfig) -> Tensor:
    """Return the (H/2,) frequencies of the token index, and 0 for those of the clone index."""
    token_width, *clone_width = config.rotary_widths(config.width // config.num_heads)
    of_token = config.rope_base ** -(torch.arange(0, token_width, 2, dtype=torch.float32) / token_width)
    return torch.cat([of_token, *(torch.zeros(width // 2) for width in clone_width)])


def _task_head(model: TaskModel, dense: str, out: str) -> dict[str, Tensor]:
    """Return the task head; that of a regression with the scale of its targets in the last layer.

    Args:
        model: The model.
        dense, out: What the class of transformers calls the layers of a head for sequences; the one layer of a head for
            tokens is always `classifier`.
    """
    head = model.head
    if not isinstance(head, SequenceHead):
        return {"classifier.weight": head.out.weight, "classifier.bias": head.out.bias}
    std_C, mean_C = model.output_std, model.output_mean
    return {
        f"{dense}.weight": head.dense.weight,
        f"{dense}.bias": head.dense.bias,
        f"{out}.weight": head.out.weight * std_C[:, None],
        f"{out}.bias": head.out.bias * std_C + mean_C,
    }
