"""Parameters, tokens and FLOPs of pre-training, counted in closed form from a recipe (App. Q.2).

FLOPs are those of forward and backward over one sequence of L positions, T masks and k states per mask, no padding:
N = k T emitting nodes, S = N + 2 nodes, encoder of width D with n layers and feed-forward width F, vocabulary V, h
transition heads over features of width D' (D, or 2 D with `position_features`). A product of an (a, b) and a (b, c)
matrix is 2 a b c FLOPs; its backward pass has two such products, so that whatever is trained counts three times:

    encoder linear    3 * 2 ((n - 1) L + S) (2 D^2 + 2 D F)   query, output, the two feed-forward layers; of the last
                                                        block at the nodes alone, since nothing else is read there
                      3 * 2 n L 2 D^2                   key, value
    attention         3 * 4 ((n - 1) L + S) L D         Q K' and the weighted sum of V
    lm_head           3 * 2 N (D^2 + D V)               dense layer and tied decoder, on emitting nodes alone
    transition        3 * 2 (2 S D' D + S^2 D)          query, key and Q K'; with h > 1 also the gate, 3 * 2 S D' h
    alignment         3 * 2 E                           alpha, beta and the edge gradient: one multiply-add per edge

`alignment: chain` has one node a mask, N = T and S = T + 2, R classes, k states and edges of width d:

    lm_head           3 * 2 T (D^2 + D V + V R)         the classes' shares of each distribution as well
                      3 * 2 (T - 1) 4 D^2               what each mask reads
    transition        3 * 2 T (D R k + 2 R k) + 3 * 2 (T - 1) (2 D d + k^2 d)   states of classes; query, key, Q K'
    alignment         3 * 2 (k + (T - 1) k^2)

E, the edges that any path can take for any target, is 2 w + (T - 1) w (w + 1) / 2 with w = S - 1 - T: target t lies on
one of the w nodes t to S - 2 - T + t. An MLM is the case k = 1 without transition and alignment, and `alignment:
independent` the same with k > 1.

The lowest possible ratio of ExLM to MLM in Table 12 follows from this. Embeddings, norms, GELU, softmax, dropout,
rotation, residuals, gathers and AdamW are not counted: they are memory traffic, or small beside the rest. Nor are the
classes of the vocabulary, once a batch. Nor is recomputation that saves memory: flash attention's second Q K', and in
the backward pass the logits of a chain and those beyond `HEAD_CHUNK_ROWS`. The few edges that the sparse DAG lacks are
counted, and a chain's also in the steps before it begins.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Self

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import CHAIN_EDGE_WIDTH, CHAIN_MAX_GAP


def count_parameters(recipe: PretrainRecipe) -> int:
    """Return the number of trained parameters, tied ones counted once, for the recipe's `tokenizer.vocab_size`."""
    model = recipe.model
    width, ffn_width = model.width, model.ffn_width
    vocab = recipe.tokenizer.vocab_size
    norm = 2 * width
    attention = 4 * _linear(width, width)
    block = norm + attention + norm + _linear(width, ffn_width) + _linear(ffn_width, width)
    embeddings = vocab * width
    if model.learned_positions:
        embeddings += model.max_length * width
    lm_head = _linear(width, width) + norm + vocab
    return embeddings + model.num_layers * block + norm + lm_head + _transition_parameters(recipe)


