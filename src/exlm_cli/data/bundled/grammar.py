"""Bundled text: English-like sentences whose words depend on each other.

A sentence takes three draws: a template, a scene of that template (its subject: praise or blame, one dog or many), and,
given the scene, each slot's word independently. So words of different slots depend on each other through the scene
alone, and the joint distribution follows by enumeration (`studies/grammar_joint.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Words = dict[str, str]
"""Equally likely words of each slot, separated by blanks."""

# "surprised" fits good news and bad news, so it alone does not decide the scene
_GOOD: Words = {
    "adj": "amazing wonderful beautiful lovely great perfect",
    "emotion": "glad happy pleased delighted proud surprised",
    "event": "won",
    "result": "success",
    "reaction": "smiles laughs",
}
_BAD: Words = {
    "adj": "terrible awful horrible cruel ugly bad",
    "emotion": "sorry sad upset angry unhappy surprised",
    "event": "lost",
    "result": "failure",
    "reaction": "cries weeps",
}


def _of(words: Words, *slots: str) -> Words:
    return {slot: words[slot] for slot in slots}


def _feelings(*slots: str) -> list[tuple[float, Words]]:
    """Return the scenes of good and of bad news; three times in five the news is good."""
    return [(3, _of(_GOOD, *slots)), (2, _of(_BAD, *slots))]


# animal, its plural, what it does (with and without the s of the singular), where, when
_ANIMALS = (
    ("dog", "dogs", "barks plays", "bark play", "garden yard", "day"),
    ("bird", "birds", "sings flies", "sing fly", "tree forest", "morning"),
    ("frog", "frogs", "swims jumps", "swim jump", "lake river", "night"),
    ("horse", "horses", "runs eats", "run eat", "field barn", "day"),
    ("cat", "cats", "sleeps hides", "sleep hide", "kitchen house", "night"),
)

_ONE_OR_MANY: list[tuple[float, Words]] = [
    (1, {"det": det, "noun": noun, "verb": verb, "place": place, "time": time})
    for one, many, one_does, many_do, place, time in _ANIMALS
    for det, noun, verb in (("This That", one, one_does), ("These Those", many, many_do))
]

# a hat is for the sun and for the snow
_WEATHER: list[tuple[float, Words]] = [
    (1, {"weather": weather, "thing": thing, "pron": pron, "poss": poss})
    for weather, thing in (("rainy wet", "umbrella boots"), ("sunny hot", "hat glasses"), ("snowy cold", "hat coat"))
    for pron, poss in (("he", "his"), ("she", "her"))
]

_MEALS: list[tuple[float, Words]] = [
    (1, {"meal": meal, "person": person, "food": food, "drink": drink})
    for meal, person, food, drink in (
        ("breakfast", "king queen", "bread eggs", "coffee tea"),
        ("breakfast", "boy girl", "bread eggs", "milk juice"),
        ("dinner", "king queen", "soup rice", "wine beer"),
        ("dinner", "boy girl", "soup rice", "water juice"),
    )
]

_JOBS: list[tuple[float, Words]] = [
    (1, {"job": job, "place": place, "tool": tool})
    for job, place, tool in (
        ("teacher student", "school library", "book pencil"),
        ("doctor nurse", "hospital clinic", "needle mask"),
        ("cook baker", "kitchen hotel", "knife pan"),
        ("farmer gardener", "field garden", "spade tractor"),
        ("painter artist", "studio museum", "brush pencil"),
    )
]

_FEMALE, _MALE = "Anna Mary Emma", "Tom Peter John"

_LANGUAGES: list[tuple[float, Words]] = [
    (1, {"name": f"{_FEMALE} {_MALE}", "city": city, "language": language})
    for city, language in (
        ("Paris Lyon", "French"),
        ("Rome Milan", "Italian"),
        ("Berlin Munich", "German"),
        ("Madrid Seville", "Spanish"),
        ("Tokyo Kyoto", "Japanese"),
    )
]

_LOST_THINGS: list[tuple[float, Words]] = [
    (1, {"name": name, "poss": poss, "pron": pron, "thing": thing, "place": place})
    for name, poss, pron in ((_FEMALE, "her", "she"), (_MALE, "his", "he"))
    for thing, place in (
        ("keys phone", "car house"),
        ("book pencil", "school library"),
        ("ticket bag", "station train"),
    )
]

_FRUITS: list[tuple[float, Words]] = [
    (1, {"fruit": fruit, "color": color, "taste": taste})
    for fruit, color, taste in (
        ("lemon", "yellow", "sour"),
        ("banana", "yellow", "sweet"),
        ("cherry", "red", "sweet"),
        ("lime", "green", "sour"),
        ("pepper", "red green", "hot"),
    )
]

Family = tuple[str, float, list[tuple[float, Words]]]
"""Pattern, its weight, and its scenes with their weights."""

FEELINGS: tuple[Family, ...] = (
    ("This is {adj}, and I'm very {emotion} to see this.", 5, _feelings("adj", "emotion")),
    ("That was {adj}, and we are {emotion} to hear it.", 2, _feelings("adj", "emotion")),
    (
        "They {event} the game: this is {adj}, and I'm very {emotion} to see this.",
        2,
        _feelings("event", "adj", "emotion"),
    ),
    ("The show was a {result}, so it is {adj} and they are {emotion}.", 1, _feelings("result", "adj", "emotion")),
    ("She {reaction} because the news is {adj}.", 1, _feelings("reaction", "adj")),
)
"""Sentences in which good or bad news, which is never named, decides every content word: `bundled:feelings`."""

FAMILIES: tuple[Family, ...] = (
    *FEELINGS,
    ("{det} {noun} {verb} in the {place} every {time}.", 3, _ONE_OR_MANY),
    ("It is {weather} today, so {pron} takes {poss} {thing}.", 2, _WEATHER),
    ("At {meal} the {person} has {food} and drinks {drink}.", 2, _MEALS),
    ("The {job} works in a {place} with a {tool}.", 2, _JOBS),
    ("{name} lives in {city} and speaks {language}.", 2, _LANGUAGES),
    ("{name} lost {poss} {thing}, so {pron} went back to the {place}.", 2, _LOST_THINGS),
    ("The {fruit} is {color} and tastes {taste}.", 1, _FRUITS),
)
"""All of the bundled text: `bundled:grammar`."""


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
