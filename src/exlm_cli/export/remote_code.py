"""Code, config and weights with which an exported ExLM expands its masks, in addition to those of ESM.

The code is this package's own. transformers copies a single file into its cache, so the modules that the model needs
are concatenated in `modeling_exlm.py`.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.model.exlm import ExlmModel

MODULES = (
    "data/batch",
    "ops/precision",
    "ops/rotary",
    "ops/ctc",
    "ops/alignment/reference",
    "model/transition",
    "dag/search",
    "export/modeling_exlm",
)
"""Modules of `modeling_exlm.py`; each comes after those that it imports."""
AUTO_MAP = {
    "AutoConfig": "configuration_exlm.ExlmConfig",
    "AutoModel": "modeling_exlm.ExlmModel",
    "AutoModelForMaskedLM": "modeling_exlm.ExlmForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_exlm.ExlmForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_exlm.ExlmForTokenClassification",
}
"""Classes by the name of the Auto class that loads them with `trust_remote_code=True`."""
_PACKAGE = Path(__file__).parents[1]
_LEFT_OUT = re.compile(
    r"^(?:if TYPE_CHECKING:\n(?: .*\n|\n(?= ))+|from (?:exlm_cli|jaxtyping|__future__)\b.* import (?:\([^)]*\)|.*)\n)",
    re.MULTILINE,
)
"""Imports of modules that come before, and of names that only annotations use."""
_HEAD = """# Modules of exlm-cli, one after the other. What they import for annotations alone is left out.
from __future__ import annotations

from .configuration_exlm import ExlmConfig
"""


def remote_code() -> dict[str, str]:
    """Return the content of the Python files by name."""
    sources = [f"# exlm_cli/{module}.py\n{_LEFT_OUT.sub('', _source(module))}" for module in MODULES]
    return {
        "configuration_exlm.py": _source("export/configuration_exlm"),
        "modeling_exlm.py": "\n\n".join([_HEAD, *sources]),
    }


def _source(module: str) -> str:
    return (_PACKAGE / f"{module}.py").read_text(encoding="utf-8")


def network_config(recipe: PretrainRecipe, blank_id: int) -> dict[str, Any]:
    """Return the section `exlm` of `config.json`."""
    model = recipe.model
    return {
        "num_states_per_mask": recipe.masking.num_states_per_mask,
        "alignment": model.alignment,
        "expands_input": recipe.expands_input,
        "blank_id": blank_id,
        "width": model.width,
        "rope_base": model.rope_base,
        "axis_widths": () if model.rope == "none" else model.rotary_widths(model.width // model.num_heads),
        "transition": model.transition.model_dump(),
    }


def mask_tensors(model: ExlmModel) -> dict[str, Tensor]:
    """Return the weights of the states and transitions."""
    own = ("transition.", "clone_embedding.")
    return {name: tensor for name, tensor in model.state_dict().items() if name.startswith(own)}
