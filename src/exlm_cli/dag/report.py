"""Report files of one DAG: pictures, JSON, and an HTML page that needs no network and no library.

The page shows the SVG pictures of `figures`; pointing at a node shows its edges alone.
"""

import base64
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from exlm_cli.dag.figures import render_graph, render_heat_map
from exlm_cli.dag.inspection import WITHOUT_DAG, Inspection, two_decimals
from exlm_cli.dag.text import render_json
from exlm_cli.files import folder_for_results, write_together
from exlm_cli.format import format_percent
from exlm_cli.report.style import ink_on, mask_colour, render_page


def render_report(inspection: Inspection, formats: Sequence[str]) -> dict[str, bytes]:
    """Return the content of every file by name, in the chosen of `exlm_cli.dag.FORMATS`.

    A model without transitions has no DAG to draw: no pictures.
    """
    files: dict[str, bytes] = {}
    drawn = [name for name in ("png", "svg") if name in formats or (name == "svg" and "html" in formats)]
    if inspection.dag.has_transitions and drawn:
        for picture, render in (("graph", render_graph), ("heatmap", render_heat_map)):
            files |= {f"dag_{picture}.{name}": data for name, data in render(inspection, drawn).items()}
    if "html" in formats:
        pictures = (files.get(f"dag_{picture}.svg", b"") for picture in ("graph", "heatmap"))
        files["dag.html"] = render_html(inspection, *pictures).encode()
    if "json" in formats:
        files["dag.json"] = render_json(inspection).encode()
    return {name: data for name, data in files.items() if name.rpartition(".")[2] in formats}


def write_report(inspection: Inspection, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write the files into a folder, which is made if need be; a failure leaves no half-written file.

    Raises:
        CheckpointError: A file cannot be written.
    """
    names = [name for name in formats if name in ("html", "json") or inspection.dag.has_transitions]
    with folder_for_results(folder) if names else nullcontext():
        files = render_report(inspection, names)
        write_together({folder / name: data for name, data in files.items()})
    return [folder / name for name in files]


def render_html(inspection: Inspection, graph: bytes, heat_map: bytes) -> str:
    """Return the page: sentence, graph, fillings beside the independent guess, heat map, nodes.

    The pictures are SVG files, empty for a model without transitions.
    """
    return render_page(
        "dag.html",
        title=inspection.dag.text,
        inspection=inspection,
        graph=graph[graph.find(b"<svg ") :].decode() if graph else "",
        heat_map=base64.b64encode(heat_map).decode(),
        without_dag=WITHOUT_DAG,
        percent=format_percent,
        two_decimals=two_decimals,
        mask_colour=mask_colour,
        ink_on=ink_on,
    )
