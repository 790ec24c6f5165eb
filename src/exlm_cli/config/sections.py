"""Sections of a recipe, each field with its bounds and meaning. No torch here."""

import json
import math
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Strict, Tag, field_validator, model_validator

from exlm_cli.config.base import Mark, StrictModel, UnfitValueError

ObjectiveName = Literal["exlm", "mlm"]
Alignment = Literal["dag", "sparse_dag", "independent", "chain"]
Share = Annotated[float, Field(ge=0, lt=1)]
MaskRatio = Annotated[float, Field(gt=0, lt=1)]
OneOrRange = Annotated[
    Annotated[MaskRatio, Tag("one")] | Annotated[tuple[Share, Share], Strict(False), Tag("range")],
    Discriminator(lambda value: "range" if isinstance(value, list | tuple) else "one"),
]
"""A mask ratio, or the lowest and the highest of a range; a list of JSON is one too, also where types are strict."""
NumberOrRatio = Annotated[int, Field(ge=1, le=65536)] | MaskRatio
"""A number of masks, or a mask ratio below 1."""

PAIRS_PER_POSITION = 512
"""Pairs of nodes of a DAG that count as one position of the encoder in a microbatch with masks from a range.

Their scores and gradients in float32 take 4 KiB, less than the blocks of the smallest recipes keep of a position.
Recipes with one ratio have at most 330 pairs a position (`exlm-k8-p38.7` of the sweep `ablations`); a range meets the
bound where sequences with many masks come together.
"""
TransitionStart = Literal["formula", "next_mask"]
AlignmentBackend = Literal["auto", "reference", "native"]
TrackerName = Literal["tensorboard", "wandb"]
Family = Literal["own", "bert", "roberta", "distilbert", "esm", "modernbert"]

HEAD_CHUNK_ROWS = 2048
"""Rows of (rows, vocabulary) logits that the LM head holds at once."""
CHAIN_EDGE_WIDTH = 128
"""Numbers of which the score of an edge of `alignment: chain` is a product."""
CHAIN_MAX_GAP = 16
"""Masks of a chain that are this many tokens apart or more are alike."""

_LARGEST_NUMBER = 1 << 20
"""Above every size in the config of an encoder."""


class DataConfig(StrictModel):
    """Where sequences come from and how they are cut."""

    kind: Literal["text", "smiles"] = Field(description="What a row is: running text or one SMILES")
    train: Annotated[tuple[str, ...], Mark.INPUT] = Field(
        default=(),
        description="Files, folders, globs, `hub:OWNER/NAME[/CONFIG][@SPLIT]`, `bundled:grammar|feelings|molecules`",
    )
    valid: Annotated[tuple[str, ...], Mark.INPUT] = Field((), description="Validation inputs; empty: cut from `train`")
    valid_fraction: float = Field(0.01, gt=0, lt=0.5, description="Share of rows held out where `valid` is empty")
    column: str | None = Field(None, description="Column to read from CSV, JSONL, Parquet or Hub rows")
    sequence_length: int = Field(512, ge=4, le=65536, description="Tokens of a sequence, [CLS] and [SEP] included")
    sample_break: Literal["none", "line"] = Field(
        "none",
        description="For text: `none` packs rows into full sequences (RoBERTa), `line` makes each row a sequence",
    )
    canonical_smiles: bool = Field(
        True,
        description="For SMILES: read RDKit's canonical SMILES without atom-map numbers, not the SMILES as written",
    )
    num_spellings: int = Field(
        1,
        ge=1,
        le=100,
        description="For SMILES: how often a training molecule is read in an epoch, first its canonical SMILES, then "
        "other orders of its atoms. Above 1: to fill an unfinished SMILES however it is spelled",
    )
    on_invalid: Literal["error", "skip"] = Field(
        "error", description="Rows that cannot be used: stop, or skip and list"
    )
    max_rows: int | None = Field(
        None, ge=1, description="Rows to read from each input list, the first of each of its files; none: all"
    )
    bundled_rows: int = Field(20000, ge=10, le=10_000_000, description="Rows that a `bundled:` input generates")
    cache_dir: Annotated[str | None, Mark.INPUT, Mark.RECORD] = Field(
        None, description="Where token shards are kept; none: the user's cache directory"
    )

    @model_validator(mode="after")
    def _check_spellings(self) -> Self:
        if self.num_spellings > 1 and not self.has_canonical_smiles:
            other = "`data.kind: text`" if self.kind == "text" else "`data.canonical_smiles: false`"
            raise UnfitValueError(
                f"`data.num_spellings` is {self.num_spellings}, which cannot be combined with {other}: spellings are "
                "other orders of the atoms in a canonical SMILES",
                "give `--set data.num_spellings=1`",
            )
        return self

    @property
    def has_canonical_smiles(self) -> bool:
        """Whether the model reads RDKit's canonical SMILES; a text is never rewritten."""
        return self.canonical_smiles and self.kind == "smiles"