def tokens_per_step(recipe: PretrainRecipe) -> int:
    """Return the maximum number of input tokens in an optimiser step: repetitions counted, expansion not."""
    train = recipe.train
    if train.batch_tokens is not None:
        return train.batch_tokens
    assert train.batch_sequences is not None, "a recipe has one of the two"
    return train.batch_sequences * recipe.repeated_length


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs of forward and backward, by the part of the model that does them."""

    encoder_linear: float = 0.0
    attention: float = 0.0
    lm_head: float = 0.0
    transition: float = 0.0
    alignment: float = 0.0

    @property
    def encoder(self) -> float:
        """Linear layers and attention."""
        return self.encoder_linear + self.attention

    @property
    def total(self) -> float:
        """All parts."""
        return self.encoder + self.lm_head + self.transition + self.alignment

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def scaled(self, factor: float) -> Self:
        """Return every part times a factor."""
        return type(self)(*(factor * part for part in astuple(self)))


def count_sequence_flops(recipe: PretrainRecipe, num_positions: float, num_targets: float) -> TrainingFlops:
    """Return the FLOPs of training on one sequence; the formulas are those of this module's docstring.

    Args:
        recipe: Its `model`, `masking`, `objective` and `tokenizer.vocab_size` decide the architecture.
        num_positions: L of the encoder, after repetition and expansion in the input, [CLS] and [SEP] included.
        num_targets: T; a mean may be given.
    """
    model, transition = recipe.model, recipe.model.transition
    width, vocab = model.width, recipe.tokenizer.vocab_size
    num_inner = recipe.nodes_per_mask * num_targets
    num_nodes = num_inner + 2
    num_queries = (model.num_layers - 1) * num_positions + num_nodes
    num_keys = model.num_layers * num_positions
    of_queries, of_keys = 2 * width**2 + 2 * width * model.ffn_width, 2 * width**2
    flops = TrainingFlops(
        encoder_linear=3 * 2 * (num_queries * of_queries + num_keys * of_keys),
        attention=3 * 4 * num_queries * num_positions * width,
        lm_head=3 * 2 * num_inner * (width**2 + width * vocab),
    )
    if recipe.is_chain:
        return flops + _chain_flops(recipe, num_targets)
    if not recipe.has_transitions:
        return flops
    feature_width = width * (2 if transition.position_features else 1)
    gate_width = transition.heads if transition.heads > 1 else 0
    projections = num_nodes * feature_width * (2 * width + gate_width)
    return flops + TrainingFlops(
        transition=3 * 2 * (projections + num_nodes**2 * width),
        alignment=3 * 2 * count_path_edges(num_nodes, num_targets),
    )


def _chain_flops(recipe: PretrainRecipe, num_targets: float) -> TrainingFlops:
    width, num_classes, k = recipe.model.width, recipe.model.chain.num_classes, recipe.masking.num_states_per_mask
    states = num_targets * (width + 2) * num_classes * k
    edges = (num_targets - 1) * (2 * width + k**2) * CHAIN_EDGE_WIDTH
    reading = (num_targets - 1) * 4 * width**2
    return TrainingFlops(
        lm_head=3 * 2 * (num_targets * recipe.tokenizer.vocab_size * num_classes + reading),
        transition=3 * 2 * (states + edges),
        alignment=3 * 2 * (k + (num_targets - 1) * k**2),
    )


class FlopCounter:
    """Counts the FLOPs of training on batches of a recipe; those of a sequence of one size are worked out once.

    Args:
        recipe: As for `count_sequence_flops`.
        vocab_size: V of the tokenizer in use, which may be smaller than the recipe's.
    """

    def __init__(self, recipe: PretrainRecipe, vocab_size: int) -> None:
        tokenizer = recipe.tokenizer.model_copy(update={"vocab_size": vocab_size})
        self._recipe = recipe.model_copy(update={"tokenizer": tokenizer})
        self._known: dict[tuple[int, int], float] = {}

    def count(self, num_positions: Iterable[int], num_targets: Iterable[int]) -> float:
        """Return the FLOPs of sequences, by their L and T."""
        sizes = Counter(zip(num_positions, num_targets, strict=True))
        for size in sizes.keys() - self._known.keys():
            self._known[size] = count_sequence_flops(self._recipe, *size).total
        return math.fsum(count * self._known[size] for size, count in sizes.items())


def count_path_edges(num_nodes: float, num_targets: float) -> float:
    """Return E: the edges of a dense DAG that some path takes to each target, summed over targets, and to the end.

    Args:
        num_nodes: S, the first and the last node included.
        num_targets: T, at least 1.
    """
    choices = num_nodes - 1 - num_targets
    return 2 * choices + (num_targets - 1) * choices * (choices + 1) / 2


def recipe_step_flops(recipe: PretrainRecipe) -> TrainingFlops:
    """Return the mean FLOPs of one optimiser step of full sequences; those of one ratio have its mean number of masks.

    Scores of edges grow with T^2 and paths with T^3, so a range is summed over its law (`PretrainRecipe.mask_law`).
    An upper bound where `train.batch_sequences` is given and sequences are shorter than `data.sequence_length`.
    """
    num_sequences = tokens_per_step(recipe) / recipe.repeated_length
    flops = TrainingFlops()
    for num_targets, share in recipe.mask_law:
        of_one = count_sequence_flops(recipe, recipe.num_positions(num_targets), num_targets)
        flops += of_one.scaled(share * num_sequences)
    return flops


def _transition_parameters(recipe: PretrainRecipe) -> int:
    model = recipe.model
    if recipe.is_chain:
        num_classes, k = model.chain.num_classes, recipe.masking.num_states_per_mask
        edges = 2 * _linear(model.width, CHAIN_EDGE_WIDTH) + (CHAIN_MAX_GAP + 1 + 4 * k) * CHAIN_EDGE_WIDTH + 1
        reading = _linear(4 * model.width, model.width) + model.width + (CHAIN_MAX_GAP + 1) * (model.width + 1)
        return num_classes * model.width + _linear(model.width, num_classes * k) + edges + reading
    if not recipe.has_transitions:
        return 0
    transition = model.transition
    positions = transition.max_nodes * model.width if transition.position_features else 0
    feature_width = model.width * (2 if transition.position_features else 1)
    gate = _linear(feature_width, transition.heads) if transition.heads > 1 else 0
    return positions + 2 * _linear(feature_width, model.width) + gate + (transition.start == "next_mask")


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs
