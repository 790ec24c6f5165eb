"""Self-contained HTML page of a fine-tuning run: verdict, scores, pictures, worst rows, notes, and what to run next."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.config.tasks import SEEDED_SPLITS, CsvTaskConfig
from exlm_cli.files import make_folder, write_together
from exlm_cli.finetune.evaluation.calibration import read_scored_split
from exlm_cli.finetune.evaluation.verdict import describe_predictor
from exlm_cli.finetune.results import FinetunedRun
from exlm_cli.format import name_some
from exlm_cli.report.finetuning.data_figures import draw_errors, draw_labels
from exlm_cli.report.finetuning.score_figures import draw_run
from exlm_cli.report.finetuning.scored_rows import ShownRows
from exlm_cli.report.finetuning.scores import interval_tables, models_table, results_tables
from exlm_cli.report.style import Card, render_page
from exlm_cli.report.tables import ReportTable
from exlm_cli.run_dir import read_run_json, resume_command

PAGE_FILE = "report.html"
"""File of the page in a run directory."""
_MAX_NAMED = 4


@dataclass(frozen=True)
class Section:
    """Part of the page that is no table: an SVG file, or rows one by one below notes."""

    title: str
    picture: bytes = b""
    notes: Sequence[str] = ()
    cards: Sequence[Card] = ()


def write_page(finetuned: FinetunedRun) -> Path:
    """Draw the pictures of a finished run, write `report.html` with them, and return its path.

    Raises:
        CheckpointError: Predictions are missing or altered, or a file cannot be written.
    """
    run, results = finetuned.run_dir, finetuned.results
    scores, *labels = results_tables(finetuned)
    models = models_table(finetuned)
    sections: list[ReportTable | Section] = [replace(models, notes=(*models.notes, *_shown(finetuned)))]
    sections += [replace(table, title=f"Scores of each label, {results.scored_split}") for table in labels]
    rows = None if results.loss == "span" else read_scored_split(run, results)
    files = {} if rows is None else draw_run(finetuned, rows, run / "report", results.scored_split)
    sections += _pictures(files)
    sections += interval_tables(finetuned)
    if rows is not None:
        sections += _row_sections(finetuned, ShownRows(rows, results.input_kind == "smiles"), files)
    described, name = read_run_json(run), _name_of(finetuned)
    page = render_page(
        "run.html",
        title=f"{name}: {run.name}",
        heading=name,
        about=(
            scores.title,
            f"exlm {described.exlm_version}, torch {described.torch_version}, on {described.device}; run {run}",
        ),
        verdict=finetuned.verdict,
        sections=sections,
        notes=scores.notes,
        commands=_commands(finetuned),
    )
    path = run / PAGE_FILE
    for folder in {picture.parent for picture in files}:
        make_folder(folder)
    write_together({**files, path: page.encode()})
    return path


def _shown(finetuned: FinetunedRun) -> list[str]:
    """Return what the pictures, intervals and single rows of a page are of, where that could be something else."""
    results = finetuned.results
    notes = []
    if results.predictors is not None:
        what = describe_predictor(results.predictor, results.predictors)
        notes.append(f"pictures, intervals and single rows below are of {what}, as in `exlm predict`")
    if len(results.split_seeds) > 1:
        notes.append(
            f"pictures and single rows have the {results.scored_split} rows of all {len(results.split_seeds)} splits, "
            "each once, as the first split that tests it predicts it; validation rows of any split are left out. "
            f"Intervals and labels below are of {results.of_splits[0].split_words}, the first"
        )
    return notes


def _name_of(finetuned: FinetunedRun) -> str:
    """Return the name of the user's file, or of the benchmark, and of what is predicted."""
    results = finetuned.results
    task = load_recipe(finetuned.run_dir / "recipe.yaml", kind=FinetuneRecipe).task
    name = results.task
    if isinstance(task, CsvTaskConfig) and task.files.train is not None:
        name = Path(task.files.train).name
    if results.loss == "span":
        return name
    of_labels = task.label_columns if isinstance(task, CsvTaskConfig) else results.output_names
    return f"{name}: {name_some(of_labels, limit=_MAX_NAMED)}"


def _row_sections(finetuned: FinetunedRun, rows: ShownRows, files: dict[Path, bytes]) -> list[Section]:
    """Return what the scored rows show: error by distance, the worst and the most surprising ones, and all labels.

    Their pictures come to `files`.
    """
    results, folder = finetuned.results, finetuned.run_dir / "report"
    split, what = results.scored_split, "molecules" if rows.is_molecule else "rows"
    of_value = "absolute error" if results.loss == "regression" else "1 - probability of the truth"
    by_distance = draw_errors(rows, folder, of_value, f"{split}, {results.split_words}")
    labels = draw_labels(finetuned, folder)
    files |= by_distance | labels
    sections = _pictures(by_distance, "Error by distance to the training molecules")
    if rows.predicted.inputs:
        worst = rows.worst()
        notes = () if worst else (f"none: every one of the {split} {what} is predicted right",)
        sections.append(Section(f"Worst predicted {what}, {split}", notes=notes, cards=rows.cards(worst)))
        if rows.predicted.similarity is not None:
            least, surprising = rows.surprising()
            note = (
                f"large errors in the third of the {split} molecules that is most like the training molecules "
                f"(similarity {least:.2f} or more), where the model should be right; look at these labels"
            )
            if surprising:
                cards = rows.cards(surprising)
                sections.append(Section(f"Most surprising {what}, {split}", notes=(note,), cards=cards))
    return [*sections, *_pictures(labels, "Labels of each split")]


def _pictures(files: Mapping[Path, bytes], title: str = "") -> list[Section]:
    """Return the SVG files, by default with titles of their names."""
    return [
        Section(title or path.stem.partition("-")[2].replace("-", " ").capitalize(), picture=content)
        for path, content in files.items()
        if path.suffix == ".svg"
    ]


def _commands(finetuned: FinetunedRun) -> list[str]:
    run, results = finetuned.run_dir, finetuned.results
    given = shlex.quote(str(run))
    explain = " --explain" if results.input_kind == "smiles" else ""
    lines = [f"exlm predict {given} FILE{explain}", f"exlm eval {given}"]
    if len(results.split_seeds) == 1 and results.split in SEEDED_SPLITS:
        lines.append(f"{resume_command('finetune', run)} --set num_replicates=5")
    return lines
