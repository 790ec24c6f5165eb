"""Encoder of both objectives: a pre-LayerNorm transformer that turns tokens into contextual states.

Axes: B sequences, L positions, R positions that are read, M = B * L tokens, K = B * R queries, D width, N heads, H head
width.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from exlm_cli.config.sections import ModelConfig
from exlm_cli.model.compiled import Compiler
from exlm_cli.ops.precision import matmul_dtype
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
    """Where the tokens of a batch are, and which of them a block reads and computes.

    Attributes:
        num_sequences: B.
        rotation: Of every token's heads; None without rotary positions.
        attend: True at keys that are tokens, False at padding; None where all are tokens.
        queries: Tokens that attend; None: all.
        query_rotation: Of these tokens' heads.
    """

    num_sequences: int
    rotation: Float[Tensor, "M 2 H"] | None
    attend: Bool[Tensor, "B 1 1 L"] | None
    queries: Int64[Tensor, " K"] | None = None
    query_rotation: Float[Tensor, "K 2 H"] | None = None


class EncoderBlock(nn.Module):
    """Transformer block: x + attention(norm(x)), then x + ffn(norm(x)).

    What precedes attention and what follows it are functions of tokens in a row, whatever sequences they belong to. So
    the compiler makes one graph of each for batches of any shape, and attention chooses its kernel at every call.
    """

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

    def forward(self, x_MD: Tensor, layout: Layout) -> Tensor:
        """Return the (K, D) states at the queries of a layout: at all tokens where it names none."""
        if layout.queries is None:
            x_KD = x_MD
            heads = self.project(x_MD, layout.rotation)
        else:
            x_KD = x_MD.index_select(0, layout.queries)
            heads = self.project_queries(x_MD, layout.rotation, x_KD, layout.query_rotation)
        q, k, v = (each.unflatten(0, (layout.num_sequences, -1)).transpose(1, 2) for each in heads)
        with sdpa_kernel(_ATTENTION_KERNELS):
            mixed_BNRH = F.scaled_dot_product_attention(
                q, k, v, attn_mask=layout.attend, dropout_p=self.attention_dropout if self.training else 0.0
            )
        return self.feed_forward(x_KD, mixed_BNRH.transpose(1, 2).flatten(2).flatten(0, 1))

    def project(self, x_MD: Tensor, rotation: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the (M, N, H) queries, keys and values of every token."""
        parts = self.qkv(self.attention_norm(x_MD)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = parts.unbind(-3) if rotation is None else rotate(parts, rotation, 2)
        return q, k, v

    def project_queries(
        self, x_MD: Tensor, rotation: Tensor | None, x_KD: Tensor, query_rotation: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the (K, N, H) queries of some tokens, and the (M, N, H) keys and values of all."""
        width = x_MD.shape[-1]
        (q_weight, kv_weight), (q_bias, kv_bias) = (
            both.split([width, 2 * width]) for both in (self.qkv.weight, self.qkv.bias)
        )
        queries = F.linear(self.attention_norm(x_KD), q_weight, q_bias).unflatten(-1, (1, self.num_heads, -1))
        parts = F.linear(self.attention_norm(x_MD), kv_weight, kv_bias).unflatten(-1, (2, self.num_heads, -1))
        if rotation is None or query_rotation is None:
            (q,), (k, v) = queries.unbind(-3), parts.unbind(-3)
        else:
            (q,), (k, v) = rotate(queries, query_rotation, 1), rotate(parts, rotation, 1)
        return q, k, v

    def feed_forward(self, x_KD: Tensor, mixed_KD: Tensor) -> Tensor:
        """Return the (K, D) states, given those that entered the block and what they attended to."""
        x_KD = x_KD + self.dropout(self.attention_out(mixed_KD))
        widened = self.activation_dropout(F.gelu(self.ffn_in(self.ffn_norm(x_KD))))
        return cast(Tensor, x_KD + self.dropout(self.ffn_out(widened)))


def gather_positions(values_BLD: Shaped[Tensor, "B L D"], index_BR: Int64[Tensor, "B R"]) -> Shaped[Tensor, "B R D"]:
    """Return the values at some of the L positions of each sequence."""
    # copies whole rows, and unlike `gather` keeps no values for the backward pass
    rows = values_BLD.flatten(0, 1).index_select(0, _flat_index(index_BR, values_BLD.shape[1]))
    return rows.view(*index_BR.shape, *values_BLD.shape[2:])


def _flat_index(index_BR: Int64[Tensor, "B R"], num_positions: int) -> Int64[Tensor, " K"]:
    """Return indices of positions among the tokens of all sequences."""
    start_B1 = num_positions * torch.arange(len(index_BR), device=index_BR.device)[:, None]
    return (index_BR + start_B1).flatten()


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

    def compile_blocks(self) -> None:
        """Let the compiler run all of a block but attention: three graphs in training, and three without gradients."""
        compiler = Compiler()
        for block in self.blocks:
            for name in ("project", "project_queries", "feed_forward"):
                setattr(block, name, compiler.compiled(getattr(block, name)))

    def forward(
        self,
        token_ids: Int64[Tensor, "B L"],
        is_token: Bool[Tensor, "B L"] | None = None,
        *,
        positions: Int64[Tensor, "B L 2"] | None = None,
        query_positions: Int64[Tensor, "B R"] | None = None,
    ) -> Float[Tensor, "B R D"]:
        """Return the contextual states of the positions in `query_positions`, by default of all.

        The last block uses the other positions as keys and values only.

        Args:
            token_ids: Tokens, [CLS] first and [SEP] last, padded with anything.
            is_token: False at padding, which is never attended to; None where there is none, which allows the fastest
                attention.
            positions: (token index, clone index) of every position, where masks are expanded and `model.rope` is 2d;
                None: position j is (j, 0).
            query_positions: Positions whose states are returned.
        """
        num_sequences, num_positions = token_ids.shape
        index_1L = torch.arange(num_positions, device=token_ids.device)[None]
        embedded = self.token_embedding(token_ids)
        if self.position_embedding is not None:
            embedded = embedded + self.position_embedding(index_1L)
        rotation = self._rotation(index_1L, positions, num_sequences, matmul_dtype(embedded))
        last = layout = Layout(num_sequences, rotation, None if is_token is None else is_token[:, None, None])
        if query_positions is not None:
            queries = _flat_index(query_positions, num_positions)
            turned = None if rotation is None else rotation.index_select(0, queries)
            last = layout._replace(queries=queries, query_rotation=turned)
        x_MD = self.dropout(embedded).flatten(0, 1)
        for block, of_block in zip(self.blocks, [layout] * (len(self.blocks) - 1) + [last], strict=True):
            if self.gradient_checkpointing and self.training:
                x_MD = cast(Tensor, checkpoint(block, x_MD, of_block, use_reentrant=False))
            else:
                x_MD = block(x_MD, of_block)
        return cast(Tensor, self.final_norm(x_MD).unflatten(0, (num_sequences, -1)))

    def _rotation(
        self,
        index_1L: Int64[Tensor, "1 L"],
        positions_BL2: Int64[Tensor, "B L 2"] | None,
        num_sequences: int,
        dtype: torch.dtype,
    ) -> Float[Tensor, "M 2 H"] | None:
        """Return the rotation at (token index, clone index) for `rope: 2d`, at the index in the input for 1d."""
        if self.rope == "none":
            return None
        places = index_1L[..., None]
        if self.rope == "2d":
            places = torch.cat([places, torch.zeros_like(places)], dim=-1) if positions_BL2 is None else positions_BL2
        rotation = rotation_at(places, self.axis_widths, self.rope_base, dtype)
        return rotation.expand(num_sequences, -1, -1, -1).flatten(0, 1)
