"""Self-contained HTML page of a fine-tuning run: verdict, scores, figures, notes, and the commands to run next."""

import base64
import re
import shlex
from html import escape
from pathlib import Path

from exlm_cli.files import write_atomically
from exlm_cli.format import printable
from exlm_cli.report.intervals import interval_tables
from exlm_cli.report.score_figures import draw_runs
from exlm_cli.report.scores import FinetunedRun, results_tables
from exlm_cli.report.style import html_page
from exlm_cli.report.tables import ReportTable
from exlm_cli.run_dir import read_run_json, resume_command

PAGE_FILE = "report.html"
"""File of the page in a run directory."""

_CODE = re.compile("`([^`]+)`")
_STYLE = """
.verdict { border-left: .35rem solid #0072b2; color: var(--ink); font-size: 1rem; padding: .2rem 0 .2rem .9rem; }
img { background: #ffffff; border-radius: .4rem; height: auto; max-width: 100%; } li { margin: .2rem 0; }
ul { color: var(--faint); font-size: .85rem; max-width: 60rem; padding-left: 1.1rem; }
p code { white-space: nowrap; }
pre { background: color-mix(in srgb, var(--rule) 40%, transparent); border-radius: .4rem; padding: .7rem; }
"""


def write_page(finetuned: FinetunedRun) -> Path:
    """Draw the figures of a finished run, write `report.html` with them, and return its path.

    Raises:
        CheckpointError: Predictions are missing or altered, or a file cannot be written.
    """
    pictures = [path for path in draw_runs([finetuned], None) if path.suffix == ".svg"]
    path = finetuned.folder / PAGE_FILE
    write_atomically(path, _render(finetuned, pictures).encode())
    return path


def _render(finetuned: FinetunedRun, pictures: list[Path]) -> str:
    run, results = finetuned.folder, finetuned.results
    scores, *labels = results_tables(results)
    sections = [
        "".join(f'<p class="verdict">{_text(sentence)}</p>' for sentence in results.verdict),
        _section("Scores", _table(scores)),
        *(_section(f"Scores of each label, {results.scored_split}", _table(table)) for table in labels),
        *(_section(table.title, _table(table) + _list(table.notes)) for table in interval_tables(finetuned)),
        *(_picture(path) for path in pictures),
        _section("Notes", _list(scores.notes)),
        _section("Go on", "<pre>" + "\n".join(map(_text, _commands(finetuned))) + "</pre>"),
    ]
    described = read_run_json(run)
    about = f"exlm {described.exlm_version}, torch {described.torch_version}, on {described.device}; run {run}"
    body = f"<h1>{_text(scores.title)}</h1>\n<p>{_text(about)}</p>\n{''.join(sections)}"
    return html_page(f"{results.task}: {run.name}", body, style=_STYLE, policy="img-src data:")


def _commands(finetuned: FinetunedRun) -> list[str]:
    run, results = finetuned.folder, finetuned.results
    given = shlex.quote(str(run))
    lines = [f"exlm predict {given} FILE", f"exlm eval {given}"]
    if results.replication is None and results.split in ("random", "scaffold-balanced"):
        lines.append(f"{resume_command('finetune', run)} --set num_replicates=5")
    return lines


def _section(heading: str, content: str) -> str:
    return f'<h2>{_text(heading)}</h2>\n<div class="wide">{content}</div>\n'


def _list(notes: tuple[str, ...]) -> str:
    return "<ul>" + "".join(f"<li>{_text(note)}</li>" for note in notes) + "</ul>"


def _picture(path: Path) -> str:
    name = path.stem.partition("-")[2].replace("-", " ")
    encoded = base64.b64encode(path.read_bytes()).decode()
    return _section(name.capitalize(), f'<img alt="{_text(name)}" src="data:image/svg+xml;base64,{encoded}">')


def _table(table: ReportTable) -> str:
    """Return a table in HTML; all columns but the first hold numbers."""
    rows = [_row("th", table.columns)]
    for number, group in enumerate(table.groups):
        rows += (_row("td", row, is_first=number > 0 and row is group[0]) for row in group)
    return "<table>" + "".join(rows) + "</table>"


def _row(tag: str, cells: tuple[str, ...], *, is_first: bool = False) -> str:
    name, *numbers = (_text(cell) for cell in cells)
    rest = "".join(f'<{tag} class="number">{cell}</{tag}>' for cell in numbers)
    line = ' class="alone"' if is_first else ""
    return f"<tr{line}><{tag}>{name}</{tag}>{rest}</tr>"


def _text(text: str) -> str:
    """Return a text for the page; text in backticks becomes code."""
    return _CODE.sub(r"<code>\1</code>", escape(printable(text)))