class TokenizerConfig(StrictModel):
    """Which tokenizer, trained or taken."""

    path: Annotated[str | None, Mark.INPUT] = Field(
        None, description="An existing tokenizer.json; none: train one on `data.train`"
    )
    vocab_size: int = Field(
        50265,
        ge=16,
        le=1_000_000,
        description="Tokens, the five special ones included; SMILES: at least the 204 that spell any molecule",
    )
    min_frequency: int = Field(2, ge=1, description="How often a pair or token must occur to enter the vocabulary")
    train_rows: int | None = Field(None, ge=1, description="Rows to train the tokenizer on; none: all")
    special_tokens: tuple[str, str, str, str, str] = Field(
        ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"),
        description="Tokens of the file that mean padding, start, end, mask and unknown",
    )


class MaskingConfig(StrictModel):
    """Which tokens are masked, how often each is repeated, and how many states a [MASK] becomes."""

    mask_ratio: OneOrRange = Field(
        0.15,
        description="Share of real tokens masked, per sequence; a range [low, high] draws a number of masks m between "
        "max(1, low*n) and high*n with probability proportional to 1/m",
    )
    scheme: Literal["fixed", "bernoulli"] = Field(
        "fixed", description="`fixed`: floor(p*n + u) masks; `bernoulli`: every token on its own (Repeated MLM)"
    )
    place: Literal["scattered", "spans", "mixed"] = Field(
        "scattered",
        description="scattered: any tokens; spans: runs of neighbours, whole words of text first; mixed: half of the "
        "sequences each",
    )
    span_mean: float = Field(3.0, ge=1, le=64, description="Mean tokens of a span, 1 + Poisson(`span_mean` - 1)")
    num_states_per_mask: int = Field(1, ge=1, le=64, description="States that replace each [MASK] (k); MLM has 1")
    num_repeats: int = Field(1, ge=1, le=64, description="Copies of every token in Repeated MLM (k of section 3.1)")
    keep_ratio: float = Field(0.0, ge=0, lt=1, description="Share of chosen tokens left as they are (MLM only)")
    random_ratio: float = Field(0.0, ge=0, lt=1, description="Share of chosen tokens made random tokens (MLM only)")

    @field_validator("mask_ratio")
    @classmethod
    def _check_range(cls, ratio: float | tuple[float, float]) -> float | tuple[float, float]:
        if isinstance(ratio, tuple) and ratio[0] >= ratio[1]:
            raise ValueError("a range should be [low, high], low below high")
        return ratio

    @model_validator(mode="after")
    def _check_law(self) -> Self:
        if self.scheme == "bernoulli" and isinstance(self.mask_ratio, tuple):
            raise ValueError(
                "`masking.mask_ratio` is a range, which needs `masking.scheme: fixed`; `bernoulli` has one probability"
            )
        if self.scheme == "bernoulli" and self.place != "scattered":
            raise ValueError(
                f"`masking.place: {self.place}` needs `masking.scheme: fixed`; `bernoulli` masks every token on its own"
            )
        if self.num_repeats > 1 and self.place != "scattered":
            raise ValueError(
                f"`masking.place: {self.place}` needs `masking.num_repeats: 1`; copies of a token are masked one by one"
            )
        return self

    def mask_bounds(self, num_maskable: int) -> tuple[int, int]:
        """Return the fewest and the most masks that a range gives a sequence of at least one maskable token.

        All whole numbers from max(1, low*n) to high*n; where there is none between them, the next one above.
        """
        assert isinstance(self.mask_ratio, tuple), "one ratio has no bounds"
        # 0.29 * 100 is 29, which floats miss by 4e-15
        low, high = (round(share * num_maskable, 9) for share in self.mask_ratio)
        fewest = max(1, math.ceil(low))
        return fewest, max(fewest, math.floor(high))


