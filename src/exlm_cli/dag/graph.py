"""The DAG behind one masked input, in numbers: node distributions, transitions, occupancy (section 4.2, App. P).

Axes: S nodes (BOS, the k states of each [MASK] in order, EOS), V vocabulary, T masks. A `Dag` is numpy; functions that
need torch import it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from exlm_cli.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = NDArray[np.floating]
IntArray = NDArray[np.int64]

_MAX_SHOWN = 60


class TokenDecoder(Protocol):
    """The part of a tokenizer that an inspection needs."""

    mask_id: int

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without [CLS] and [SEP]."""

    def token_text(self, token_id: int) -> str:
        """Return one token as people read it."""


@dataclass(frozen=True)
class Dag:
    """The states of one input with T masks: S = k * T + 2 nodes and the edges between them.

    Attributes:
        text: The user's input.
        kind: RDKit checks the fillings of "smiles".
        node_log_probs: (S, V) log-probabilities of tokens, nats; the rows of BOS and EOS are -inf.
        log_trans: (S, S) log E[v, u], nats; -inf at and below the diagonal.
        node_mask: (S,) the mask of each node, from 0; -1 for BOS and EOS.
        node_clone: (S,) the number of each node among its mask's k states, from 1; 0 for BOS and EOS.
        num_states_per_mask: k.
        input_ids: (L,) tokens before expansion, [CLS], [MASK]s and [SEP] included.
        tokenizer: Turns ids into text.
        has_transitions: False for an MLM and for `alignment: independent`, whose masks do not depend on each other.
            Such a DAG has one node a mask and edges of probability 1, and its probabilities are the model's; for
            several states a mask, given that they yield one token.
    """

    text: str
    kind: Literal["text", "smiles"]
    node_log_probs: FloatArray
    log_trans: FloatArray
    node_mask: IntArray
    node_clone: IntArray
    num_states_per_mask: int
    input_ids: IntArray
    tokenizer: TokenDecoder
    has_transitions: bool = True

    @property
    def num_nodes(self) -> int:
        """S."""
        return len(self.node_mask)

    @property
    def num_masks(self) -> int:
        """T."""
        return int(self.node_mask.max()) + 1

    def segments(self, tokens_by_mask: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
        """Return the filled text in pieces, each with the mask that it fills, or -1 around the masks."""
        pieces: list[tuple[str, int]] = []
        start = 0
        mask_positions = np.flatnonzero(self.input_ids == self.tokenizer.mask_id)
        for mask, position in enumerate(mask_positions.tolist()):
            pieces.append((self.tokenizer.decode(self.input_ids[start:position].tolist()), -1))
            pieces.append((self.tokenizer.decode(list(tokens_by_mask[mask])), mask))
            start = position + 1
        pieces.append((self.tokenizer.decode(self.input_ids[start:].tolist()), -1))
        return [piece for piece in pieces if piece[0]]

    def fill(self, tokens_by_mask: Sequence[Sequence[int]]) -> str:
        """Return the text with its masks filled; a character may be split over tokens."""
        ids: list[int] = []
        remaining = iter(tokens_by_mask)
        for token in self.input_ids.tolist():
            ids += next(remaining) if token == self.tokenizer.mask_id else [token]
        return self.tokenizer.decode(ids).strip()


def check_sentence(text: str, *, is_smiles: bool) -> None:
    """Check that an input has something to predict.

    Raises:
        DataError: It is empty or has no [MASK].
    """
    example = "c1ccc([MASK])cc1" if is_smiles else "This is [MASK], and I'm very [MASK] to see this."
    hint = f'write [MASK] for each hidden token, as in: exlm inspect-dag "{example}"'
    if not text.strip():
        raise DataError("the sentence is empty", hint)
    if "[MASK]" not in text:
        shown = text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
        raise DataError(f"there is no [MASK] in {shown!r}", hint)


@dataclass(frozen=True)
class NodeToken:
    """One token that a node may emit."""

    token_id: int
    text: str
    probability: float


def top_tokens(dag: Dag, n: int) -> list[list[NodeToken]]:
    """Return the n most probable tokens of every node, best first, ties by id; none for BOS and EOS."""
    nodes: list[list[NodeToken]] = [[] for _ in range(dag.num_nodes)]
    for node in np.flatnonzero(dag.node_mask >= 0):
        log_probs = dag.node_log_probs[node]
        best = np.argsort(-log_probs, kind="stable")[:n]
        nodes[node] = [
            NodeToken(token_id, printable(dag.tokenizer.token_text(token_id)), float(np.exp(log_probs[token_id])))
            for token_id in best.tolist()
        ]
    return nodes


def printable(text: str) -> str:
    """Escape control characters, bidirectional marks and odd blanks, which a terminal or browser would obey."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def length_log_prob(dag: Dag) -> float:
    """Return the log-probability, nats, that the DAG yields exactly T tokens: the mass of paths of T inner nodes."""
    from exlm_cli.ops.alignment import states_alignment_nll

    return -float(states_alignment_nll(*_silent_alignment(dag)))


def token_occupancy(dag: Dag) -> FloatArray:
    """Return the probability that node u emits token t, (T, S), given a path of exactly T inner nodes.

    This is the DAG's prior: forward and backward over the transitions alone.

    Raises:
        DataError: No path has exactly T inner nodes.
    """
    from exlm_cli.ops.alignment import alignment_posterior

    check_length_possible(dag)
    posterior: FloatArray = alignment_posterior(*_silent_alignment(dag))[0].numpy()
    return posterior


def occupancy(dag: Dag) -> FloatArray:
    """Return the probability that a path of exactly T inner nodes visits a node, (S,); 1 at BOS and EOS.

    Raises:
        DataError: No path has exactly T inner nodes.
    """
    visited: FloatArray = token_occupancy(dag).sum(axis=0)
    visited[[0, -1]] = 1.0
    return visited


def edge_use(dag: Dag) -> FloatArray:
    """Return the probability that a path of exactly T inner nodes takes an edge, (S, S); it sums to T + 1.

    Raises:
        DataError: No path has exactly T inner nodes.
    """
    from exlm_cli.ops.alignment import alignment_edge_posterior

    check_length_possible(dag)
    posterior: FloatArray = alignment_edge_posterior(*_silent_alignment(dag))[0].numpy()
    return posterior


def most_likely_path(dag: Dag) -> list[int]:
    """Return the T inner nodes of the best path, each emitting its most probable token.

    Raises:
        DataError: No path has exactly T inner nodes.
    """
    import torch

    from exlm_cli.ops.alignment import best_alignment

    check_length_possible(dag)
    log_emit, log_trans, num_targets, num_states = _silent_alignment(dag)
    best = torch.from_numpy(dag.node_log_probs.max(axis=1).astype(np.float64))
    path: list[int] = best_alignment(log_emit + best, log_trans, num_targets, num_states)[0].tolist()
    return path


def check_length_possible(dag: Dag) -> None:
    """Check that a path of exactly T inner nodes exists.

    Raises:
        DataError: It does not.
    """
    if length_log_prob(dag) == -np.inf:
        raise DataError(
            f"the DAG of {dag.text!r} has no path that yields exactly {dag.num_masks} tokens",
            "choose another model with `checkpoint=RUN`, or train this one further",
        )


def _silent_alignment(dag: Dag) -> "tuple[Tensor, Tensor, Tensor, Tensor]":
    """Return arguments of the alignment op with T emissions of probability 1, float64."""
    import torch

    log_trans = torch.from_numpy(dag.log_trans.astype(np.float64))[None]
    log_emit = torch.zeros(1, dag.num_masks, dag.num_nodes, dtype=torch.float64)
    return log_emit, log_trans, torch.tensor([dag.num_masks]), torch.tensor([dag.num_nodes])
