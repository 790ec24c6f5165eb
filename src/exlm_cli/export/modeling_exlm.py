"""An exported ExLM: ESM's layers, expanded masks, and the DAG between their states; this file travels with the model.

Axes: B sequences, L tokens, X positions after expansion, S nodes, T masks, V vocabulary, D width.
"""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import EsmForMaskedLM, EsmForSequenceClassification, EsmForTokenClassification, EsmModel
from transformers.utils import ModelOutput

from exlm_cli.dag.search import SearchProblem, best_sequences
from exlm_cli.data.batch import Batch, batch_from_masked_ids
from exlm_cli.export.configuration_exlm import ExlmConfig
from exlm_cli.model.transition import TransitionHead
from exlm_cli.ops.alignment.reference import states_alignment_nll
from exlm_cli.ops.ctc import one_token_log_probs
from exlm_cli.ops.rotary import rotate, rotate_half_order, rotation_at

SMALLEST = 1e-38
"""Smaller probabilities are raised to it, so that logits stay finite."""


@dataclasses.dataclass
class ExlmOutput(ModelOutput):  # type: ignore[misc]
    """Output of `ExlmForMaskedLM`; all fields but the logits are None unless `output_dag=True`.

    Node 0 is [CLS], then come the k states of each [MASK], then the last [SEP]. With `alignment: independent` a [MASK]
    is one node, but `node_states` still has its k states.

    Attributes:
        logits: (B, L, V). At the t-th [MASK]: log-probabilities of the t-th token, given that paths have T
            tokens.
        node_states: (B, S, D) states at the nodes as the LM head reads them.
        node_log_probs: (B, S, V) log-probabilities of the token that a node emits; -inf where it emits none.
        log_transitions: (B, S, S) log-probability of an edge from node v (row) to node u.
        num_nodes: (B,) nodes of each sequence.
    """

    logits: Tensor | None = None
    node_states: Tensor | None = None
    node_log_probs: Tensor | None = None
    log_transitions: Tensor | None = None
    num_nodes: Tensor | None = None


# an Auto class that loads the configuration of the folder accepts only models that name it


class ExlmModel(EsmModel):  # type: ignore[misc]
    """ESM's encoder for `AutoModel`; it does not expand masks."""

    config_class = ExlmConfig

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False, so that transformers 5 finds the rotary frequencies, which it renames only for its own code."""
        return False


class ExlmForSequenceClassification(EsmForSequenceClassification):  # type: ignore[misc]
    """ESM's encoder with a head for `AutoModelForSequenceClassification`; it does not expand masks."""

    config_class = ExlmConfig


class ExlmForTokenClassification(EsmForTokenClassification):  # type: ignore[misc]
    """ESM's encoder with a head for `AutoModelForTokenClassification`; it does not expand masks."""

    config_class = ExlmConfig


