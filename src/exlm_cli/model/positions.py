"""Rotary positions by the scheme of the recipe, and attention masks: which positions see which.

Axes: B sequences, L positions to rotate, A position axes, X expanded positions, F further states, S nodes.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int64, Real
from torch import Tensor

from exlm_cli.config.sections import ModelConfig
from exlm_cli.data.batch import Batch
from exlm_cli.ops.rotary import rotation_at


class RotaryPositions:
    """Rotation of heads by token index and clone index, as `model.rope` says; `none` counts as 2d (transition head).

    `2d` rotates by both indices, each with its own entries of a head (section 4.2). `fractional` rotates all entries by
    one position, i + (c - (k + 1) / 2) / k for clone c of the [MASK] at index i. `1d` counts along the expanded
    sequence.

    Args:
        config: Section `model` of the recipe.
        num_states_per_mask: k.
        head_width: H of the heads to rotate.
    """

    def __init__(self, config: ModelConfig, num_states_per_mask: int, head_width: int) -> None:
        self.scheme = config.rotary_scheme
        self.base = config.rope_base
        self.num_states_per_mask = num_states_per_mask
        self.axis_widths = config.rotary_widths(head_width)

    def __call__(
        self, index: Int64[Tensor, "B L"], clone: Int64[Tensor, "B L"], expanded_index: Int64[Tensor, "#B L"]
    ) -> Tensor:
        """Return the rotation of every position.

        Args:
            index: Index before expansion.
            clone: 1..k for the clones of a [MASK], else 0.
            expanded_index: Index after expansion, the only one that `1d` uses.
        """
        positions: Real[Tensor, "B L A"]
        if self.scheme == "2d":
            positions = torch.stack([index, clone], dim=-1)
        elif self.scheme == "1d":
            positions = expanded_index[..., None]
        else:
            k = self.num_states_per_mask
            positions = (index + torch.where(clone > 0, (clone - (k + 1) / 2) / k, 0.0))[..., None]
        return rotation_at(positions, self.axis_widths, self.base)


def visible_positions(batch: Batch, *, hides_further_states: bool) -> Bool[Tensor, "B q X"] | None:
    """Return which of X expanded positions each query sees; if q is 1, every query sees the same. None: all see all.

    Args:
        batch: Its padding is never seen.
        hides_further_states: The states of a mask beyond the first are seen by each other alone
            (`model.mask_attention: first`).
    """
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    is_token = index < batch.lengths[:, None, None] if batch.is_padded else None
    if not hides_further_states:
        return is_token
    token_BX, clone_BX = batch.positions.unbind(-1)
    is_own_BXX = (token_BX[:, :, None] == token_BX[:, None, :]) & (clone_BX > 1)[:, :, None]
    visible_BXX: Tensor = (clone_BX <= 1)[:, None, :] | is_own_BXX
    return visible_BXX if is_token is None else visible_BXX & is_token


def visible_to_further(batch: Batch, num_states_per_mask: int) -> Bool[Tensor, "B F X"]:
    """Return which of X positions each of F further states of a sequence sees, as `visible_positions` does."""
    k = num_states_per_mask
    index_BF = batch.node_index[:, 1:-1].unflatten(1, (-1, k))[..., 1:].flatten(1)
    token_BX, clone_BX = batch.positions.unbind(-1)
    token_BF = token_BX.gather(1, index_BF)
    is_own_BFX = (token_BF[:, :, None] == token_BX[:, None, :]) & (clone_BX > 1)[:, None, :]
    is_token_BX = torch.arange(token_BX.shape[1], device=token_BX.device) < batch.lengths[:, None]
    visible: Tensor = ((clone_BX <= 1)[:, None, :] | is_own_BFX) & is_token_BX[:, None, :]
    return visible


class ContextFirst(NamedTuple):
    """Order of positions with the context first and the further states of masks after it.

    In a sequence with fewer masks than another, [CLS] fills the places of missing further states; nothing reads them.

    Attributes:
        order: Position at each place.
        num_further: Positions that come last.
        visible: Which places each of the F further states sees.
        read: Places of the nodes: those in the context, and then all further states.
        node: Where each node is in `read`, the same for all sequences.
    """

    order: Int64[Tensor, "B X"]
    num_further: int
    visible: Bool[Tensor, "1 F X"]
    read: Int64[Tensor, "B S"]
    node: Int64[Tensor, " S"]


def context_first(batch: Batch, num_states_per_mask: int) -> ContextFirst:
    """Put the context first, so that only further states need an attention mask (`model.mask_attention: first`).

    Context positions attend to the context alone, densely. Requires `batch.has_even_context` and k > 1.
    """
    k, further_each = num_states_per_mask, num_states_per_mask - 1
    num_context, most_masks = batch.first_index.shape[1], batch.target_ids.shape[1]
    num_further = further_each * most_masks
    further_BF = batch.node_index[:, 1:-1].unflatten(1, (-1, k))[..., 1:].flatten(1)
    index_X = torch.arange(num_context + num_further, device=further_BF.device)
    mask_X = (index_X - num_context).div(further_each, rounding_mode="floor")  # below 0 in the context
    visible_FX = (mask_X < 0) | (mask_X == mask_X[num_context:, None])

    # BOS is node 0, the first state of mask t is node 1 + k t, and after T masks EOS is where that of mask T would be;
    # the place of each in the context is its token's index before expansion
    token_BX = batch.positions[..., 0]
    read_context_BC = token_BX.gather(1, F.pad(batch.node_index[:, 1::k], (1, 0)))
    read_further_BF = index_X[num_context:].expand(len(token_BX), -1)
    before_S = torch.arange(batch.node_index.shape[1], device=index_X.device) - 1
    mask_S, clone_S = before_S.div(k, rounding_mode="floor"), before_S.remainder(k)
    further_S = most_masks + 1 + further_each * mask_S + clone_S
    row_S = torch.where((clone_S == 0) | (mask_S < 0), 1 + mask_S, further_S)
    return ContextFirst(
        torch.cat([batch.first_index, further_BF], dim=1),
        num_further,
        visible_FX[None],
        torch.cat([read_context_BC, read_further_BF], dim=1),
        row_S,
    )
