"""Encoders behind one interface: our own, or that of a masked LM of transformers, of which each family is one row.

`build_encoder` gives either. `forward(token_ids, is_token, positions=..., query_positions=...)` returns states, the
weight of `token_embedding` is also the decoder of the LM head, and `gradient_checkpointing` saves memory in training.
This module alone imports transformers, and only for such a model; code that comes with a model is never run.

Axes: B sequences, L positions, R positions that are read, D width, N tokens.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from exlm_cli.config.sections import BackboneConfig, ModelConfig
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.model.compiled import Compiler
from exlm_cli.model.encoder import Encoder, gather_positions

Special = tuple[str, str, str, str, str]

_OTHER_MODELS = frozenset(
    {"is_decoder", "add_cross_attention", "use_cache", "is_folding_model", "esmfold_config", "vocab_list"}
)
"""Keys of the families' configs that would make another model than an encoder."""

_BERT_DROPOUTS = {"hidden_dropout_prob": "dropout", "attention_probs_dropout_prob": "attention_dropout"}


@dataclass(frozen=True)
class Family:
    """A family of masked LMs: an encoder, and on it a dense layer, an activation, a LayerNorm and the tied decoder.

    Attributes:
        classes: Beginning of the names of its classes: `Bert` of `BertConfig`, `BertModel` and `BertForMaskedLM`.
        encoder: Name of the encoder in the masked LM.
        blocks: Name of the list of blocks in the encoder.
        dense, norm, bias: Names of the LM head's parts in the masked LM.
        activation, norm_eps: Keys of the config for them; without one GELU and 1e-12.
        ffn_width: Key of the config for the width of the feed-forward layer.
        dropouts: Key of the config -> key of `model`.
        special_tokens: Those of its published tokenizers: padding, start, end, mask, unknown.
        skips_positions: Whether positions are counted from the id of the padding plus one.
        has_pooler: Whether the encoder has a pooler unless told otherwise.
    """

    classes: str
    encoder: str
    blocks: str
    dense: str
    norm: str
    bias: str
    activation: str | None = "hidden_act"
    norm_eps: str | None = "layer_norm_eps"
    ffn_width: str = "intermediate_size"
    dropouts: Mapping[str, str] = field(default_factory=lambda: _BERT_DROPOUTS)
    special_tokens: Special = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
    skips_positions: bool = False
    has_pooler: bool = True


FAMILIES: dict[str, Family] = {
    "bert": Family(
        "Bert",
        "bert",
        "encoder.layer",
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
    ),
    "roberta": Family(
        "Roberta",
        "roberta",
        "encoder.layer",
        "lm_head.dense",
        "lm_head.layer_norm",
        "lm_head.bias",
        activation=None,
        special_tokens=("<pad>", "<s>", "</s>", "<mask>", "<unk>"),
        skips_positions=True,
    ),
    "distilbert": Family(
        "DistilBert",
        "distilbert",
        "transformer.layer",
        "vocab_transform",
        "vocab_layer_norm",
        "vocab_projector.bias",
        activation="activation",
        norm_eps=None,
        ffn_width="hidden_dim",
        dropouts={"dropout": "dropout", "attention_dropout": "attention_dropout"},
        has_pooler=False,
    ),
    "esm": Family(
        "Esm",
        "esm",
        "encoder.layer",
        "lm_head.dense",
        "lm_head.layer_norm",
        "lm_head.bias",
        activation=None,
        special_tokens=("<pad>", "<cls>", "<eos>", "<mask>", "<unk>"),
        skips_positions=True,
    ),
    "modernbert": Family(
        "ModernBert",
        "model",
        "layers",
        "head.dense",
        "head.norm",
        "decoder.bias",
        activation="classifier_activation",
        norm_eps="norm_eps",
        dropouts={
            "embedding_dropout": "dropout",
            "attention_dropout": "attention_dropout",
            "mlp_dropout": "activation_dropout",
        },
        has_pooler=False,
    ),
}
"""`model.backbone.family`, which is also `model_type` of the config of transformers -> where its parts are."""


