"""Bundled text: English-like sentences whose words depend on each other.

A sentence takes three draws: a template, a scene of that template (its subject: praise or blame, one dog or many), and,
given the scene, each slot's word independently. So words of different slots depend on each other through the scene
alone, and the joint distribution follows by enumeration (`benchmarks/grammar_joint.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from exlm_cli.data.bundled.words import FAMILIES, FEELINGS

Corpus = Literal["grammar", "feelings"]
"""All families of sentences, or only those in which good or bad news decides every content word."""


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
