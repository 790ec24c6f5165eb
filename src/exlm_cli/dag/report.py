"""Report files of one DAG: pictures, DOT, JSON, and an HTML page that needs no network and no library.

The page shows the SVG pictures of `figures`; pointing at a node shows all its edges.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from html import escape
from pathlib import Path

from exlm_cli.dag.figures import GRAPH_CAPTION, HEAT_MAP_CAPTION, render_graph, render_heat_map
from exlm_cli.dag.fillings import Filling
from exlm_cli.dag.inspect import Inspection, two_decimals
from exlm_cli.dag.text import render_dot, render_json
from exlm_cli.files import folder_for_results, write_together
from exlm_cli.format import format_percent, printable
from exlm_cli.report.style import html_page, ink_on, mask_colour

_STYLE = """
.chip { border-radius: .35em; padding: .1em .4em; white-space: nowrap; }
.bar { background: var(--bar); display: block; height: .7em; }
svg { background: #ffffff; border-radius: .4rem; } svg text { pointer-events: none; }
[id^="node-"] { cursor: pointer; outline: none; } [id^="node-"]:focus path { stroke: #1f2933 !important; }
#graph.pointed [id^="edge-"], #graph.pointed [id^="number-"] { opacity: .1; }
#graph.pointed .lit { opacity: 1; visibility: visible; } #graph .lit[id^="edge-"] path { stroke: #1f2933 !important; }
#graph .lit[id^="edge-"] path + path { fill: #1f2933 !important; }
"""

_SCRIPT = """
const graph = document.getElementById("graph");
function light(node) {
  graph.classList.toggle("pointed", node !== null);
  for (const e of graph.querySelectorAll('[id^="edge-"], [id^="number-"]'))
    e.classList.toggle("lit", e.id.split("-").slice(1).includes(node));
}
for (const e of graph.querySelectorAll('[id^="node-"]')) {
  const node = e.id.split("-")[1];
  e.setAttribute("tabindex", "0");
  for (const name of ["mouseenter", "focus"]) e.addEventListener(name, () => light(node));
  for (const name of ["mouseleave", "blur"]) e.addEventListener(name, () => light(null));
}
"""


def render_report(inspection: Inspection, formats: Sequence[str]) -> dict[str, bytes]:
    """Return the content of every file by name, in the chosen of `exlm_cli.dag.FORMATS`.

    A model without transitions has no DAG to draw: no pictures and no DOT.
    """
    files: dict[str, bytes] = {}
    has_dag = inspection.dag.has_transitions
    drawn = [name for name in ("png", "svg") if name in formats or (name == "svg" and "html" in formats)]
    if has_dag and drawn:
        for picture, render in (("graph", render_graph), ("heatmap", render_heat_map)):
            files |= {f"dag_{picture}.{name}": data for name, data in render(inspection, drawn).items()}
    if "html" in formats:
        pictures = [files[f"dag_{picture}.svg"].decode() for picture in ("graph", "heatmap") if has_dag]
        files["dag.html"] = render_html(inspection, pictures).encode()
    if "dot" in formats and has_dag:
        files["dag.dot"] = render_dot(inspection).encode()
    if "json" in formats:
        files["dag.json"] = render_json(inspection).encode()
    return {name: data for name, data in files.items() if name.rpartition(".")[2] in formats}


def write_report(
    inspection: Inspection, folder: Path, formats: Sequence[str], *, show: Callable[[], None] = lambda: None
) -> list[Path]:
    """Write the files into a folder, which is made if need be; a failure leaves no half-written file.

    `show` is called once the folder is there: pictures of a large DAG take seconds.

    Raises:
        CheckpointError: A file cannot be written.
    """
    names = [name for name in formats if name in ("html", "json") or inspection.dag.has_transitions]
    with folder_for_results(folder) if names else nullcontext():
        show()
        files = render_report(inspection, names)
        write_together({folder / name: data for name, data in files.items()})
    return [folder / name for name in files]


def render_html(inspection: Inspection, pictures: Sequence[str]) -> str:
    """Return the page: sentence, graph, fillings beside the independent guess, heat map, nodes.

    `pictures` are the SVG files of the graph and the heat map, or none for a model without transitions.
    """
    counted = f"Share {inspection.counted_fillings()}, summed over all paths. {inspection.note_on_proof()}"
    visits = "Paths: the share of paths with as many tokens as masks that visit the node."
    sections = [
        _section("Most probable joint fillings", counted, _fillings_table(inspection)),
        _section("Nodes", visits, _nodes_table(inspection)),
    ]
    if pictures:
        cut = inspection.note_on_cut()
        pointed = f"{GRAPH_CAPTION} Point at a node to see all its edges. {cut}"
        sections.insert(0, _section("Graph", pointed, _graphic("graph", pictures[0])))
        transitions = _graphic("heatmap", pictures[1])
        sections.insert(2, _section("Transition probabilities", f"{HEAT_MAP_CAPTION} {cut}", transitions))
        sections.append(f"<script>{_SCRIPT}</script>")
    sentence = "".join(_chip(piece, m) if m >= 0 else escape(piece) for piece, m in inspection.sentence())
    about = f"{inspection.checkpoint}: {inspection.health()}" if inspection.checkpoint else inspection.health()
    body = f"<h1>{sentence}</h1>\n<p>{escape(about)}</p>\n{''.join(sections)}"
    return html_page(inspection.dag.text, body, style=_STYLE, policy="script-src 'unsafe-inline'")


def _section(heading: str, note: str, content: str) -> str:
    return f'<h2>{escape(heading)}</h2>\n<p>{escape(note.strip())}</p>\n<div class="wide">{content}</div>\n'


def _graphic(name: str, svg: str) -> str:
    """Return an SVG as an element of the page, cut to its graphic: the page itself has title and captions."""
    element = svg[svg.index("<svg ") :]
    view_box = re.findall(r'data-graphic="([^"]*)"', element)[0]
    width, height = view_box.split()[2:]
    size = f'width="{width}pt" height="{height}pt" viewBox="{view_box}"'
    element = re.sub(r'width="[^"]*" height="[^"]*" viewBox="[^"]*"', size, element, count=1)
    return f'<div id="{name}">{element}</div>'


def _fillings_table(inspection: Inspection) -> str:
    verdict = ["RDKit"] if inspection.dag.kind == "smiles" else []
    masks = [f"[MASK {mask + 1}]" for mask in range(inspection.dag.num_masks)]
    rows = [_header(["", "share", "", *masks, "text", *verdict])]
    for rank, filling in enumerate(inspection.n_best.fillings, start=1):
        bar = f'<span class="bar" style="width:{90 * inspection.relative_probability(filling):.1f}px"></span>'
        rows.append(f"<tr>{_filling_cells(inspection, filling, str(rank), bar)}</tr>\n")
    alone = f"each [MASK] guessed on its own; {inspection.share_if_independent()}"
    note = f"<br><small>{escape(alone)}</small>"
    rows.append(f'<tr class="alone">{_filling_cells(inspection, inspection.guess.filling, note=note)}</tr>\n')
    return f"<table>{''.join(rows)}</table>"


def _filling_cells(inspection: Inspection, filling: Filling, rank: str = "", bar: str = "", note: str = "") -> str:
    cells = [f'<td class="number">{rank}</td><td class="number">{format_percent(inspection.share(filling))}</td>']
    texts = [bar, *(_chip(word, mask) for mask, word in enumerate(inspection.filled_words(filling)))]
    texts.append(escape(printable(filling.text)) + note)
    if filling.is_valid_smiles is not None:
        texts.append("valid" if filling.is_valid_smiles else "refused")
    return "".join([*cells, *(f"<td>{text}</td>" for text in texts)])


def _nodes_table(inspection: Inspection) -> str:
    rows = [_header(["node", "paths", "mask", "most probable words"])]
    for node in range(1, inspection.dag.num_nodes - 1):
        mask = int(inspection.dag.node_mask[node])
        paths = escape(two_decimals(inspection.occupancy[node]))
        rows.append(
            f'<tr><td class="number">{node}</td><td class="number">{paths}</td>'
            f"<td>{_chip(f'[MASK {mask + 1}]', mask)}</td><td>{escape(inspection.listed_words(node))}</td></tr>\n"
        )
    return f"<table>{''.join(rows)}</table>"


def _header(names: Sequence[str]) -> str:
    """Return the head of a table whose first two columns are numbers."""
    cells = [f"<th{' class=number' if index < 2 else ''}>{escape(name)}</th>" for index, name in enumerate(names)]
    return f"<tr>{''.join(cells)}</tr>\n"


def _chip(text: str, mask: int) -> str:
    colour = mask_colour(mask)
    return f'<span class="chip" style="background:{colour};color:{ink_on(colour)}">{escape(text)}</span>'
