"""Networks of ExLM and its MLM baseline: an encoder, an LM head on the nodes, and for ExLM a transition head.

Axes: B sequences, X expanded positions, C positions before expansion, R positions that are read, P packed positions,
S nodes, T targets, N packed inner nodes, D width, V vocabulary.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.batch import Batch, Packing
from exlm_cli.model.encoder import Encoder, Unexpanded, draw_weights, gather_positions, unpacked
from exlm_cli.model.positions import context_first, visible_positions, visible_to_further
from exlm_cli.model.transition import TransitionHead
from exlm_cli.ops.emissions import TokenStatistics, token_log_probs, token_statistics


class LMHead(nn.Module):
    """RoBERTa's LM head: dense, GELU, LayerNorm; its decoder is tied to the token embedding."""

    def __init__(self, width: int, embedding: nn.Embedding) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(embedding.num_embeddings))

    def forward(self, states: Tensor) -> Tensor:
        """Return the features that the tied decoder multiplies."""
        return cast(Tensor, self.norm(F.gelu(self.dense(states))))


@dataclass(frozen=True)
class NodeStates:
    """States of the encoder at the DAG nodes, and which nodes emit.

    Attributes:
        states: (B, S, D), zero beyond `state_lengths`.
        is_inner: (B, S) True at nodes that emit: neither BOS, EOS nor padding.
        inner_index: (N,) the same nodes in a flat (B * S).
    """

    states: Float[Tensor, "B S D"]
    is_inner: Bool[Tensor, "B S"]
    inner_index: Int64[Tensor, " N"]

    @property
    def packed(self) -> Float[Tensor, "N D"]:
        """Return the states of the inner nodes alone, in order."""
        return self.states.flatten(0, 1).index_select(0, self.inner_index)

    def spread(self, values_N: Tensor) -> Tensor:
        """Return (B, S, ...) values of the packed inner nodes, zero at the others."""
        flat: Tensor = values_N.new_zeros((self.is_inner.numel(), *values_N.shape[1:]))
        # `index_copy` would keep the values for a backward pass that does not need them
        return flat.index_put((self.inner_index,), values_N).view(*self.is_inner.shape, *values_N.shape[1:])


