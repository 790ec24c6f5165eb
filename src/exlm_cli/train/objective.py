"""Loss of a batch under a model; the only caller of the alignment op in training.

Axes: B sequences, T targets, S nodes, N packed inner nodes (B x k x T without padding), M packed masks (B x T).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from exlm_cli.config.sections import AlignmentBackend
from exlm_cli.data.batch import Batch
from exlm_cli.model.chain import BALANCE, zero_of
from exlm_cli.model.exlm import ExlmModel, NodeStates
from exlm_cli.ops.alignment import states_alignment_nll
from exlm_cli.ops.chain import chain_nll, share_imbalance
from exlm_cli.ops.ctc import single_target_ctc_nll
from exlm_cli.ops.path_prior import state_imbalance


@dataclass(frozen=True)
class Objective:
    """The loss of a recipe.

    Attributes:
        unk_id: Token id of [UNK], the blank of `alignment: independent` (the official code's choice).
        num_repeats: Copies of every token, for the entropy of Repeated MLM.
        backend: Backend of the alignment op.
    """

    unk_id: int
    num_repeats: int
    backend: AlignmentBackend

    def sequence_nll(self, model: ExlmModel, batch: Batch) -> Float[Tensor, " B"]:
        """Return the negative log-likelihood of each sequence's targets divided by their number, nats, float32.

        `inf` where no alignment exists, as for a sequence without targets; the caller counts these and averages the
        others. In training the penalty on states that are used unevenly adds to the gradient alone: the value stays a
        likelihood.
        """
        nodes = model.node_states(batch)
        if model.chain_head is not None:
            if model.training and not model.chain_head.is_learning:
                return self.mean_mask_nll(self.mask_nll(model, nodes, batch), batch) + zero_of(model.chain_head)
            chain = model.chain(nodes, batch)
            nll_per_target = _per_target(chain_nll(chain), batch)
            return _with_penalty(nll_per_target, BALANCE * share_imbalance(chain)) if model.training else nll_per_target
        if model.transition is None:
            return self.mean_mask_nll(self.mask_nll(model, nodes, batch), batch)
        log_emit, log_trans = model.log_emissions(nodes, batch), model.log_transitions(nodes, batch)
        nll = states_alignment_nll(log_emit, log_trans, batch.target_lengths, batch.state_lengths, backend=self.backend)
        nll_per_target = nll / batch.target_lengths.clamp(min=1)
        if model.training and model.transition.balance:
            imbalance_B = state_imbalance(log_trans, model.num_states_per_mask)
            return _with_penalty(nll_per_target, model.transition.balance_weight * imbalance_B)
        return nll_per_target

    def mask_nll(self, model: ExlmModel, nodes: NodeStates, batch: Batch) -> Float[Tensor, " M"]:
        """Return the negative log-likelihood of each masked token alone: MLM, or one-target CTC over its k states.

        Of a chain it is that of the LM head, which edges change for all masks but the first.
        """
        k = model.nodes_per_mask
        target_N = batch.target_ids.flatten().index_select(0, batch.target_index).repeat_interleave(k)
        if model.objective == "mlm" or model.chain_head is not None:
            return -model.token_log_probs(nodes, target_N[:, None])[:, 0]
        blank_N = torch.full_like(target_N, self.unk_id)
        log_probs = model.token_log_probs(nodes, torch.stack([target_N, blank_N], dim=1)).unflatten(0, (-1, k))
        return single_target_ctc_nll(log_probs[..., 0], log_probs[..., 1])

    def mean_mask_nll(self, mask_nll_M: Float[Tensor, " M"], batch: Batch) -> Float[Tensor, " B"]:
        """Return the mean over each sequence's masks; `inf` for a sequence without any."""
        return _per_target(batch.scatter_targets(mask_nll_M).sum(1), batch)


def _with_penalty(nll_B: Tensor, penalty_B: Tensor) -> Float[Tensor, " B"]:
    """Return the same values with the gradient of a penalty as well."""
    return nll_B + (penalty_B - penalty_B.detach())


def _per_target(nll_B: Float[Tensor, " B"], batch: Batch) -> Float[Tensor, " B"]:
    """Return the sum over each sequence's targets as a mean; `inf` for a sequence without any."""
    mean_B = nll_B / batch.target_lengths.clamp(min=1)
    return mean_B.masked_fill(batch.target_lengths == 0, math.inf)


def is_target(batch: Batch) -> Bool[Tensor, "B T"]:
    """Return True at real targets, False at their padding."""
    index = torch.arange(batch.target_ids.shape[1], device=batch.target_ids.device)
    return index < batch.target_lengths[:, None]


def is_fully_masked(batch: Batch, num_repeats: int) -> Bool[Tensor, "B T"]:
    """Return True at targets whose token has all its copies masked: its semantics are corrupted (App. C, E.1)."""
    source_BT: Int64[Tensor, "B T"] = batch.target_source
    masked_copies_BT = (source_BT[:, :, None] == source_BT[:, None, :]).sum(-1)
    return is_target(batch) & (masked_copies_BT == num_repeats)
