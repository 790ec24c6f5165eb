"""Everything that reports show of one DAG: numbers, and the words that describe them."""

import math
import re
from dataclasses import dataclass

import numpy as np
from scipy.special import entr

from exlm_cli.dag import graph
from exlm_cli.dag.fillings import Filling, IndependentGuess, NBest, independent_guess, n_best_fillings
from exlm_cli.dag.search import Length
from exlm_cli.format import format_number_of, format_percent, printable
from exlm_cli.train.evaluation import MIN_CLONES

MAX_MASKS_DRAWN = 40
"""Pictures show this many masks; of a longer sentence they show the first ones and say so."""

WITHOUT_DAG = "Without the DAG, each [MASK] on its own"
"""Heading of the guess that stands below the joint fillings."""

NOTE_ON_PROOF = "The search met its limit: more probable fillings may be missing from this list."

_NOTHING = "–"


@dataclass(frozen=True)
class Inspection:
    """A DAG with its words, paths and fillings.

    Attributes:
        tokens: Most probable tokens of every node, best first.
        occupancy: (S,) probability that a path of exactly T inner nodes visits a node.
        edge_use: (S, S) probability that such a path takes an edge.
        path: Inner nodes of the best path.
        length: Number of tokens in a filling: `exact` or `any`.
        log_prob_exact: Log-probability, nats, that a path has exactly T inner nodes.
        checkpoint: Path of the model's checkpoint; empty for a DAG made by hand.
    """

    dag: graph.Dag
    tokens: list[list[graph.NodeToken]]
    occupancy: graph.FloatArray
    edge_use: graph.FloatArray
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

    def quote(self, word: str) -> str:
        """Return a word as it reads in a list: punctuation of running text in quotation marks."""
        is_punctuation = self.dag.kind == "text" and not any(character.isalnum() for character in word)
        return f"“{word}”" if is_punctuation else word

    def listed_words(self, node: int) -> str:
        """Return the words of a node with their probabilities, best first; nothing for BOS and EOS."""
        return ", ".join(f"{self.quote(token.text)} {two_decimals(token.probability)}" for token in self.tokens[node])

    def strongest_transitions(self, n: int) -> list[tuple[int, int]]:
        """Return the n edges that paths use most; E alone would not tell, as the edges of a rare node sum to 1 too."""
        flat = self.edge_use.ravel()
        best = np.argsort(-flat, kind="stable")[:n].tolist()
        return [divmod(index, self.dag.num_nodes) for index in best if flat[index] > 0]

    def states_in_use(self) -> graph.FloatArray:
        """Return the effective states of each mask, (T,): perplexity of the shares of visits, 1 to k; 0 if unvisited.

        Near 1 throughout, the DAG has collapsed onto one path, and each [MASK] is filled on its own.
        """
        visits_Tk = self.occupancy[1:-1].reshape(self.dag.num_masks, -1)
        total_T1 = visits_Tk.sum(axis=1, keepdims=True)
        entropy_T = entr(visits_Tk / np.maximum(total_T1, np.finfo(np.float64).tiny)).sum(axis=1)
        in_use: graph.FloatArray = np.exp(entropy_T) * (total_T1[:, 0] > 0)
        return in_use

    def share(self, filling: Filling) -> float:
        """Return the probability of a filling among those counted: of T tokens, or of any number."""
        return math.exp(filling.log_prob - self.n_best.log_prob_length)

    def relative_probability(self, filling: Filling) -> float:
        """Return the probability of a filling relative to the best one; shares may be too small for a float."""
        return math.exp(filling.log_prob - self.n_best.fillings[0].log_prob)

    def filled_words(self, filling: Filling) -> list[str]:
        """Return the printable text that fills each mask."""
        decode = self.dag.tokenizer.decode
        return [printable(decode(list(tokens)).strip(" ")) or _NOTHING for tokens in filling.tokens_by_mask]

    def sentence(self) -> list[tuple[str, int]]:
        """Return the input in pieces, each with the number of its mask, from 0, or -1 for text around the masks."""
        pieces = re.split(r"(\[MASK\])", re.sub(r"\s+", " ", self.dag.text))
        return [(printable(piece), index // 2 if index % 2 else -1) for index, piece in enumerate(pieces)]

    def numbered_sentence(self) -> str:
        """Return the input in one line, each [MASK] with its number."""
        return "".join(f"[MASK {mask + 1}]" if mask >= 0 else piece for piece, mask in self.sentence()).strip()

    def health(self) -> str:
        """Describe in one line how much of the DAG is in use, and whether it has collapsed."""
        if not self.dag.has_transitions:
            return "This model fills each mask on its own, so there is no DAG to draw."
        in_use = self.states_in_use()
        mean = f"{in_use.mean():.2f} of {self.dag.num_states_per_mask} states in use per [MASK]"
        if self.dag.chain is not None:
            return f"{mean}, as the first filling leads to them: each mask reads the token of the one before."
        if self.dag.num_states_per_mask > 1 and in_use.max() <= MIN_CLONES:
            return f"{mean}: this DAG has collapsed onto one path, and each [MASK] is filled on its own."
        share = format_percent(math.exp(self.log_prob_exact))
        return f"{mean}; {share} of the probability lies on paths with {self._num_tokens()}."

    def counted_fillings(self) -> str:
        """Describe the set of fillings in which shares sum to 1."""
        return "of all fillings of any length" if self.length == "any" else f"of all fillings with {self._num_tokens()}"

    def share_if_independent(self) -> str:
        """Describe the probability of the guess if masks were independent, and its condition where it has another."""
        given = " given as many tokens as masks" if self.length == "any" else ""
        return f"{format_percent(self.guess.prob_independent)} if masks were independent{given}"

    def note_on_cut(self) -> str:
        """Return a sentence on the masks that pictures leave out, or nothing."""
        num_left_out = self.dag.num_masks - MAX_MASKS_DRAWN
        if num_left_out <= 0:
            return ""
        return f"Only the first {MAX_MASKS_DRAWN} [MASK]s are drawn; the tables have the other {num_left_out}."

    def note_on_proof(self) -> str:
        """Return a warning that the list of fillings may be incomplete, or nothing."""
        if self.n_best.is_proven:
            return ""
        return NOTE_ON_PROOF

    def _num_tokens(self) -> str:
        return format_number_of(self.dag.num_masks, "token")


def inspect(
    dag: graph.Dag, *, num_top: int = 3, num_fillings: int = 10, length: Length = "exact", checkpoint: str = ""
) -> Inspection:
    """Compute everything that reports show of a DAG, with `num_top` words a node; for `length` see `fillings`.

    Raises:
        DataError: No path has exactly T inner nodes.
    """
    occupancy = graph.token_occupancy(dag).sum(axis=0)
    occupancy[[0, -1]] = 1.0
    return Inspection(
        dag=dag,
        tokens=graph.top_tokens(dag, num_top),
        occupancy=occupancy,
        edge_use=graph.edge_use(dag),
        path=graph.most_likely_path(dag),
        length=length,
        n_best=n_best_fillings(dag, num_fillings, length),
        guess=independent_guess(dag, length),
        log_prob_exact=graph.length_log_prob(dag),
        checkpoint=checkpoint,
    )


def two_decimals(probability: float) -> str:
    """Return `0.25`, or `<0.01` for a probability that would be rounded to 0."""
    return "<0.01" if 0 < probability < 0.005 else f"{probability:.2f}"
