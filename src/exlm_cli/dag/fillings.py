"""The n most probable joint fillings of a DAG, with exact probabilities, and the guess that ignores dependency.

A filling is a choice of tokens; its probability is the sum over all alignments of these tokens to paths, so two paths
with the same tokens are one filling. Two ways to count (App. P and Q.3):

- `exact`: T tokens, the t-th at the t-th [MASK], whichever nodes emit them, as training scores them.
- `any`: any path from BOS to EOS; a token stands where the mask is whose state emitted it, so a mask may yield no token
  or several. Neighbouring masks have one place: which of them emitted a token does not change the text.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from exlm_cli.dag.allowed import Allowed
from exlm_cli.dag.chain import ChainOfInput
from exlm_cli.dag.graph import Dag, length_log_prob, token_marginals
from exlm_cli.dag.search import MAX_WORK, Length, SearchProblem, Tokens, best_sequences
from exlm_cli.data.molecules import find_invalid_smiles
from exlm_cli.ops.alignment import best_alignment, states_alignment_nll

MAX_SEQUENCES = 4096
"""Limit on the token sequences searched when many of them have the same text."""
MAX_SCORED_CELLS = 10**10
"""Limit on sequences * tokens * nodes * nodes that are scored: seconds on one core."""
_BATCH_SIZE = 16


@dataclass(frozen=True)
class Filling:
    """One text and how probable it is.

    Attributes:
        tokens_by_mask: Tokens of each mask; under `any`, none or several, as `path` emits them.
        text: The input with its masks filled.
        log_prob: Log-probability, nats, of this text among texts of any length that the DAG yields: the sum over all
            alignments of the token sequences found that read so. Subtract the log of P(exactly T tokens) for its share
            among texts with T tokens.
        path: Nodes of the most probable alignment, or -1 where there is none.
        is_valid_smiles: RDKit's verdict; None for running text.
    """

    tokens_by_mask: tuple[tuple[int, ...], ...]
    text: str
    log_prob: float
    path: tuple[int, ...]
    is_valid_smiles: bool | None = None


@dataclass(frozen=True)
class NBest:
    """The most probable fillings, best first.

    Attributes:
        log_prob_length: Log-probability of exactly T tokens (`exact`), or 0: all texts count (`any`).
        is_proven: True if the bound shows that no token sequence outside the list is more probable than its last;
            False if the search met its limit first.
    """

    fillings: tuple[Filling, ...]
    log_prob_length: float
    is_proven: bool


@dataclass(frozen=True)
class IndependentGuess:
    """Every mask filled on its own, as an MLM does.

    Attributes:
        filling: The guess; its `log_prob` is the DAG's for these tokens together.
        token_probs: Marginal probability of each guessed token, given T tokens.
        prob_independent: Their product: the probability, given T tokens, if masks were independent.
    """

    filling: Filling
    token_probs: tuple[float, ...]
    prob_independent: float


def n_best_fillings(dag: Dag, n: int, length: Length = "exact", allowed: Allowed | None = None) -> NBest:
    """Find the n most probable fillings and their exact probabilities.

    `search` finds the token sequences and, unless it meets a limit, proves that it missed none (`NBest.is_proven`). The
    alignment op then scores each sequence over all its alignments. Sequences with the same text ("g" + "lad", "gl" +
    "ad" in neighbouring masks) are one filling with the sum of their probabilities. The result is shorter than n if the
    DAG yields fewer texts, or if the search meets a limit. With `allowed`, for `exact`, it is of the fillings that have
    such tokens alone; their probabilities are still those among all.

    Raises:
        DataError: `exact`, and no path has exactly T inner nodes.
    """
    if dag.chain is not None:
        of_chain, is_proven = dag.chain.best(n, allowed)
        fillings = _merge_by_text(dag, [tuple(enumerate(tokens)) for tokens in of_chain], length)
        return NBest(tuple(fillings), 0.0, is_proven)
    log_prob_length = length_log_prob(dag) if length == "exact" else 0.0
    problem = SearchProblem(dag, length, allowed=allowed)
    limit = max(_BATCH_SIZE, min(MAX_SEQUENCES, MAX_SCORED_CELLS // (problem.max_tokens * dag.num_nodes**2)))
    wanted = min(n, limit)
    while True:
        found, is_proven = best_sequences(problem, wanted)
        sequences = [tokens for _, tokens in found]
        fillings = _merge_by_text(dag, sequences, length)
        is_enough = len(fillings) >= n or len(sequences) < wanted
        if is_enough or not is_proven or wanted == limit or problem.work_left < MAX_WORK // 2:
            return NBest(tuple(fillings[:n]), log_prob_length, is_proven and is_enough)
        wanted = min(2 * wanted, limit)


def independent_guess(dag: Dag, length: Length = "exact") -> IndependentGuess:
    """Fill every mask with its most probable token, independently of the other masks.

    The distribution at mask t is the exact marginal of the t-th token given T tokens (`token_marginals`). The guess is
    scored as the fillings of this `length` are.

    Raises:
        DataError: No path has exactly T inner nodes.
    """
    marginal_TV = token_marginals(dag)
    probs = marginal_TV.max(axis=1)
    tokens = marginal_TV.argmax(axis=1).tolist()
    slots = range(dag.num_masks) if length == "exact" or dag.chain is not None else dag.mask_run.tolist()
    (filling,) = _merge_by_text(dag, [tuple(zip(slots, tokens, strict=True))], length)
    filling = replace(filling, tokens_by_mask=tuple((token,) for token in tokens))
    return IndependentGuess(filling, tuple(probs.tolist()), math.exp(np.log(probs).sum()))


def _merge_by_text(dag: Dag, sequences: Sequence[Tokens], length: Length) -> list[Filling]:
    """Score sequences exactly, add up the probabilities of equal texts, and sort by probability.

    Parts of UTF-8 characters all read as U+FFFD, so texts with one are equal only if their tokens are.
    """
    merged: dict[tuple[object, ...], Filling] = {}
    for filling in sorted(_score(dag, sequences, length), key=lambda f: (-f.log_prob, f.tokens_by_mask)):
        key = (filling.text, filling.tokens_by_mask if "\ufffd" in filling.text else ())
        if key in merged:
            best = merged[key]
            filling = replace(best, log_prob=float(np.logaddexp(best.log_prob, filling.log_prob)))
        elif dag.kind == "smiles":
            filling = replace(filling, is_valid_smiles=find_invalid_smiles(filling.text) is None)
        merged[key] = filling
    return sorted(merged.values(), key=lambda f: -f.log_prob)


def _score(dag: Dag, sequences: Sequence[Tokens], length: Length) -> Iterator[Filling]:
    """Yield each sequence with its exact probability over all alignments, and its best path."""
    if dag.chain is not None:
        yield from _score_chain(dag, dag.chain, sequences)
        return
    slot_S = dag.node_mask if length == "exact" else dag.mask_run[dag.node_mask]
    for start in range(0, len(sequences), _BATCH_SIZE):
        batch = sequences[start : start + _BATCH_SIZE]
        num_targets = [len(s) for s in batch]
        log_emit = np.full((len(batch), max(num_targets), dag.num_nodes), -np.inf)
        for row, sequence in zip(log_emit, batch, strict=True):
            for t, (slot, token) in enumerate(sequence):
                may_emit = (slot_S == slot) | (length == "exact")
                row[t] = np.where(may_emit, dag.node_log_probs[:, token], -np.inf)
        arguments = (
            torch.from_numpy(log_emit),
            torch.from_numpy(dag.log_trans).repeat(len(batch), 1, 1),
            torch.tensor(num_targets),
            torch.full((len(batch),), dag.num_nodes),
        )
        log_probs = (-states_alignment_nll(*arguments)).tolist()
        paths = best_alignment(*arguments).tolist()
        for sequence, log_prob, path in zip(batch, log_probs, paths, strict=True):
            nodes = path[: len(sequence)]
            if length == "exact":
                masks = [mask for mask, _ in sequence]
            elif -1 in nodes:  # no path; any mask of the run gives the text
                masks = np.searchsorted(dag.mask_run, [run for run, _ in sequence]).tolist()
            else:
                masks = dag.node_mask[nodes].tolist()
            by_mask = tuple(
                tuple(token for m, (_, token) in zip(masks, sequence, strict=True) if m == mask)
                for mask in range(dag.num_masks)
            )
            if not sequence:
                # the op calls an empty target infeasible; here it is the one edge from BOS to EOS
                log_prob = float(dag.log_trans[0, -1])
            yield Filling(by_mask, dag.fill(by_mask), log_prob, tuple(nodes))


def _score_chain(dag: Dag, chain: ChainOfInput, sequences: Sequence[Tokens]) -> Iterator[Filling]:
    """Yield each sequence of one token a mask with its exact probability, and its best path."""
    first_T = 1 + dag.num_states_per_mask * np.arange(dag.num_masks)
    for start in range(0, len(sequences), _BATCH_SIZE):
        tokens_NT = np.array([[token for _, token in sequence] for sequence in sequences[start : start + _BATCH_SIZE]])
        log_prob_N, state_NT = chain.score(torch.from_numpy(tokens_NT))
        for tokens, log_prob, states in zip(tokens_NT.tolist(), log_prob_N.tolist(), state_NT.cpu(), strict=True):
            by_mask = tuple((token,) for token in tokens)
            yield Filling(by_mask, dag.fill(by_mask), log_prob, tuple((first_T + states.numpy()).tolist()))
