"""Fillings drawn from a DAG: a path of as many nodes as masks, then the tokens of its nodes.

Axes: N draws, S nodes, T masks, G masks to fill.
"""

from collections.abc import Sequence

import numpy as np
import torch

from exlm_cli.dag.graph import Dag, FloatArray, length_log_prob
from exlm_cli.dag.search import hops_between, log_matmul
from exlm_cli.data import IntArray


def draw_tokens(dag: Dag, masks: Sequence[int], n: int, temperature: float, draw: np.random.Generator) -> IntArray:
    """Return (N, G) tokens of some masks, whatever tokens the others have.

    Args:
        masks: Those G, ascending.
        n: N.
        temperature: X; tokens of a node are drawn from P^(1/X), normalised. Paths are drawn as the DAG has them.
    """
    if dag.chain is not None:  # whose states read the tokens before
        return dag.chain.draw(n, temperature, draw).cpu().numpy()[:, masks]
    node_NT = _draw_paths(dag, n, draw)
    tokens_NG = np.zeros((n, len(masks)), dtype=np.int64)
    for at, mask in enumerate(masks):
        for node in np.unique(node_NT[:, mask]):
            log_probs = dag.node_log_probs[node] / temperature
            weights = np.exp(log_probs - log_probs.max())
            mine = node_NT[:, mask] == node
            tokens_NG[mine, at] = draw.choice(len(weights), size=int(mine.sum()), p=weights / weights.sum())
    return tokens_NG


def log_probs_of(dag: Dag, masks: Sequence[int], tokens_NG: IntArray) -> FloatArray:
    """Return (N,) log-probabilities, nats, of tokens of some masks together, given T tokens, over all paths.

    Of some masks of a chain they are not known: NaN.
    """
    if dag.chain is not None and len(masks) < dag.num_masks:
        return np.full(len(tokens_NG), np.nan)
    if dag.chain is not None:
        of_chain: FloatArray = dag.chain.score(torch.from_numpy(tokens_NG))[0].cpu().numpy()
        return of_chain
    log_alpha_NS = np.full((len(tokens_NG), dag.num_nodes), -np.inf)
    log_alpha_NS[:, 0] = 0.0
    *hops, last = hops_between(dag, masks)
    for hop_SS, tokens_N in zip(hops, tokens_NG.T, strict=True):
        log_alpha_NS = log_matmul(log_alpha_NS, hop_SS) + dag.node_log_probs[:, tokens_N].T
    log_total_N: FloatArray = log_matmul(log_alpha_NS, last)[:, -1] - length_log_prob(dag)
    return log_total_N


def _draw_paths(dag: Dag, n: int, draw: np.random.Generator) -> IntArray:
    """Return (N, T) inner nodes of paths of T of them, at their probability."""
    rest_TS = [dag.trans[:, -1]]  # what follows a node: the end, or so many nodes and then the end
    for _ in range(dag.num_masks - 1):
        rest_TS.append(dag.trans[:, 1:-1] @ rest_TS[-1][1:-1])
    node_N = np.zeros(n, dtype=np.int64)
    path = []
    for rest_S in reversed(rest_TS):
        weight_NS = dag.trans[node_N] * rest_S
        weight_NS[:, -1] = 0.0
        total_NS = np.cumsum(weight_NS, axis=1)
        node_N = (total_NS > draw.random((n, 1)) * total_NS[:, -1:]).argmax(axis=1)
        path.append(node_N)
    return np.stack(path, axis=1)