class ExlmModel(nn.Module):
    """Network of a pre-training recipe.

    Args:
        recipe: Its `model`, `masking` and `objective` define the architecture.
        vocab_size: V of the tokenizer in use, which may be smaller than the recipe's.
    """

    def __init__(self, recipe: PretrainRecipe, vocab_size: int) -> None:
        super().__init__()
        config = recipe.model
        k = recipe.masking.num_states_per_mask
        self.objective = recipe.objective
        self.alignment = config.alignment
        self.num_states_per_mask = k
        self.head_chunk_rows = recipe.train.head_chunk_rows
        self.hides_further_states = config.mask_attention == "first" and k > 1
        self.expands_late = config.num_early_blocks > 0 and k > 1
        self.expands_last = config.num_early_blocks == config.num_layers and k > 1
        self.token_embedding = nn.Embedding(vocab_size, config.width)
        self.clone_embedding = nn.Embedding(k, config.width) if config.clone_embedding != "none" else None
        self.encoder = Encoder(config, k)
        self.lm_head = LMHead(config.width, self.token_embedding)
        has_transitions = recipe.objective == "exlm" and config.alignment != "independent"
        self.transition = TransitionHead(config, k) if has_transitions else None
        draw_weights(self, config.init_std)
        if self.clone_embedding is not None:
            nn.init.normal_(self.clone_embedding.weight, std=config.clone_init_std)

    def encode(self, batch: Batch, read: Int64[Tensor, "B R"] | None = None) -> Float[Tensor, "B R D"]:
        """Return the state of every expanded position, or of those in `read`; padding is never attended to."""
        visible = visible_positions(batch, hides_further_states=self.hides_further_states)
        embedded, unexpanded = self._input(batch, batch.token_ids, batch.positions)
        if unexpanded is not None and self.expands_last:  # a position has the state of its token
            read = unexpanded.origin if read is None else unexpanded.origin.gather(1, read)
            expanded_index = unexpanded.expanded_index
            hidden = self.encoder(
                embedded, unexpanded.positions, unexpanded.visible, expanded_index=expanded_index, read=read
            )
            return cast(Tensor, hidden)
        return cast(Tensor, self.encoder(embedded, batch.positions, visible, read=read, unexpanded=unexpanded))

    def _encode_nodes(self, batch: Batch) -> Float[Tensor, "B S D"]:
        """Return the state at every node; entries beyond `state_lengths` hold states of other positions."""
        if self.expands_last:
            return self._encode_masks(batch)
        if batch.packing is not None:
            return self._encode_packed(batch, batch.packing)
        if self.hides_further_states and batch.has_even_context:
            order = context_first(batch, self.num_states_per_mask)
            positions_BX2 = gather_positions(batch.positions, order.order)
            embedded, unexpanded = self._input(batch, batch.token_ids.gather(1, order.order), positions_BX2)
            hidden_BSD: Tensor = self.encoder(
                embedded,
                positions_BX2,
                order.visible,
                expanded_index=order.order,
                num_further=order.num_further,
                read=order.read,
                unexpanded=unexpanded,
            )
            return hidden_BSD.index_select(1, order.node)
        return self.encode(batch, read=batch.node_index)

    def _encode_masks(self, batch: Batch) -> Float[Tensor, "B S D"]:
        """Return the state at every node if masks expand after the last block: the one state of a mask is repeated."""
        k, num_nodes = self.num_states_per_mask, batch.node_index.shape[1]
        place_S = (torch.arange(num_nodes, device=batch.node_index.device) + k - 1).div(k, rounding_mode="floor")
        # nodes that are read: BOS, the first state of each mask, and EOS
        first_R = (k * torch.arange((num_nodes - 2) // k + 2, device=place_S.device) - k + 1).clamp(min=0)
        if batch.packing is None:
            hidden_BRD = self.encode(batch, read=batch.node_index.index_select(1, first_R))
        else:
            packing = batch.packing
            num_further = len(packing.further_place)
            context = packing._replace(
                source=packing.source[: len(packing.source) - num_further],
                further_place=packing.further_place[:0],
                read=packing.read[: len(packing.read) - num_further],
                node_row=packing.node_row.index_select(1, first_R),
            )
            hidden_BRD = self._encode_packed(batch, context)
        return hidden_BRD.index_select(1, place_S)

    def _encode_packed(self, batch: Batch, packing: Packing) -> Float[Tensor, "B S D"]:
        """Return the state at every node, from sequences that are packed without padding."""
        positions_1P2 = batch.positions.flatten(0, 1)[packing.source][None]
        expanded_index_1P = (packing.source % batch.token_ids.shape[1])[None]
        num_at_input, unexpanded = len(packing.source), None
        if self.expands_late and not self.expands_last:
            num_at_input -= len(packing.further_place)
            origin_BX = packing.row.gather(1, batch.first_index).gather(1, batch.positions[..., 0])
            context = slice(num_at_input)
            unexpanded = Unexpanded(
                positions_1P2[:, context],
                expanded_index_1P[:, context],
                None,
                origin_BX.flatten()[packing.source][None],
            )
        token_ids_1C = batch.token_ids.flatten()[packing.source[:num_at_input]][None]
        has_further = self.hides_further_states and not self.expands_last
        visible = visible_to_further(batch, self.num_states_per_mask) if has_further else None
        hidden_1RD = self.encoder(
            self.token_embedding(token_ids_1C),
            positions_1P2,
            visible,
            expanded_index=expanded_index_1P,
            packing=packing,
            read=packing.read[None],
            unexpanded=unexpanded,
        )
        return unpacked(hidden_1RD[0], packing.node_row)

    def _input(self, batch: Batch, token_ids_BX: Tensor, positions_BX2: Tensor) -> tuple[Tensor, Unexpanded | None]:
        """Return the embedded tokens at the first block, and what the blocks before a late expansion see."""
        if not self.expands_late:
            return self.token_embedding(token_ids_BX), None
        visible = None
        if not batch.has_even_context:
            num_tokens_B = batch.lengths - (self.num_states_per_mask - 1) * batch.target_lengths
            index_C = torch.arange(batch.first_index.shape[1], device=num_tokens_B.device)
            visible = index_C < num_tokens_B[:, None, None]
        positions_BC2 = gather_positions(batch.positions, batch.first_index)
        # a token's place among the unexpanded is its index before expansion
        unexpanded = Unexpanded(positions_BC2, batch.first_index, visible, positions_BX2[..., 0])
        return self.token_embedding(batch.token_ids.gather(1, batch.first_index)), unexpanded

    def node_states(self, batch: Batch) -> NodeStates:
        """Return the states at BOS, the clones and EOS."""
        states_BSD = self._encode_nodes(batch)
        if self.clone_embedding is not None:
            clone_BS = batch.node_clone
            vectors_BSD = self.clone_embedding((clone_BS - 1).clamp(min=0))
            states_BSD = states_BSD + vectors_BSD * (clone_BS > 0)[..., None]
        index = torch.arange(states_BSD.shape[1], device=states_BSD.device)
        is_real = index < batch.state_lengths[:, None]
        return NodeStates(states_BSD * is_real[..., None], batch.node_mask >= 0, batch.inner_index)

    def token_log_probs(self, nodes: NodeStates, token_ids_NT: Int64[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        """Return log-probabilities of T tokens at each packed inner node, float32."""
        return token_log_probs(
            self.lm_head(nodes.packed),
            self.token_embedding.weight,
            self.lm_head.bias,
            token_ids_NT,
            chunk_rows=self.head_chunk_rows,
        )

    def token_statistics(self, nodes: NodeStates) -> TokenStatistics:
        """Return entropy and most likely token at each packed inner node."""
        return token_statistics(
            self.lm_head(nodes.packed),
            self.token_embedding.weight,
            self.lm_head.bias,
            chunk_rows=self.head_chunk_rows,
        )

    def node_log_probs(self, nodes: NodeStates) -> Float[Tensor, "B S V"]:
        """Return whole distributions, -inf at BOS, EOS and padding; for a few sequences, not for training."""
        logits = F.linear(self.lm_head(nodes.packed), self.token_embedding.weight, self.lm_head.bias)
        full = logits.new_full((*nodes.is_inner.shape, logits.shape[-1]), -torch.inf, dtype=torch.float32)
        full[nodes.is_inner] = logits.float().log_softmax(-1)
        return full

    def log_emissions(self, nodes: NodeStates, batch: Batch) -> Float[Tensor, "B T S"]:
        """Return log P_u(y_i) of every inner node u and target i; zero, and never read, at nodes that emit nothing."""
        sequence_N = nodes.inner_index // nodes.is_inner.shape[1]
        log_probs_NT = self.token_log_probs(nodes, batch.target_ids.index_select(0, sequence_N))
        return nodes.spread(log_probs_NT).transpose(1, 2)

    def log_transitions(self, nodes: NodeStates, batch: Batch) -> Float[Tensor, "B S S"]:
        """Return log E[v, u]; only for `alignment: dag` and `sparse_dag`."""
        assert self.transition is not None, "an MLM or `alignment: independent` has no transitions"
        return cast(Tensor, self.transition(nodes.states, batch))
