"""The DAG behind one masked input, in numbers: node distributions, transitions, occupancy (section 4.2, App. P).

Axes: S nodes (BOS, the k states of each [MASK] in order, EOS), V vocabulary, T masks. All functions of paths raise a
`DataError` if no path has exactly T inner nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exlm_cli.dag.chain import ChainOfInput
from exlm_cli.data import IntArray
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.format import format_number_of, printable
from exlm_cli.ops.alignment import alignment_edge_posterior, alignment_posterior, best_alignment, states_alignment_nll

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Dag:
    """The states of one input with T masks: S = k * T + 2 nodes and the edges between them.

    Attributes:
        kind: RDKit checks the fillings of "smiles".
        numbers: Gives `node_log_probs` and `log_trans` when they are first read.
        num_states_per_mask: k.
        input_ids: (L,) tokens before expansion, [CLS], [MASK]s and [SEP] included.
        has_transitions: False for an MLM and for `alignment: independent`, whose masks do not depend on each other.
            Such a DAG has one node a mask and edges of probability 1. Its probabilities are the model's; if a mask has
            several states, they are conditional on these yielding one token.
        chain: With `alignment: chain`, what each mask emits after any token. The states and edges above are those that
            follow the tokens of the most probable filling.
    """

    text: str
    kind: Literal["text", "smiles"]
    numbers: Callable[[], tuple[FloatArray, FloatArray]]
    num_states_per_mask: int
    input_ids: IntArray
    tokenizer: Tokenizer
    has_transitions: bool = True
    chain: ChainOfInput | None = None

    @cached_property
    def _numbers(self) -> tuple[FloatArray, FloatArray]:
        return self.numbers()

    @property
    def node_log_probs(self) -> FloatArray:
        """(S, V) log-probabilities of tokens, nats; the rows of BOS and EOS are -inf."""
        return self._numbers[0]

    @property
    def log_trans(self) -> FloatArray:
        """(S, S) log E[v, u], nats; -inf at and below the diagonal."""
        return self._numbers[1]

    @cached_property
    def num_masks(self) -> int:
        """T."""
        return int((self.input_ids == self.tokenizer.mask_id).sum())

    @property
    def num_nodes(self) -> int:
        """S."""
        return self.num_states_per_mask * self.num_masks + 2

    @cached_property
    def node_mask(self) -> IntArray:
        """The mask of each node, (S,), from 0; -1 for BOS and EOS."""
        return np.concatenate([[-1], np.repeat(np.arange(self.num_masks), self.num_states_per_mask), [-1]])

    @cached_property
    def mask_run(self) -> IntArray:
        """The run of neighbouring masks that each mask is part of, (T,), from 0; no text parts the masks of a run."""
        positions = np.flatnonzero(self.input_ids == self.tokenizer.mask_id)
        run_T: IntArray = np.cumsum(np.diff(positions, prepend=positions[:1]) > 1)
        return run_T

    @cached_property
    def trans(self) -> FloatArray:
        """E, (S, S)."""
        return np.exp(self.log_trans)

    def segments(self, tokens_by_mask: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
        """Return the filled text in pieces, each with the mask that it fills, or -1 around the masks."""
        pieces: list[tuple[str, int]] = []
        start = 0
        mask_positions = np.flatnonzero(self.input_ids == self.tokenizer.mask_id)
        for mask, position in enumerate(mask_positions.tolist()):
            pieces.append((self.tokenizer.decode(self.input_ids[start:position].tolist()), -1))
            pieces.append((self.tokenizer.decode(tokens_by_mask[mask]), mask))
            start = position + 1
        pieces.append((self.tokenizer.decode(self.input_ids[start:].tolist()), -1))
        return [piece for piece in pieces if piece[0]]

    def fill(self, tokens_by_mask: Sequence[Sequence[int]]) -> str:
        """Return the text with its masks filled, without a blank at its beginning; tokens may share a character."""
        ids: list[int] = []
        remaining = iter(tokens_by_mask)
        for token in self.input_ids.tolist():
            ids += next(remaining) if token == self.tokenizer.mask_id else [token]
        return self.tokenizer.decode(ids).removeprefix(" ")


@dataclass(frozen=True)
class NodeToken:
    """One token that a node may emit."""

    token_id: int
    text: str
    probability: float


def top_tokens(dag: Dag, n: int) -> list[list[NodeToken]]:
    """Return the n most probable tokens of every node, best first, ties by id; none for BOS and EOS."""
    nodes: list[list[NodeToken]] = [[] for _ in range(dag.num_nodes)]
    for node in range(1, dag.num_nodes - 1):
        log_probs = dag.node_log_probs[node]
        least = np.partition(log_probs, -n)[-n] if n < len(log_probs) else -np.inf
        likely = np.flatnonzero(log_probs >= least)
        best = likely[np.argsort(-log_probs[likely], kind="stable")[:n]]
        nodes[node] = [
            NodeToken(token_id, printable(dag.tokenizer.token_text(token_id)), float(np.exp(log_probs[token_id])))
            for token_id in best.tolist()
        ]
    return nodes


def length_log_prob(dag: Dag) -> float:
    """Return the log-probability, nats, that the DAG yields exactly T tokens: the mass of paths of T inner nodes."""
    return -float(states_alignment_nll(*_silent_alignment(dag)))


def token_occupancy(dag: Dag) -> FloatArray:
    """Return the probability that node u emits token t, (T, S), given a path of exactly T inner nodes.

    This is the DAG's prior: forward and backward over the transitions alone.
    """
    posterior: FloatArray = alignment_posterior(*_silent_alignment(dag))[0].numpy()
    return posterior


def token_marginals(dag: Dag) -> FloatArray:
    """Return the probabilities of the t-th token, (T, V), given T tokens: nodes weighted by `token_occupancy`.

    Those of a chain are the LM head's, of each mask by itself.
    """
    if dag.chain is not None:
        own_TV: FloatArray = dag.chain.own_log_probs.double().softmax(-1).cpu().numpy()
        return own_TV
    marginal_TV: FloatArray = token_occupancy(dag)[:, 1:-1] @ np.exp(dag.node_log_probs[1:-1])
    return marginal_TV


def edge_use(dag: Dag) -> FloatArray:
    """Return the probability that a path of exactly T inner nodes takes an edge, (S, S); it sums to T + 1."""
    posterior: FloatArray = alignment_edge_posterior(*_silent_alignment(dag))[0].numpy()
    return posterior


def most_likely_path(dag: Dag) -> list[int]:
    """Return the T inner nodes of the best path, each emitting its most probable token."""
    log_emit, *others = _silent_alignment(dag)
    best_token = torch.from_numpy(dag.node_log_probs.max(axis=1))
    path: list[int] = best_alignment(log_emit + best_token, *others)[0].tolist()
    return path


def _silent_alignment(dag: Dag) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return arguments of the alignment op with T emissions of probability 1; refuse a DAG without such a path."""
    log_emit = torch.zeros(1, dag.num_masks, dag.num_nodes, dtype=torch.float64)
    log_trans = torch.from_numpy(dag.log_trans)[None]
    arguments = log_emit, log_trans, torch.tensor([dag.num_masks]), torch.tensor([dag.num_nodes])
    if states_alignment_nll(*arguments).isinf():
        raise DataError(
            f"the DAG of {dag.text!r} has no path that yields exactly {format_number_of(dag.num_masks, 'token')}",
            "choose another model with `--checkpoint RUN`, or train this one further",
        )
    return arguments
