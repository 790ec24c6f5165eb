"""Alignments before any token is seen: the number of tokens of a path, and the mask that each target falls on.

With every emission equal to one, the likelihood of T targets is the probability that a path through the DAG has T inner
nodes, and the posterior is where such a path puts each target. Axes: B sequences, T targets, S nodes.
"""

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from exlm_cli.ops.alignment import Backend, alignment_posterior, states_alignment_nll


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


def own_mask_share(
    log_trans: Float[Tensor, "B S S"],
    node_mask: Int64[Tensor, "B S"],
    target_lengths: Int[Tensor, " B"],
    state_lengths: Int[Tensor, " B"],
    *,
    backend: Backend = "auto",
) -> Float[Tensor, " B"]:
    """Return the posterior probability that a target is emitted by a state of its own mask, mean over targets.

    At 1 the DAG is centred: transitions alone align target t with mask t. Where states emit alike, as before training,
    every target trains the masks that it falls on, so that a low share trains masks on their neighbours' tokens.

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
