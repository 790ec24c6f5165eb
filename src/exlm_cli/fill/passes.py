"""Fillings of inputs in one pass or several: the surest masks are filled jointly, then the text is read again.

Axes: N fillings, S nodes, T masks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from exlm_cli.dag.allowed import Allowed
from exlm_cli.dag.build import dags_of_inputs
from exlm_cli.dag.fillings import n_best_fillings
from exlm_cli.dag.graph import Dag, length_log_prob, token_marginals, token_occupancy
from exlm_cli.dag.read import MaskedText
from exlm_cli.dag.search import SearchProblem, best_sequences
from exlm_cli.data import IntArray
from exlm_cli.errors import DataError
from exlm_cli.fill.sample import draw_tokens, log_probs_of
from exlm_cli.train.pretrained import Pretrained


@dataclass(frozen=True)
class Ask:
    """One input whose masks are to be filled.

    Attributes:
        masked: What the model reads.
        top: Most probable fillings to find.
        draws: Fillings to draw; 0: the most probable ones are searched.
        temperature: Of the draws.
        draw: Source of the draws.
        allowed: The allowed tokens, for a search in one pass; None: all.
    """

    masked: MaskedText
    top: int = 1
    draws: int = 0
    temperature: float = 1.0
    draw: np.random.Generator | None = None
    allowed: Allowed | None = None


@dataclass(frozen=True)
class Found:
    """One filling; between passes not of all masks yet.

    Attributes:
        input_ids: (L,) tokens of the input with those filled that are.
        tokens: The token of each mask that is filled, by its place in the input.
        log_prob: Log-probability, nats, of the tokens of each pass together, given those of the passes before; of a
            chain, that of all tokens in the first reading, however many passes found them.
        log_prob_alone: Sum of those of its tokens, each mask on its own, in the first reading.
        is_proven: Whether no filling that is missing is more probable than the last one.
    """

    input_ids: IntArray
    tokens: dict[int, int] = field(default_factory=dict)
    log_prob: float = 0.0
    log_prob_alone: float = math.nan
    is_proven: bool = True


def fill_inputs(pretrained: Pretrained, asks: Sequence[Ask], passes: int) -> list[list[Found] | str]:
    """Return the fillings of each input: the most probable ones, best first, or those drawn; or why there are none.

    In each of P passes those masks are filled that have the most probable tokens, as many as leave equal shares for the
    passes to come, with the probability that they have whatever the others have. Every filling is read again by itself.
    """
    rows: list[list[Found] | str] = [[Found(ask.masked.input_ids)] * max(1, ask.draws) for ask in asks]
    first: list[Dag | None] = [None] * len(asks)
    for passes_left in range(passes, 0, -1):
        dags = _dags_by_input(pretrained, [found for row in rows if not isinstance(row, str) for found in row])
        for number, (ask, row) in enumerate(zip(asks, rows, strict=True)):
            if isinstance(row, str):
                continue
            first[number] = first[number] or dags[row[0].input_ids.tobytes()]
            try:
                found = _next_pass(ask, row, dags, passes_left)
                rows[number] = found if passes == 1 or ask.draws else _best(found, ask.top)
            except DataError as error:
                rows[number] = error.message
    return [
        row if isinstance(row, str) else _with_alone(dag, row, was_in_passes=passes > 1)
        for dag, row in zip(first, rows, strict=True)
    ]


def _dags_by_input(pretrained: Pretrained, states: Sequence[Found]) -> dict[bytes, Dag]:
    """Return the DAG of each input that has masks left."""
    mask_id = pretrained.tokenizer.mask_id
    inputs = {found.input_ids.tobytes(): found.input_ids for found in states if (found.input_ids == mask_id).any()}
    masked = [MaskedText("", input_ids) for input_ids in inputs.values()]
    dags: dict[bytes, Dag] = {}
    for key, dag in zip(
        inputs, dags_of_inputs(pretrained.model, pretrained.tokenizer, pretrained.recipe, masked), strict=True
    ):
        if dag.chain is None:
            dag.node_log_probs[:, mask_id] = -np.inf  # a mask that is filled with [MASK] would be read again
        dags[key] = dag
    return dags


def _next_pass(ask: Ask, states: Sequence[Found], dags: Mapping[bytes, Dag], passes_left: int) -> list[Found]:
    """Return what each filling becomes in a pass; equal ones are drawn from together, and keep their places."""
    places: dict[bytes, list[int]] = {}
    for place, state in enumerate(states):
        places.setdefault(state.input_ids.tobytes(), []).append(place)
    if not ask.draws:
        return [
            new
            for key, (place, *_) in places.items()
            for new in (_search(ask, states[place], dags[key], passes_left) if key in dags else [states[place]])
        ]
    drawn = list(states)
    for key, mine in places.items():
        if key in dags:
            for place, new in zip(mine, _drawn(ask, states[mine[0]], dags[key], passes_left, len(mine)), strict=True):
                drawn[place] = new
    return drawn


def _search(ask: Ask, state: Found, dag: Dag, passes_left: int) -> list[Found]:
    """Return the most probable fillings of the masks of a pass."""
    masks = _surest(dag, passes_left)
    if dag.chain is not None and len(masks) < dag.num_masks:
        # of the masks of a chain, each of which reads the token before, all are filled jointly and the surest kept
        sequences, _ = dag.chain.best(ask.top, seeks_proof=False)  # a later pass changes the others anyway
        log_probs = dag.chain.score(torch.tensor(sequences))[0].tolist()
        pairs = zip(sequences, log_probs, strict=True)
        kept = {tuple(row[mask] for mask in masks): log_prob for row, log_prob in reversed([*pairs])}
        # a mask that is filled with [MASK] would be read again, and its fillings counted twice
        found = [([*tokens], log_prob) for tokens, log_prob in kept.items() if dag.tokenizer.mask_id not in tokens]
        is_proven = False
    elif len(masks) == dag.num_masks:
        best = n_best_fillings(dag, ask.top, allowed=ask.allowed)
        found = [([token for (token,) in f.tokens_by_mask], f.log_prob - best.log_prob_length) for f in best.fillings]
        is_proven = best.is_proven and not state.tokens
    else:
        log_prob_length = length_log_prob(dag)
        scored, _ = best_sequences(SearchProblem(dag, "exact", masks), ask.top)
        found = [([token for _, token in tokens], log_prob - log_prob_length) for log_prob, tokens in scored]
        is_proven = False
    return [_filled(state, dag, masks, tokens, log_prob, is_proven) for tokens, log_prob in found]


def _drawn(ask: Ask, state: Found, dag: Dag, passes_left: int, n: int) -> list[Found]:
    """Return n fillings of the masks of a pass that are drawn."""
    assert ask.draw is not None, "draws have a source"
    masks = _surest(dag, passes_left)
    tokens_NG = draw_tokens(dag, masks, n, ask.temperature, ask.draw)
    log_prob_N = log_probs_of(dag, masks, tokens_NG)
    return [
        _filled(state, dag, masks, tokens, log_prob, False)
        for tokens, log_prob in zip(tokens_NG.tolist(), log_prob_N.tolist(), strict=True)
    ]


def _surest(dag: Dag, passes_left: int) -> list[int]:
    """Return the masks that a pass fills, ascending."""
    size = math.ceil(dag.num_masks / passes_left)
    if size == dag.num_masks:
        return list(range(size))
    most_T = token_marginals(dag).max(axis=1)
    return sorted(np.argsort(-most_T, kind="stable")[:size].tolist())


def _filled(
    state: Found, dag: Dag, masks: Sequence[int], tokens: Sequence[int], log_prob: float, is_proven: bool
) -> Found:
    """Return a filling with tokens at some of the masks that are left, which are counted from 0."""
    places = np.flatnonzero(dag.input_ids == dag.tokenizer.mask_id)[masks]
    input_ids = dag.input_ids.copy()
    input_ids[places] = tokens
    added = dict(zip(places.tolist(), tokens, strict=True))
    return Found(input_ids, state.tokens | added, state.log_prob + log_prob, is_proven=is_proven)


def _best(found: Sequence[Found], top: int) -> list[Found]:
    return sorted(found, key=lambda one: -one.log_prob)[:top]


def score_tokens(pretrained: Pretrained, masked: Sequence[MaskedText], tokens: Sequence[IntArray]) -> list[list[Found]]:
    """Return given fillings of inputs, (N, T) tokens of each, with their probabilities in one pass."""
    rows = []
    dags = dags_of_inputs(pretrained.model, pretrained.tokenizer, pretrained.recipe, masked)
    for dag, tokens_NT in zip(dags, tokens, strict=True):
        masks = list(range(dag.num_masks))
        log_prob_N = log_probs_of(dag, masks, tokens_NT)
        begin = Found(dag.input_ids)
        found = [
            _filled(begin, dag, masks, row, log_prob, False)
            for row, log_prob in zip(tokens_NT.tolist(), log_prob_N.tolist(), strict=True)
        ]
        rows.append(_with_alone(dag, found))
    return rows


def _with_alone(dag: Dag | None, row: Sequence[Found], *, was_in_passes: bool = False) -> list[Found]:
    """Return fillings with the probability of their tokens if each mask is filled on its own.

    Of a chain that was filled in several passes, also with that of all tokens in the first reading.
    """
    assert dag is not None, "a row that is filled was read"
    tokens_NT = np.array([[token for _, token in sorted(found.tokens.items())] for found in row]).reshape(len(row), -1)
    if dag.chain is not None:
        own_TV = dag.chain.own_log_probs.double().cpu().numpy()
        alone_N = own_TV[np.arange(dag.num_masks), tokens_NT].sum(1).tolist()
        row = [replace(found, log_prob_alone=alone) for found, alone in zip(row, alone_N, strict=True)]
        if not was_in_passes:
            return row
        joint_N = dag.chain.score(torch.from_numpy(tokens_NT))[0].tolist()
        return [replace(found, log_prob=joint) for found, joint in zip(row, joint_N, strict=True)]
    occupancy_TS = token_occupancy(dag)
    with np.errstate(divide="ignore"):
        log_marginal_TN = np.log(
            [
                occupancy_S @ np.exp(dag.node_log_probs[:, tokens_N])
                for occupancy_S, tokens_N in zip(occupancy_TS, tokens_NT.T, strict=True)
            ]
        )
    return [
        replace(found, log_prob_alone=total) for found, total in zip(row, log_marginal_TN.sum(0).tolist(), strict=True)
    ]
