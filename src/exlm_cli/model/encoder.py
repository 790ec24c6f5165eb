"""Encoder of both objectives: a pre-LayerNorm transformer with rotary positions.

Axes: B sequences, L positions, C positions before masks are expanded, R positions that attend, P positions of all
sequences without padding; of a sequence in such a packed batch X expanded positions and F further states; D width,
N heads, H head width.
"""

import functools
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from exlm_cli.config.sections import ModelConfig
from exlm_cli.data.batch import Packing
from exlm_cli.model.positions import RotaryPositions
from exlm_cli.ops.rotary import rotate
from exlm_cli.ops.varlen_attention import varlen_attention

# Not cuDNN's, which torch prefers on an H100: it makes a plan for each new shape, and the number of masks and with it
# the shape changes from batch to batch.
_ATTENTION_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def draw_weights(module: nn.Module, std: float) -> None:
    """Draw matrices and embeddings from normal(0, `std`) and zero the biases, as BERT does."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)


class Layout(NamedTuple):
    """How the positions of a batch attend to each other.

    Attributes:
        rotation, query_rotation: Rotations of keys and of queries; None without rotary positions.
        attend: True where a query sees a key; None where all see all. With `num_further` its queries are the further
            states alone; with `packing` it is (B, 1, F, X), for the F further states of each sequence.
        num_further: Number of positions at the end that are further states of masks, which the others do not see.
        packing: Order of the positions if all sequences are packed into one row; None where each has its own row.
        queries: Positions that attend; None: all. With `num_further` or `packing`, all further states come last.
    """

    rotation: Tensor | None
    query_rotation: Tensor | None
    attend: Bool[Tensor, "b 1 q l"] | None
    num_further: int
    packing: Packing | None
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
        attend_to = attention if layout.packing is None else packed_attention
        with sdpa_kernel(_ATTENTION_KERNELS):
            mixed_BNRH = attend_to(q, k, v, layout, self.attention_dropout if self.training else 0.0)
        x_BRD = x_BLD + self.dropout(self.attention_out(mixed_BNRH.transpose(1, 2).flatten(2)))
        widened = self.activation_dropout(F.gelu(self.ffn_in(self.ffn_norm(x_BRD))))
        return cast(Tensor, x_BRD + self.dropout(self.ffn_out(widened)))


def attention(
    q_BNRH: Float[Tensor, "B N R H"],
    k_BNLH: Float[Tensor, "B N L H"],
    v_BNLH: Float[Tensor, "B N L H"],
    layout: Layout,
    dropout: float,
) -> Float[Tensor, "B N R H"]:
    """Attend over a layout without packing; `dropout` is the probability of dropping an attention weight."""
    attend_to = functools.partial(F.scaled_dot_product_attention, dropout_p=dropout)
    num_further = layout.num_further
    if not num_further:
        return attend_to(q_BNRH, k_BNLH, v_BNLH, attn_mask=layout.attend)
    q_context, q_further = q_BNRH.split([q_BNRH.shape[2] - num_further, num_further], dim=2)
    num_context = k_BNLH.shape[2] - num_further
    # torch leaves `Function.apply` without types
    k_context, k_all = _ContextAndAll.apply(k_BNLH, num_context)  # type: ignore[no-untyped-call]
    v_context, v_all = _ContextAndAll.apply(v_BNLH, num_context)  # type: ignore[no-untyped-call]
    of_context = attend_to(q_context, k_context, v_context)
    of_further = attend_to(q_further, k_all, v_all, attn_mask=layout.attend)
    # heads side by side at a position, so that they need no copy to be projected
    return torch.cat([of_context.transpose(1, 2), of_further.transpose(1, 2)], dim=1).transpose(1, 2)


class _ContextAndAll(torch.autograd.Function):
    """Return the first positions and all positions; its backward pass adds both gradients without padding by zeros."""

    @staticmethod
    def forward(ctx: Any, x_BNLH: Tensor, num_context: int) -> tuple[Tensor, Tensor]:
        ctx.num_context = num_context
        return x_BNLH[:, :, :num_context], x_BNLH.view_as(x_BNLH)

    @staticmethod
    def backward(ctx: Any, of_context: Tensor, of_all: Tensor) -> tuple[Tensor, None]:
        context, further = of_all.transpose(1, 2).tensor_split([ctx.num_context], dim=1)
        return torch.cat([context + of_context.transpose(1, 2), further], dim=1).transpose(1, 2), None


def packed_attention(
    q_1NRH: Float[Tensor, "1 N R H"],
    k_1NPH: Float[Tensor, "1 N P H"],
    v_1NPH: Float[Tensor, "1 N P H"],
    layout: Layout,
    dropout: float,
) -> Float[Tensor, "1 N R H"]:
    """Attend within each of the sequences that `layout.packing` puts into one row."""
    packing, attend = layout.packing, layout.attend
    assert packing is not None
    q, k, v = (heads[0].transpose(0, 1) for heads in (q_1NRH, k_1NPH, v_1NPH))
    num_further = len(packing.further_place)
    q_context, q_further = q.split([len(q) - num_further, num_further])
    context = slice(len(k) - num_further)
    cu_queries = packing.cu_lengths if layout.queries is None else packing.cu_read
    max_length = packing.row.shape[1]
    mixed = varlen_attention(q_context, k[context], v[context], cu_queries, packing.cu_lengths, max_length, dropout)
    if attend is not None:
        num_sequences, _, most_further, _ = attend.shape
        further = q.new_zeros((num_sequences * most_further, *q.shape[1:]))
        further = further.index_put((packing.further_place,), q_further)
        keys, values = (unpacked(rows, packing.row).transpose(1, 2) for rows in (k, v))
        queries = further.unflatten(0, (num_sequences, most_further)).transpose(1, 2)
        of_further = F.scaled_dot_product_attention(queries, keys, values, attn_mask=attend, dropout_p=dropout)
        of_further = of_further.transpose(1, 2).flatten(0, 1).index_select(0, packing.further_place)
        mixed = torch.cat([mixed, of_further])
    return mixed.transpose(0, 1)[None]


def unpacked(rows: Float[Tensor, "P ..."], row: Int64[Tensor, "B X"]) -> Float[Tensor, "B X ..."]:
    """Put packed rows back at their places in the padded batch; padding gets the first row."""
    at_places: Tensor = rows.index_select(0, row.flatten()).unflatten(0, row.shape)
    return at_places


def gather_positions(values_BLD: Shaped[Tensor, "B L D"], index_BR: Int64[Tensor, "B R"]) -> Shaped[Tensor, "B R D"]:
    """Return the values at some of the L positions of each sequence."""
    num_sequences, num_positions = values_BLD.shape[:2]
    start_B1 = num_positions * torch.arange(num_sequences, device=index_BR.device)[:, None]
    # copies whole rows, and unlike `gather` keeps no values for the backward pass
    rows = values_BLD.flatten(0, 1).index_select(0, (index_BR + start_B1).flatten())
    return rows.view(*index_BR.shape, *values_BLD.shape[2:])


class Unexpanded(NamedTuple):
    """The C positions before expansion, where each mask is one state: input of the first `expand_after` blocks.

    Attributes:
        positions: (token index, clone index) of every position.
        expanded_index: Index of every position in its expanded sequence.
        visible: Positions that every query of a sequence sees; None where all see all.
        origin: Which of the C positions each of the L expanded positions continues: the state of its mask, or itself.
    """

    positions: Int64[Tensor, "B C 2"]
    expanded_index: Int64[Tensor, "B C"]
    visible: Bool[Tensor, "B 1 C"] | None
    origin: Int64[Tensor, "B L"]


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
        self.num_early = config.num_early_blocks
        self.final_norm = nn.LayerNorm(config.width)
        self.recomputes = False

    def forward(
        self,
        embedded: Float[Tensor, "B C D"],
        positions: Int64[Tensor, "#B L 2"],
        visible: Bool[Tensor, "b q l"] | None,
        *,
        expanded_index: Int64[Tensor, "#B L"] | None = None,
        num_further: int = 0,
        packing: Packing | None = None,
        read: Int64[Tensor, "B R"] | None = None,
        unexpanded: Unexpanded | None = None,
    ) -> Float[Tensor, "B R D"]:
        """Return the contextual states of the positions in `read`, by default of all.

        The last block uses the other positions as keys and values only.

        Args:
            embedded: Token embeddings of the L positions; with `unexpanded`, of its C positions.
            positions: (token index, clone index) of every position.
            visible: Which keys each query sees; if q is 1, every query sees the same. None: all see all, which allows
                the fastest attention.
            expanded_index: Index of every position in its expanded sequence; None: they are in order.
            num_further: Number of positions at the end that the others do not see; only they are queries of `visible`.
            packing: Order of the positions if all sequences are packed into one row. `visible` is then (sequences,
                further states, positions), for the further states alone; None where there are none.
            read: Positions whose states are returned; with `num_further` or `packing`, all further states come last.
            unexpanded: Positions of the first `model.expand_after` blocks; None: masks are expanded from the start.
        """
        if expanded_index is None:
            expanded_index = torch.arange(positions.shape[1], device=embedded.device)[None]
        if self.position_embedding is not None:
            at_input = expanded_index if unexpanded is None else unexpanded.expanded_index
            embedded = embedded + self.position_embedding(at_input)
        rotation = None
        if self.rotation_of is not None:
            rotation = self.rotation_of(positions[..., 0], positions[..., 1], expanded_index)
        attend = None if visible is None else visible[:, None]
        layout = last = Layout(rotation, rotation, attend, num_further, packing)
        if read is not None:
            if self.rotation_of is not None:
                indices = (*positions.unbind(-1), expanded_index)
                rotation = self.rotation_of(*(index.expand(len(read), -1).gather(1, read) for index in indices))
            if visible is not None and visible.shape[1] > 1 and not num_further and packing is None:
                attend = gather_positions(visible, read)[:, None]
            last = Layout(layout.rotation, rotation, attend, num_further, packing, read)
        x_BLD = self.dropout(embedded)
        layouts = [layout] * (len(self.blocks) - 1) + [last]
        if unexpanded is not None:
            layouts[: self.num_early] = [self._before_expansion(unexpanded, packing)] * self.num_early
        for number, (block, of_block) in enumerate(zip(self.blocks, layouts, strict=True)):
            if unexpanded is not None and number == self.num_early:
                x_BLD = gather_positions(x_BLD, unexpanded.origin)
            if self.recomputes and self.training:
                x_BLD = cast(Tensor, checkpoint(block, x_BLD, of_block, use_reentrant=False))
            else:
                x_BLD = block(x_BLD, of_block)
        return cast(Tensor, self.final_norm(x_BLD))

    def _before_expansion(self, unexpanded: Unexpanded, packing: Packing | None) -> Layout:
        rotation = None
        if self.rotation_of is not None:
            token_BC, clone_BC = unexpanded.positions.unbind(-1)
            rotation = self.rotation_of(token_BC, clone_BC, unexpanded.expanded_index)
        attend = None if unexpanded.visible is None else unexpanded.visible[:, None]
        if packing is not None:
            packing = packing._replace(further_place=packing.further_place[:0])
        return Layout(rotation, rotation, attend, 0, packing)
