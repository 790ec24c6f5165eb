"""Bundled text: English-like sentences whose words depend on each other, with an exactly known joint distribution.

A sentence takes three draws: a template, a scene of that template (its subject: praise or blame, one dog or many), and,
given the scene, each slot's word independently. So words of different slots depend on each other through the scene
alone, and every conditional distribution follows by enumeration (`true_joint`).
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from exlm_cli.data.bundled.words import FAMILIES, FEELINGS
from exlm_cli.data.tokenizer import MASK

# As byte-level BPE cuts text before it merges, so that each piece is a token of a trained vocabulary.
_PIECE = re.compile(r"\[MASK\]|\{\w+\}|'\w+|\w+|[^\w\s]")

Corpus = Literal["grammar", "feelings"]
"""All families of sentences, or only those in which good or bad news decides every content word."""

Joint = dict[tuple[str, ...], float]
"""Probability of each joint filling of the masks, in the order of the masks."""


@dataclass(frozen=True)
class Scene:
    """One subject of a sentence: its share of the template, and the equally likely words of each slot."""

    weight: float
    words: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Template:
    """A sentence with slots, such as "The {noun} {verb}.", and the scenes that fill them."""

    pattern: str
    weight: float
    scenes: tuple[Scene, ...]

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """Words, punctuation and slots of the pattern, in order."""
        return split_pieces(self.pattern)

    def choices(self, scene: Scene) -> tuple[tuple[str, ...], ...]:
        """Return what each piece can be in a scene; a fixed piece can be itself only."""
        return tuple(scene.words[p[1:-1]] if p.startswith("{") else (p,) for p in self.pieces)


def split_pieces(sentence: str) -> tuple[str, ...]:
    """Cut a sentence into words, contractions, punctuation and [MASK]s."""
    return tuple(_PIECE.findall(sentence))


@lru_cache(maxsize=2)
def templates(corpus: Corpus = "grammar") -> tuple[Template, ...]:
    """Return the templates of a bundled corpus; their weights, and those of each one's scenes, sum to one."""
    families = FEELINGS if corpus == "feelings" else FAMILIES
    total = sum(weight for _, weight, _ in families)
    made = []
    for pattern, weight, scenes in families:
        scene_total = sum(scene_weight for scene_weight, _ in scenes)
        made.append(
            Template(
                pattern,
                weight / total,
                tuple(Scene(w / scene_total, {k: tuple(v.split()) for k, v in words.items()}) for w, words in scenes),
            )
        )
    return tuple(made)


def sample_sentences(num: int, seed: int, corpus: Corpus = "grammar") -> Iterator[str]:
    """Yield `num` independent sentences; the same for the same seed."""
    rng = np.random.Generator(np.random.Philox(seed))
    all_templates = templates(corpus)
    template_bounds = np.cumsum([t.weight for t in all_templates])
    scene_bounds = [np.cumsum([s.weight for s in t.scenes]) for t in all_templates]
    for _ in range(num):
        which = _pick(template_bounds, rng.random())
        template = all_templates[which]
        scene = template.scenes[_pick(scene_bounds[which], rng.random())]
        yield template.pattern.format(
            **{slot: words[int(rng.random() * len(words))] for slot, words in scene.words.items()}
        )


def _pick(bounds: np.ndarray, uniform: float) -> int:
    """Return the index at which a cumulative distribution first exceeds a uniform number."""
    return min(int(np.searchsorted(bounds, uniform, side="right")), len(bounds) - 1)


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
        if len(template.pieces) != len(given):
            continue
        for scene in template.scenes:
            choices = template.choices(scene)
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
