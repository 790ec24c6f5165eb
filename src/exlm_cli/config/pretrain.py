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
from exlm_cli.format import describe_ratio


class PretrainRecipe(Recipe):
    """Everything a pre-training run depends on; `tokenize` uses its `data` and `tokenizer` sections."""

    command: ClassVar[str] = "pretrain"
    groups: ClassVar[tuple[str, ...]] = ("quickstart", "small", "medium", "paper")
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
        if model.backbone.family != "own" and self.expands_input:
            raise UnfitValueError(
                f"the encoder of `model.backbone.family: {model.backbone.family}` reads no expanded masks, as "
                f"`model.alignment: {model.alignment}` needs",
                "give `--set model.alignment=chain`",
            )
        self._check_rope()

    def _check_rope(self) -> None:
        model = self.model
        if model.rope == "none" and not model.learned_positions:
            raise ValueError(
                "`model.rope: none` leaves the encoder without positions; set `model.learned_positions: true`"
            )
        if self.is_chain and model.rope == "2d":
            raise UnfitValueError(
                "`model.alignment: chain` leaves no clones in the encoder for `model.rope: 2d`",
                "give `--set model.rope=1d`",
            )
        if model.rope != "none" and model.backbone.family == "own":
            head_width = model.width // model.num_heads
            try:
                model.rotary_widths(head_width)
            except ValueError as error:
                raise ValueError(f"head width `model.width` / `model.num_heads` is {head_width}: {error}") from error
        head_width = model.width // model.transition.heads
        if self.has_transitions and model.transition.rope == "nodes" and head_width % 2:
            raise ValueError(
                f"head width `model.width` / `model.transition.heads` is {head_width}: `model.transition.rope: nodes` "
                "rotates pairs of entries"
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
        longest, ratio = self.longest_input, describe_ratio(masking.mask_ratio)
        if longest > model.max_length:
            raise ValueError(
                f"`model.max_length` is {model.max_length}, but `data.sequence_length` {self.data.sequence_length} "
                f"with `masking.num_repeats` {masking.num_repeats}, `mask_ratio` {ratio} and "
                f"`num_states_per_mask` {masking.num_states_per_mask} becomes {longest} positions"
            )
        k = masking.num_states_per_mask
        for at in self.train.validate_at:
            most = self._most_masks(at)
            limited = [("model.max_length", model.max_length, self.num_positions(most))]
            if self.has_transitions and model.transition.position_features:
                limited.append(("model.transition.max_nodes", model.transition.max_nodes, k * most + 2))
            for key, limit, needed in limited:
                if needed > limit:
                    raise ValueError(f"`train.validate_at` has {at:g}, which needs {needed} of `{key}` {limit}")
        num_nodes = masking.num_states_per_mask * self.max_masks + 2
        if self.has_transitions and model.transition.position_features and num_nodes > model.transition.max_nodes:
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
        self.optim.check_steps(train.max_steps)
        if train.batch_tokens is not None and train.batch_tokens < self.repeated_length:
            raise ValueError(
                f"`train.batch_tokens` {train.batch_tokens} does not hold one sequence of {self.repeated_length}"
            )
        if train.microbatch_tokens < self.longest_input:
            raise ValueError(
                f"`train.microbatch_tokens` {train.microbatch_tokens} is too small for one sequence of "
                f"{self.longest_input} positions"
            )

    @property
    def expands_input(self) -> bool:
        """Whether the encoder reads k copies of each [MASK]."""
        return self.objective == "exlm" and self.model.alignment != "chain"

    @property
    def has_transitions(self) -> bool:
        """Whether the model has a transition head: a DAG with edges between all its masks."""
        return self.objective == "exlm" and self.model.alignment in ("dag", "sparse_dag")

    @property
    def is_chain(self) -> bool:
        """Whether the DAG of the model is a chain of classes."""
        return self.objective == "exlm" and self.model.alignment == "chain"

    @property
    def nodes_per_mask(self) -> int:
        """States of the encoder for each mask: k where it reads as many copies, else one."""
        return self.masking.num_states_per_mask if self.expands_input else 1

    @property
    def max_masks(self) -> int:
        """The most masks a full sequence can have: all n tokens for `bernoulli`, floor(p*n) + 1 for `fixed`."""
        masking, real_tokens = self.masking, self._real_tokens
        if isinstance(masking.mask_ratio, tuple):
            return masking.mask_bounds(real_tokens)[1]
        if masking.scheme == "bernoulli":
            return real_tokens
        return self._most_masks(masking.mask_ratio)

    def _most_masks(self, at: float) -> int:
        """Return the most masks of a full sequence for a mask ratio, or for a number of masks of at least 1."""
        return min(self._real_tokens, int(at) if at >= 1 else math.floor(at * self._real_tokens) + 1)

    @property
    def mean_masks(self) -> float:
        """The mean number of masks of a full sequence of n tokens: p*n, more where a sequence needs its one mask.

        Of a range from a to b masks, (b - a + 1) / (1/a + ... + 1/b).
        """
        masking, real_tokens = self.masking, self._real_tokens
        if isinstance(masking.mask_ratio, tuple):
            return math.fsum(number * share for number, share in self.mask_law)
        if masking.scheme == "bernoulli":
            return masking.mask_ratio * real_tokens + (1 - masking.mask_ratio) ** real_tokens
        return max(1.0, masking.mask_ratio * real_tokens)

    @property
    def mask_law(self) -> tuple[tuple[float, float], ...]:
        """Numbers of masks of a full sequence, each with its probability; of one ratio the mean number alone."""
        if not isinstance(self.masking.mask_ratio, tuple):
            return ((self.mean_masks, 1.0),)
        fewest, most = self.masking.mask_bounds(self._real_tokens)
        total = math.fsum(1 / number for number in range(fewest, most + 1))
        return tuple((number, 1 / (number * total)) for number in range(fewest, most + 1))

    @property
    def _real_tokens(self) -> int:
        return (self.data.sequence_length - 2) * self.masking.num_repeats

    @property
    def repeated_length(self) -> int:
        """Input tokens of a full sequence after repetition, [CLS] and [SEP] included."""
        return self._real_tokens + 2

    @property
    def longest_input(self) -> int:
        """Positions of the longest input of the encoder."""
        return int(self.num_positions(self.max_masks))

    def num_positions(self, num_masks: float) -> float:
        """Return the encoder's positions for a full sequence with T masks: L, expanded in the input L + (k - 1) T."""
        return self.repeated_length + (self.masking.num_states_per_mask - 1) * num_masks * self.expands_input
