"""Conversion of a model whose encoder is one of transformers back to the classes of its family.

Names of weights are those of `model.backbones`; only heads, the vector of a clone and the config are made here.
"""

from typing import Any

from torch import Tensor

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import ConfigError
from exlm_cli.export.esm import folded_bias, task_head
from exlm_cli.model.backbones import FAMILIES, to_masked_lm
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.model.heads import SequenceHead, TaskModel

_SEQUENCE_HEADS = {
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "esm": ("classifier.dense", "classifier.out_proj"),
}
"""Names of the dense layer, which a tanh follows, and of the output layer in the family's classifier of sequences."""


def refuse_head(family: str, model: ExlmModel | TaskModel) -> None:
    """Refuse a task head that the family's classes do not have.

    Raises:
        ConfigError: The family's classifier computes something else than a tanh between two layers, or a layer.
    """
    is_sequence = isinstance(model, TaskModel) and isinstance(model.head, SequenceHead)
    if (is_sequence and family not in _SEQUENCE_HEADS) or (isinstance(model, TaskModel) and family == "modernbert"):
        raise ConfigError(
            f"a fine-tuned {family} cannot be exported: the head of this run is a tanh between two layers, or a layer, "
            "and the classes of the family have other heads",
            "`exlm predict` uses the run as it is",
        )


def family_config(recipe: PretrainRecipe, tokenizer: Tokenizer, model: ExlmModel | TaskModel) -> dict[str, Any]:
    """Return the entries of `config.json` that every class of the family has."""
    backbone = recipe.model.backbone
    config = {
        "model_type": backbone.family,
        "dtype": "float32",
        "torch_dtype": "float32",  # the name of `dtype` in transformers 4
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.cls_id,
        "eos_token_id": tokenizer.sep_id,
        **backbone.hf_config,
        **{name: getattr(recipe.model, key) for name, key in FAMILIES[backbone.family].dropouts.items()},
    }
    if isinstance(model, ExlmModel) and model.lm_head.dense.bias is None and model.clone_embedding is not None:
        config["classifier_bias"] = True  # ModernBERT's LM head has no bias to which a vector could be added
    return config


def family_tensors(
    recipe: PretrainRecipe, model: ExlmModel | TaskModel, state_vector: Tensor | None
) -> dict[str, Tensor]:
    """Return the weights under the names of the family's class; arguments as of `esm_tensors`."""
    family = recipe.model.backbone.family
    tensors = to_masked_lm(model.state_dict(), recipe.model)
    if isinstance(model, TaskModel):
        return tensors | task_head(model, *_SEQUENCE_HEADS.get(family, ("", "")))
    if state_vector is not None and (model.lm_head.dense.bias is not None or model.clone_embedding is not None):
        tensors[f"{FAMILIES[family].dense}.bias"] = folded_bias(model, state_vector)
    return tensors
