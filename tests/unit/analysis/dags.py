"""DAGs made by hand and at random, a tokenizer without files, and path enumeration that shares no code with src."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from exlm_cli.analysis.dag import Dag, FloatArray


class LetterTokenizer:
    """Token i of 0..25 is the i-th letter; 26 is [MASK]; 27 [CLS] and 28 [SEP] vanish."""

    mask_id, cls_id, sep_id = 26, 27, 28

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.token_text(i) for i in ids if i < self.cls_id)

    def token_text(self, token_id: int) -> str:
        return "[MASK]" if token_id == self.mask_id else chr(ord("a") + token_id)


class WordTokenizer:
    """Tokens are the given words, each with a blank in front; then [MASK], [CLS], [SEP]."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.mask_id = len(words)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(" " + self.token_text(i) if i < self.mask_id else "[MASK]" for i in ids if i <= self.mask_id)

    def token_text(self, token_id: int) -> str:
        return self.words[token_id]


def random_dag(num_masks: int, k: int, vocab_size: int, seed: int, sharpness: float = 2.0) -> Dag:
    """Return a DAG with random emissions over letters and random transitions."""
    rng = np.random.default_rng(seed)
    num_nodes = k * num_masks + 2
    node_log_probs = np.full((num_nodes, vocab_size), -np.inf)
    node_log_probs[1:-1] = log_softmax(sharpness * rng.normal(size=(num_nodes - 2, vocab_size)))
    scores = sharpness * rng.normal(size=(num_nodes, num_nodes))
    scores[np.tril_indices(num_nodes)] = -np.inf
    tokenizer = LetterTokenizer()
    return Dag(
        text="[MASK]z" * num_masks,
        kind="text",
        node_log_probs=node_log_probs,
        log_trans=log_softmax(scores),
        node_mask=node_masks(num_masks, k),
        node_clone=node_clones(num_masks, k),
        num_states_per_mask=k,
        input_ids=np.array([tokenizer.cls_id, *([tokenizer.mask_id, 25] * num_masks), tokenizer.sep_id]),
        tokenizer=tokenizer,
    )


def node_masks(num_masks: int, k: int) -> np.ndarray:
    return np.concatenate([[-1], np.repeat(np.arange(num_masks), k), [-1]])


def node_clones(num_masks: int, k: int) -> np.ndarray:
    return np.concatenate([[0], np.tile(np.arange(1, k + 1), num_masks), [0]])


def log_softmax(scores: FloatArray) -> FloatArray:
    """Rows of -inf stay."""
    peak = np.where(np.isinf(scores.max(axis=1)), 0.0, scores.max(axis=1))[:, None]
    with np.errstate(divide="ignore"):
        return scores - peak - np.log(np.exp(scores - peak).sum(axis=1, keepdims=True).clip(min=1e-300))


def enumerate_paths(dag: Dag, lengths: Sequence[int]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield every path with one of the given numbers of inner nodes, and its probability."""
    trans = np.exp(dag.log_trans)
    inner = range(1, dag.num_nodes - 1)
    for length in lengths:
        for nodes in itertools.combinations(inner, length):
            stops = (0, *nodes, dag.num_nodes - 1)
            yield nodes, float(np.prod([trans[v, u] for v, u in itertools.pairwise(stops)]))


def enumerate_fillings(dag: Dag, length: str) -> dict[tuple[tuple[int, ...], ...], float]:
    """Probability of every choice of tokens by mask, summed over all paths that yield it."""
    emit = np.exp(dag.node_log_probs)
    lengths = [dag.num_masks] if length == "exact" else range(dag.num_nodes - 1)
    total: dict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
    for nodes, path_prob in enumerate_paths(dag, lengths):
        for tokens in itertools.product(range(emit.shape[1]), repeat=len(nodes)):
            prob = path_prob * float(np.prod([emit[u, y] for u, y in zip(nodes, tokens, strict=True)]))
            owner = range(dag.num_masks) if length == "exact" else [int(dag.node_mask[u]) for u in nodes]
            by_mask = tuple(
                tuple(y for m, y in zip(owner, tokens, strict=True) if m == mask) for mask in range(dag.num_masks)
            )
            total[by_mask] += prob
    return total
