"""Head of `alignment: chain`: states that are groups of token classes, edges to the next mask's, and what a token says
of the next.

Axes: B sequences, M masks, T masks of a sequence, U = T - 1 pairs of neighbouring masks, R classes of tokens, k states,
D width, d edge width, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from exlm_cli.config.sections import CHAIN_EDGE_WIDTH, CHAIN_MAX_GAP, ModelConfig
from exlm_cli.ops.precision import without_autocast

BALANCE = 0.1
"""Weight of the penalty on states that are used unevenly, nats a target. Without it the states wake later."""
_LEAST_SHARE = 1e-3
"""Share that is spread evenly over classes and over states, so that none of them is ever empty."""
_SPREAD = 2.0
"""Standard deviation of the initial scores of a token's classes."""
_SORT_SPREAD = 0.1
"""Standard deviation of the initial scores of a class's states: almost even, so that each state may become anything."""
_STAY = 4.0
"""Initial log-odds of keeping the state."""
_EDGE_SPREAD = 0.3
_CLUSTER_ROUNDS = 30
_ALONE_EVERY = 6
"""In training one mask of so many reads nothing, so that the LM head learns to fill it alone."""


class ChainHead(nn.Module):
    """The states of a mask share its one distribution, and its DAG is a chain of masks (not in the paper).

    Token y belongs to class r with probability A[y, r] = softmax_r(v_r . norm(embedding of y) / sqrt(D)), whatever the
    context. The state h of a mask sorts the classes into k states, C[r, c] = softmax_c(b_rc + w_rc . h). So a
    distribution P of the mask's token falls into k parts: state c has the share Z_c = sum_y,r P(y) A[y, r] C[r, c], and
    emits P_c(y) = sum_r P(y) A[y, r] C[r, c] / Z_c. An edge from state c of a mask to state d of the next has the
    probability

        E[c, d] = softmax_d(log Z_d + q_c . k_d / sqrt(d) + s [c = d]),   q_c = a_c * (W_q h + gap) + b_c,
                                                                          k_d = a'_d * (W_k h') + b'_d,

    with the states h and h' of the two masks and a learned vector for their distance. The first mask's P is the LM
    head's, and its states have the probabilities Z: one mask alone is filled as by an MLM. At any other mask the LM
    head's features change by

        g W_o gelu(W_p h + W_n h' + W_t norm(embedding of y) + gap'),

    where y is the token at the mask before and g a learned number for the distance. Each path visits every mask once,
    so that y is the target before on all of them, and the sum over paths stays one pass. In training some masks read
    nothing (`reads`).

    An encoder that has not learned yet makes poor classes, which last. So the model begins as an MLM, and the DAG when
    `model.chain.starts_at` of the steps are done; then classes are clusters of the embeddings.

    Args:
        config: Section `model` of the recipe.
        num_states: k.

    Attributes:
        is_learning: Whether the DAG takes part in training.
    """

    same_state: Tensor
    is_learning = False

    def __init__(self, config: ModelConfig, num_states: int) -> None:
        super().__init__()
        width, num_classes = config.width, config.chain.num_classes
        self.num_states, self.starts_at = num_states, config.chain.starts_at
        self.classes = nn.Linear(width, num_classes, bias=False)
        self.states = nn.Linear(width, num_classes * num_states)
        self.query, self.key = nn.Linear(width, CHAIN_EDGE_WIDTH), nn.Linear(width, CHAIN_EDGE_WIDTH)
        self.gap = nn.Embedding(CHAIN_MAX_GAP + 1, CHAIN_EDGE_WIDTH)
        self.read_states, self.read_token = nn.Linear(2 * width, width), nn.Linear(width, width, bias=False)
        self.read_gap = nn.Embedding(CHAIN_MAX_GAP + 1, width)
        self.read_amount = nn.Embedding(CHAIN_MAX_GAP + 1, 1)
        self.change = nn.Linear(width, width)
        self.stay = nn.Parameter(torch.zeros(()))
        self.register_buffer("same_state", torch.eye(num_states), persistent=False)
        self.query_scale, self.query_shift, self.key_scale, self.key_shift = (
            nn.Parameter(torch.empty(num_states, CHAIN_EDGE_WIDTH)) for _ in range(4)
        )

    def draw(self) -> None:
        """Draw the weights of classes, states and edges; the projections are drawn with the encoder's."""
        nn.init.zeros_(self.classes.weight)  # until they are found
        nn.init.normal_(self.states.bias, std=_SORT_SPREAD)
        nn.init.constant_(self.stay, _STAY)
        for weight in (self.gap.weight, self.query_scale, self.query_shift):
            nn.init.zeros_(weight)  # all that an edge prefers at first is its own state
        for weight in (self.read_gap.weight, self.change.weight):
            nn.init.zeros_(weight)  # at first a token says nothing of the next
        with torch.no_grad():  # and later the less, the farther off it is
            self.read_amount.weight.copy_(1 / torch.arange(CHAIN_MAX_GAP + 1).clamp(min=1)[:, None])
        for weight in (self.key_scale, self.key_shift):
            nn.init.normal_(weight, std=_EDGE_SPREAD)

    def begin_step(self, share_done: float, embedding_VD: Float[Tensor, "V D"]) -> None:
        """Find the classes at the first step of the DAG; `share_done` is the share of training before it."""
        if self.is_learning or share_done < self.starts_at:
            return
        self.is_learning = True
        if not self.classes.weight.any():  # a run that was stopped after this step has them
            self.find_classes(embedding_VD)

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

    def sort(self, states_MD: Float[Tensor, "M D"]) -> Float[Tensor, "M R k"]:
        """Return C, the states of each mask's classes; float32, positive, rows sum to 1."""
        scores_MRk: Tensor = self.states(states_MD).unflatten(-1, (-1, self.num_states))
        with without_autocast(states_MD):
            return _softmax(scores_MRk.float())

    def feature_changes(
        self,
        states_BTD: Float[Tensor, "B T D"],
        position_BT: Int64[Tensor, "B T"],
        token_BTD: Float[Tensor, "B T D"],
    ) -> Float[Tensor, "B T D"]:
        """Return what the token of the mask before changes in the LM head's features; zero at the first mask.

        Args:
            states_BTD: As for `edge_scores`.
            position_BT: As for `edge_scores`.
            token_BTD: Embeddings of the masks' tokens.
        """
        pair_BUX = torch.cat([states_BTD[:, :-1], states_BTD[:, 1:]], -1)
        read_BUD = self.read_states(pair_BUX) + self.read_token(_normed(token_BTD[:, :-1]).to(pair_BUX.dtype))
        gap_BU = _gaps(position_BT)
        change_BUD: Tensor = self.read_amount(gap_BU) * self.change(F.gelu(read_BUD + self.read_gap(gap_BU)))
        return F.pad(change_BUD, (0, 0, 1, 0))

    def edge_scores(
        self, states_BTD: Float[Tensor, "B T D"], position_BT: Int64[Tensor, "B T"]
    ) -> Float[Tensor, "B U k k"]:
        """Return what E adds to log Z before the softmax, float32.

        Args:
            states_BTD: States of the masks; anything beyond those of a sequence.
            position_BT: Their places in the input.
        """
        query_BUd = self.query(states_BTD[:, :-1]) + self.gap(_gaps(position_BT))
        key_BUd = self.key(states_BTD[:, 1:])
        with without_autocast(states_BTD):
            query_BUkd = torch.addcmul(self.query_shift, query_BUd.float()[:, :, None], self.query_scale)
            key_BUkd = torch.addcmul(self.key_shift, key_BUd.float()[:, :, None], self.key_scale)
            return query_BUkd @ key_BUkd.mT / math.sqrt(CHAIN_EDGE_WIDTH) + self.stay * self.same_state

    def forward(
        self,
        states_BTD: Float[Tensor, "B T D"],
        position_BT: Int64[Tensor, "B T"],
        log_size_BTk: Float[Tensor, "B T k"],
    ) -> Float[Tensor, "B U k k"]:
        """Return the log-probabilities of the next mask's states, float32; `log_size_BTk` is log Z."""
        scores_BUkk = self.edge_scores(states_BTD, position_BT)
        return (scores_BUkk + log_size_BTk[:, 1:, None]).log_softmax(-1)


def zero_of(module: nn.Module) -> Float[Tensor, ""]:
    """Return 0 with a gradient of 0 for every weight that learns: ranks exchange all gradients in each step."""
    return torch.stack([0.0 * parameter.sum() for parameter in module.parameters()]).sum()


def reads(sample_index_B: Int64[Tensor, " B"], mask_index_T: Int64[Tensor, " T"]) -> Bool[Tensor, "B T"]:
    """Return whether a mask reads the target before in training: the same on any number of ranks."""
    return (sample_index_B[:, None] + mask_index_T) % _ALONE_EVERY != 0


def _gaps(position_BT: Tensor) -> Int64[Tensor, "B U"]:
    return (position_BT[:, 1:] - position_BT[:, :-1]).clamp(0, CHAIN_MAX_GAP)


def _normed(embedding_VD: Tensor) -> Tensor:
    return F.layer_norm(embedding_VD.float(), embedding_VD.shape[-1:])


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1) * (1 - _LEAST_SHARE) + _LEAST_SHARE / scores.shape[-1]
