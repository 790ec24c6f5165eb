"""Prior over paths through the DAG, from transitions alone: visits of states, path length, where each target falls.

With every emission set to one, the likelihood of T targets is the probability that a path has T inner nodes, and the
posterior of a target is the prior probability of each node to emit it.

Axes: B sequences, T targets, S nodes, k states of a mask.
"""

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from exlm_cli.ops.alignment import Backend, alignment_posterior, states_alignment_nll


def expected_visits(log_trans: Float[Tensor, "B S S"]) -> Float[Tensor, "B S"]:
    """Return the probability that a path from node 0 visits each node, whatever tokens it emits.

    visits = e_0 + E' visits: one triangular system, as edges only lead to later nodes. Differentiable.

    Args:
        log_trans: log E[v, u], -inf at and below the diagonal.
    """
    size = log_trans.shape[-1]
    system = torch.eye(size, dtype=log_trans.dtype, device=log_trans.device) - log_trans.exp().mT
    begin = torch.zeros_like(log_trans[..., :1])
    begin[:, 0] = 1.0
    visits: Tensor = torch.linalg.solve_triangular(system, begin, upper=False, unitriangular=True)
    return visits[..., 0]


def state_imbalance(log_trans: Float[Tensor, "B S S"], num_states_per_mask: int) -> Float[Tensor, " B"]:
    """Return the KL divergence (uniform || shares of expected visits by clone) of each sequence, nats.

    0 if the sums of visits over masks are equal for all k states, however uneven single masks are; unbounded as the
    visits of a state vanish. 0 for sequences without masks. Not in the paper.

    Args:
        log_trans: log E[v, u]; after node 0 come the masks' states, k a mask, then the end.
        num_states_per_mask: k.
    """
    # a path ends at the node without edges; no path visits the padding beyond it
    is_end_BS = log_trans.exp().sum(-1) == 0
    visits_BS = expected_visits(log_trans).masked_fill(is_end_BS, 0.0)
    # a sum, not a product with one-hot rows: autocast would compute that in 16 bits
    visits_Bk = visits_BS[:, 1:-1].unflatten(1, (-1, num_states_per_mask)).sum(1)
    tiny = torch.finfo(visits_Bk.dtype).tiny
    total_B1 = visits_Bk.sum(-1, keepdim=True)
    share_Bk = torch.where(total_B1 > 0, visits_Bk / total_B1.clamp(min=tiny), 1 / num_states_per_mask)
    return -(share_Bk.clamp(min=tiny) * num_states_per_mask).log().mean(-1)


def path_length_nll(
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int[Tensor, " B"],
    state_lengths: Int[Tensor, " B"],
    *,
    backend: Backend = "auto",
) -> Float[Tensor, " B"]:
    """Return -log P(a path has as many inner nodes as the sequence has targets), nats; `inf` where none has.

    The loss of ExLM is this plus -log P(targets | a path of that length); an MLM pays the second alone.

    Args:
        log_trans, target_lengths, state_lengths, backend: As for `states_alignment_nll`.
    """
    emissions = _certain_emissions(log_trans, target_lengths)
    return states_alignment_nll(emissions, log_trans, target_lengths, state_lengths, backend=backend)


def token_nll(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    target_lengths: Int[Tensor, " B"],
    state_lengths: Int[Tensor, " B"],
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "B T"]:
    """Return -log of each target's own probability given the number of targets, nats; 0 beyond `target_lengths`.

    The probability of target t alone sums over the nodes, weighted by the prior that a path of T tokens emits it there.
    The excess of its sum over -log P(targets | T) measures what the DAG knows about the targets jointly. A node whose
    prior underflows (below e-103 in float32) counts as unreachable. Not in the paper.

    Args:
        log_emit, log_trans, target_lengths, state_lengths, backend: As for `states_alignment_nll`.

    Returns:
        `inf` at the targets of a sequence without a path.
    """
    emissions = torch.zeros_like(log_emit)
    prior_BTS = alignment_posterior(emissions, log_trans, target_lengths, state_lengths, backend=backend)
    # nodes without a prior are not read, whatever they hold
    terms_BTS = torch.where(prior_BTS > 0, prior_BTS.log() + log_emit, -torch.inf)
    is_target_BT = torch.arange(log_emit.shape[1], device=log_emit.device) < target_lengths[:, None]
    return -terms_BTS.logsumexp(-1).where(is_target_BT, 0.0)


def own_mask_share(
    log_trans: Float[Tensor, "B S S"],
    node_mask: Int64[Tensor, "B S"],
    target_lengths: Int[Tensor, " B"],
    state_lengths: Int[Tensor, " B"],
    *,
    backend: Backend = "auto",
) -> Float[Tensor, " B"]:
    """Return the prior probability that a state of mask t emits target t, mean over targets; emissions do not enter.

    At 1 the DAG is centred: transitions alone align target t with mask t. Before training all states emit alike, and
    each target trains the masks on which the prior puts it; a low share then trains masks on their neighbours' tokens.

    Args:
        log_trans, target_lengths, state_lengths, backend: As for `states_alignment_nll`.
        node_mask: Mask of each node, counted from 0; -1 for nodes that emit nothing.

    Returns:
        0 for a sequence without targets or without a path.
    """
    emissions = _certain_emissions(log_trans, target_lengths)
    posterior_BTS = alignment_posterior(emissions, log_trans, target_lengths, state_lengths, backend=backend)
    is_own_BTS = node_mask[:, None] == torch.arange(emissions.shape[1], device=node_mask.device)[:, None]
    return (posterior_BTS * is_own_BTS).sum((1, 2)) / target_lengths.clamp(min=1)


def _certain_emissions(log_trans: Tensor, target_lengths: Tensor) -> Float[Tensor, "B T S"]:
    num_targets = int(target_lengths.max()) if len(target_lengths) else 0
    return log_trans.new_zeros((len(log_trans), num_targets, log_trans.shape[-1]))
