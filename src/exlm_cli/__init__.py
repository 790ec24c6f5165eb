"""ExLM: masked language models whose [MASK] tokens expand into states tied by a DAG.

The alignment op is here too, for models that are not ExLM: `from exlm_cli import states_alignment_nll`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exlm_cli.ops.alignment import (
        alignment_edge_posterior,
        alignment_posterior,
        best_alignment,
        states_alignment_nll,
    )

__all__ = ["alignment_edge_posterior", "alignment_posterior", "best_alignment", "states_alignment_nll"]


def __getattr__(name: str) -> Any:
    """Import the op when it is first asked for: the command line starts without torch (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from exlm_cli.ops import alignment

    return getattr(alignment, name)
