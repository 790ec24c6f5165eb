"""Network of a downstream task: a pre-trained encoder and a task head.

Axes: B sequences, L tokens, R positions after repetition, C outputs, D width, F descriptors, Q quantiles.
"""

import math
from typing import Literal, Self, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from exlm_cli.config.finetune import FinetuneModelConfig
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import ModelConfig
from exlm_cli.model.backbones import build_encoder
from exlm_cli.model.encoder import draw_weights
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.ops.precision import without_autocast

Pooled = Literal["cls", "mean", "means"]
NUM_QUANTILES = 101
HIDDEN_WIDTH = 300


class SequenceHead(nn.Module):
    """RoBERTa's classification head: dropout, dense, tanh, dropout and an output layer on the state of a row."""

    def __init__(self, state_width: int, width: int, num_outputs: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(state_width, width)
        self.out = nn.Linear(width, num_outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BRD: Tensor, lengths: Tensor) -> Tensor:
        """Return (B, C)."""
        del lengths
        pooled = torch.tanh(self.dense(self.dropout(hidden_BRD[:, 0])))
        return cast(Tensor, self.out(self.dropout(pooled)))


class DescriptorRanks(nn.Module):
    """Puts numbers of any scale on one: each becomes its rank among the training rows.

    The lowest training value becomes -sqrt(3), the median 0 and the highest sqrt(3), so that numbers without ties have
    variance 1; equal values have their mean rank. No outlier lies beyond, and a missing number is the median. A number
    that is the same in all training rows is 0 everywhere. With all quantiles this is scikit-learn's
    `QuantileTransformer`, but for these bounds.

    Attributes:
        quantiles: (F, Q) float64, ascending: evenly spaced quantiles of the training rows.
    """

    quantiles: Tensor

    def __init__(self, num_descriptors: int) -> None:
        super().__init__()
        self.register_buffer("quantiles", torch.zeros(num_descriptors, NUM_QUANTILES, dtype=torch.float64))

    def forward(self, descriptors_BF: Float[Tensor, "B F"]) -> Float[Tensor, "B F"]:
        """Return the scaled ranks, float32."""
        known_FQ, value_FB = self.quantiles, descriptors_BF.double().T.contiguous()
        last = known_FQ.shape[1] - 1
        # quantiles at or below, and at or above; between two of them the rank is interpolated
        below_FB = (torch.searchsorted(known_FQ, value_FB, right=True) - 1).clamp(min=0)
        above_FB = torch.searchsorted(known_FQ, value_FB).clamp(max=last)
        low_FB, high_FB = known_FQ.gather(1, below_FB), known_FQ.gather(1, above_FB)
        is_between_FB = low_FB < high_FB
        step_FB = torch.where(is_between_FB, high_FB - low_FB, 1.0)
        share_FB = torch.where(is_between_FB & (below_FB < above_FB), (value_FB - low_FB) / step_FB, 0.5)
        place_FB = torch.lerp(below_FB.double(), above_FB.double(), share_FB) / last
        is_used_FB = ~value_FB.isnan() & (known_FQ[:, :1] < known_FQ[:, -1:])
        ranks_FB = torch.where(is_used_FB, math.sqrt(3) * (2 * place_FB - 1), 0.0)
        return ranks_FB.T.float()


class DescriptorHead(nn.Module):
    """The state of a row through dense and tanh, beside descriptors; one hidden layer reads both, as in chemprop."""

    def __init__(self, state_width: int, width: int, num_descriptors: int, num_outputs: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(state_width, width)
        self.ranks = DescriptorRanks(num_descriptors)
        self.hidden = nn.Linear(width + num_descriptors, HIDDEN_WIDTH)
        self.out = nn.Linear(HIDDEN_WIDTH, num_outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BRD: Tensor, descriptors_BF: Tensor) -> Tensor:
        """Return (B, C)."""
        pooled_BD = self.dropout(torch.tanh(self.dense(self.dropout(hidden_BRD[:, 0]))))
        joined_BX = torch.cat([pooled_BD, self.ranks(descriptors_BF)], dim=1)
        return cast(Tensor, self.out(self.dropout(nn.functional.gelu(self.hidden(joined_BX)))))


class SpanHead(nn.Module):
    """Logits of each token as first and as last token of an answer; copies of a token are averaged."""

    def __init__(self, width: int, dropout: float, num_repeats: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 2)
        self.dropout = nn.Dropout(dropout)
        self.num_repeats = num_repeats

    def forward(self, hidden_BRD: Tensor, lengths: Tensor) -> Tensor:
        """Return (B, L, 2) over the tokens as they were before repetition."""
        logits_BR2: Tensor = self.out(self.dropout(hidden_BRD))
        if self.num_repeats == 1:
            return logits_BR2
        index_R = torch.arange(logits_BR2.shape[1], device=lengths.device)
        # [CLS] is token 0 and has one copy; position 1 begins the copies of token 1
        token_R = torch.where(index_R == 0, 0, (index_R - 1) // self.num_repeats + 1)
        is_real_BR = (index_R < lengths[:, None]).to(logits_BR2.dtype)
        num_tokens = (logits_BR2.shape[1] - 2) // self.num_repeats + 2
        sums_BL2 = logits_BR2.new_zeros(len(lengths), num_tokens, 2)
        sums_BL2 = sums_BL2.index_add(1, token_R, logits_BR2 * is_real_BR[..., None])
        copies_BL = is_real_BR.new_zeros(len(lengths), num_tokens).index_add(1, token_R, is_real_BR)
        return sums_BL2 / copies_BL.clamp(min=1)[..., None]


def mean_state(states_BRD: Float[Tensor, "B R D"], lengths: Int64[Tensor, " B"]) -> Float[Tensor, "B D"]:
    """Return the mean of the states of each sequence without its padding, float32."""
    is_token_BR = torch.arange(states_BRD.shape[1], device=lengths.device) < lengths[:, None]
    return (states_BRD.float() * is_token_BR[..., None]).sum(1) / lengths[:, None]


def pair_state(first_BD: Float[Tensor, "B D"], second_BD: Float[Tensor, "B D"]) -> Float[Tensor, "B 4D"]:
    """Return both states of a pair, their absolute difference and their product, as Conneau et al. (2017) do.

    States are scaled to a mean square of 1, so that the mean of the products is the cosine.
    """
    first_BD, second_BD = (state * state.square().mean(-1, keepdim=True).rsqrt() for state in (first_BD, second_BD))
    return torch.cat([first_BD, second_BD, (first_BD - second_BD).abs(), first_BD * second_BD], dim=-1)


class TaskModel(nn.Module):
    """Encoder of a pre-trained model, and a task head.

    Inputs have no masks, so nothing expands, and the LM head and the DAG's head of the checkpoint are not used. The
    position of token i is (i, 0).

    Args:
        recipe: Recipe of pre-training, with the architecture and the number of copies of each token.
        finetune: Dropout that replaces the one of pre-training.
        vocab_size: V of the checkpoint's tokenizer.
        num_outputs: C; None for spans, which have two outputs a token.
        num_descriptors: F numbers of each sequence that the head reads as well.
        pooled: What the head reads of a row: `cls`: the state at [CLS]; `mean`: the mean of the states of its tokens,
            [CLS], [SEP] and copies included; `means`: of both texts of a pair, each read alone.
    """

    output_mean: Tensor
    output_std: Tensor
    is_encoder_frozen = False

    def __init__(
        self,
        recipe: PretrainRecipe,
        finetune: FinetuneModelConfig,
        vocab_size: int,
        num_outputs: int | None,
        num_descriptors: int = 0,
        *,
        pooled: Pooled = "cls",
    ) -> None:
        super().__init__()
        self.pooled = pooled
        config = with_dropout(recipe.model, finetune)
        self.encoder = build_encoder(config, vocab_size, reads_pairs=True)
        self.head: SpanHead | SequenceHead | DescriptorHead
        if num_outputs is None:
            self.head = SpanHead(config.width, finetune.pooler_dropout, recipe.masking.num_repeats)
        elif num_descriptors:
            sizes = (self.state_width, config.width, num_descriptors, num_outputs)
            self.head = DescriptorHead(*sizes, finetune.pooler_dropout)
        else:
            self.head = SequenceHead(self.state_width, config.width, num_outputs, finetune.pooler_dropout)
        # regression trains on standardised targets; in the task's units float32 may be too coarse
        self.register_buffer("output_mean", torch.zeros(num_outputs or 1, dtype=torch.float64))
        self.register_buffer("output_std", torch.ones(num_outputs or 1, dtype=torch.float64))
        draw_weights(self, config.init_std)

    def encode(
        self,
        token_ids: Int64[Tensor, "B R"],
        lengths: Int64[Tensor, " B"],
        is_padded: bool = True,
        query_positions: Int64[Tensor, "B r"] | None = None,
    ) -> Float[Tensor, "B r D"]:
        """Return the state of every position, or of those in `query_positions`; other arguments as for `forward`.

        Padding is never attended to.
        """
        index = torch.arange(token_ids.shape[1], device=token_ids.device)
        is_token = index < lengths[:, None] if is_padded else None
        return cast(Tensor, self.encoder(token_ids, is_token, query_positions=query_positions))

    def forward(
        self,
        token_ids: Int64[Tensor, "B R"],
        lengths: Int64[Tensor, " B"],
        is_padded: bool = True,
        descriptors: Float[Tensor, "B F"] | None = None,
        states: Float[Tensor, "B D"] | None = None,
    ) -> Tensor:
        """Return (B, C) outputs, or (B, L, 2) for spans, float32; those of a regression are in standardised units.

        Args:
            token_ids: Repeated input tokens, [CLS] first and [SEP] last, padded with anything; with `pooled: means` the
                first texts of all pairs, then the second ones.
            lengths: Real positions of each sequence.
            is_padded: False where all sequences have R positions: attention then needs no mask.
            descriptors: As they are, NaN where missing; needed by a model that reads some.
            states: The result of `encode_row`, if it is known: the head alone runs.
        """
        if states is not None:
            states_BrD = states[:, None]
        elif isinstance(self.head, SpanHead):
            states_BrD = self.encode(token_ids, lengths, is_padded).float()
        else:
            states_BrD = self.encode_row(token_ids, lengths, is_padded)[:, None]
        with without_autocast(states_BrD):  # 16-bit scores have ties, which change rank metrics
            beside = descriptors if isinstance(self.head, DescriptorHead) else lengths
            return cast(Tensor, self.head(states_BrD, beside))

    def encode_row(
        self, token_ids: Int64[Tensor, "B R"], lengths: Int64[Tensor, " B"], is_padded: bool = True
    ) -> Float[Tensor, "B D"]:
        """Return the state of each row, float32; arguments as for `forward`."""
        if self.pooled == "means":
            return pair_state(*mean_state(self.encode(token_ids, lengths, is_padded), lengths).chunk(2))
        if self.pooled == "mean":
            return mean_state(self.encode(token_ids, lengths, is_padded), lengths)
        return self.encode(token_ids, lengths, is_padded, torch.zeros_like(lengths)[:, None])[:, 0].float()

    @property
    def state_width(self) -> int:
        """Width of the state of a row."""
        width: int = self.encoder.token_embedding.embedding_dim
        return 4 * width if self.pooled == "means" else width

    def in_units(self, outputs: Tensor) -> Tensor:
        """Return the outputs of `forward` in the task's units, float64; logits stay as they are."""
        return outputs.double() if isinstance(self.head, SpanHead) else outputs * self.output_std + self.output_mean

    def freeze_encoder(self) -> None:
        """Keep the encoder as it is, without dropout; the head alone is trained."""
        self.encoder.requires_grad_(False)
        self.is_encoder_frozen = True

    def train(self, mode: bool = True) -> Self:
        """Set training mode; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.is_encoder_frozen:
            self.encoder.eval()
        return self

    def load_encoder(self, pretrained: ExlmModel) -> None:
        """Load the encoder of a pre-trained model; the head stays as drawn."""
        self.encoder.load_state_dict(pretrained.encoder.state_dict())


def with_dropout(model: ModelConfig, finetune: FinetuneModelConfig) -> ModelConfig:
    """Return the architecture with the dropout rates that fine-tuning sets."""
    given = finetune.model_dump(exclude={"pooler_dropout"}, exclude_none=True)
    return model.model_copy(update=given)
