"""Which values of a pre-training recipe decide what is trained, and their hashes, by which a run knows its recipe."""

import hashlib
import json
from typing import Any

from exlm_cli.config.input_paths import PRETRAIN_PATHS
from exlm_cli.config.pretrain import PretrainRecipe

_COMPUTING = ("microbatch_tokens", "num_threads", "alignment_backend", "compile", "head_chunk_rows")
"""How a step is computed, which changes it by rounding alone, and by the draws of dropout."""


def decisive_values(recipe: PretrainRecipe) -> dict[str, Any]:
    """Return what of a recipe decides the weights, as JSON; how often to look or save does not."""
    content = recipe.model_dump(mode="json", exclude={"name", "purpose", "paper", "device"})
    for key in (
        "validate_every_steps",
        "validation_sequences",
        "checkpoint_every_steps",
        "keep_last",
        "log_every_steps",
        "tensorboard",
    ):
        del content["train"][key]
    if recipe.train.batch_tokens is not None and recipe.train.bucket_steps > 1:
        content["train"]["steps"] = "even"  # earlier versions cut them otherwise: a run of theirs has another order
    return content


def trained_values(recipe: PretrainRecipe) -> dict[str, Any]:
    """Return what of a recipe decides the weights beside the data fingerprint, as JSON.

    Where the data lie does not, nor how a step is computed: a run that ran out of memory goes on with less.
    """
    content = _without_places(decisive_values(recipe))
    for name in _COMPUTING:
        del content["train"][name]
    return content


def trained_identity(recipe: PretrainRecipe) -> str:
    """Return a hash of `trained_values`, which checkpoints hold."""
    return _sha256(_hashed(trained_values(recipe), recipe))


def former_identities(recipe: PretrainRecipe, begun: PretrainRecipe) -> tuple[str, str]:
    """Return what checkpoints held before they held `trained_identity`.

    First they named the inputs, then not, and how a step is computed was always in it. Both are taken from the recipe
    that the run began with.
    """
    content, then = _hashed(decisive_values(recipe), recipe), decisive_values(begun)
    for section, names in {**PRETRAIN_PATHS, "train": _COMPUTING}.items():
        content[section] |= {name: then[section][name] for name in names}
    return _sha256(content), _sha256(_without_places(content))


def recipe_identity(recipe: PretrainRecipe) -> str:
    """Return a hash of everything in a recipe that decides the weights.

    Inputs are in it by name: it is for who has no data fingerprint beside it.
    """
    return _sha256(_hashed(decisive_values(recipe), recipe))


def _without_places(content: dict[str, Any]) -> dict[str, Any]:
    """Leave out where inputs are; the data fingerprint holds what they are, the tokenizer included."""
    kept = content.copy()
    for section, names in PRETRAIN_PATHS.items():
        kept[section] = {name: value for name, value in content[section].items() if name not in names}
    return kept


def _hashed(content: dict[str, Any], recipe: PretrainRecipe) -> dict[str, Any]:
    """Return values as they are hashed: a key that came later is left out where it says what was done before."""
    return content | {"optim": recipe.optim.as_identity()}


def _sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
