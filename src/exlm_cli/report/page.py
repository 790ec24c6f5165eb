"""Self-contained HTML page of a fine-tuning run: verdict, scores, pictures, notes, and the commands to run next."""

import base64
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.files import write_atomically
from exlm_cli.finetune.results import FinetunedRun
from exlm_cli.report.intervals import interval_tables
from exlm_cli.report.score_figures import draw_runs
from exlm_cli.report.scores import results_tables
from exlm_cli.report.style import render_page
from exlm_cli.run_dir import read_run_json, resume_command

PAGE_FILE = "report.html"
"""File of the page in a run directory."""


@dataclass(frozen=True)
class Section:
    """Part of the page: a table, a picture, or both.

    Attributes:
        columns: Headings of a table; all but the first are those of numbers.
        groups: Its rows; a line separates groups.
        notes: Lines below the table.
        picture: An SVG file in base64; empty: none.
    """

    title: str
    columns: Sequence[str] = ()
    groups: Iterable[Iterable[Sequence[str]]] = ()
    notes: Sequence[str] = ()
    picture: str = ""


def write_page(finetuned: FinetunedRun) -> Path:
    """Draw the pictures of a finished run, write `report.html` with them, and return its path.

    Raises:
        CheckpointError: Predictions are missing or altered, or a file cannot be written.
    """
    run, results = finetuned.folder, finetuned.results
    scores, *labels = results_tables(finetuned)
    sections = [Section("Scores", scores.columns, scores.groups)]
    sections += [
        Section(f"Scores of each label, {results.scored_split}", table.columns, table.groups) for table in labels
    ]
    sections += [Section(table.title, table.columns, table.groups, table.notes) for table in interval_tables(finetuned)]
    sections += [_picture(path) for path in draw_runs([finetuned], None) if path.suffix == ".svg"]
    described = read_run_json(run)
    page = render_page(
        "run.html",
        title=f"{results.task}: {run.name}",
        heading=scores.title,
        about=f"exlm {described.exlm_version}, torch {described.torch_version}, on {described.device}; run {run}",
        verdict=results.verdict,
        sections=sections,
        notes=scores.notes,
        commands=_commands(finetuned),
    )
    path = run / PAGE_FILE
    write_atomically(path, page.encode())
    return path


def _picture(path: Path) -> Section:
    name = path.stem.partition("-")[2].replace("-", " ")
    return Section(name.capitalize(), picture=base64.b64encode(path.read_bytes()).decode())


def _commands(finetuned: FinetunedRun) -> list[str]:
    run, results = finetuned.folder, finetuned.results
    given = shlex.quote(str(run))
    lines = [f"exlm predict {given} FILE", f"exlm eval {given}"]
    if results.replication is None and results.split in ("random", "scaffold-balanced"):
        lines.append(f"{resume_command('finetune', run)} --set num_replicates=5")
    return lines