def require_transformers() -> Any:
    """Return the package.

    Raises:
        ConfigError: It is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "transformers is not installed; the encoder of this model is one of its classes",
            'run `pip install ".[hf]"` in your copy of the repository',
        )
    package = importlib.import_module("transformers")
    package.logging.set_verbosity_error()
    return package


@contextmanager
def _refusing_config(family: str) -> Iterator[None]:
    """Turn what transformers raises for a config that is no encoder's into one line."""
    from huggingface_hub.errors import StrictDataclassError  # newer configs check their types themselves

    usual = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
    try:
        yield
    except (*usual, StrictDataclassError) as error:
        reason = " ".join(str(error).split()) or repr(error)
        raise CheckpointError(
            f"the config of the {family} encoder is not accepted: {reason}", "take the config.json of its publisher"
        ) from error


def plain_config(family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a `config.json` that decide an encoder of the family; no class, code or path is among them.

    Raises:
        CheckpointError: A value is not accepted.
        ConfigError: transformers is not installed.
    """
    package = require_transformers()
    with _refusing_config(family):
        common = package.PretrainedConfig().to_dict().keys() - {"pad_token_id"}  # common in transformers 4
        own = getattr(package, f"{FAMILIES[family].classes}Config")
        kept = own().to_dict().keys() - common - _OTHER_MODELS
        # others are given too, because some are older names of these
        taken = own(**{key: value for key, value in values.items() if key not in common | _OTHER_MODELS}).to_dict()
        return {key: taken[key] for key in sorted(kept)}


def _config_object(backbone: BackboneConfig, dropouts: Mapping[str, float] | None = None) -> Any:
    family = FAMILIES[backbone.family]
    values = {**plain_config(backbone.family, backbone.hf_config), **(dropouts or {})}
    with _refusing_config(backbone.family):
        config = getattr(require_transformers(), f"{family.classes}Config")(**values)
        config._attn_implementation = "sdpa"  # not flash attention where it is installed: it has no padding mask
        if hasattr(config, "reference_compile"):  # of ModernBERT in transformers 4: `train.compile` decides
            config.reference_compile = False
    return config


def model_values(backbone: BackboneConfig) -> dict[str, Any]:
    """Return the keys of `model` that a backbone decides.

    Raises:
        CheckpointError: The config is not one of an encoder.
        ConfigError: transformers is not installed.
    """
    family, config = FAMILIES[backbone.family], _config_object(backbone)
    with _refusing_config(backbone.family):
        is_rotary = backbone.family == "modernbert" or getattr(config, "position_embedding_type", "") == "rotary"
        skipped = config.pad_token_id + 1 if family.skips_positions else 0
        return {
            "num_layers": int(config.num_hidden_layers),
            "num_heads": int(config.num_attention_heads),
            "width": int(config.hidden_size),
            "ffn_width": int(getattr(config, family.ffn_width)),
            "max_length": config.max_position_embeddings - skipped,
            "rope": "1d" if is_rotary else "none",
            "learned_positions": not is_rotary,
            **{key: float(getattr(config, name)) for name, key in family.dropouts.items()},
        }


class ForeignEncoder(nn.Module):
    """Encoder of a family of transformers: `base` is transformers' base model.

    Args:
        config: Section `model` of the recipe; its dropout rates replace those of the config of transformers.
        vocab_size: V of the tokenizer, at most that of the encoder.
        reads_pairs: Give the second text of a pair its segment, where the encoder has segments.

    Raises:
        CheckpointError: The config is not one of an encoder.
        ConfigError: transformers is not installed, or the encoder has no dropout of a kind that `model` asks for.
    """

    base: Any
    inv_freq: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int, *, reads_pairs: bool = False) -> None:
        super().__init__()
        backbone = config.backbone
        family = FAMILIES[backbone.family]
        if config.activation_dropout and "activation_dropout" not in family.dropouts.values():
            raise ConfigError(
                f"`model.activation_dropout` is {config.activation_dropout:g}, and the encoder of a {backbone.family} "
                "has no dropout there",
                "give `--set model.activation_dropout=0`",
            )
        hf_config = _config_object(backbone, {name: getattr(config, key) for name, key in family.dropouts.items()})
        if vocab_size > hf_config.vocab_size:
            raise CheckpointError(
                f"the tokenizer has ids up to {vocab_size - 1}, and the encoder embeds {hf_config.vocab_size} tokens",
                "take the tokenizer of the same model",
            )
        with _refusing_config(backbone.family):
            make = getattr(require_transformers(), f"{family.classes}Model")
            self.base = make(hf_config, add_pooling_layer=False) if family.has_pooler else make(hf_config)
        for part in self.base.modules():
            # all but the frequencies below follow from the config, and their names differ between versions
            part._non_persistent_buffers_set.update(part._buffers)
        self._keeps_frequencies = backbone.family == "esm" and bool(self._rotary())
        if self._keeps_frequencies:
            self.register_buffer("inv_freq", self._rotary()[0].inv_freq.clone())
            self._share_frequencies()
            self.base.contact_head.requires_grad_(False)  # it reads attention weights, for contacts in proteins
        self._blocks = family.blocks
        self.segment_separator = backbone.segment_separator if reads_pairs else None
        self._gradient_checkpointing = False

    @property
    def token_embedding(self) -> nn.Embedding:
        """Its weight is also the decoder of the LM head."""
        return cast(nn.Embedding, self.base.get_input_embeddings())

    @property
    def gradient_checkpointing(self) -> bool:
        """Keep only each block's input in training, and compute the block again in the backward pass."""
        return self._gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, wanted: bool) -> None:
        if wanted != self._gradient_checkpointing:
            word = "activation" if hasattr(self.base, "activation_checkpointing_enable") else "gradient"
            if wanted:
                getattr(self.base, f"{word}_checkpointing_enable")({"use_reentrant": False})
            else:
                getattr(self.base, f"{word}_checkpointing_disable")()
        self._gradient_checkpointing = wanted

    def compile_blocks(self) -> None:
        """Let the compiler run the blocks: with padding, without, and of one sequence they are three graphs.

        Those of ModernBERT, of which some attend to neighbours alone, are eight; as many without gradients.
        """
        compiler = Compiler()
        for block in cast(nn.ModuleList, self.base.get_submodule(self._blocks)):
            block.forward = compiler.compiled(block.forward)

    def forward(
        self,
        token_ids: Int64[Tensor, "B L"],
        is_token: Bool[Tensor, "B L"] | None = None,
        *,
        positions: Int64[Tensor, "B L 2"] | None = None,
        query_positions: Int64[Tensor, "B R"] | None = None,
    ) -> Float[Tensor, "B R D"]:
        """Return the contextual states at `query_positions`, by default at all; arguments as of `Encoder`."""
        assert positions is None, "a recipe whose masks expand in the input has an encoder of our own"
        given: dict[str, Any] = {"input_ids": token_ids}
        if is_token is not None:
            given["attention_mask"] = is_token.long()
        if self.segment_separator is not None:
            ends = (token_ids == self.segment_separator).long()
            given["token_type_ids"] = (ends.cumsum(1) - ends).clamp(max=1)
        states_BLD: Tensor = self.base(**given).last_hidden_state
        return states_BLD if query_positions is None else gather_positions(states_BLD, query_positions)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._share_frequencies()
        return self

    def _rotary(self) -> list[Any]:
        return [part for part in self.base.modules() if "inv_freq" in part._buffers]

    def _share_frequencies(self) -> None:
        """Let the rotary frequencies of an ESM be those that were saved, some in 16 bits: recomputed, they differ."""
        if self._keeps_frequencies:
            for part in self._rotary():
                part.inv_freq = self.inv_freq


