"""Encoder of both objectives: a pre-LayerNorm transformer with rotary positions.

Axes: B sequences, L positions, D width, N heads, H head width.
"""

import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from exlm_cli.config.sections import ModelConfig
from exlm_cli.data.batch import Packing
from exlm_cli.model.positions import RotaryPositions
from exlm_cli.ops.rotary import rotate
from exlm_cli.ops.varlen_attention import varlen_attention


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

    def forward(
        self,
        x_BLD: Tensor,
        rotation: Tensor | None,
        attend: Tensor | None,
        num_context: int | None,
        packing: Packing | None,
    ) -> Tensor:
        """Apply the block; `attend` and `num_context` are those of `attention`, or of `packed_attention`."""
        projected = self.qkv(self.attention_norm(x_BLD)).chunk(3, dim=-1)
        q, k, v = (heads.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for heads in projected)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        attention_dropout = self.attention_dropout if self.training else 0.0
        mixed_BNLH = (
            attention(q, k, v, attend, num_context, attention_dropout)
            if packing is None
            else packed_attention(q, k, v, attend, packing, attention_dropout)
        )
        x_BLD = x_BLD + self.dropout(self.attention_out(mixed_BNLH.transpose(1, 2).flatten(2)))
        widened = self.activation_dropout(F.gelu(self.ffn_in(self.ffn_norm(x_BLD))))
        return cast(Tensor, x_BLD + self.dropout(self.ffn_out(widened)))


def attention(
    q_BNLH: Tensor, k_BNLH: Tensor, v_BNLH: Tensor, attend: Tensor | None, num_context: int | None, dropout: float
) -> Tensor:
    """Return the (B, N, L, H) values that each query reads.

    Args:
        q_BNLH, k_BNLH, v_BNLH: Queries, keys and values.
        attend: (B, 1, q, L) True where a query sees a key; None where all see all.
        num_context: The first so many positions see each other alone, and `attend` is that of the others. None: it is
            that of all.
        dropout: Probability of dropping a weight.
    """
    attend_to = functools.partial(F.scaled_dot_product_attention, dropout_p=dropout)
    if num_context is None:
        return attend_to(q_BNLH, k_BNLH, v_BNLH, attn_mask=attend)
    q_context, q_further = q_BNLH.split([num_context, q_BNLH.shape[2] - num_context], dim=2)
    # torch leaves `Function.apply` without types
    k_context, k_all = _ContextAndAll.apply(k_BNLH, num_context)  # type: ignore[no-untyped-call]
    v_context, v_all = _ContextAndAll.apply(v_BNLH, num_context)  # type: ignore[no-untyped-call]
    of_context = attend_to(q_context, k_context, v_context)
    of_further = attend_to(q_further, k_all, v_all, attn_mask=attend)
    # heads side by side at a position, so that they need no copy to be projected
    return torch.cat([of_context.transpose(1, 2), of_further.transpose(1, 2)], dim=1).transpose(1, 2)


class _ContextAndAll(torch.autograd.Function):
    """The first positions, and all; its backward pass adds their gradients at once, without the zeros of a slice's."""

    @staticmethod
    def forward(ctx: Any, x_BNLH: Tensor, num_context: int) -> tuple[Tensor, Tensor]:
        ctx.num_context = num_context
        return x_BNLH[:, :, :num_context], x_BNLH.view_as(x_BNLH)

    @staticmethod
    def backward(ctx: Any, of_context: Tensor, of_all: Tensor) -> tuple[Tensor, None]:
        context, further = of_all.transpose(1, 2).tensor_split([ctx.num_context], dim=1)
        return torch.cat([context + of_context.transpose(1, 2), further], dim=1).transpose(1, 2), None