class TransitionConfig(StrictModel):
    """The head that turns node states into the DAG's edges (section 4.2)."""

    heads: int = Field(1, ge=1, le=64, description="1: softmax(QK'/sqrt(D)); more: a gated mixture of softmaxes")
    position_features: bool = Field(False, description="Concatenate learned node positions before Q and K")
    max_nodes: int = Field(2048, ge=3, le=65536, description="Number of learned node positions (`position_features`)")
    rope: Literal["none", "nodes"] = Field(
        "none",
        description="Rotary positions on Q and K. nodes: the number of the mask, its k states evenly around it; "
        "none: the paper's formula, whose scores do not depend on positions",
    )
    start: TransitionStart = Field(
        "formula",
        description="Initial edges. formula: all equal; next_mask: mostly to the next mask",
    )
    start_strength: float = Field(
        4.0,
        ge=0,
        le=20,
        description="Log-odds of the next mask against all other later nodes",
    )
    balance: float = Field(
        0.0,
        ge=0,
        le=10,
        description="Weight of a penalty on uneven expected visits of a mask's k states, in nats a target, so that "
        "none dies; it falls to 0 in the first 70 % of the steps. 0: the paper's loss",
    )


class ChainConfig(StrictModel):
    """The DAG of `model.alignment: chain`."""

    num_classes: int = Field(32, ge=2, le=1024, description="Classes of tokens; each mask sorts them into its k states")
    starts_at: float = Field(
        0.25,
        ge=0,
        lt=1,
        description="Share of the steps in which the model learns as an MLM, before it has classes and edges",
    )


class BackboneConfig(StrictModel):
    """Whose encoder it is; `exlm pretrain --checkpoint hf:NAME` sets this section."""

    family: Family = Field("own", description="own: the one that `model` describes; else a family of transformers")
    config: str = Field("", max_length=100_000, description="The config of transformers, as JSON")
    segment_separator: int | None = Field(
        None,
        ge=0,
        description="Token that ends the first text of a pair; the encoder embeds what follows as the second",
    )

    @field_validator("config")
    @classmethod
    def _check_config(cls, config: str) -> str:
        if config:
            try:
                values = json.loads(config)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"it should be JSON: {error}") from error
            if not isinstance(values, dict):
                raise ValueError("it should be a JSON object")
            _refuse_huge(values)
        return config

    @model_validator(mode="after")
    def _check_family(self) -> Self:
        if (self.family == "own") != (not self.config):
            raise ValueError("`config` belongs to a `family` other than `own`")
        return self

    @property
    def hf_config(self) -> dict[str, Any]:
        """The config of transformers; empty for an encoder of our own."""
        values: dict[str, Any] = json.loads(self.config) if self.config else {}
        return values


def one_ratio(mask_ratio: float | tuple[float, float]) -> float:
    """Return a mask ratio that is known to be one number, as every one of `bernoulli` is."""
    assert not isinstance(mask_ratio, tuple), "a range is not one ratio"
    return mask_ratio


