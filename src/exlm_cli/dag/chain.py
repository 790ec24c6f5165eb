"""Fillings of one input under `alignment: chain`: what each mask emits given the token before, and the search.

The search is a beam over token prefixes, as `search` is, and each prefix has its forward vector over the states of its
last mask. A prefix bounds all its completions, since what follows has at most probability 1. So the result is proven
if the most probable prefix that was cut is no more probable than the last filling of the list.

Axes: T masks, k states of each, W prefixes or N sequences of tokens, D width, V vocabulary, R classes.
"""

from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from exlm_cli.dag.allowed import Allowed
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.ops.chain import Chain, best_chain, chain_nll

MAX_CELLS = 50_000_000
"""Limit on the (prefix, token) pairs of all masks in one pass of the search: a second or two on one core."""
_FIRST_WIDTH = 8
_DRAWN_ROWS = 256
_ROUNDING = 1e-6


class ChainNumbers(NamedTuple):
    """States and edges of a chain whose masks follow the tokens of one sequence, log-probabilities, float64.

    Attributes:
        emit: (T, k, V) of tokens by the states of each mask.
        start: (k,) of the first mask's states.
        next: (T - 1, k, k) of the next mask's states.
    """

    emit: Float[Tensor, "T k V"]
    start: Float[Tensor, " k"]
    next: Float[Tensor, "U k k"]


