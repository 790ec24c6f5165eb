"""A DAG for programs: Graphviz DOT and JSON."""

import json
import math
from typing import Any

import numpy as np

from exlm_cli.dag.fillings import Filling
from exlm_cli.dag.graph import printable
from exlm_cli.dag.inspect import Inspection
from exlm_cli.dag.words import filled_words
from exlm_cli.report.style import fade, ink_on, mask_colour

SCHEMA = "exlm.dag/1"
_LEAST_DRAWN = 0.03


def render_dot(inspection: Inspection) -> str:
    """Return the graph for Graphviz, masks as columns; edges from 0.03 on, and the best one of every node."""
    dag = inspection.dag
    lines = [
        "digraph dag {",
        "  rankdir=LR; nodesep=0.35; ranksep=1.2; labelloc=t;",
        f"  label={_quote(dag.text)};",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica"];',
        '  edge [fontname="Helvetica", fontsize=10];',
    ]
    for node in range(dag.num_nodes):
        colour = mask_colour(int(dag.node_mask[node]))
        filled = fade(colour, 0.25 + 0.75 * float(inspection.occupancy[node]) ** 0.5)
        lines.append(
            f"  n{node} [label={_quote(inspection.word(node))}, color={_quote(colour)}, fillcolor={_quote(filled)}, "
            f"fontcolor={_quote(ink_on(filled))}];"
        )
    for mask in range(dag.num_masks):
        members = "; ".join(f"n{node}" for node in np.flatnonzero(dag.node_mask == mask))
        lines.append(f"  {{ rank=same; {members}; }}")
    probabilities = np.exp(dag.log_trans)
    for source, row in enumerate(probabilities[:-1]):
        targets = np.flatnonzero(row >= _LEAST_DRAWN).tolist() or [int(row.argmax())]
        for target in targets:
            p = float(row[target])
            lines.append(
                f"  n{source} -> n{target} [label={_quote(f'{p:.2f}')}, penwidth={0.5 + 3.5 * p:.2f}, "
                f"color={_quote(f'#1F2933{round(60 + 195 * p):02X}')}];"
            )
    return "\n".join([*lines, "}"]) + "\n"


def render_json(inspection: Inspection) -> str:
    """Return `inspection_as_dict` as JSON."""
    return json.dumps(inspection_as_dict(inspection), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def inspection_as_dict(inspection: Inspection) -> dict[str, Any]:
    """Return everything of an inspection, JSON-able.

    Masks and states count from 1, nodes from 0 (BOS). `probability` is that of a text among all the DAG yields, `share`
    that among the texts with as many tokens as masks (for `length: any` the two are the same). A log-probability of
    -inf is null. `transitions[v][u]` is E[v, u], null for a model whose masks know nothing of each other.
    """
    dag, n_best, guess = inspection.dag, inspection.n_best, inspection.guess
    return {
        "schema": SCHEMA,
        "text": dag.text,
        "kind": dag.kind,
        "checkpoint": inspection.checkpoint,
        "num_masks": dag.num_masks,
        "num_states_per_mask": dag.num_states_per_mask,
        "has_transitions": dag.has_transitions,
        "nodes": [_node_as_dict(inspection, node) for node in range(dag.num_nodes)],
        "transitions": np.exp(dag.log_trans).round(9).tolist() if dag.has_transitions else None,
        "best_path": inspection.path,
        "states_in_use": inspection.states_in_use().round(9).tolist(),
        "length": inspection.length,
        "probability_of_length": math.exp(n_best.log_prob_length),
        "fillings": [_filling_as_dict(inspection, filling) for filling in n_best.fillings],
        "fillings_are_proven_best": n_best.is_proven,
        "independent_guess": {
            **_filling_as_dict(inspection, guess.filling),
            "token_probabilities": list(guess.token_probs),
            "probability_if_independent": math.exp(guess.log_prob_independent),
        },
    }


def _node_as_dict(inspection: Inspection, node: int) -> dict[str, Any]:
    dag = inspection.dag
    mask = int(dag.node_mask[node])
    return {
        "node": node,
        "mask": mask + 1 if mask >= 0 else None,
        "state": int(dag.node_clone[node]) if mask >= 0 else None,
        "occupancy": round(float(inspection.occupancy[node]), 9),
        "tokens": [
            {"id": token.token_id, "text": token.text, "probability": token.probability}
            for token in inspection.tokens[node]
        ],
    }


def _filling_as_dict(inspection: Inspection, filling: Filling) -> dict[str, Any]:
    is_possible = filling.log_prob > -math.inf
    return {
        "text": filling.text,
        "words": filled_words(inspection, filling),
        "token_ids": [list(tokens) for tokens in filling.tokens_by_mask],
        "log_probability": filling.log_prob if is_possible else None,
        "probability": math.exp(filling.log_prob),
        "share": math.exp(filling.log_prob - inspection.n_best.log_prob_length),
        "path": list(filling.path),
        "is_valid_smiles": filling.is_valid_smiles,
    }


def _quote(text: str) -> str:
    """Quote a DOT string; every backslash is doubled, so that none is one of Graphviz's escapes."""
    escaped = printable(" ".join(text.split())).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
