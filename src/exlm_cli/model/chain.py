"""Head of `alignment: chain`: states that are groups of token classes, and edges from a mask's states to the next's.

Axes: B sequences, M masks, T masks of a sequence, U = T - 1 pairs of neighbouring masks, R classes of tokens, k states,
D width, d edge width, V vocabulary.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from exlm_cli.ops.precision import without_autocast

EDGE_WIDTH = 128
"""d, numbers of which the score of an edge is a product."""
MAX_GAP = 16
"""Masks this many tokens apart or more are alike."""
_LEAST_SHARE = 1e-3
"""Share that is spread evenly over classes and over states, so that none of them is ever empty."""
_SPREAD = 2.0
"""Standard deviation of the initial scores of a token's classes."""
_EDGE_SPREAD = 0.3
_CLUSTER_ROUNDS = 30
import os
_SORT=float(os.environ.get('SORT','1'))
_STAY=float(os.environ.get('STAY','0'))


class ChainHead(nn.Module):
    """The states of a mask share its one distribution, and its DAG is a chain of masks (not in the paper).

    Token y belongs to class r with probability A[y, r] = softmax_r(v_r . norm(embedding of y) / sqrt(D)), whatever the
    context. The state h of a mask sorts the classes into k states, C[r, c] = softmax_c(b_rc + w_rc . h). So the LM
    head's distribution P of the mask falls into k parts: state c has the share Z_c = sum_y,r P(y) A[y, r] C[r, c], and
    emits P_c(y) = sum_r P(y) A[y, r] C[r, c] / Z_c. An edge from state c of a mask to state d of the next has the
    probability

        E[c, d] = softmax_d(log Z_d + q_c . k_d / sqrt(d)),   q_c = a_c * (W_q h + gap) + b_c,
                                                              k_d = a'_d * (W_k h') + b'_d,

    with the states h and h' of the two masks and a learned vector for their distance. The first mask's states have the
    probabilities Z. So one mask alone is filled as by an MLM, and if q . k were 0, every mask were.

    Args:
        width: D of the encoder.
        num_classes: R.
        num_states: k.
    """

    def __init__(self, width: int, num_classes: int, num_states: int) -> None:
        super().__init__()
        self.num_states = num_states
        self.classes = nn.Linear(width, num_classes, bias=False)
        self.sort = nn.Linear(width, num_classes * num_states)
        self.query, self.key = nn.Linear(width, EDGE_WIDTH), nn.Linear(width, EDGE_WIDTH)
        self.gap = nn.Embedding(MAX_GAP + 1, EDGE_WIDTH)
        self.stay = nn.Parameter(torch.zeros(()))
        self.query_scale, self.query_shift, self.key_scale, self.key_shift = (
            nn.Parameter(torch.empty(num_states, EDGE_WIDTH)) for _ in range(4)
        )

    def draw(self) -> None:
        """Draw the weights of classes, states and edges; the projections are drawn with the encoder's."""
        nn.init.normal_(self.classes.weight)
        nn.init.normal_(self.sort.bias, std=_SORT)
        nn.init.constant_(self.stay, _STAY)
        for weight in (self.gap.weight, self.query_scale, self.query_shift):
            nn.init.zeros_(weight)  # no edge prefers a state yet, so the model begins as an MLM
        for weight in (self.key_scale, self.key_shift):
            nn.init.normal_(weight, std=_EDGE_SPREAD)

    is_learning = True

    def start(self, share_done, embedding):
        import os
        at = float(os.environ.get("AT", "0"))
        on = share_done >= at
        if on and not self.is_learning: self.find_classes(embedding)
        self.is_learning = on

    @torch.no_grad()
    def find_classes(self, embedding_VD: Float[Tensor, "V D"]) -> None:
        """Make the classes clusters of tokens with like embeddings (spherical k-means); for a trained embedding."""
        token_VD = F.normalize(_normed(embedding_VD) - _normed(embedding_VD).mean(0), dim=-1)
        num_classes = self.classes.out_features
        # spread over the vocabulary, which is sorted by frequency or by length
        centre_RD = token_VD[torch.linspace(0, len(token_VD) - 1, num_classes).long()]
        for _ in range(_CLUSTER_ROUNDS):
            nearest_V = (token_VD @ centre_RD.t()).argmax(-1)
            sums_RD = torch.zeros_like(centre_RD).index_add(0, nearest_V, token_VD)
            centre_RD = F.normalize(torch.where(sums_RD.any(-1, keepdim=True), sums_RD, centre_RD), dim=-1)
        spread = (_normed(embedding_VD) @ centre_RD.t()).std()
        self.classes.weight.copy_(centre_RD * (math.sqrt(embedding_VD.shape[-1]) / spread))

    def membership(self, embedding_VD: Float[Tensor, "V D"]) -> Float[Tensor, "V R"]:
        """Return A, the classes of all tokens; float32, positive, rows sum to 1."""
        with without_autocast(embedding_VD):
            # a factor, not the spread of the weights: Adam's steps do not grow with the weights
            scale = _SPREAD / math.sqrt(embedding_VD.shape[-1])
            return _softmax(scale * self.classes(_normed(embedding_VD)))

    def state_shares(self, states_MD: Float[Tensor, "M D"]) -> Float[Tensor, "M R k"]:
        """Return C, the states of each mask's classes; float32, positive, rows sum to 1."""
        scores: Tensor = self.sort(states_MD)
        return _softmax(scores.float().unflatten(-1, (-1, self.num_states)))

    def forward(
        self, states_BTD: Float[Tensor, "B T D"], position_BT: Int64[Tensor, "B T"], log_size_BTk: Float[Tensor, "B T k"]
    ) -> Float[Tensor, "B U k k"]:
        """Return the log-probabilities of the next mask's states, float32.

        Args:
            states_BTD: States of the masks; anything beyond those of a sequence.
            position_BT: Their places in the input.
            log_size_BTk: log Z.
        """
        gap_BU = (position_BT[:, 1:] - position_BT[:, :-1]).clamp(0, MAX_GAP)
        query_BUd = self.query(states_BTD[:, :-1]) + self.gap(gap_BU)
        key_BUd = self.key(states_BTD[:, 1:])
        with without_autocast(states_BTD):
            query_BUkd = torch.addcmul(self.query_shift, query_BUd.float()[:, :, None], self.query_scale)
            key_BUkd = torch.addcmul(self.key_shift, key_BUd.float()[:, :, None], self.key_scale)
            scores_BUkk = query_BUkd @ key_BUkd.mT / math.sqrt(EDGE_WIDTH) + self.stay * torch.eye(self.num_states)
            return cast(Tensor, (scores_BUkk + log_size_BTk[:, 1:, None]).log_softmax(-1))


def _normed(embedding_VD: Tensor) -> Tensor:
    return F.layer_norm(embedding_VD.float(), embedding_VD.shape[-1:])


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1) * (1 - _LEAST_SHARE) + _LEAST_SHARE / scores.shape[-1]
