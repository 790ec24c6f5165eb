"""Inspections to draw: the case study, many masks, awkward words."""

import functools
from dataclasses import replace

import numpy as np

from exlm_cli.dag.inspection import Inspection, inspect
from exlm_cli.dag.report import render_report
from tests.unit.dag.dags import case_study_dag, handmade_dag

AWKWARD = (
    "$x_1$", "<b>&amp;</b>", 'say "hi"', "back\\slash", "字幕", "internationalisation", "]]>", "\u202e", "\x1b[31mred",
    "<script>alert(1)</script>", "' onload=alert(1) x='", "[bold]x[/bold]",
)  # fmt: skip
"""Commands to matplotlib, browsers, terminals, rich and XML."""


@functools.cache
def case_study() -> Inspection:
    return inspect(case_study_dag(), checkpoint="runs/example/checkpoints/step-10")


@functools.cache
def case_files() -> dict[str, bytes]:
    return render_report(case_study(), ["svg", "html"])


@functools.cache
def many_masks(num_masks: int, k: int) -> Inspection:
    """Return a DAG whose edges mostly lead to the next mask, some further."""
    rng = np.random.default_rng(0)
    nodes = []
    for _ in range(num_masks * k):
        chosen = rng.choice(30, 3, replace=False)
        nodes.append({f"word{i}": p for i, p in zip(chosen, (0.6, 0.2, 0.1), strict=True)})
    num_nodes = num_masks * k + 2
    order = np.array([-1, *np.repeat(np.arange(num_masks), k), num_masks])
    edges = {}
    for source in range(num_nodes - 1):
        targets = np.arange(source + 1, num_nodes)
        weight = np.exp(2 * rng.normal(size=len(targets)) - 2.5 * np.abs(order[targets] - order[source] - 1))
        edges[source] = dict(zip(targets.tolist(), (weight / weight.sum()).tolist(), strict=True))
    return inspect(handmade_dag(" and then ".join(["the [MASK]"] * num_masks) + ".", nodes, edges, k))


@functools.cache
def smiles() -> Inspection:
    nodes = [{"O": 0.6, "(": 0.3, "\\": 0.1}, {"N": 0.5, "Cl": 0.3, "[nH+]": 0.2}]
    edges = {0: {1: 0.7, 2: 0.3}, 1: {2: 0.1, 3: 0.9}, 2: {3: 1.0}}
    return inspect(handmade_dag("CC[MASK]C", nodes, edges, 2, "smiles"))


@functools.cache
def awkward() -> Inspection:
    """Return an inspection in which each awkward word is the best one of a node, and one is in the sentence."""
    nodes = [{word: 0.6, "plain": 0.2} for word in AWKWARD]
    edges = {v: dict.fromkeys(range(v + 1, 14), 1 / (13 - v)) for v in range(13)}
    dag = handmade_dag("<i>$x$ [MASK] [MASK] [MASK]", nodes, edges, 4)
    return inspect(replace(dag, text=f"<i>$x$ {AWKWARD[-2]} [MASK] [MASK] [MASK]"))


@functools.cache
def awkward_files() -> dict[str, bytes]:
    return render_report(awkward(), ["svg", "html"])
