"""Transition head: from node states to the edges of the DAG (section 4.2).

Axes: B sequences, S nodes, D width, h transition heads.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from exlm_cli.config.sections import ModelConfig
from exlm_cli.data.batch import Batch
from exlm_cli.ops.precision import without_autocast
from exlm_cli.ops.rotary import rotate, rotation_at

_BALANCE_ENDS = 0.7
"""Share of the training at which the weight of the balance penalty, which falls linearly, reaches zero."""


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

    One head and nothing else is the paper's formula. The official code trains gated heads and learned node positions
    concatenated to the states; set `transition.heads` and `transition.position_features` for these. Our additions are
    rotary positions on Q and K (`transition.rope`), because no score of the formula depends on the place of a node, and
    a start score (`transition.start`): a learned number, added to M, that sets the edge probabilities at initialisation
    (docs/start_of_the_dag.md).

    Args:
        config: Section `model` of the recipe.
        num_states_per_mask: k.
    """

    start_score: Tensor
    balance_weight: Tensor

    def __init__(self, config: ModelConfig, num_states_per_mask: int) -> None:
        super().__init__()
        transition = config.transition
        self.num_states_per_mask = num_states_per_mask
        self.num_heads = transition.heads
        self.is_sparse = config.alignment == "sparse_dag"
        self.start = transition.start
        self.balance = transition.balance
        self.register_buffer("balance_weight", torch.tensor(transition.balance), persistent=False)
        self.rope, self.rope_base = transition.rope, config.rope_base
        feature_width = config.width * (2 if transition.position_features else 1)
        self.node_position = nn.Embedding(transition.max_nodes, config.width) if transition.position_features else None
        self.query = nn.Linear(feature_width, config.width)
        self.key = nn.Linear(feature_width, config.width)
        self.gate = nn.Linear(feature_width, transition.heads) if transition.heads > 1 else None
        if transition.start == "next_mask":
            self.start_score = nn.Parameter(torch.tensor(transition.start_strength))

    def fade_balance(self, share_done: float) -> None:
        """Set the weight of the balance penalty for a step; `share_done` is the share of training before it."""
        self.balance_weight.fill_(self.balance * max(0.0, 1.0 - share_done / _BALANCE_ENDS))

    def forward(self, states: Float[Tensor, "B S D"], batch: Batch) -> Float[Tensor, "B S S"]:
        """Return log E[v, u] in float32: rows are log-probabilities over the allowed u > v, -inf elsewhere.

        A row with no allowed edge (EOS, padding) is -inf throughout and its gradient is zero.

        Args:
            states: States at the nodes of `batch`.
            batch: Its node fields give the nodes' masks, clones and places.
        """
        features = states
        if self.node_position is not None:
            index = torch.arange(states.shape[1], device=states.device)
            features = torch.cat([states, self.node_position(index).expand_as(states)], dim=-1)
        if batch.is_even:  # nodes have the same masks in all sequences, so one row serves them all
            alike = ("node_mask", "state_lengths")
            batch = replace(batch, **{name: getattr(batch, name)[:1] for name in alike})
        allowed_bSS = allowed_edges(batch.node_mask, batch.state_lengths, is_sparse=self.is_sparse)
        query_BShd = self.query(features).unflatten(-1, (self.num_heads, -1))
        key_BShd = self.key(features).unflatten(-1, (self.num_heads, -1))
        # 16 bits round log E by up to a fifth, and so TF32 by a fiftieth (docs/lab_notes/gpu.md)
        with without_autocast(states):
            log_heads_BhSS = self._log_heads(query_BShd.float(), key_BShd.float(), allowed_bSS, batch)
        if self.gate is None:
            return log_heads_BhSS[:, 0]
        log_gate_BhS1 = F.log_softmax(self.gate(features).float(), dim=-1).transpose(1, 2)[..., None]
        # mixed before the mask is applied: logsumexp over heads that are all -inf has a NaN gradient
        mixed = (log_heads_BhSS.masked_fill(~allowed_bSS[:, None], 0.0) + log_gate_BhS1).logsumexp(dim=1)
        return mixed.masked_fill(~allowed_bSS, -math.inf)

    def _log_heads(self, query: Tensor, key: Tensor, allowed: Tensor, batch: Batch) -> Float[Tensor, "B h S S"]:
        """Return log E of every head."""
        if self.rope == "nodes":
            places_BS = node_places(batch.node_mask, batch.state_lengths, self.num_states_per_mask)
            rotation = rotation_at(places_BS[..., None], (query.shape[-1],), self.rope_base, query.dtype)
            (query,), (key,) = (rotate(heads[..., None, :, :], rotation, 1) for heads in (query, key))
        scores_BhSS = query.transpose(1, 2) @ key.transpose(1, 2).mT / math.sqrt(query.shape[-1])
        if self.start != "formula":
            scores_BhSS = scores_BhSS + self._start_bias(batch)[:, None]
        return _masked_log_softmax(scores_BhSS, allowed[:, None])

    def _start_bias(self, batch: Batch) -> Float[Tensor, "B S S"]:
        """Return the start score of every edge: the log-odds of the next mask."""
        k, node_mask, lengths_B1 = self.num_states_per_mask, batch.node_mask, batch.state_lengths[:, None]
        order_BS = mask_order(node_mask, batch.state_lengths, k)
        is_next = order_BS[:, None, :] == order_BS[:, :, None] + 1
        # counted, not summed over (B, S, S): BOS and every mask but the last come before k nodes, the last before EOS
        masks_left_BS = (lengths_B1 - 2) // k - order_BS
        num_next_BS = torch.where(masks_left_BS > 0, k, masks_left_BS == 0)
        index_S = torch.arange(node_mask.shape[1], device=node_mask.device)
        num_later_BS = lengths_B1 - 1 - index_S
        if self.is_sparse:
            num_later_BS = num_later_BS - torch.where(node_mask >= 0, k - 1 - (index_S - 1) % k, 0)
        # the odds are those of all the next states against all other nodes, however many masks a sequence has
        level = ((num_later_BS - num_next_BS).clamp(min=1) / num_next_BS.clamp(min=1)).log()[..., None]
        return torch.where(is_next, level + self.start_score.float(), 0.0)