def packed_attention(
    q_1NPH: Tensor, k_1NPH: Tensor, v_1NPH: Tensor, attend: Tensor | None, packing: Packing, dropout: float
) -> Tensor:
    """Return the (1, N, P, H) values that each query of all sequences reads.

    Args:
        q_1NPH, k_1NPH, v_1NPH: Queries, keys and values in the order of `packing`.
        attend: (B, 1, F, X) True where one of F further states sees a position; None where there are none.
        packing: Where the positions are.
        dropout: Probability of dropping a weight.
    """
    q, k, v = (heads[0].transpose(0, 1) for heads in (q_1NPH, k_1NPH, v_1NPH))
    context = slice(len(packing.source) - len(packing.further_place))
    max_length = packing.row.shape[1]
    mixed = varlen_attention(q[context], k[context], v[context], packing.cu_lengths, max_length, dropout)
    if attend is not None:
        num_sequences, _, num_further, _ = attend.shape
        further = q.new_zeros((num_sequences * num_further, *q.shape[1:]))
        further = further.index_put((packing.further_place,), q[context.stop :])
        keys, values = (unpacked(rows, packing).transpose(1, 2) for rows in (k, v))
        queries = further.unflatten(0, (num_sequences, num_further)).transpose(1, 2)
        of_further = F.scaled_dot_product_attention(queries, keys, values, attn_mask=attend, dropout_p=dropout)
        of_further = of_further.transpose(1, 2).flatten(0, 1).index_select(0, packing.further_place)
        mixed = torch.cat([mixed, of_further])
    return mixed.transpose(0, 1)[None]


def unpacked(rows: Float[Tensor, "P ..."], packing: Packing) -> Float[Tensor, "B X ..."]:
    """Return the rows of a batch without padding at their positions; padding gets the first row."""
    at_positions: Tensor = rows.index_select(0, packing.row.flatten()).unflatten(0, packing.row.shape)
    return at_positions


class Encoder(nn.Module):
    """Stack of blocks that turns embedded tokens into contextual states.

    Args:
        config: Section `model` of the recipe.
        num_states_per_mask: k of the inputs; 1 where nothing expands.

    Attributes:
        recomputes: Keep only each block's input in training, and compute the block again in the backward pass.
    """

    def __init__(self, config: ModelConfig, num_states_per_mask: int) -> None:
        super().__init__()
        head_width = config.width // config.num_heads
        self.rotation_of = None if config.rope == "none" else RotaryPositions(config, num_states_per_mask, head_width)
        self.position_embedding = nn.Embedding(config.max_length, config.width) if config.learned_positions else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.recomputes = False

    def forward(
        self,
        embedded: Float[Tensor, "B L D"],
        positions: Int64[Tensor, "B L 2"],
        visible: Bool[Tensor, "b q l"] | None,
        *,
        expanded_index: Int64[Tensor, "#B L"] | None = None,
        num_context: int | None = None,
        packing: Packing | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Return the contextual state of every position.

        Args:
            embedded: Token embeddings.
            positions: (token index, clone index) of every position.
            visible: Which keys each query sees, or all queries where q is 1; None where all see all, which allows
                the fastest attention.
            expanded_index: Index of every position in its expanded sequence; None: they are in order.
            num_context: The first so many positions see each other alone, and `visible` is that of the others.
            packing: Order of the positions of all sequences, which are here as one sequence; `visible` is then that of
                their further states, (sequences, further states, positions), and None where there are none.
        """
        if expanded_index is None:
            expanded_index = torch.arange(embedded.shape[1], device=embedded.device)[None]
        if self.position_embedding is not None:
            embedded = embedded + self.position_embedding(expanded_index)
        rotation = None
        if self.rotation_of is not None:
            rotation = self.rotation_of(positions[..., 0], positions[..., 1], expanded_index)
        attend = None if visible is None else visible[:, None]
        x_BLD, layout = self.dropout(embedded), (rotation, attend, num_context, packing)
        for block in self.blocks:
            if self.recomputes and self.training:
                x_BLD = cast(Tensor, checkpoint(block, x_BLD, *layout, use_reentrant=False))
            else:
                x_BLD = block(x_BLD, *layout)
        return cast(Tensor, self.final_norm(x_BLD))
