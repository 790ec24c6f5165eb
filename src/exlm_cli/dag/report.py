"""Report files of one inspection: pictures, HTML, DOT and JSON."""

from collections.abc import Sequence
from pathlib import Path

from exlm_cli.dag.figures import render_graph, render_heat_map
from exlm_cli.dag.html import render_html
from exlm_cli.dag.inspect import Inspection
from exlm_cli.dag.text import render_dot, render_json
from exlm_cli.files import folder_for_results, write_atomically


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


def write_report(inspection: Inspection, folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write the files into a folder, which is made if need be; a failure leaves no half-written file.

    Raises:
        CheckpointError: The file system refuses.
    """
    files = render_report(inspection, formats)
    if not files:
        return []
    with folder_for_results(folder):
        for name, data in files.items():
            write_atomically(folder / name, data)
    return [folder / name for name in files]
