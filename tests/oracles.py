"""Alignment by counting on the fingers: every path listed, every score added up, in Python floats.

Nothing here is shared with `src`; the recursion, log-sum-exp and the gradients are what it judges. Rotations are
products of complex numbers.
"""

import cmath
import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import torch
from torch import Tensor

Path = tuple[int, ...]


def scored_paths(
    log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor
) -> Iterator[dict[Path, float]]:
    """For each sequence, the log score of every path of `target_length` inner nodes that is possible at all."""
    for emit, trans, num_targets, num_states in zip(
        log_emit.tolist(), log_trans.tolist(), target_lengths.tolist(), state_lengths.tolist(), strict=True
    ):
        scores: dict[Path, float] = {}
        for path in combinations(range(1, num_states - 1), num_targets) if num_targets else ():
            emitted = [emit[target][node] for target, node in enumerate(path)]
            edges = [trans[v][u] for v, u in pairwise((0, *path, num_states - 1))]
            score = math.fsum(emitted + edges) if min(emitted + edges) > -math.inf else -math.inf
            if score > -math.inf:
                scores[path] = score
        yield scores


def enumerate_nll(log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor) -> Tensor:
    """Minus the log of the summed probability of all paths, float64 (B,)."""
    dag = (log_emit, log_trans, target_lengths, state_lengths)
    return torch.tensor([-_log_total(scores) for scores in scored_paths(*dag)], dtype=torch.float64)


def enumerate_posteriors(
    log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Share of the probability that has target t at node s (B, T, S), and that takes edge v -> u (B, S, S)."""
    nodes = torch.zeros(log_emit.shape, dtype=torch.float64)
    edges = torch.zeros(log_trans.shape, dtype=torch.float64)
    for row, scores in enumerate(scored_paths(log_emit, log_trans, target_lengths, state_lengths)):
        log_total = _log_total(scores)
        for path, score in scores.items():
            share = math.exp(score - log_total)
            for target, node in enumerate(path):
                nodes[row, target, node] += share
            for v, u in pairwise((0, *path, int(state_lengths[row]) - 1)):
                edges[row, v, u] += share
    return nodes, edges


def enumerate_best(log_emit: Tensor, log_trans: Tensor, target_lengths: Tensor, state_lengths: Tensor) -> Tensor:
    """Nodes of the path with the highest score (B, T); -1 where there is none."""
    best = torch.full(log_emit.shape[:2], -1)
    for row, scores in enumerate(scored_paths(log_emit, log_trans, target_lengths, state_lengths)):
        if scores:
            path = max(scores, key=scores.__getitem__)
            best[row, : len(path)] = torch.tensor(path)
    return best


def _log_total(scores: dict[Path, float]) -> float:
    if not scores:
        return -math.inf
    peak = max(scores.values())
    return peak + math.log(math.fsum(math.exp(score - peak) for score in scores.values()))


def turned(x: Tensor, position: Sequence[float], widths: Sequence[int], base: float = 10_000.0) -> Tensor:
    """Turn one vector: for each axis, pair (2p, 2p + 1) of its w entries turns by position * base^(-2p/w)."""
    out, start = x.clone(), 0
    for place, width in zip(position, widths, strict=True):
        for pair in range(width // 2):
            entries = slice(start + 2 * pair, start + 2 * pair + 2)
            value = complex(*x[entries].tolist()) * cmath.exp(1j * place * base ** (-2 * pair / width))
            out[entries] = torch.tensor([value.real, value.imag], dtype=x.dtype)
        start += width
    return out
