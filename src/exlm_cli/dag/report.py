"""Report files of one inspection: pictures, HTML, DOT and JSON."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from exlm_cli.dag.figures import render_graph, render_heat_map
from exlm_cli.dag.html import render_html
from exlm_cli.dag.inspect import Inspection
from exlm_cli.dag.text import render_dot, render_json
from exlm_cli.files import folder_for_results, write_atomically

_TABLES = ("dot", "json")
"""Formats without a picture."""


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

    `show` is called once the folder and the files without pictures are there: pictures of a large DAG take seconds.

    Raises:
        CheckpointError: The file system refuses.
    """
    tables = render_report(inspection, [name for name in formats if name in _TABLES])
    drawn = [name for name in formats if name not in _TABLES and (name == "html" or inspection.dag.has_transitions)]
    if not tables and not drawn:
        show()
        return []
    with folder_for_results(folder):
        _write(tables, folder)
        show()
        pictures = render_report(inspection, drawn)
        _write(pictures, folder)
    return [folder / name for name in (*pictures, *tables)]


def _write(files: Mapping[str, bytes], folder: Path) -> None:
    for name, data in files.items():
        write_atomically(folder / name, data)