class ExlmForMaskedLM(EsmForMaskedLM):  # type: ignore[misc]
    """ESM's encoder and LM head over inputs in which each [MASK] becomes k states, tied by transitions. Inference only.

    With `EsmForMaskedLM` the same weights read inputs without masks.
    """

    config_class = ExlmConfig

    def __init__(self, config: ExlmConfig) -> None:
        super().__init__(config)
        self.network = config.network()
        k = self.network.num_states_per_mask
        has_clones = not self.network.expands_input
        self.clone_embedding = nn.Embedding(k, config.hidden_size) if has_clones else None
        self.transition = TransitionHead(self.network, k) if self.network.alignment != "independent" else None
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        output_dag: bool = False,
        **_: Any,
    ) -> ExlmOutput:
        """Return logits of every token, and with `output_dag` the DAG.

        Args:
            input_ids: (B, L) tokens, [CLS] first, [SEP] last, [PAD] beyond.
            attention_mask: (B, L) as the tokenizer gives it; [PAD] is never attended to in any case.
            labels: None: the model computes no loss.
            output_dag: Also return the states, and the log-probabilities of their tokens and transitions.

        Raises:
            ValueError: The padding is not on the right, or labels are given.
        """
        if labels is not None:
            raise ValueError("this model computes no loss: leave out `labels`")
        if attention_mask is not None:
            input_ids = input_ids.masked_fill(attention_mask == 0, self.config.pad_token_id)
        batch = self._expanded(input_ids)
        hidden_BXD = self._encode(batch)
        is_mask_BL = input_ids == self.config.mask_token_id
        # where each token is in the encoder's input, for an expanded [MASK] its first copy
        further = self.network.num_states_per_mask - 1 if self.network.expands_input else 0
        first_BL = torch.arange(input_ids.shape[1], device=input_ids.device)
        first_BL = first_BL + further * (is_mask_BL.cumsum(1) - is_mask_BL.long())
        logits_BLV = self.lm_head(_states_at(hidden_BXD, first_BL.clamp(max=hidden_BXD.shape[1] - 1))).float()
        states, log_probs, log_trans, num_nodes = self._dag(hidden_BXD, batch)
        is_target_BT = torch.arange(batch.target_ids.shape[1], device=input_ids.device) < batch.target_lengths[:, None]
        marginal_BTV = _occupancy(log_trans, batch.target_lengths, num_nodes) @ log_probs.double().exp()
        logits_BLV[is_mask_BL] = marginal_BTV[is_target_BT].clamp(min=SMALLEST).log().float()
        if not output_dag:
            return ExlmOutput(logits=logits_BLV)
        return ExlmOutput(logits_BLV, states, log_probs, log_trans, num_nodes)

    @torch.no_grad()
    def fill_masks(self, input_ids: Tensor, n: int = 5) -> list[list[tuple[tuple[int, ...], float]]]:
        """Return the n most probable fillings of each sequence's masks together, best first.

        A filling is (tokens, probability): a token for each [MASK] in order, and its share among all fillings with as
        many tokens. A sequence without a [MASK] has no fillings; there are fewer than n where the search meets its
        limit.

        Args:
            input_ids: (B, L) tokens, as for `forward`.
            n: Number of fillings.

        Raises:
            ValueError: `n` is below 1, or the padding is not on the right.
        """
        if n < 1:
            raise ValueError(f"`n={n}`: accepted: 1 or more")
        dag = self(input_ids, output_dag=True)
        found: list[list[tuple[tuple[int, ...], float]]] = []
        for row, num_nodes in enumerate(dag.num_nodes.tolist()):
            num_masks = int((input_ids[row] == self.config.mask_token_id).sum())
            if num_masks == 0:
                found.append([])
                continue
            log_trans = dag.log_transitions[row, :num_nodes, :num_nodes].double().cpu()
            numbers: Any = SimpleNamespace(
                node_log_probs=dag.node_log_probs[row, :num_nodes].double().cpu().numpy(),
                log_trans=log_trans.numpy(),
                trans=log_trans.exp().numpy(),
                node_mask=np.array([-1, *[0] * (num_nodes - 2), -1]),
                num_masks=num_masks,
            )
            silent = log_trans.new_zeros(1, num_masks, num_nodes)
            nll = states_alignment_nll(silent, log_trans[None], torch.tensor([num_masks]), torch.tensor([num_nodes]))
            best, _ = best_sequences(SearchProblem(numbers, "exact"), n)
            found.append(
                [(tuple(token for _, token in pairs), math.exp(log_prob + float(nll))) for log_prob, pairs in best]
            )
        return found

    def _expanded(self, input_ids: Tensor) -> Batch:
        pad_id = self.config.pad_token_id
        is_token_BL = input_ids != pad_id
        if not torch.equal(is_token_BL, is_token_BL.cummin(1).values):
            raise ValueError("the padding must be on the right, and the input must hold no [PAD] elsewhere")
        return batch_from_masked_ids(
            input_ids.cpu().numpy(),
            mask_id=self.config.mask_token_id,
            pad_id=pad_id,
            num_states_per_mask=self.network.num_states_per_mask,
            expands_input=self.network.expands_input,
        ).to(input_ids.device)

    def _encode(self, batch: Batch) -> Tensor:
        """Return (B, X, D) states of all positions: ESM's layers with the positions of ExLM."""
        index_X = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
        hidden: Tensor = self.esm.embeddings.word_embeddings(batch.token_ids)
        rotation = order = None
        if self.config.position_embedding_type == "absolute":
            hidden = hidden + self.esm.embeddings.position_embeddings(index_X + self.config.pad_token_id + 1)
        else:
            axis_widths = self.network.axis_widths
            places = index_X[None, :, None] if len(axis_widths) == 1 else batch.positions
            rotation = rotation_at(places, axis_widths, self.network.rope_base)
            order = rotate_half_order(sum(axis_widths)).argsort().to(hidden.device)
        attend = None if batch.is_token is None else batch.is_token[:, None, None]
        for layer in self.esm.encoder.layer:
            attention = layer.attention
            normed = attention.LayerNorm(hidden)
            projections = attention.self.query, attention.self.key, attention.self.value
            query, key, value = (
                project(normed).unflatten(-1, (self.config.num_attention_heads, -1)).transpose(1, 2)
                for project in projections
            )
            if rotation is not None:
                # ESM's order of a head's entries is not ours; a product of queries and keys does not depend on it
                query, key = rotate(query[..., order], rotation), rotate(key[..., order], rotation)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attend)
            hidden = attention.output(mixed.transpose(1, 2).flatten(2), hidden)
            hidden = layer.output(layer.intermediate(layer.LayerNorm(hidden)), hidden)
        return cast(Tensor, self.esm.encoder.emb_layer_norm_after(hidden))

    def _dag(self, hidden_BXD: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return node states, the log-probabilities of their tokens and of the edges, and the number of nodes."""
        k, num_nodes = self.network.num_states_per_mask, batch.state_lengths
        states = _states_at(hidden_BXD, batch.node_index)
        if self.clone_embedding is not None:
            clone_S = (torch.arange(states.shape[1], device=states.device) - 1) % k
            states = states + self.clone_embedding(clone_S) * (batch.node_mask >= 0)[..., None]
        is_inner_BS = batch.node_mask >= 0
        log_probs = self.lm_head(states).float().log_softmax(-1)
        if self.transition is not None:
            is_real = torch.arange(states.shape[1], device=states.device) < num_nodes[:, None]
            log_trans = self.transition(states * is_real[..., None], batch)
            return states, log_probs.masked_fill(~is_inner_BS[..., None], -torch.inf), log_trans, num_nodes
        # each [MASK] alone: its k states are frames that yield one token
        is_inner_BS = torch.cat([is_inner_BS[:, :1], is_inner_BS[:, 1:-1:k], is_inner_BS[:, -1:]], dim=1)
        inner = one_token_log_probs(log_probs[:, 1:-1].unflatten(1, (-1, k)).flatten(0, 1), self.network.blank_id)
        log_probs = F.pad(inner.unflatten(0, (len(states), -1)), (0, 0, 1, 1))
        num_nodes = batch.target_lengths + 2
        index = torch.arange(log_probs.shape[1], device=states.device)
        is_edge = (index[:, None] + 1 == index) & (index < num_nodes[:, None, None])
        log_trans = torch.zeros_like(is_edge, dtype=torch.float32).masked_fill(~is_edge, -torch.inf)
        return states, log_probs.masked_fill(~is_inner_BS[..., None], -torch.inf), log_trans, num_nodes


def _states_at(states_BXD: Tensor, index_BS: Tensor) -> Tensor:
    return states_BXD.gather(1, index_BS[..., None].expand(-1, -1, states_BXD.shape[-1]))


def _occupancy(log_trans: Tensor, num_masks: Tensor, num_nodes: Tensor) -> Tensor:
    """Return the (B, T, S) probability that a node emits the t-th token, given a path of exactly T tokens; float64.

    It is the gradient of the log-likelihood with respect to the log emissions, at log emissions of 0.
    """
    with torch.inference_mode(False), torch.enable_grad():
        log_trans = log_trans.detach().double().clone()
        log_emit = log_trans.new_zeros(len(log_trans), max(1, int(num_masks.max())), log_trans.shape[-1])
        nll = states_alignment_nll(log_emit.requires_grad_(), log_trans, num_masks.clone(), num_nodes.clone())
        return -torch.autograd.grad(nll.sum(), log_emit)[0]