class ForeignLMHead(nn.Module):
    """LM head of a family: dense, activation, LayerNorm; its decoder is tied to the token embedding.

    Args:
        backbone: Section `model.backbone` of the recipe.
        embedding: Token embedding of the encoder.
    """

    def __init__(self, backbone: BackboneConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        family, config = FAMILIES[backbone.family], _config_object(backbone)
        width = embedding.embedding_dim
        eps = 1e-12 if family.norm_eps is None else getattr(config, family.norm_eps)
        # ModernBERT alone may leave out biases
        has_bias = {key: bool(getattr(config, key, True)) for key in ("classifier_bias", "norm_bias", "decoder_bias")}
        self.dense = nn.Linear(width, width, bias=has_bias["classifier_bias"])
        self.norm = nn.LayerNorm(width, eps=eps, bias=has_bias["norm_bias"])
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings), requires_grad=has_bias["decoder_bias"])
        activation = "gelu" if family.activation is None else getattr(config, family.activation)
        with _refusing_config(backbone.family):
            self.activation = importlib.import_module("transformers.activations").ACT2FN[activation]

    def forward(self, states: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """Return the features that the tied decoder multiplies."""
        return cast(Tensor, self.norm(self.activation(self.dense(states))))


def build_encoder(config: ModelConfig, vocab_size: int, *, reads_pairs: bool = False) -> Encoder | ForeignEncoder:
    """Return the encoder of a recipe; `reads_pairs` where its inputs are those of a task.

    Raises:
        CheckpointError, ConfigError: As `ForeignEncoder`.
    """
    if config.backbone.family == "own":
        return Encoder(config, vocab_size)
    return ForeignEncoder(config, vocab_size, reads_pairs=reads_pairs)


_INV_FREQ = "encoder.inv_freq"


def names_in_masked_lm(names: Iterable[str], family: str) -> dict[str, str]:
    """Return what transformers' masked LM calls the parameters of an `ExlmModel`'s encoder and LM head."""
    row = FAMILIES[family]
    parts = {
        "encoder.base.": f"{row.encoder}.",
        "lm_head.dense.": f"{row.dense}.",
        "lm_head.norm.": f"{row.norm}.",
        "lm_head.bias": row.bias,
    }
    return {
        name: theirs + name.removeprefix(own) for name in names for own, theirs in parts.items() if name.startswith(own)
    }


def has_lm_head(names: Iterable[str], family: str) -> bool:
    """Return whether tensors of these names in a file are those of a masked LM, not of an encoder alone."""
    row = FAMILIES[family]
    return any(name.startswith((f"{row.dense}.", f"{row.norm}.")) for name in names)


def from_transformers(tensors: Mapping[str, Tensor], model: nn.Module, family: str) -> dict[str, Tensor]:
    """Return the tensors of `encoder` and `lm_head` of an `ExlmModel`, from those of a masked LM or of an encoder.

    Those that the model lacks are left out, such as a pooler. An encoder gives no `lm_head`; saved on its own, as
    sentence encoders are, it has names without the prefix that it has in a masked LM.

    Args:
        tensors: By their names in the file.
        model: The model that takes them.
        family: Its family.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    # names of TensorFlow's BERT, which the oldest files have
    known = {name.replace(".gamma", ".weight").replace(".beta", ".bias"): tensor for name, tensor in tensors.items()}
    state, row = model.state_dict(), FAMILIES[family]
    has_head = has_lm_head(known, family)
    is_alone = not any(name.startswith(f"{row.encoder}.") for name in known)
    found = {}
    for name, theirs in names_in_masked_lm(state, family).items():
        if not has_head and name.startswith("lm_head."):
            continue
        if is_alone:
            theirs = theirs.removeprefix(f"{row.encoder}.")
        tensor, saved = state[name], known.get(theirs)
        if saved is None and (name == "lm_head.bias" or ".contact_head." in name):
            saved = known.get(theirs.replace("predictions.bias", "predictions.decoder.bias"), tensor)
        if saved is None or saved.shape != tensor.shape:
            shape = "is missing" if saved is None else f"has the shape {tuple(saved.shape)}"
            raise CheckpointError(
                f"`{theirs}` {shape}; by its config.json it is {tuple(tensor.shape)}",
                "take weights and config.json from the same model",
            )
        found[name] = saved
    if (own := state.get(_INV_FREQ)) is not None:
        frequencies = (one for name, one in known.items() if name.endswith(".inv_freq") and one.shape == own.shape)
        found[_INV_FREQ] = next(frequencies, own)
    return found


def to_masked_lm(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of `encoder` and `lm_head` in a state dict by their names in transformers' masked LM.

    Args:
        state: Of an `ExlmModel`, or of a model with such an encoder; names outside of both parts are left out.
        config: Section `model` of the recipe.
    """
    backbone = config.backbone
    found = {theirs: state[name] for name, theirs in names_in_masked_lm(state, backbone.family).items()}
    if not backbone.hf_config.get("decoder_bias", True):
        found.pop(FAMILIES[backbone.family].bias, None)
    if _INV_FREQ in state:  # transformers 4 reads them from every layer, 5 from the first
        for layer in range(config.num_layers):
            found[f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"] = state[_INV_FREQ].clone()
    return found
