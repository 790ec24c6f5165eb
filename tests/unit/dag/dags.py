"""DAGs made by hand and at random, a tokenizer without files, and path enumeration that shares no code with src."""

import itertools
import string
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from exlm_cli.dag.graph import Dag
from tests.unit.ops.alignment.dags import log_softmax


class PieceTokenizer:
    """Tokens are the given pieces of text, blanks and all; then [MASK]; [CLS] and [SEP] vanish."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)
        self.mask_id, self.cls_id, self.sep_id = range(len(pieces), len(pieces) + 3)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("[MASK]" if i == self.mask_id else self.pieces[i] for i in ids if i <= self.mask_id)

    def token_text(self, token_id: int) -> str:
        return self.pieces[token_id].strip()


def random_dag(num_masks: int, k: int, vocab_size: int, seed: int, sharpness: float = 2.0) -> Dag:
    """Return a DAG with random emissions over letters and random transitions."""
    rng = np.random.default_rng(seed)
    num_nodes = k * num_masks + 2
    node_log_probs = np.full((num_nodes, vocab_size), -np.inf)
    node_log_probs[1:-1] = log_softmax(sharpness * rng.normal(size=(num_nodes - 2, vocab_size)))
    scores = sharpness * rng.normal(size=(num_nodes, num_nodes))
    scores[np.tril_indices(num_nodes)] = -np.inf
    tokenizer = PieceTokenizer(string.ascii_lowercase)
    return Dag(
        text="[MASK]z" * num_masks,
        kind="text",
        numbers=lambda: (node_log_probs, log_softmax(scores)),
        num_states_per_mask=k,
        input_ids=np.array([tokenizer.cls_id, *([tokenizer.mask_id, 25] * num_masks), tokenizer.sep_id]),
        tokenizer=tokenizer,
    )


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


def case_study_dag() -> Dag:
    """Return the sentence of Figures 7 and 10 with k = 4: amazing goes with glad, terrible with sorry."""
    nodes = [
        {"it": 0.30, "news": 0.22, "what": 0.11},
        {"terrible": 0.46, "awful": 0.31, "sad": 0.09},
        {"amazing": 0.58, "wonderful": 0.24, "beautiful": 0.10},
        {"good": 0.35, "great": 0.33, "nice": 0.12},
        {"sorry": 0.88, "sad": 0.06, "ashamed": 0.03},
        {"glad": 0.74, "happy": 0.21, "pleased": 0.03},
        {"happy": 0.66, "glad": 0.25, "proud": 0.05},
        {"excited": 0.55, "pleased": 0.30, "curious": 0.10},
    ]
    edges = {
        0: {1: 0.14, 2: 0.30, 3: 0.41, 4: 0.13, 6: 0.02},
        1: {2: 0.05, 3: 0.10, 5: 0.25, 6: 0.20, 7: 0.22, 8: 0.18},
        2: {3: 0.02, 5: 0.86, 6: 0.05, 7: 0.03, 8: 0.04},
        3: {4: 0.04, 5: 0.02, 6: 0.55, 7: 0.27, 8: 0.12},
        4: {5: 0.04, 6: 0.30, 7: 0.44, 8: 0.22},
        5: {6: 0.03, 7: 0.02, 8: 0.01, 9: 0.94},
        6: {7: 0.08, 8: 0.02, 9: 0.90},
        7: {8: 0.05, 9: 0.95},
        8: {9: 1.0},
    }
    return handmade_dag("This is [MASK], and I'm very [MASK] to see this.", nodes, edges, 4)


def handmade_dag(
    text: str, nodes: list[dict[str, float]], edges: dict[int, dict[int, float]], k: int, kind: str = "text"
) -> Dag:
    """Return a DAG from words with probabilities; what is left of each node is spread evenly over all other words."""
    blank = " " if kind == "text" else ""
    words = [blank + word for word in dict.fromkeys(word for node in nodes for word in node)]
    around = [piece.rstrip(blank) for piece in text.split("[MASK]")]
    tokenizer = PieceTokenizer([*words, *around])
    probs = np.zeros((len(nodes) + 2, tokenizer.sep_id + 1))
    for row, node in zip(probs[1:-1], nodes, strict=True):
        row[: len(words)] = [node.get(word.strip(), 0.0) for word in words]
        row[: len(words)] += np.where(row[: len(words)] == 0, (1 - row.sum()) / max(1, len(words) - len(node)), 0.0)
    trans = np.zeros((len(nodes) + 2, len(nodes) + 2))
    for source, targets in edges.items():
        for target, probability in targets.items():
            trans[source, target] = probability
    ids = [len(words)]
    for i in range(1, len(around)):
        ids += [tokenizer.mask_id, len(words) + i]
    with np.errstate(divide="ignore"):
        numbers = np.log(probs), np.log(trans)
        return Dag(
            text=text,
            kind=kind,
            numbers=lambda: numbers,
            num_states_per_mask=k,
            input_ids=np.array([tokenizer.cls_id, *ids, tokenizer.sep_id]),
            tokenizer=tokenizer,
        )
