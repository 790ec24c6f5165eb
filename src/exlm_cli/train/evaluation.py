"""Validation metrics of a model: loss, accuracy, entropy and the health of the DAG; and the watch on its collapse.

Axes: B sequences, T targets, S nodes, N packed inner nodes, k states of a mask, M packed masks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from scipy.special import entr
from torch import Tensor
from torch.nn.functional import one_hot

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import AlignmentBackend
from exlm_cli.data.batch import Batch
from exlm_cli.format import format_percent
from exlm_cli.model.exlm import ExlmModel, NodeStates
from exlm_cli.ops.alignment import (
    alignment_edge_posterior,
    alignment_posterior,
    best_alignment,
    states_alignment_nll,
)
from exlm_cli.ops.chain import Chain, chain_nll, chain_posterior
from exlm_cli.ops.emissions import TokenStatistics
from exlm_cli.ops.path_prior import own_mask_share, path_length_nll, token_nll
from exlm_cli.progress import Progress
from exlm_cli.train.objective import Objective, is_fully_masked, is_target
from exlm_cli.train.task import Callback

_LARGEST_NATS = 88.0
"""Largest exponent of a perplexity: e^88 is still below the largest float32, and so a metric of `metrics.jsonl`."""


Sums = dict[str, tuple[float, ...]]
"""Metrics of a batch by name, which `summarise` adds up over batches and divides once: (sum, count) of a mean,
(number,) of a count, and for `clones_in_use` the expected number of targets that each of the k clones emits."""


@torch.no_grad()
def evaluate_batch(model: ExlmModel, objective: Objective, batch: Batch) -> Sums:
    """Score one batch without training.

    Mask accuracy decodes without seeing the targets: for a DAG, the best path with T nodes through each node's most
    likely token; for a chain, each mask on its own. Entropy is that of the emitted distributions, for Repeated MLM over
    tokens whose copies are all masked (App. E). The health of the DAG is that of the posterior over alignments given
    the true targets.
    """
    nodes = model.node_states(batch)
    if model.chain_head is not None:
        chain, entropy_Mk = model.chain(nodes, batch), model.state_entropies(nodes, batch)
        own_nll_M, own_M = objective.mask_nll(model, nodes, batch), model.token_statistics(nodes).best_token
        with torch.autocast(chain.log_emit.device.type, enabled=False):
            return _evaluate_chain(chain, entropy_Mk, own_nll_M, own_M, batch)
    statistics = model.token_statistics(nodes)
    if model.transition is None:
        return _evaluate_masks(model, objective, nodes, statistics, batch)
    log_emit, log_trans = model.log_emissions(nodes, batch), model.log_transitions(nodes, batch)
    with torch.autocast(log_emit.device.type, enabled=False):  # autocast is for the model: metrics stay float32
        return _evaluate_dag(log_emit, log_trans, objective, nodes, statistics, batch, model.num_states_per_mask)


class SequenceScores(NamedTuple):
    """Negative log-likelihoods of given targets, nats.

    Attributes:
        token_nll: (B, T) each target on its own; 0 beyond `target_lengths`.
        joint_nll: (B,) all targets of a sequence together, given their number; the sum of `token_nll` without a DAG.
    """

    token_nll: Float[Tensor, "B T"]
    joint_nll: Float[Tensor, " B"]


@torch.no_grad()
def score_sequences(model: ExlmModel, objective: Objective, batch: Batch) -> SequenceScores:
    """Return what the model thinks of the targets of each sequence, alone and together."""
    nodes = model.node_states(batch)
    if model.chain_head is not None:
        chain = model.chain(nodes, batch)
        return SequenceScores(batch.scatter_targets(objective.mask_nll(model, nodes, batch)), chain_nll(chain))
    if model.transition is None:
        token_nll_BT = batch.scatter_targets(objective.mask_nll(model, nodes, batch))
        return SequenceScores(token_nll_BT, token_nll_BT.sum(-1))
    log_emit, log_trans = model.log_emissions(nodes, batch), model.log_transitions(nodes, batch)
    arguments = (log_emit, log_trans, batch.target_lengths, batch.state_lengths)
    length_nll_B = path_length_nll(*arguments[1:], backend=objective.backend)
    return SequenceScores(
        token_nll(*arguments, backend=objective.backend),
        states_alignment_nll(*arguments, backend=objective.backend) - length_nll_B,
    )


def summarise(batches: Iterable[Sums]) -> dict[str, float]:
    """Turn the sums of batches into the metrics of a validation row, those of a DAG only where the model has one.

    `loss` is the mean over sequences of nats per target and `perplexity` its exponential, at most e^88.
    `loss_given_length` leaves out -log P(a path has T tokens), which an MLM does not pay: ExLM and MLM are compared by
    it. `loss_independent` is that loss if each target were drawn on its own from the DAG. `entropy_bits` is the mean
    over emitting states, NaN where App. E leaves no token to count; `entropy_posterior_bits` weighs each state by its
    posterior. `effective_states` is the perplexity of the posterior over a mask's k states, between 1 and k;
    `clones_in_use` is that of the shares of all targets that clones 1 to k emit. Where each target determines its state
    there is one effective state; a collapsed DAG also has one clone in use. `path_entropy_bits` is per target. Masks
    are counted on the best alignment of the targets: the share that emits no token, the share that emits two or more,
    and the mean tokens of the first, middle (T // 2) and last mask, which are all 1 unless paths are shifted. A mean
    over nothing is NaN.
    """
    totals: Sums = {}
    for batch in batches:
        for name, values in batch.items():
            totals[name] = tuple(map(sum, zip_longest(totals.get(name, ()), values, fillvalue=0.0)))
    row = {name: _value_of(name, total) for name, total in totals.items()}
    losses = {name: row.pop(name) for name in ("loss", "loss_given_length")}
    return {**losses, "perplexity": math.exp(min(losses["loss"], _LARGEST_NATS)), **row}


def _value_of(name: str, total: tuple[float, ...]) -> float:
    if name == "clones_in_use":
        return _perplexity(total)
    if len(total) == 1:
        return total[0]
    mean = total[0] / (total[1] or math.nan)
    return mean / math.log(2) if name.endswith("_bits") else mean


@torch.no_grad()
def measure_own_mask_shares(model: ExlmModel, batch: Batch, *, backend: AlignmentBackend = "auto") -> tuple[float, ...]:
    """Return the own-mask share of a model's transitions (see `ops.path_prior`) in each sequence with masks."""
    log_trans = model.log_transitions(model.node_states(batch), batch)
    lengths = (batch.target_lengths, batch.state_lengths)
    share_B = own_mask_share(log_trans, batch.node_mask, *lengths, backend=backend)
    return tuple(share_B[batch.target_lengths > 0].tolist())


def _evaluate_dag(
    log_emit: Float[Tensor, "B T S"],
    log_trans: Float[Tensor, "B S S"],
    objective: Objective,
    nodes: NodeStates,
    statistics: TokenStatistics,
    batch: Batch,
    num_states_per_mask: int,
) -> Sums:
    lengths = (batch.target_lengths, batch.state_lengths)
    backend = objective.backend
    nll_B = states_alignment_nll(log_emit, log_trans, *lengths, backend=backend)
    is_feasible = nll_B.isfinite()
    given_length_B = nll_B - path_length_nll(log_trans, *lengths, backend=backend)
    independent_B = token_nll(log_emit, log_trans, *lengths, backend=backend).sum(-1)
    is_mask = is_target(batch) & is_feasible[:, None]

    posterior_BTS = alignment_posterior(log_emit, log_trans, *lengths, backend=backend)
    edges_BSS = alignment_edge_posterior(log_emit, log_trans, *lengths, backend=backend)
    # H(path | targets) = log Z - E[log score], both under the posterior; at most rounding below zero
    path_entropy_B = -nll_B - _expected(posterior_BTS, log_emit) - _expected(edges_BSS, log_trans)

    best_log_prob_BS = nodes.scatter_inner(statistics.best_log_prob)
    guess_emit = best_log_prob_BS[:, None].expand_as(log_emit)
    guess_path_BT = best_alignment(guess_emit, log_trans, *lengths, backend=backend)
    guess_BT = nodes.scatter_inner(statistics.best_token).gather(1, guess_path_BT.clamp(min=0))
    is_correct_BT = (guess_BT == batch.target_ids) & (guess_path_BT >= 0) & is_target(batch)

    aligned_path_BT = best_alignment(log_emit, log_trans, *lengths, backend=backend)
    emitted_BT = _tokens_per_mask(aligned_path_BT, batch)
    last_B = (batch.target_lengths - 1).clamp(min=0)
    first, middle, last = (
        int(emitted_BT.gather(1, at_B[:, None])[is_feasible].sum())
        for at_B in (torch.zeros_like(last_B), batch.target_lengths // 2, last_B)
    )
    num_targets_B = batch.target_lengths.clamp(min=1)
    entropy_BS = nodes.scatter_inner(statistics.entropy_nats)
    num_sequences, num_masks = int(is_feasible.sum()), int(is_mask.sum())
    return {
        "loss": (_total((nll_B / num_targets_B)[is_feasible]), num_sequences),
        "loss_given_length": (_total((given_length_B / num_targets_B)[is_feasible]), num_sequences),
        "mask_accuracy": (int(is_correct_BT.sum()), int(is_target(batch).sum())),
        "entropy_bits": (_total(statistics.entropy_nats), len(statistics.entropy_nats)),
        "num_sequences": (num_sequences,),
        "num_infeasible": (int((~is_feasible).sum()),),
        "loss_independent": (_total((independent_B / num_targets_B)[is_feasible]), num_sequences),
        "entropy_posterior_bits": (_total((posterior_BTS * entropy_BS[:, None]).sum(-1)[is_mask]), num_masks),
        "effective_states": (_total(_effective_states(posterior_BTS, batch)[is_mask]), num_masks),
        "clones_in_use": _targets_of_clones(posterior_BTS, num_states_per_mask),
        "path_entropy_bits": (_total(path_entropy_B[is_feasible].clamp(min=0)), num_masks),
        "masks_with_0_share": (int(((emitted_BT == 0) & is_mask).sum()), num_masks),
        "masks_with_2plus_share": (int(((emitted_BT >= 2) & is_mask).sum()), num_masks),
        "tokens_of_first_mask": (first, num_sequences),
        "tokens_of_middle_mask": (middle, num_sequences),
        "tokens_of_last_mask": (last, num_sequences),
    }


def _evaluate_chain(
    chain: Chain,
    entropy_Mk: Float[Tensor, "M k"],
    own_nll_M: Float[Tensor, " M"],
    own_token_M: Int64[Tensor, " M"],
    batch: Batch,
) -> Sums:
    nll_B = chain_nll(chain)
    has_targets_B, num_targets_B = batch.target_lengths > 0, batch.target_lengths.clamp(min=1)
    independent_B = batch.scatter_targets(own_nll_M).sum(-1)
    posterior = chain_posterior(chain)
    state_BTk = posterior.states
    log_score_B = _expected(state_BTk, chain.log_emit) + _expected(posterior.edges, chain.log_next)
    path_entropy_B = -nll_B - log_score_B - _expected(state_BTk[:, 0], chain.log_share[:, 0])
    is_mask_BT = is_target(batch)
    surprise_BT = -torch.xlogy(state_BTk, state_BTk).sum(-1)
    entropy_BT = (state_BTk * batch.scatter_targets(entropy_Mk)).sum(-1)
    num_sequences, num_masks = int(has_targets_B.sum()), int(is_mask_BT.sum())
    loss = (_total((nll_B / num_targets_B)[has_targets_B]), num_sequences)
    return {
        "loss": loss,
        "loss_given_length": loss,
        "mask_accuracy": (int((own_token_M == batch.target_ids[is_mask_BT]).sum()), num_masks),
        "entropy_bits": (_total(entropy_Mk), entropy_Mk.numel()),
        "num_sequences": (num_sequences,),
        "num_infeasible": (int((~has_targets_B).sum()),),
        "loss_independent": (_total((independent_B / num_targets_B)[has_targets_B]), num_sequences),
        "entropy_posterior_bits": (_total(entropy_BT[is_mask_BT]), num_masks),
        "effective_states": (_total(surprise_BT.exp()[is_mask_BT]), num_masks),
        "clones_in_use": tuple(state_BTk.double().sum((0, 1)).tolist()),
        "path_entropy_bits": (_total(path_entropy_B[has_targets_B].clamp(min=0)), num_masks),
    }


def _evaluate_masks(
    model: ExlmModel, objective: Objective, nodes: NodeStates, statistics: TokenStatistics, batch: Batch
) -> Sums:
    k = model.num_states_per_mask
    nll_B = objective.mean_mask_nll(objective.mask_nll(model, nodes, batch), batch)
    has_targets = batch.target_lengths > 0
    targets_M = batch.target_ids[is_target(batch)]
    best_log_prob_Mk = statistics.best_log_prob.unflatten(0, (-1, k))
    best_token_Mk = statistics.best_token.unflatten(0, (-1, k))
    if model.objective == "exlm":
        # a state whose best token is the blank emits nothing; take the surest of the others
        best_log_prob_Mk = best_log_prob_Mk.masked_fill(best_token_Mk == objective.unk_id, -math.inf)
    guess_M = best_token_Mk.gather(1, best_log_prob_Mk.argmax(-1, keepdim=True))[:, 0]
    is_counted_M = is_fully_masked(batch, objective.num_repeats)[is_target(batch)]
    entropy_N = statistics.entropy_nats[is_counted_M.repeat_interleave(k)]
    loss, num_sequences = _total(nll_B[has_targets]), int(has_targets.sum())
    return {
        "loss": (loss, num_sequences),
        "loss_given_length": (loss, num_sequences),
        "mask_accuracy": (int((guess_M == targets_M).sum()), len(targets_M)),
        "entropy_bits": (_total(entropy_N), len(entropy_N)),
        "num_sequences": (num_sequences,),
        "num_infeasible": (int((~has_targets).sum()),),
    }


def _expected(probability: Tensor, log_score: Tensor) -> Float[Tensor, " B"]:
    """Return the sum of p * log score over all but the batch axis, in float64, with 0 * -inf = 0."""
    terms = torch.where(probability > 0, probability.double() * log_score.double(), 0.0)
    return terms.flatten(1).sum(1).float()


def _node_masks_one_hot(batch: Batch) -> Float[Tensor, "B S T"]:
    mask_index = torch.arange(batch.target_ids.shape[1], device=batch.node_mask.device)
    return (batch.node_mask[..., None] == mask_index).float()


def _effective_states(posterior_BTS: Tensor, batch: Batch) -> Float[Tensor, "B T"]:
    """Return the perplexity of the posterior over the states of each mask; 1 for a mask that no alignment visits."""
    occupancy_BS = posterior_BTS.sum(1)
    belongs_BST = _node_masks_one_hot(batch)
    mask_total_BT = torch.einsum("bs,bst->bt", occupancy_BS, belongs_BST)
    own_total_BS = torch.einsum("bt,bst->bs", mask_total_BT, belongs_BST)
    share_BS = occupancy_BS / own_total_BS.clamp(min=torch.finfo(torch.float32).tiny)
    surprise_BS = -torch.xlogy(share_BS, share_BS)
    return torch.einsum("bs,bst->bt", surprise_BS, belongs_BST).exp()


def _targets_of_clones(posterior_BTS: Tensor, num_states_per_mask: int) -> tuple[float, ...]:
    """Return the expected number of targets that clones 1 to k emit; sequences without an alignment count nothing."""
    occupancy_BS = posterior_BTS.double().sum(1)
    return tuple(occupancy_BS[:, 1:-1].sum(0).unflatten(0, (-1, num_states_per_mask)).sum(0).tolist())


def _perplexity(counts: Sequence[float]) -> float:
    total = sum(counts)
    return float(np.exp(entr(np.array(counts) / total).sum())) if total else math.nan


def _tokens_per_mask(path_BT: Tensor, batch: Batch) -> Float[Tensor, "B T"]:
    """Return how many tokens of a path each mask emits."""
    visited_BTS = one_hot(path_BT.clamp(min=0), batch.node_mask.shape[1])
    visited_BS = (visited_BTS * (path_BT >= 0)[..., None]).sum(1).float()
    return torch.einsum("bs,bst->bt", visited_BS, _node_masks_one_hot(batch)).round()


def _total(values: Tensor) -> float:
    return float(values.double().sum())


MAX_PASSED_OVER_SHARE = 0.05
MIN_CLONES = 1.05
"""With at most this many clones in use, the DAG counts as collapsed to one."""


class CollapseWatch(Callback):
    """Check each validation for a collapsed DAG, and warn once per kind of collapse."""

    def __init__(self, recipe: PretrainRecipe, progress: Progress) -> None:
        self.recipe = recipe
        self.progress = progress
        self._reported: set[str] = set()

    def on_validate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report a collapse that the metrics show."""
        for kind, (finding, cure) in find_collapse(metrics, self.recipe).items():
            if kind not in self._reported:
                self._reported.add(kind)
                self.progress.message(f"warning: the DAG of step {step} has collapsed: {finding}; {cure}")


def find_collapse(metrics: Mapping[str, float], recipe: PretrainRecipe) -> dict[str, tuple[str, str]]:
    """Return (finding, remedy) by kind of collapse; empty if the DAG is healthy."""
    found = {}
    k = recipe.masking.num_states_per_mask
    if (share := metrics["masks_with_0_share"]) > MAX_PASSED_OVER_SHARE:
        found["passed over"] = (f"{format_percent(share)} of the masks yield no token", _cure_of_the_path(recipe))
    if k > 1 and metrics["num_sequences"] and (clones := metrics["clones_in_use"]) <= MIN_CLONES:
        found["one state"] = (f"{clones:.2f} of {k} states of a mask are in use", _cure_of_the_states(recipe))
    return found


def _cure_of_the_path(recipe: PretrainRecipe) -> str:
    transition = recipe.model.transition
    missing = []
    if transition.rope == "none":
        missing.append("`--set model.transition.rope=nodes`")
    if transition.start == "formula":
        missing.append("`--set model.transition.start=next_mask`")
    return f"start a new run with {' and '.join(missing) or f'a lower `optim.lr` (now {recipe.optim.lr:g})'}"


def _cure_of_the_states(recipe: PretrainRecipe) -> str:
    if not recipe.model.transition.balance:
        return "to keep states apart, start a new run with `--set model.transition.balance=0.1`"
    return "for another DAG, start a new run with `--set model.alignment=chain` and `--set model.rope=1d`"
