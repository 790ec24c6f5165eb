"""Network of a downstream task: a pre-trained encoder and a task head.

Axes: B sequences, L tokens, R positions after repetition, C outputs, D width.
"""

from typing import Self, cast

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


class SequenceHead(nn.Module):
    """RoBERTa's classification head: dropout, dense, tanh, dropout and an output layer on the state at [CLS]."""

    def __init__(self, width: int, num_outputs: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.out = nn.Linear(width, num_outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BRD: Tensor, lengths: Tensor) -> Tensor:
        """Return (B, C)."""
        del lengths
        pooled = torch.tanh(self.dense(self.dropout(hidden_BRD[:, 0])))
        return cast(Tensor, self.out(self.dropout(pooled)))


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


class TaskModel(nn.Module):
    """Encoder of a pre-trained model, and a task head.

    Inputs have no masks, so nothing expands, and the LM head, the transition head and the clone vectors of the
    checkpoint are not used. The position of token i is (i, 0).

    Args:
        recipe: Recipe of pre-training, with the architecture and the number of copies of each token.
        finetune: Dropout that replaces the one of pre-training.
        vocab_size: V of the checkpoint's tokenizer.
        num_outputs: C; None for spans, which have two outputs a token.
    """

    output_mean: Tensor
    output_std: Tensor
    is_encoder_frozen = False

    def __init__(
        self, recipe: PretrainRecipe, finetune: FinetuneModelConfig, vocab_size: int, num_outputs: int | None
    ) -> None:
        super().__init__()
        config = with_dropout(recipe.model, finetune)
        self.encoder = build_encoder(config, vocab_size, reads_pairs=True)
        self.head = (
            SpanHead(config.width, finetune.pooler_dropout, recipe.masking.num_repeats)
            if num_outputs is None
            else SequenceHead(config.width, num_outputs, finetune.pooler_dropout)
        )
        # regression trains on standardised targets; in the task's units float32 may be too coarse
        self.register_buffer("output_mean", torch.zeros(num_outputs or 1, dtype=torch.float64))
        self.register_buffer("output_std", torch.ones(num_outputs or 1, dtype=torch.float64))
        draw_weights(self, config.init_std)

    def encode(
        self,
        token_ids: Int64[Tensor, "B R"],
        lengths: Int64[Tensor, " B"],
        is_padded: bool = True,
        read: Int64[Tensor, "B r"] | None = None,
    ) -> Float[Tensor, "B r D"]:
        """Return the state of every position, or of those in `read`; other arguments as for `forward`.

        Padding is never attended to.
        """
        index = torch.arange(token_ids.shape[1], device=token_ids.device)
        is_token = index < lengths[:, None] if is_padded else None
        return cast(Tensor, self.encoder(token_ids, is_token, read=read))

    def forward(self, token_ids: Int64[Tensor, "B R"], lengths: Int64[Tensor, " B"], is_padded: bool = True) -> Tensor:
        """Return (B, C) outputs, or (B, L, 2) for spans, float32; those of a regression are in standardised units.

        Args:
            token_ids: Repeated input tokens, [CLS] first and [SEP] last, padded with anything.
            lengths: Real positions of each sequence.
            is_padded: False where all sequences have R positions: attention then needs no mask.
        """
        read = None if isinstance(self.head, SpanHead) else torch.zeros_like(lengths)[:, None]  # [CLS]
        states = self.encode(token_ids, lengths, is_padded, read).float()
        with without_autocast(states):  # 16-bit scores have ties, which change rank metrics
            return cast(Tensor, self.head(states, lengths))

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
