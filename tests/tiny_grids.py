"""A Repeated-MLM grid so small that a cell takes a tenth of a second."""

from pathlib import Path
from typing import Any

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.config.repeat_mlm import RepeatMlmRecipe
from tests.tiny import tiny_recipe


def tiny_grid(cache: Path, **changes: Any) -> RepeatMlmRecipe:
    """Return a grid of two cells on bundled text; keyword arguments replace top-level values."""
    pretrain = tiny_recipe(
        objective="mlm",
        data={"bundled_rows": 300, "cache_dir": str(cache), "sample_break": "none"},
        masking={"scheme": "bernoulli"},
        model={"rope": "none", "learned_positions": True, "max_length": 16, "dropout": 0.1},
        train={"max_steps": 6, "checkpoint_every_steps": 2, "validate_every_steps": 3, "log_every_steps": 1},
    )
    content = {
        "name": "tiny-grid",
        "cells": [[1, 0.3], [2, 0.5]],
        "device": "cpu",
        "pretrain": pretrain.model_dump(),
        "finetune": load_recipe("repeat-mlm-finetune", kind=FinetuneRecipe).model_dump(),
    }
    return RepeatMlmRecipe.model_validate(content | changes)