def _refuse_huge(value: Any) -> None:
    """Refuse a number in JSON that no size or id of an encoder has: a model of it would fill the memory."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _refuse_huge(one)
    elif isinstance(value, int | float) and not abs(value) <= _LARGEST_NUMBER:
        raise ValueError(f"it holds {value}; numbers are at most {_LARGEST_NUMBER}")


class ModelConfig(StrictModel):
    """The encoder and its two heads."""

    backbone: BackboneConfig = BackboneConfig()
    num_layers: int = Field(ge=1, le=200, description="Transformer blocks")
    num_heads: int = Field(ge=1, le=256, description="Attention heads of a block")
    width: int = Field(ge=8, le=16384, description="Model width D")
    ffn_width: int = Field(ge=8, le=65536, description="Width of the feed-forward layer")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout on embeddings and on each block's two outputs")
    attention_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout on attention weights")
    activation_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout after the feed-forward activation")
    rope: Literal["2d", "1d", "none"] = Field(
        "2d",
        description="Rotary positions. 2d: of tokens and clones, each in half of a head; 1d: of the encoder's input. "
        "`alignment: chain` has no clones in its input and takes 1d or none",
    )
    rope_base: float = Field(10000.0, gt=1, description="Base of the rotary frequencies")
    learned_positions: bool = Field(False, description="Add learned absolute positions of the encoder's input")
    max_length: int = Field(2048, ge=4, le=262144, description="Longest input the encoder takes")
    alignment: Alignment = Field(
        "dag",
        description="How states are tied to targets (ExLM only). dag, sparse_dag, independent: Tables 2 and 13, the "
        "encoder reads k copies of each [MASK]; chain: ours, the encoder reads what an MLM's reads, states are groups "
        "of classes of tokens, edges lead to the next mask alone, and each mask reads the token of the one before",
    )
    transition: TransitionConfig = TransitionConfig()
    chain: ChainConfig = ChainConfig()
    init_std: float = Field(0.02, gt=0, le=1, description="Standard deviation of the initial weights (BERT)")

    def rotary_widths(self, head_width: int) -> tuple[int, ...]:
        """Return the entries of a head that each position axis of the encoder rotates; they sum to `head_width`.

        Raises:
            ValueError: `head_width` cannot be cut into an even number of entries for each axis.
        """
        num_axes = 2 if self.rope == "2d" else 1
        if head_width % (2 * num_axes):
            raise ValueError(f"`model.rope: {self.rope}` cannot cut {head_width} entries of a head into even parts")
        return (head_width // num_axes,) * num_axes


class OptimConfig(StrictModel):
    """AdamW and its schedule."""

    lr: float = Field(gt=0, le=1, description="Peak learning rate")
    schedule: Literal["polynomial", "cosine", "constant"] = Field(
        "polynomial", description="After warm-up. polynomial: linear to 0, fairseq's default; cosine: to 0"
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Steps of linear warm-up. A recipe or `--set` that gives `optim.warmup_steps` replaces an "
        "inherited `optim.warmup_ratio`, and the reverse",
    )
    warmup_ratio: float | None = Field(
        None, ge=0, lt=1, description="Share of all steps that is linear warm-up, in place of `optim.warmup_steps`"
    )
    betas: tuple[Share, Share] = Field((0.9, 0.98), description="Adam's betas")
    eps: float = Field(1e-6, gt=0, le=1e-2, description="Adam's epsilon")
    weight_decay: float = Field(0.01, ge=0, le=1, description="On matrices and embeddings; not on biases and norms")
    clip_norm: float = Field(0.0, ge=0, description="Largest gradient norm; 0 does not clip")
    encoder_lr_scale: float = Field(
        1.0, gt=0, le=1, description="Factor on the learning rate of the encoder; below 1 keeps what it has learned"
    )
    encoder_starts_at: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the steps in which the heads alone learn, before the encoder does; these steps cost less",
    )

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"`optim.warmup_steps` {self.warmup_steps} and `optim.warmup_ratio` {self.warmup_ratio:g} are both "
                "above 0; give one of them"
            )
        return self

    def check_steps(self, max_steps: int | None) -> None:
        """Check that the warm-up ends within `train.max_steps`.

        Raises:
            UnfitValueError: It is longer.
        """
        if max_steps is not None and self.warmup_steps > max_steps:
            raise UnfitValueError(
                f"`optim.warmup_steps` {self.warmup_steps} is more than `train.max_steps` {max_steps}",
                "warm up for a share of the steps with `--set optim.warmup_ratio=0.06`",
            )

    def resolve_warmup_steps(self, total_steps: int) -> int:
        """Return the steps of warm-up in a run of `total_steps`; a ratio is rounded up."""
        return math.ceil(self.warmup_ratio * total_steps) if self.warmup_ratio else self.warmup_steps


class LoopConfig(StrictModel):
    """What the training loop needs of a `train` section; pre-training and fine-tuning add their own keys."""

    max_steps: int | None = Field(None, ge=1, description="Optimiser steps")
    max_epochs: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Passes over the data; with `max_steps` as well, the first limit ends the run",
    )
    bucket_steps: int = Field(16, ge=1, description="Steps whose sequences are sorted by length together; 1: never")
    validate_every_steps: int | None = Field(None, ge=1, description="Steps between validations; none: each epoch")
    checkpoint_every_steps: Annotated[int | None, Mark.RECORD] = Field(
        None, ge=1, description="Steps between checkpoints; none: each epoch"
    )
    keep_last: Annotated[int, Mark.RECORD] = Field(2, ge=1, le=1000, description="Checkpoints kept")
    log_every_steps: Annotated[int, Mark.RECORD] = Field(10, ge=1, description="Steps between rows of metrics.jsonl")
    report_to: Annotated[tuple[TrackerName, ...], Mark.RECORD] = Field(
        (), description="Trackers that get every row of metrics.jsonl: tensorboard, wandb"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Precision of products. auto: fp32 on a CPU, bf16 on CUDA, fp16 on cards older than sm_80, which "
        "lack bf16; fp16 trains with a loss scale",
    )
    compile: Annotated[bool, Mark.COMPUTING] = Field(False, description="torch.compile the blocks of the encoder")
    gradient_checkpointing: Annotated[bool, Mark.COMPUTING] = Field(
        False, description="Compute each block again in the backward pass: less memory, about a third more time"
    )
    num_threads: Annotated[int | None, Mark.COMPUTING] = Field(
        None, ge=1, le=1024, description="CPU threads; none: torch's choice"
    )
    batch_sequences: int | None = Field(None, ge=1, description="Sequences of a step")

    @property
    def known_steps(self) -> int | None:
        """Steps of the whole run; None where `max_epochs` limits it too, and so the data decide."""
        return self.max_steps if self.max_epochs is None else None


class TrainConfig(LoopConfig):
    """How long to pre-train, how much at once, and what to keep."""

    batch_tokens: int | None = Field(
        None, ge=4, description="Maximum input tokens per step; instead of `batch_sequences`"
    )
    microbatch_tokens: Annotated[int, Mark.COMPUTING] = Field(
        16384,
        ge=4,
        description="Positions of the encoder, padding included, that go through at once; with masks from a range, "
        "512 pairs of nodes of the DAG count as one",
    )
    validate_every_steps: Annotated[int, Mark.RECORD] = Field(1000, ge=1, description="Steps between validations")
    validation_sequences: Annotated[int | None, Mark.RECORD] = Field(
        None, ge=1, description="Validation sequences used; none: all"
    )
    validate_at: Annotated[tuple[NumberOrRatio, ...], Mark.RECORD] = Field(
        (),
        description="Numbers of masks, like 1 and 5, or mask ratios, like 0.387, at which each validation scores 512 "
        "sequences more, with scattered masks; runs of different `masking` are compared by them",
    )
    checkpoint_every_steps: Annotated[int, Mark.RECORD] = Field(1000, ge=1, description="Steps between checkpoints")
    alignment_backend: Annotated[AlignmentBackend, Mark.COMPUTING] = Field(
        "auto", description="Backend of the states-alignment loss"
    )
