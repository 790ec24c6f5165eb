"""States-alignment likelihood over a DAG of states (section 4, App. H and I): loss, posteriors, best alignment."""

from exlm_cli.ops.alignment.api import (
    Backend,
    alignment_edge_posterior,
    alignment_posterior,
    best_alignment,
    choose_backend,
    states_alignment_nll,
)

__all__ = [
    "Backend",
    "alignment_edge_posterior",
    "alignment_posterior",
    "best_alignment",
    "choose_backend",
    "states_alignment_nll",
]
