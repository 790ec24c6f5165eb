"""The states-alignment likelihood (section 4, App. H and I): loss, posteriors and best alignment over a state DAG."""

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