def mask_order(
    node_mask: Int64[Tensor, "B S"], state_lengths: Int64[Tensor, " B"], num_states_per_mask: int
) -> Int64[Tensor, "B S"]:
    """Return the ordinal of each node's mask: 1..T, 0 for BOS and padding, T + 1 for EOS."""
    index = torch.arange(node_mask.shape[1], device=node_mask.device)
    num_masks = (state_lengths - 2) // num_states_per_mask
    is_end = index == state_lengths[:, None] - 1
    return torch.where(is_end, num_masks[:, None] + 1, node_mask + 1)


def node_places(
    node_mask: Int64[Tensor, "B S"], state_lengths: Int64[Tensor, " B"], num_states_per_mask: int
) -> Float[Tensor, "B S"]:
    """Return where `transition.rope: nodes` puts each node: i + (c - (k + 1) / 2) / k for clone c of the i-th mask.

    So the k nodes of a mask lie evenly around its ordinal; BOS is at 0 and EOS at T + 1.
    """
    k = num_states_per_mask
    clone_S = (torch.arange(node_mask.shape[1], device=node_mask.device) - 1) % k + 1
    offset_BS = torch.where(node_mask >= 0, (clone_S - (k + 1) / 2) / k, 0.0)
    return mask_order(node_mask, state_lengths, k) + offset_BS


def _masked_log_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Return the log-softmax over allowed entries, -inf elsewhere; rows without any have zero gradient, not NaN."""
    log_probs = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).log_softmax(-1)
    return log_probs.masked_fill(~allowed, -math.inf)
