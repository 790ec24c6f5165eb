"""A DAG as one HTML file that needs nothing else: no network, no library, readable on dark and on light screens."""

import math
from collections.abc import Sequence
from html import escape

from exlm_cli.dag.fillings import Filling
from exlm_cli.dag.graph import printable
from exlm_cli.dag.inspect import Inspection
from exlm_cli.dag.shapes import GRAPH_CAPTION
from exlm_cli.dag.svg import graph_svg, heat_map_svg
from exlm_cli.dag.words import counted_fillings, filled_words, health, note_on_cut, note_on_proof, sentence_words
from exlm_cli.format import format_percent
from exlm_cli.report.style import ink_on, mask_colour

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2933; --faint: #5f6b76; --rule: #dde2e7; --heat: #08519c;
  --bar: #b8c4d0; }
@media (prefers-color-scheme: dark) { :root { --paper: #15191e; --ink: #e6eaee; --faint: #9aa5b1; --rule: #333b44;
  --heat: #4d9be6; --bar: #46525f; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 "DejaVu Sans", Verdana, "Segoe UI", sans-serif;
  margin: 2rem auto; max-width: 76rem; padding: 0 1.5rem; }
h1 { font-size: 1.35rem; font-weight: 500; line-height: 2; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .4rem; }
p { color: var(--faint); font-size: .85rem; margin: .3rem 0 .8rem; max-width: 60rem; }
.wide { overflow-x: auto; }
.chip { border-radius: .35em; padding: .1em .4em; white-space: nowrap; }
table { border-collapse: collapse; font-size: .9rem; }
td, th { padding: .25rem .8rem .25rem 0; text-align: left; white-space: nowrap; }
th { border-bottom: 1px solid var(--rule); font-weight: 600; } td.number, th.number { text-align: right; }
small { color: var(--faint); } tr.alone td { border-top: 1px solid var(--rule); }
.bar { background: var(--bar); display: block; height: .7em; }
svg text { font-family: "DejaVu Sans", Verdana, sans-serif; text-anchor: middle; } svg .ink { fill: var(--ink); }
svg .paper { fill: var(--paper); } .edge path { fill: none; stroke: var(--ink); } .edge polygon { fill: var(--ink); }
.cell { fill: var(--heat); stroke: var(--rule); stroke-width: .5; } .node { cursor: pointer; outline: none; }
.node:focus rect { stroke: var(--ink); stroke-width: 2; }
#graph.pointed .edge { opacity: .08; } #graph.pointed .edge.lit { opacity: 1; } #graph .edge.lit > g { opacity: 1; }
"""

_SCRIPT = """
const graph = document.getElementById("graph");
function light(id) {
  graph.classList.toggle("pointed", id !== null);
  for (const e of graph.querySelectorAll(".edge"))
    e.classList.toggle("lit", id !== null && (e.dataset.source === id || e.dataset.target === id));
}
for (const n of graph.querySelectorAll(".node")) {
  n.addEventListener("mouseenter", () => light(n.dataset.node));
  n.addEventListener("mouseleave", () => light(null));
  n.addEventListener("focus", () => light(n.dataset.node));
  n.addEventListener("blur", () => light(null));
}
"""


def render_html(inspection: Inspection) -> str:
    """Return the page: sentence, graph, heat map, fillings beside the independent guess, nodes.

    A model without transitions has no graph and no heat map.
    """
    dag = inspection.dag
    sections = []
    if dag.has_transitions:
        cut = note_on_cut(inspection)
        sections += [
            _section("Graph", f"{GRAPH_CAPTION} Point at a node to see its edges. {cut}", graph_svg(inspection)),
            _section(
                "Transition probabilities",
                f"Row: the node a path leaves. Column: the node it enters next. {cut}",
                heat_map_svg(inspection),
            ),
        ]
    sections.insert(
        1,
        _section(
            "Most probable joint fillings",
            f"Share {counted_fillings(inspection)}, summed over all paths. {note_on_proof(inspection)}",
            _fillings_table(inspection),
        ),
    )
    note = "Paths: the share of paths with as many tokens as masks that visit the node."
    sections.append(_section("Nodes", note, _nodes_table(inspection)))
    script = f"<script>{_SCRIPT}</script>" if dag.has_transitions else ""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(printable(dag.text))}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{_sentence(inspection)}</h1>
<p>{escape(_about(inspection))}</p>
{"".join(sections)}
{script}
</body>
</html>
"""


def _section(heading: str, note: str, content: str) -> str:
    return f'<h2>{escape(heading)}</h2>\n<p>{escape(note)}</p>\n<div class="wide">{content}</div>\n'


def _sentence(inspection: Inspection) -> str:
    words = []
    for word, mask in sentence_words(inspection):
        bare = word.rstrip()
        words.append((_chip(bare, mask) if mask >= 0 else escape(bare)) + word[len(bare) :])
    return "".join(words)


def _about(inspection: Inspection) -> str:
    return f"{inspection.checkpoint}: {health(inspection)}" if inspection.checkpoint else health(inspection)


def _fillings_table(inspection: Inspection) -> str:
    n_best, guess = inspection.n_best, inspection.guess
    shares = [math.exp(filling.log_prob - n_best.log_prob_length) for filling in n_best.fillings]
    verdict = ["RDKit"] if inspection.dag.kind == "smiles" else []
    masks = [f"[MASK] {mask + 1}" for mask in range(inspection.dag.num_masks)]
    rows = [_header(["", "share", "", *masks, "text", *verdict], num_numbers=2)]
    for rank, (filling, share) in enumerate(zip(n_best.fillings, shares, strict=True), start=1):
        # not from the shares, which may be too small for a number
        width = 90 * math.exp(filling.log_prob - n_best.fillings[0].log_prob)
        bar = f'<span class="bar" style="width:{width:.1f}px"></span>'
        rows.append(_filling_row(inspection, str(rank), share, bar, filling))
    share = math.exp(guess.filling.log_prob - n_best.log_prob_length)
    believed = format_percent(math.exp(guess.log_prob_independent))
    alone = f"each [MASK] guessed on its own; {believed} if masks were independent"
    rows.append(_filling_row(inspection, "", share, "", guess.filling, note=alone))
    return f"<table>{''.join(rows)}</table>"


def _filling_row(inspection: Inspection, rank: str, share: float, bar: str, filling: Filling, note: str = "") -> str:
    chips = "".join(f"<td>{_chip(word, mask)}</td>" for mask, word in enumerate(filled_words(inspection, filling)))
    verdict = ""
    if filling.is_valid_smiles is not None:
        verdict = f"<td>{'valid' if filling.is_valid_smiles else 'refused'}</td>"
    css, remark = (' class="alone"', f"<br><small>{escape(note)}</small>") if note else ("", "")
    return (
        f'<tr{css}><td class="number">{rank}</td><td class="number">{format_percent(share)}</td><td>{bar}</td>'
        f"{chips}<td>{escape(printable(filling.text))}{remark}</td>{verdict}</tr>\n"
    )


def _nodes_table(inspection: Inspection) -> str:
    rows = [_header(["node", "paths", "mask", "most probable words"], num_numbers=2)]
    for node, tokens in enumerate(inspection.tokens):
        mask = int(inspection.dag.node_mask[node])
        if mask >= 0:
            words = ", ".join(f"{escape(token.text)} {token.probability:.2f}" for token in tokens)
            rows.append(
                f'<tr><td class="number">{node}</td><td class="number">{inspection.occupancy[node]:.2f}</td>'
                f"<td>{_chip(f'[MASK] {mask + 1}', mask)}</td><td>{words}</td></tr>\n"
            )
    return f"<table>{''.join(rows)}</table>"


def _header(names: Sequence[str], num_numbers: int) -> str:
    cells = [
        f"<th{' class=number' if index < num_numbers else ''}>{escape(name)}</th>" for index, name in enumerate(names)
    ]
    return f"<tr>{''.join(cells)}</tr>\n"


def _chip(text: str, mask: int) -> str:
    colour = mask_colour(mask)
    return f'<span class="chip" style="background:{colour};color:{ink_on(colour)}">{escape(text)}</span>'
