"""A recipe small enough for tests, and batches made of made-up tokens."""

from typing import Any

import numpy as np

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.batch import Batch, collate
from exlm_cli.data.expansion import expand
from exlm_cli.data.masking import SpecialTokens, mask_sequence, sample_rng

SPECIAL = SpecialTokens(pad=0, cls=1, sep=2, mask=3, never_masked=frozenset(range(5)), vocab_size=40)


def tiny_recipe(**sections: Any) -> PretrainRecipe:
    """Return a two-layer recipe; keyword arguments replace top-level values or update sections."""
    content: dict[str, Any] = {
        "name": "tiny",
        "objective": "exlm",
        "device": "cpu",  # what is asserted of it, bit by bit, holds there
        "data": {"kind": "text", "train": ["bundled:grammar"], "sequence_length": 16, "sample_break": "line"},
        "tokenizer": {"vocab_size": 300},
        "masking": {"mask_ratio": 0.3, "num_states_per_mask": 3},
        "model": {"num_layers": 2, "num_heads": 2, "width": 16, "ffn_width": 32, "max_length": 64},
        "optim": {"lr": 1e-3, "warmup_steps": 2},
        "train": {"max_steps": 6, "batch_sequences": 8, "microbatch_tokens": 256},
    }
    for key, value in sections.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) and key in content else value
    if content["objective"] == "mlm":
        content["masking"] = {**content["masking"], "num_states_per_mask": 1}
    return PretrainRecipe.model_validate(content)


def tiny_batch(recipe: PretrainRecipe, lengths: tuple[int, ...] = (9, 4, 12), seed: int = 0) -> Batch:
    """Return a masked and expanded batch of random tokens, one sequence for each length."""
    rng = np.random.default_rng(seed)
    expanded = []
    for index, length in enumerate(lengths):
        tokens = rng.integers(5, SPECIAL.vocab_size, size=length)
        masked = mask_sequence(tokens, recipe.masking, SPECIAL, sample_rng(seed, 0, index))
        expanded.append(expand(masked, recipe.masking.num_states_per_mask, recipe.objective))
    return collate(expanded, range(len(lengths)), SPECIAL.pad)
