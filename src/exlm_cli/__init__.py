"""ExLM: masked language models whose [MASK] tokens expand into states tied by a DAG.

`docs/python.md` explains the names that are imported from here. The alignment op is among them, for models that are not
ExLM: `from exlm_cli import states_alignment_nll`.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exlm_cli.api.estimators import ExlmClassifier, ExlmRegressor
    from exlm_cli.api.fitting import cross_validate, fit
    from exlm_cli.api.run import Run, load
    from exlm_cli.config.finetune import FinetuneRecipe
    from exlm_cli.config.load import load_recipe
    from exlm_cli.config.pretrain import PretrainRecipe
    from exlm_cli.errors import ExlmError
    from exlm_cli.finetune.run import resume_finetuning, run_finetuning
    from exlm_cli.ops.alignment import (
        alignment_edge_posterior,
        alignment_posterior,
        best_alignment,
        states_alignment_nll,
    )
    from exlm_cli.train.pretrain import resume_pretraining, run_pretraining
    from exlm_cli.train.task import Callback

    __version__: str

_HOMES = {
    "Run": "api.run",
    "load": "api.run",
    "Callback": "train.task",
    "ExlmClassifier": "api.estimators",
    "ExlmError": "errors",
    "ExlmRegressor": "api.estimators",
    "FinetuneRecipe": "config.finetune",
    "PretrainRecipe": "config.pretrain",
    "cross_validate": "api.fitting",
    "fit": "api.fitting",
    "load_recipe": "config.load",
    "resume_finetuning": "finetune.run",
    "resume_pretraining": "train.pretrain",
    "run_finetuning": "finetune.run",
    "run_pretraining": "train.pretrain",
}
"""Module of each public name; names that are not here come from `ops.alignment`."""

__all__ = [
    "Callback",
    "ExlmClassifier",
    "ExlmError",
    "ExlmRegressor",
    "FinetuneRecipe",
    "PretrainRecipe",
    "Run",
    "__version__",
    "alignment_edge_posterior",
    "alignment_posterior",
    "best_alignment",
    "cross_validate",
    "fit",
    "load",
    "load_recipe",
    "resume_finetuning",
    "resume_pretraining",
    "run_finetuning",
    "run_pretraining",
    "states_alignment_nll",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that the command line starts without torch (PEP 562)."""
    if name == "__version__":
        return version("exlm-cli")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"exlm_cli.{_HOMES.get(name, 'ops.alignment')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
