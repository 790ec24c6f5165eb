"""Exact joint distribution of the masked words of a sentence of the bundled grammar, and its entropies."""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Sequence

from exlm_cli.data.bundled.grammar import Scene, Template, templates
from exlm_cli.data.tokenizer import MASK

# As byte-level BPE cuts text before it merges, so that each piece is a token of a trained vocabulary.
_PIECE = re.compile(r"\[MASK\]|\{\w+\}|'\w+|\w+|[^\w\s]")

Joint = dict[tuple[str, ...], float]
"""Probability of each joint filling of the masks, in the order of the masks."""


def split_pieces(sentence: str) -> tuple[str, ...]:
    """Cut a sentence or pattern into words, contractions, punctuation, slots and [MASK]s."""
    return tuple(_PIECE.findall(sentence))


def choices_of(template: Template, scene: Scene) -> tuple[tuple[str, ...], ...]:
    """Return what each piece of a template can be in a scene; a fixed piece can be itself only."""
    return tuple(scene.words[p[1:-1]] if p.startswith("{") else (p,) for p in split_pieces(template.pattern))


def true_joint(sentence: str) -> Joint:
    """Return the exact distribution of the masked words given all others, by enumeration over the grammar.

    Args:
        sentence: A sentence of the grammar with one or more of its words, contractions ("'m") or punctuation marks
            replaced by "[MASK]".

    Returns:
        Probability of each joint filling; sums to 1; fillings of probability 0 are missing.

    Raises:
        ValueError: It has no mask, or no sentence of the grammar fits.
    """
    given = split_pieces(sentence)
    if MASK not in given:
        raise ValueError(f"`{sentence}` has no {MASK}")
    mass: dict[tuple[str, ...], float] = defaultdict(float)
    for template in templates():
        pieces = split_pieces(template.pattern)
        if len(pieces) != len(given):
            continue
        for scene in template.scenes:
            choices = choices_of(template, scene)
            if any(word not in options for word, options in zip(given, choices, strict=True) if word != MASK):
                continue
            # Every filling of a scene has the same probability: words are equally likely given the scene.
            probability = template.weight * scene.weight / math.prod(len(options) for options in choices)
            masked = [options for word, options in zip(given, choices, strict=True) if word == MASK]
            for filling in itertools.product(*masked):
                mass[filling] += probability
    if not mass:
        raise ValueError(f"`{sentence}` is not a sentence of the grammar")
    total = math.fsum(mass.values())
    return {filling: p / total for filling, p in mass.items()}


def marginals(joint: Joint) -> list[dict[str, float]]:
    """Return the distribution of each masked word: the best that independent predictions can do."""
    num_masks = len(next(iter(joint)))
    made: list[dict[str, float]] = [defaultdict(float) for _ in range(num_masks)]
    for filling, probability in joint.items():
        for marginal, word in zip(made, filling, strict=True):
            marginal[word] += probability
    return [dict(marginal) for marginal in made]


def joint_entropy_nats(joint: Joint) -> float:
    """Return the entropy per masked word: the minimum loss of any model, ExLM included."""
    return _entropy_nats(list(joint.values())) / len(next(iter(joint)))


def independence_bound_nats(joint: Joint) -> float:
    """Return the marginals' entropy per masked word: the minimum loss of a model that fills masks independently."""
    each = marginals(joint)
    return sum(_entropy_nats(list(marginal.values())) for marginal in each) / len(each)


def _entropy_nats(probabilities: Sequence[float]) -> float:
    return -math.fsum(p * math.log(p) for p in probabilities if p > 0)
