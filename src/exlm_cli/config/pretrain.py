"""Pre-training recipe: its sections, and the checks across them. No torch here."""

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from exlm_cli.config.base import Mark, Recipe, UnfitValueError
from exlm_cli.config.sections import (
    DataConfig,
    MaskingConfig,
    ModelConfig,
    ObjectiveName,
    OptimConfig,
    TokenizerConfig,
    TrainConfig,
)


class PretrainRecipe(Recipe):
    """Everything a pre-training run depends on; `tokenize` uses its `data` and `tokenizer` sections."""

    command: ClassVar[str] = "pretrain"
    groups: ClassVar[tuple[str, ...]] = ("quickstart", "small", "paper", "ablations")
    example: ClassVar[str] = "quickstart-text"

    objective: ObjectiveName = Field("exlm", description="Expanded states with alignment, or plain MLM")
    seed: int = Field(1, ge=0, lt=2**63, description="Seed of initial weights, data order, masks and dropout")
    device: Annotated[Literal["auto", "cpu", "cuda"], Mark.RECORD] = Field("auto", description="Where the model runs")
    data: DataConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    masking: MaskingConfig = MaskingConfig()
    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        self._check_model()
        self._check_masking()
        self._check_lengths()
        self._check_budget()
        return self

    def _check_model(self) -> None:
        model = self.model
        if model.width % model.num_heads:
            raise ValueError(
                f"`model.width` {model.width} is not divisible by `model.num_heads` {model.num_heads}; "
                "choose a multiple"
            )
        if model.width % model.transition.heads:
            raise ValueError(
                f"`model.width` {model.width} is not divisible by `model.transition.heads` {model.transition.heads}"
            )
        self._check_rope()
        self._check_expansion()
        if model.clone_embedding != "none" and self.objective == "mlm":
            raise ValueError("`model.clone_embedding` must be none for `objective: mlm`: there are no clones")

    def _check_rope(self) -> None:
        model = self.model
        if model.rope == "none" and not model.learned_positions:
            raise ValueError(
                "`model.rope: none` leaves the encoder without positions; set `model.learned_positions: true`"
            )
        heads = {"model.num_heads": model.num_heads} if model.rope != "none" else {}
        if self.objective == "exlm" and model.alignment != "independent" and model.transition.rope != "none":
            heads["model.transition.heads"] = model.transition.heads
        for key, num_heads in heads.items():
            try:
                model.rotary_widths(model.width // num_heads)
            except ValueError as error:
                raise ValueError(
                    f"head width `model.width` / `{key}` is {model.width // num_heads}: {error}"
                ) from error

    def _check_expansion(self) -> None:
        model = self.model
        if not self.num_early_blocks:
            return
        given = f"`model.expand_after` is {model.expand_after}"
        if model.num_early_blocks > model.num_layers:
            raise ValueError(f"{given}, more than `model.num_layers` {model.num_layers}")
        if model.mask_attention != "first":
            raise ValueError(f"{given}, which needs `model.mask_attention: first`")
        if model.num_early_blocks == model.num_layers and model.clone_embedding != "nodes":
            raise ValueError(
                f"{given}, and `model.num_layers` {model.num_layers}: after all blocks, only `model.clone_embedding: "
                "nodes` tells the states of a mask apart"
            )
        if model.rope == "none" and model.num_early_blocks < model.num_layers:
            raise ValueError(
                f"{given}, but `model.rope: none` leaves nothing that tells the states of a mask apart after it"
            )

    def _check_masking(self) -> None:
        masking = self.masking
        if masking.keep_ratio + masking.random_ratio >= 1:
            raise ValueError("`masking.keep_ratio` + `masking.random_ratio` must stay below 1")
        if self.objective == "exlm":
            if masking.keep_ratio or masking.random_ratio:
                raise ValueError(
                    "`masking.keep_ratio` and `masking.random_ratio` must be 0 for `objective: exlm`: "
                    "only a [MASK] expands"
                )
            if masking.num_repeats > 1:
                raise ValueError("`masking.num_repeats` is Repeated MLM's; it needs `objective: mlm`")
        elif masking.num_states_per_mask > 1:
            raise ValueError("`masking.num_states_per_mask` must be 1 for `objective: mlm`: nothing expands")

    def _check_lengths(self) -> None:
        masking, model = self.masking, self.model
        longest = self.longest_expanded_length
        if longest > model.max_length:
            raise ValueError(
                f"`model.max_length` is {model.max_length}, but `data.sequence_length` {self.data.sequence_length} "
                f"with `masking.num_repeats` {masking.num_repeats}, `mask_ratio` {masking.mask_ratio:g} and "
                f"`num_states_per_mask` {masking.num_states_per_mask} expands to {longest} positions"
            )
        num_nodes = masking.num_states_per_mask * self.max_masks + 2
        if model.transition.position_features and num_nodes > model.transition.max_nodes:
            raise ValueError(
                f"`model.transition.max_nodes` is {model.transition.max_nodes}, but a sequence can have {num_nodes} "
                "nodes"
            )

    def _check_budget(self) -> None:
        train = self.train
        if (train.batch_sequences is None) == (train.batch_tokens is None):
            raise ValueError("give exactly one of `train.batch_sequences` and `train.batch_tokens`")
        if train.max_steps is None and train.max_epochs is None:
            raise ValueError("give `train.max_steps`, `train.max_epochs`, or both")
        if train.max_steps is not None and self.optim.warmup_steps > train.max_steps:
            raise UnfitValueError(
                f"`optim.warmup_steps` {self.optim.warmup_steps} is more than `train.max_steps` {train.max_steps}",
                "warm up for a share of the steps with `optim.warmup_steps=0` and `optim.warmup_ratio=0.06`",
            )
        if train.batch_tokens is not None and train.batch_tokens < self.repeated_length:
            raise ValueError(
                f"`train.batch_tokens` {train.batch_tokens} does not hold one sequence of {self.repeated_length}"
            )
        if train.microbatch_tokens < self.longest_expanded_length:
            raise ValueError(
                f"`train.microbatch_tokens` {train.microbatch_tokens} is too small for one expanded sequence of "
                f"{self.longest_expanded_length}"
            )

    @property
    def num_early_blocks(self) -> int:
        """Blocks before masks expand; 0 at k = 1, where `model.expand_after` has no effect."""
        return self.model.num_early_blocks if self.masking.num_states_per_mask > 1 else 0

    @property
    def max_masks(self) -> int:
        """The most masks a full sequence can have: all n tokens for `bernoulli`, floor(p*n) + 1 for `fixed`."""
        real_tokens = (self.data.sequence_length - 2) * self.masking.num_repeats
        if self.masking.scheme == "bernoulli":
            return real_tokens
        return min(real_tokens, max(1, math.floor(self.masking.mask_ratio * real_tokens) + 1))

    @property
    def mean_masks(self) -> float:
        """The mean number of masks of a full sequence of n tokens: p*n, more where a sequence needs its one mask."""
        real_tokens, p = (self.data.sequence_length - 2) * self.masking.num_repeats, self.masking.mask_ratio
        if self.masking.scheme == "bernoulli":
            return p * real_tokens + (1 - p) ** real_tokens
        return max(1.0, p * real_tokens)

    @property
    def repeated_length(self) -> int:
        """Input tokens of a full sequence after repetition, [CLS] and [SEP] included."""
        return (self.data.sequence_length - 2) * self.masking.num_repeats + 2

    @property
    def longest_expanded_length(self) -> int:
        """Positions of the longest sequence after repetition and expansion: L + (k - 1) T."""
        return self.repeated_length + (self.masking.num_states_per_mask - 1) * self.max_masks
