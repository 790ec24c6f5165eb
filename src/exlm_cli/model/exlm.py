"""Networks of ExLM and its MLM baseline: an encoder, an LM head on the nodes, and for ExLM the head of its DAG.

Axes: B sequences, X positions of the encoder, R positions that are read, S nodes, T targets, N packed inner nodes,
D width, V vocabulary.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import HEAD_CHUNK_ROWS
from exlm_cli.data.batch import Batch
from exlm_cli.model.backbones import ForeignLMHead, build_encoder
from exlm_cli.model.chain import ChainHead, reads, zero_of
from exlm_cli.model.encoder import draw_weights
from exlm_cli.model.transition import TransitionHead
from exlm_cli.ops.chain import Chain
from exlm_cli.ops.classes import LMHeadOutput, class_shares, state_entropies
from exlm_cli.ops.emissions import TokenStatistics, token_log_probs, token_statistics
from exlm_cli.ops.precision import without_autocast


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

    def gather_inner(self) -> Float[Tensor, "N D"]:
        """Return the states of the inner nodes alone, in order."""
        return self.states.flatten(0, 1).index_select(0, self.inner_index)

    def scatter_inner(self, values_N: Tensor) -> Tensor:
        """Return (B, S, ...) values of the packed inner nodes, zero at the others."""
        flat: Tensor = values_N.new_zeros((self.is_inner.numel(), *values_N.shape[1:]))
        # `index_copy` would keep the values for a backward pass that does not need them
        return flat.index_put((self.inner_index,), values_N).view(*self.is_inner.shape, *values_N.shape[1:])


class ExlmModel(nn.Module):
    """Network of a pre-training recipe.

    The encoder reads the k copies of each [MASK] and returns their states. With `model.alignment: chain` it reads what
    an MLM's encoder reads, and the k states of a mask share its one distribution (`ChainHead`).

    Args:
        recipe: Its `model`, `masking` and `objective` define the architecture.
        vocab_size: V of the tokenizer in use, which may be smaller than the recipe's.

    Attributes:
        expands_input: Whether the encoder reads expanded masks.
        nodes_per_mask: States of the encoder for each mask.
        transition: None for an MLM and with `alignment: independent` and `chain`.
        chain_head: None but with `alignment: chain`.
        is_encoder_learning: Whether training moves the encoder.
    """

    is_encoder_learning = True

    def __init__(self, recipe: PretrainRecipe, vocab_size: int) -> None:
        super().__init__()
        config = recipe.model
        k = recipe.masking.num_states_per_mask
        self.objective = recipe.objective
        self.alignment = config.alignment
        self.num_states_per_mask = k
        self.expands_input = recipe.expands_input
        self.nodes_per_mask = recipe.nodes_per_mask
        self.vocab_size = vocab_size
        self.encoder = build_encoder(config, vocab_size)
        embedding = self.encoder.token_embedding
        self.lm_head: LMHead | ForeignLMHead = (
            LMHead(config.width, embedding)
            if config.backbone.family == "own"
            else ForeignLMHead(config.backbone, embedding)
        )
        self.transition = TransitionHead(config, k) if recipe.has_transitions else None
        self.chain_head = ChainHead(config, k) if recipe.is_chain else None
        draw_weights(self, config.init_std)
        if self.chain_head is not None:
            self.chain_head.draw()

    @property
    def has_dag(self) -> bool:
        """Whether masks depend on each other: not in an MLM, nor with `alignment: independent`."""
        return self.transition is not None or self.chain_head is not None

    @property
    def decoder_weight(self) -> Float[Tensor, "V D"]:
        """Weight of the LM head's decoder: the token embedding, without rows that no token has."""
        weight = self.encoder.token_embedding.weight
        return weight if len(weight) == self.vocab_size else weight[: self.vocab_size]

    @property
    def decoder_bias(self) -> Float[Tensor, " V"]:
        """Bias of the LM head's decoder."""
        bias = self.lm_head.bias
        return bias if len(bias) == self.vocab_size else bias[: self.vocab_size]

    def encode(self, batch: Batch, query_positions: Int64[Tensor, "B R"] | None = None) -> Float[Tensor, "B R D"]:
        """Return the encoder's state at every position that it reads, or at those in `query_positions`."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.is_encoder_learning):
            states = self.encoder(
                batch.token_ids, batch.is_token, positions=batch.positions, query_positions=query_positions
            )
        return cast(Tensor, states if self.is_encoder_learning else states + zero_of(self.encoder))

    def node_states(self, batch: Batch) -> NodeStates:
        """Return the states at BOS, the nodes of each mask, and EOS."""
        states_BSD = self.encode(batch, batch.node_index)
        index = torch.arange(states_BSD.shape[1], device=states_BSD.device)
        is_real = index < batch.state_lengths[:, None]
        return NodeStates(states_BSD * is_real[..., None], batch.node_mask >= 0, batch.inner_index)

    def token_log_probs(self, nodes: NodeStates, token_ids_NT: Int64[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        """Return log-probabilities of T tokens at each packed inner node, float32."""
        features_ND = self.lm_head(nodes.gather_inner())
        return token_log_probs(
            features_ND, self.decoder_weight, self.decoder_bias, token_ids_NT, chunk_rows=HEAD_CHUNK_ROWS
        )

    def token_statistics(self, nodes: NodeStates) -> TokenStatistics:
        """Return entropy and most likely token at each packed inner node."""
        features_ND = self.lm_head(nodes.gather_inner())
        return token_statistics(features_ND, self.decoder_weight, self.decoder_bias, chunk_rows=HEAD_CHUNK_ROWS)

    def node_log_probs(self, nodes: NodeStates) -> Float[Tensor, "B S V"]:
        """Return whole distributions, -inf at BOS, EOS and padding; for a few sequences, not for training."""
        logits = F.linear(self.lm_head(nodes.gather_inner()), self.decoder_weight, self.decoder_bias)
        full = logits.new_full((*nodes.is_inner.shape, logits.shape[-1]), -torch.inf, dtype=torch.float32)
        full[nodes.is_inner] = logits.float().log_softmax(-1)
        return full

    def log_emissions(self, nodes: NodeStates, batch: Batch) -> Float[Tensor, "B T S"]:
        """Return log P_u(y_i) of every inner node u and target i; zero, and never read, at nodes that emit nothing."""
        sequence_N = nodes.inner_index // nodes.is_inner.shape[1]
        log_probs_NT = self.token_log_probs(nodes, batch.target_ids.index_select(0, sequence_N))
        return nodes.scatter_inner(log_probs_NT).transpose(1, 2)

    def chain(self, nodes: NodeStates, batch: Batch) -> Chain:
        """Return the log-probabilities of a chain, float32; only for `alignment: chain`."""
        assert self.chain_head is not None, "`alignment` is not chain"
        states_MD = nodes.gather_inner()
        target_M = batch.target_ids.flatten().index_select(0, batch.target_index)
        membership_VR, share_MRk = self.chain_head.membership(self.decoder_weight), self.chain_head.sort(states_MD)
        head = self.chain_output(nodes, batch)
        log_prob_M, class_MR = class_shares(head, membership_VR, target_M, chunk_rows=HEAD_CHUNK_ROWS)
        with without_autocast(states_MD):
            log_size_Mk = torch.einsum("mr,mrk->mk", class_MR, share_MRk).log()
            of_target_Mk = torch.einsum("mr,mrk->mk", membership_VR.index_select(0, target_M), share_MRk)
            log_emit_Mk = log_prob_M[:, None] + of_target_Mk.log() - log_size_Mk
        log_size_BTk = batch.scatter_targets(log_size_Mk)
        log_next_BUkk = self.chain_head(nodes.states[:, 1:-1], batch.node_index[:, 1:-1], log_size_BTk)
        return Chain(log_size_BTk, log_next_BUkk, batch.scatter_targets(log_emit_Mk), batch.target_lengths)

    def state_entropies(self, nodes: NodeStates, batch: Batch) -> Float[Tensor, "M k"]:
        """Return the entropies of each packed mask's states given the target before; only for `alignment: chain`."""
        assert self.chain_head is not None, "`alignment` is not chain"
        membership_VR = self.chain_head.membership(self.decoder_weight)
        share_MRk = self.chain_head.sort(nodes.gather_inner())
        return state_entropies(self.chain_output(nodes, batch), membership_VR, share_MRk, chunk_rows=HEAD_CHUNK_ROWS)

    def chain_output(self, nodes: NodeStates, batch: Batch) -> LMHeadOutput:
        """Return the LM head's features at the packed masks, each given the target before; its decoder."""
        assert self.chain_head is not None, "`alignment` is not chain"
        token_BTD = F.embedding(batch.target_ids, self.decoder_weight)
        change_BTD = self.chain_head.feature_changes(nodes.states[:, 1:-1], batch.node_index[:, 1:-1], token_BTD)
        if self.training:
            index_T = torch.arange(token_BTD.shape[1], device=token_BTD.device)
            change_BTD = change_BTD * reads(batch.sample_index, index_T)[..., None]
        features_MD = self.lm_head(nodes.gather_inner())
        change_MD = change_BTD.flatten(0, 1).index_select(0, batch.target_index)
        return LMHeadOutput(features_MD + change_MD.to(features_MD.dtype), self.decoder_weight, self.decoder_bias)

    def log_transitions(self, nodes: NodeStates, batch: Batch) -> Float[Tensor, "B S S"]:
        """Return log E[v, u]; only for `alignment: dag` and `sparse_dag`."""
        assert self.transition is not None, "`alignment` is neither dag nor sparse_dag"
        return cast(Tensor, self.transition(nodes.states, batch))
