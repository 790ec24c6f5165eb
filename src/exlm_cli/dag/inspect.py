"""Everything a report shows of one DAG, worked out once."""

from dataclasses import dataclass

import numpy as np

from exlm_cli.dag.fillings import IndependentGuess, NBest, independent_guess, n_best_fillings
from exlm_cli.dag.graph import (
    Dag,
    FloatArray,
    NodeToken,
    edge_use,
    length_log_prob,
    most_likely_path,
    occupancy,
    top_tokens,
)
from exlm_cli.dag.search import Length


@dataclass(frozen=True)
class Transition:
    """One edge of the DAG.

    Attributes:
        source: Node it leaves.
        target: Node it enters.
        probability: E[source, target].
        use: Probability that a path of exactly T inner nodes takes it.
    """

    source: int
    target: int
    probability: float
    use: float


@dataclass(frozen=True)
class Inspection:
    """A DAG with its words, paths and fillings.

    Attributes:
        dag: What was inspected.
        tokens: Most probable tokens of every node, best first.
        occupancy: (S,) probability that a path of exactly T inner nodes visits a node.
        edge_use: (S, S) probability that such a path takes an edge.
        path: Inner nodes of the best path.
        length: How fillings were counted.
        n_best: The most probable joint fillings.
        guess: Every mask on its own.
        log_prob_exact: Log-probability, nats, that a path has exactly T inner nodes.
        checkpoint: Where the model came from; empty where it was made by hand.
    """

    dag: Dag
    tokens: list[list[NodeToken]]
    occupancy: FloatArray
    edge_use: FloatArray
    path: list[int]
    length: Length
    n_best: NBest
    guess: IndependentGuess
    log_prob_exact: float
    checkpoint: str = ""

    def word(self, node: int) -> str:
        """Return the most probable word of a node, or BOS, EOS."""
        if self.tokens[node]:
            return self.tokens[node][0].text
        return "BOS" if node == 0 else "EOS"

    def states_in_use(self) -> FloatArray:
        """Return how many states of each mask paths use, (T,): perplexity of their shares, 1 to k; 0 where unvisited.

        Near 1 throughout, the DAG has collapsed onto one path, and each [MASK] is filled on its own.
        """
        in_use = np.zeros(self.dag.num_masks)
        for mask in range(self.dag.num_masks):
            visited = self.occupancy[self.dag.node_mask == mask]
            share = visited[visited > 0] / max(visited.sum(), np.finfo(np.float64).tiny)
            in_use[mask] = np.exp(-(share * np.log(share)).sum()) if len(share) else 0.0
        return in_use

    def strongest_transitions(self, n: int) -> list[Transition]:
        """Return the n edges that most paths take; not the largest E, for a rare node's edges sum to 1 too."""
        flat = self.edge_use.ravel()
        best = [i for i in np.argsort(-flat, kind="stable")[:n].tolist() if flat[i] > 0]
        pairs = [divmod(i, self.dag.num_nodes) for i in best]
        return [Transition(v, u, float(np.exp(self.dag.log_trans[v, u])), float(self.edge_use[v, u])) for v, u in pairs]


def inspect(
    dag: Dag, *, num_top: int = 3, num_fillings: int = 10, length: Length = "exact", checkpoint: str = ""
) -> Inspection:
    """Work out what a report shows.

    Args:
        dag: Any DAG.
        num_top: Words of each node.
        num_fillings: How many joint fillings.
        length: How these are counted, see `fillings`.
        checkpoint: Named in reports.

    Raises:
        DataError: No path has exactly T inner nodes.
    """
    return Inspection(
        dag=dag,
        tokens=top_tokens(dag, num_top),
        occupancy=occupancy(dag),
        edge_use=edge_use(dag),
        path=most_likely_path(dag),
        length=length,
        n_best=n_best_fillings(dag, num_fillings, length),
        guess=independent_guess(dag),
        log_prob_exact=length_log_prob(dag),
        checkpoint=checkpoint,
    )
