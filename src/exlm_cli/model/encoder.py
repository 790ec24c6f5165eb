"""Encoder of both objectives: a pre-LayerNorm transformer that turns tokens into contextual states.

Axes: B sequences, L positions, R positions that are read, D width, N heads, H head width.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from exlm_cli.config.sections import ModelConfig
from exlm_cli.ops.rotary import rotate, rotation_at

# Not cuDNN's, which torch prefers on an H100: it makes a plan for each new shape, and the number of masks and with it
# the shape changes from batch to batch.
_ATTENTION_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def draw_weights(module: nn.Module, std: float) -> None:
    """Draw matrices and embeddings from normal(0, `std`) and zero the biases, as BERT does."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


class Layout(NamedTuple):
    """Where the positions of a batch are, and which of them a block reads and computes.

    Attributes:
        rotation, query_rotation: Rotations of keys and of queries; None without rotary positions.
        attend: True at keys that are tokens, False at padding; None where all are tokens.
        queries: Positions that attend; None: all.
    """

    rotation: Tensor | None
    query_rotation: Tensor | None
    attend: Bool[Tensor, "B 1 1 L"] | None
    queries: Int64[Tensor, "B R"] | None = None


class EncoderBlock(nn.Module):
    """Transformer block: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_dropout = config.attention_dropout
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.ffn_norm = nn.LayerNorm(config.width)
        self.ffn_in = nn.Linear(config.width, config.ffn_width)
        self.ffn_out = nn.Linear(config.ffn_width, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.activation_dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x_BLD: Tensor, layout: Layout) -> Tensor:
        """Return the (B, R, D) states at the queries of a layout: at all positions where it names none."""
        width, queries = x_BLD.shape[-1], layout.queries
        normed_BLD = self.attention_norm(x_BLD)
        if queries is None:
            q, k, v = self.qkv(normed_BLD).chunk(3, dim=-1)
        else:  # the other positions are keys and values only
            (q_weight, kv_weight), (q_bias, kv_bias) = (
                both.split([width, 2 * width]) for both in (self.qkv.weight, self.qkv.bias)
            )
            q = F.linear(gather_positions(normed_BLD, queries), q_weight, q_bias)
            k, v = F.linear(normed_BLD, kv_weight, kv_bias).chunk(2, dim=-1)
            x_BLD = gather_positions(x_BLD, queries)
        q, k, v = (heads.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for heads in (q, k, v))
        if layout.rotation is not None and layout.query_rotation is not None:
            q, k = rotate(q, layout.query_rotation), rotate(k, layout.rotation)
        with sdpa_kernel(_ATTENTION_KERNELS):
            mixed_BNRH = F.scaled_dot_product_attention(
                q, k, v, attn_mask=layout.attend, dropout_p=self.attention_dropout if self.training else 0.0
            )
        x_BRD = x_BLD + self.dropout(self.attention_out(mixed_BNRH.transpose(1, 2).flatten(2)))
        widened = self.activation_dropout(F.gelu(self.ffn_in(self.ffn_norm(x_BRD))))
        return cast(Tensor, x_BRD + self.dropout(self.ffn_out(widened)))


def gather_positions(values_BLD: Shaped[Tensor, "B L D"], index_BR: Int64[Tensor, "B R"]) -> Shaped[Tensor, "B R D"]:
    """Return the values at some of the L positions of each sequence."""
    num_sequences, num_positions = values_BLD.shape[:2]
    start_B1 = num_positions * torch.arange(num_sequences, device=index_BR.device)[:, None]
    # copies whole rows, and unlike `gather` keeps no values for the backward pass
    rows = values_BLD.flatten(0, 1).index_select(0, (index_BR + start_B1).flatten())
    return rows.view(*index_BR.shape, *values_BLD.shape[2:])


class Encoder(nn.Module):
    """Token embedding and a stack of blocks: tokens and their padding in, contextual states out.

    Args:
        config: Section `model` of the recipe.
        vocab_size: V of the tokenizer.

    Attributes:
        token_embedding: Its weight is also the decoder of the LM head.
        gradient_checkpointing: Keep only each block's input in training, and compute the block again in the backward
            pass.
    """

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.max_length, config.width) if config.learned_positions else None
        self.rope, self.rope_base = config.rope, config.rope_base
        self.axis_widths = () if config.rope == "none" else config.rotary_widths(config.width // config.num_heads)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.gradient_checkpointing = False

    def forward(
        self,
        token_ids: Int64[Tensor, "B L"],
        is_token: Bool[Tensor, "B L"] | None = None,
        *,
        positions: Int64[Tensor, "B L 2"] | None = None,
        read: Int64[Tensor, "B R"] | None = None,
    ) -> Float[Tensor, "B R D"]:
        """Return the contextual states of the positions in `read`, by default of all.

        The last block uses the other positions as keys and values only.

        Args:
            token_ids: Tokens, [CLS] first and [SEP] last, padded with anything.
            is_token: False at padding, which is never attended to; None where there is none, which allows the fastest
                attention.
            positions: (token index, clone index) of every position, where masks are expanded and `model.rope` is 2d;
                None: position j is (j, 0).
            read: Positions whose states are returned.
        """
        index_1L = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        embedded = self.token_embedding(token_ids)
        if self.position_embedding is not None:
            embedded = embedded + self.position_embedding(index_1L)
        rotation = query_rotation = self._rotation(index_1L, positions)
        if read is not None:
            query_rotation = self._rotation(read, None if positions is None else gather_positions(positions, read))
        attend = None if is_token is None else is_token[:, None, None]
        layout = Layout(rotation, rotation, attend)
        last = Layout(rotation, query_rotation, attend, read)
        x_BLD = self.dropout(embedded)
        for block, of_block in zip(self.blocks, [layout] * (len(self.blocks) - 1) + [last], strict=True):
            if self.gradient_checkpointing and self.training:
                x_BLD = cast(Tensor, checkpoint(block, x_BLD, of_block, use_reentrant=False))
            else:
                x_BLD = block(x_BLD, of_block)
        return cast(Tensor, self.final_norm(x_BLD))

    def _rotation(self, index_bL: Int64[Tensor, "b L"], positions_BL2: Int64[Tensor, "B L 2"] | None) -> Tensor | None:
        """Return the rotation at (token index, clone index) for `rope: 2d`, at the index in the input for 1d."""
        if self.rope == "none":
            return None
        places = index_bL[..., None]
        if self.rope == "2d":
            places = torch.cat([places, torch.zeros_like(places)], dim=-1) if positions_BL2 is None else positions_BL2
        return rotation_at(places, self.axis_widths, self.rope_base)
