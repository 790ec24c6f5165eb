"""Transition head: from node states to the edges of the DAG (section 4.2).

Axes: B sequences, S nodes, D width, h transition heads.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from exlm_cli.config.sections import ModelConfig


def allowed_edges(
    node_mask: Int64[Tensor, "B S"], state_lengths: Int64[Tensor, " B"], *, is_sparse: bool
) -> Bool[Tensor, "B S S"]:
    """Return where an edge v -> u may exist: u > v, both real nodes, and for `sparse_dag` not inside one mask.

    Args:
        node_mask: Which mask a node belongs to; -1 for BOS, EOS and padding.
        state_lengths: Nodes of each sequence.
        is_sparse: Forbid edges between the states of one [MASK] (App. Q.3).
    """
    num_nodes = node_mask.shape[1]
    index = torch.arange(num_nodes, device=node_mask.device)
    is_real = index < state_lengths[:, None]
    allowed = (index[:, None] < index) & is_real[:, None, :] & is_real[:, :, None]
    if is_sparse:
        is_same_mask = (node_mask[:, :, None] == node_mask[:, None, :]) & (node_mask[:, :, None] >= 0)
        allowed = allowed & ~is_same_mask
    return allowed


class TransitionHead(nn.Module):
    """E = softmax(Q K' / sqrt(D) + M); with several heads a mixture of such softmaxes, weighted by a gate per node.

    One head is the paper's formula. The official code trains gated heads and learned node positions concatenated to the
    states; set `transition.heads` and `transition.position_features` for these. `transition.lane_bias` is our addition:
    two learned scalars, added to M, that start the DAG as k parallel lanes through the masks. Without it a DAG whose
    clones are alike collapses onto one path before it can learn (docs/results.md).

    Args:
        config: Section `model` of the recipe.
        num_states_per_mask: k.
    """

    def __init__(self, config: ModelConfig, num_states_per_mask: int) -> None:
        super().__init__()
        transition = config.transition
        self.num_states_per_mask = num_states_per_mask
        self.num_heads = transition.heads
        self.is_sparse = config.alignment == "sparse_dag"
        self.detach_states = transition.detach_states
        feature_width = config.width * (2 if transition.position_features else 1)
        self.node_position = nn.Embedding(transition.max_nodes, config.width) if transition.position_features else None
        self.query = nn.Linear(feature_width, config.width)
        self.key = nn.Linear(feature_width, config.width)
        self.gate = nn.Linear(feature_width, transition.heads) if transition.heads > 1 else None
        self.lane_scores = nn.Parameter(torch.full((2,), transition.lane_bias)) if transition.lane_bias else None

    def forward(
        self,
        states: Float[Tensor, "B S D"],
        node_mask: Int64[Tensor, "B S"],
        state_lengths: Int64[Tensor, " B"],
    ) -> Float[Tensor, "B S S"]:
        """Return log E[v, u] in float32: rows are log-softmaxed over the allowed u > v, -inf elsewhere.

        A row with no allowed edge (EOS, padding) is -inf throughout and its gradient is zero.
        """
        features = states.detach() if self.detach_states else states
        if self.node_position is not None:
            index = torch.arange(states.shape[1], device=states.device)
            features = torch.cat([features, self.node_position(index).expand_as(states)], dim=-1)
        allowed_BSS = allowed_edges(node_mask, state_lengths, is_sparse=self.is_sparse)
        query_BhSd = self.query(features).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key_BhSd = self.key(features).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        with torch.autocast(states.device.type, enabled=False):  # 16 bits round log E by up to a tenth
            scores_BhSS = query_BhSd.float() @ key_BhSd.float().mT / math.sqrt(query_BhSd.shape[-1])
        if self.lane_scores is not None:
            scores_BhSS = scores_BhSS + self._lanes(node_mask, state_lengths)[:, None]
        log_heads_BhSS = _masked_log_softmax(scores_BhSS, allowed_BSS[:, None])
        if self.gate is None:
            return log_heads_BhSS[:, 0]
        log_gate_BhS1 = F.log_softmax(self.gate(features).float(), dim=-1).transpose(1, 2)[..., None]
        # mixed before the mask is applied: logsumexp over heads that are all -inf has a NaN gradient
        mixed = (log_heads_BhSS.masked_fill(~allowed_BSS[:, None], 0.0) + log_gate_BhS1).logsumexp(dim=1)
        return mixed.masked_fill(~allowed_BSS, -math.inf)

    def _lanes(self, node_mask: Tensor, state_lengths: Tensor) -> Float[Tensor, "B S S"]:
        assert self.lane_scores is not None
        is_next, is_same_lane = next_mask_edges(node_mask, state_lengths, self.num_states_per_mask)
        return (self.lane_scores[0] * is_next + self.lane_scores[1] * is_same_lane).float()


def next_mask_edges(
    node_mask: Int64[Tensor, "B S"], state_lengths: Int64[Tensor, " B"], num_states_per_mask: int
) -> tuple[Bool[Tensor, "B S S"], Bool[Tensor, "B S S"]]:
    """Return where an edge leads to the next mask, and where it leads to the same clone of the next mask.

    BOS comes before the first mask and EOS after the last; an edge to or from them has no clone to keep.

    Args:
        node_mask: Which mask a node belongs to; -1 for BOS, EOS and padding.
        state_lengths: Nodes of each sequence.
        num_states_per_mask: k.
    """
    index = torch.arange(node_mask.shape[1], device=node_mask.device)
    is_end = index == state_lengths[:, None] - 1
    num_masks = (state_lengths - 2) // num_states_per_mask
    order = torch.where(is_end, num_masks[:, None], node_mask)
    is_next = order[:, None, :] == order[:, :, None] + 1
    clone = (index - 1) % num_states_per_mask
    is_inner = node_mask >= 0
    is_same_clone = (clone[:, None] == clone) & is_inner[:, :, None] & is_inner[:, None, :]
    return is_next, is_next & is_same_clone


def _masked_log_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Return the log-softmax over allowed entries, -inf elsewhere; rows without any have zero gradient, not NaN."""
    is_dead_row = ~allowed.any(-1, keepdim=True)
    log_probs = scores.masked_fill(~(allowed | is_dead_row), -math.inf).log_softmax(-1)
    return log_probs.masked_fill(~allowed, -math.inf)