class ChainOfInput:
    """The masks of one input, on the model's device.

    Args:
        model: With a chain head.
        states_TD: States of its masks.
        position_T: Their places in the input.
        membership_VR: The classes of all tokens.
        own_log_probs: (T, V) log-probabilities of tokens at each mask by itself: those of the LM head.
    """

    def __init__(
        self,
        model: ExlmModel,
        states_TD: Float[Tensor, "T D"],
        position_T: Int64[Tensor, " T"],
        membership_VR: Float[Tensor, "V R"],
        own_log_probs: Float[Tensor, "T V"],
    ) -> None:
        assert model.chain_head is not None, "`alignment` is not chain"
        self._model, self._head = model, model.chain_head
        self._states_TD, self._position_T, self._member_VR = states_TD, position_T, membership_VR
        self.own_log_probs = own_log_probs
        with torch.inference_mode():
            self._features_TD = model.lm_head(states_TD)
            self._sort_TRk = self._head.sort(states_TD)
            self._scores_Ukk = self._head.edge_scores(states_TD[None], position_T[None])[0].double()

    @property
    def num_masks(self) -> int:
        """T."""
        return len(self._states_TD)

    @torch.inference_mode()
    def score(self, tokens_NT: Int64[Tensor, "N T"]) -> tuple[Float[Tensor, " N"], Int64[Tensor, "N T"]]:
        """Return the log-probabilities of sequences of tokens, float64 nats, and the states of their best paths."""
        tokens_NT = tokens_NT.to(self._states_TD.device)
        before_NT = F.pad(tokens_NT[:, :-1], (1, 0))
        shares, edges, emits = [], [], []
        for t in range(self.num_masks):
            log_prob_NV = self._log_probs_after(t, before_NT[:, t])
            log_size_Nk = self._log_sizes(t, log_prob_NV)
            of_token_Nk = (self._member_VR[tokens_NT[:, t]] @ self._sort_TRk[t]).log().double()
            log_prob_N = log_prob_NV.gather(1, tokens_NT[:, t, None]).double()
            emits.append(log_prob_N + of_token_Nk - log_size_Nk)
            shares.append(log_size_Nk)
            if t:
                edges.append(self._log_edges(t, log_size_Nk))
        num_states = self._sort_TRk.shape[2]
        no_edges = torch.zeros(len(tokens_NT), 0, num_states, num_states, dtype=torch.float64, device=tokens_NT.device)
        log_next_NUkk = torch.stack(edges, 1) if edges else no_edges
        lengths_N = torch.full((len(tokens_NT),), self.num_masks, device=tokens_NT.device)
        chain = Chain(torch.stack(shares, 1), log_next_NUkk, torch.stack(emits, 1), lengths_N)
        return -chain_nll(chain), best_chain(chain)

    @torch.inference_mode()
    def numbers(self, tokens_T: Int64[Tensor, " T"]) -> ChainNumbers:
        """Return states and edges where each mask follows the token before of one sequence."""
        tokens_T = tokens_T.to(self._states_TD.device)
        emits, edges, start_k = [], [], torch.empty(0)
        for t in range(self.num_masks):
            log_prob_1V = self._log_probs_after(t, tokens_T[None, max(t - 1, 0)])
            log_part_kV = log_prob_1V.double() + (self._sort_TRk[t].double().T @ self._member_VR.double().T).log()
            log_size_k = log_part_kV.logsumexp(-1)
            emits.append(log_part_kV - log_size_k[:, None])
            if t:
                edges.append(self._log_edges(t, log_size_k[None])[0])
            else:
                start_k = log_size_k
        no_edges = torch.empty(0, len(start_k), len(start_k), dtype=torch.float64)
        return ChainNumbers(torch.stack(emits).cpu(), start_k.cpu(), torch.stack(edges).cpu() if edges else no_edges)

    @torch.inference_mode()
    def best(
        self, wanted: int, allowed: Allowed | None = None, *, seeks_proof: bool = True
    ) -> tuple[list[tuple[int, ...]], bool]:
        """Return the `wanted` most probable sequences of T tokens, best first, and whether that is proven.

        Fewer where no more have a probability above zero, or where the search meets its limit. With `allowed`, those
        of such tokens alone. Without `seeks_proof` the narrowest beam is enough.
        """
        width, log_known = max(_FIRST_WIDTH, 2 * wanted), -torch.inf
        while True:
            log_prob_N, tokens_NT, log_cut = self._beam(width, log_known, allowed)
            log_prob_N, tokens_NT = log_prob_N[:wanted], tokens_NT[:wanted]
            log_known = float(log_prob_N[-1]) if len(log_prob_N) == wanted else -torch.inf
            is_proven = log_cut <= log_known + _ROUNDING
            width *= 4
            is_limit = not seeks_proof or width * len(self._member_VR) * self.num_masks > MAX_CELLS
            if is_proven or is_limit:
                return [tuple(tokens) for tokens in tokens_NT.tolist()], is_proven

    def _beam(self, width: int, log_known: float, allowed: Allowed | None) -> tuple[Tensor, Tensor, float]:
        """Return log-probabilities and tokens of complete sequences, best first, and the most probable cut prefix.

        At least as many as are wanted have log-probability `log_known` or more, so other prefixes are dropped.
        """
        device, num_states = self._states_TD.device, self._sort_TRk.shape[2]
        tokens_WT = torch.empty(1, 0, dtype=torch.long, device=device)
        log_prefix_W = torch.zeros(1, dtype=torch.float64, device=device)
        log_alpha_Wk = torch.zeros(1, num_states, dtype=torch.float64, device=device)
        log_cut = -torch.inf
        states = [None if allowed is None else allowed.start]
        for t in range(self.num_masks):
            before_W = tokens_WT[:, -1] if t else torch.zeros(1, dtype=torch.long, device=device)
            log_prob_WV = self._log_probs_after(t, before_W)
            log_size_Wk = self._log_sizes(t, log_prob_WV)
            if t:
                log_reach_Wk = (log_alpha_Wk[:, :, None] + self._log_edges(t, log_size_Wk)).logsumexp(1)
            else:
                log_reach_Wk = log_size_Wk
            # what the states that were reached add to the token's own probability, by its classes
            factor_WR = (log_reach_Wk - log_size_Wk - log_prefix_W[:, None]).exp().float() @ self._sort_TRk[t].T
            log_next_WV = log_prob_WV + (factor_WR @ self._member_VR.T).log() + log_prefix_W[:, None].float()
            if allowed is not None:
                log_next_WV = log_next_WV.masked_fill(~_allowed_after(allowed, states, t, log_next_WV), -torch.inf)
            flat = log_next_WV.flatten()
            best = flat.topk(min(width + 1, len(flat)))
            if len(flat) > width:
                log_cut = max(log_cut, float(best.values[-1]))
            is_kept = (best.values[:width] >= log_known - 1e-4) & (best.values[:width] > -torch.inf)
            cell_W = best.indices[:width][is_kept]
            row_W, token_W = cell_W // log_next_WV.shape[1], cell_W % log_next_WV.shape[1]
            if allowed is not None:
                columns = allowed.tokens.searchsorted(token_W.cpu().numpy())
                pairs = zip(row_W.tolist(), columns.tolist(), strict=True)
                states = [allowed.step(states[row], t, column) for row, column in pairs]
            of_token_Wk = (self._member_VR[token_W] @ self._sort_TRk[t]).log() + log_prob_WV[row_W, token_W, None]
            log_alpha_Wk = (log_reach_Wk - log_size_Wk)[row_W] + of_token_Wk.double()
            log_prefix_W = log_alpha_Wk.logsumexp(1)
            tokens_WT = torch.cat([tokens_WT[row_W], token_W[:, None]], 1)
        order = log_prefix_W.argsort(descending=True, stable=True)
        return log_prefix_W[order], tokens_WT[order], log_cut

    @torch.inference_mode()
    def draw(self, n: int, temperature: float, draw: np.random.Generator) -> Int64[Tensor, "N T"]:
        """Return n sequences of tokens: of each mask a state, at its probability after the one before, then a token.

        Tokens of a state are drawn from P^(1 / temperature), normalised.
        """
        return torch.cat([self._draw(min(_DRAWN_ROWS, n - at), temperature, draw) for at in range(0, n, _DRAWN_ROWS)])

    def _draw(self, n: int, temperature: float, draw: np.random.Generator) -> Int64[Tensor, "N T"]:
        device = self._states_TD.device
        row_N = torch.arange(n, device=device)
        token_N = state_N = torch.zeros(n, dtype=torch.long, device=device)
        drawn = []
        for t in range(self.num_masks):
            log_prob_NV = self._log_probs_after(t, token_N)
            log_size_Nk = self._log_sizes(t, log_prob_NV)
            log_state_Nk = self._log_edges(t, log_size_Nk)[row_N, state_N] if t else log_size_Nk
            state_N = _drawn(log_state_Nk, draw)
            log_of_state_NV = log_prob_NV + (self._sort_TRk[t].T[state_N] @ self._member_VR.T).log()
            token_N = _drawn(log_of_state_NV / temperature, draw)
            drawn.append(token_N)
        return torch.stack(drawn, 1)

    def _log_probs_after(self, mask: int, before_W: Int64[Tensor, " W"]) -> Float[Tensor, "W V"]:
        """Return log-probabilities of tokens at a mask given the token at the one before; one row at the first."""
        if mask == 0:
            return self.own_log_probs[:1].expand(len(before_W), -1)
        known, inverse_W = before_W.unique(return_inverse=True)
        pair = slice(mask - 1, mask + 1)
        token_X2D = F.embedding(known, self._model.decoder_weight)[:, None].expand(-1, 2, -1)
        change_X2D = self._head.feature_changes(
            self._states_TD[None, pair].expand(len(known), -1, -1),
            self._position_T[None, pair].expand(len(known), -1),
            token_X2D,
        )
        return self._log_probs(self._features_TD[mask] + change_X2D[:, 1])[inverse_W]

    def _log_probs(self, features_XD: Tensor) -> Float[Tensor, "X V"]:
        logits_XV = F.linear(features_XD, self._model.decoder_weight, self._model.decoder_bias)
        return logits_XV.float().log_softmax(-1)

    def _log_sizes(self, mask: int, log_prob_WV: Tensor) -> Float[Tensor, "W k"]:
        """Return log Z, float64."""
        return (log_prob_WV.exp() @ self._member_VR @ self._sort_TRk[mask]).log().double()

    def _log_edges(self, mask: int, log_size_Wk: Tensor) -> Float[Tensor, "W k k"]:
        """Return log-probabilities of a mask's states given those of the mask before, float64."""
        return (self._scores_Ukk[mask - 1] + log_size_Wk[:, None]).log_softmax(-1)


def _drawn(log_weight_NX: Tensor, draw: np.random.Generator) -> Int64[Tensor, " N"]:
    """Return one index of each row, drawn by the weights."""
    total_NX = log_weight_NX.double().softmax(-1).cumsum(-1)
    level_N1 = torch.from_numpy(draw.random((len(total_NX), 1))).to(total_NX) * total_NX[:, -1:]
    return (total_NX > level_N1).int().argmax(-1)


def _allowed_after(allowed: Allowed, states: list[Hashable], mask: int, log_next_WV: Tensor) -> Tensor:
    """Return (W, V) the tokens that may follow each prefix."""
    is_allowed_WV = np.zeros(log_next_WV.shape, dtype=bool)
    rows = {state: allowed.after(state, mask) for state in set(states)}
    is_allowed_WV[:, allowed.tokens] = np.stack([rows[state] for state in states])
    return torch.from_numpy(is_allowed_WV).to(log_next_WV.device)
