"""Self-contained HTML page of a fine-tuning run: verdict, scores, pictures, worst rows, notes, and what to run next.

Axes: N scored rows, C outputs.
"""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.config.tasks import SEEDED_SPLITS, CsvTaskConfig
from exlm_cli.data import BoolArray
from exlm_cli.files import make_folder, write_together
from exlm_cli.finetune.evaluation.calibration import PredictedRows, read_scored_split
from exlm_cli.finetune.evaluation.verdict import describe_predictor
from exlm_cli.finetune.results import FinetunedRun
from exlm_cli.format import format_number, name_some, shorten
from exlm_cli.report.finetuning.figures import draw_errors, draw_labels, draw_run
from exlm_cli.report.finetuning.scores import interval_tables, models_table, results_tables
from exlm_cli.report.style import Card, draw_molecule, render_page
from exlm_cli.report.tables import ReportTable
from exlm_cli.run_dir import read_run_json, resume_command
from exlm_cli.tasks.base import FloatArray

PAGE_FILE = "report.html"
"""File of the page in a run directory."""
_MAX_NAMED = 4
_WRONG = 0.5
"""Error of a label from which on the truth is not what was predicted."""
_TEXT_CHARACTERS = 300
NUM_CARDS = 8


@dataclass(frozen=True)
class Section:
    """Part of the page that is no table: an SVG file, or rows one by one below notes."""

    title: str
    picture: bytes = b""
    notes: Sequence[str] = ()
    cards: Sequence[Card] = ()


@dataclass(frozen=True)
class ShownRows:
    """Rows of the split whose scores are reported; `is_molecule` says whether what the model read are SMILES."""

    predicted: PredictedRows
    is_molecule: bool

    @cached_property
    def errors(self) -> FloatArray:
        """(N, C) distances of values, or 1 minus the probability of the truth, (N, 1) for classes; NaN: unknown."""
        rows = self.predicted
        if rows.loss == "regression":
            return np.abs(rows.mean - rows.targets)
        if rows.loss == "binary":
            return np.abs(rows.targets - rows.mean)
        true_N = np.nan_to_num(rows.targets[:, 0]).astype(np.int64)
        errors_N = 1 - rows.mean[np.arange(len(rows.mean)), true_N]
        return np.where(np.isnan(rows.targets[:, 0]), np.nan, errors_N)[:, None]

    @property
    def _is_wrong(self) -> BoolArray:
        """(N, C): whether an answer is not the truth, as every known value is; False where that is unknown."""
        if self.predicted.loss == "regression":
            return ~np.isnan(self.errors)
        if self.predicted.loss == "binary":
            return np.nan_to_num(self.errors) >= _WRONG
        truth_N = self.predicted.targets[:, 0]
        is_wrong: BoolArray = (self.predicted.mean.argmax(axis=1) != truth_N) & ~np.isnan(truth_N)
        return is_wrong[:, None]

    @property
    def _sizes(self) -> FloatArray:
        """(N, C): errors of wrong answers, those of values in standard deviations of the truth; -1 for right ones."""
        errors_NC = self.errors
        if self.predicted.loss == "regression":
            deviation_C = np.nanstd(self.predicted.targets, axis=0)
            errors_NC = errors_NC / np.where(deviation_C > 0, deviation_C, 1.0)
        return np.where(self._is_wrong, errors_NC, -1.0)

    def worst(self, is_chosen_N: BoolArray | None = None) -> list[tuple[int, int]]:
        """Return row and output of the largest errors, each row once, the largest first.

        Of labels and classes, they are those of wrong answers alone.

        Args:
            is_chosen_N: Whether a row may be taken; None: all.
        """
        errors_NC = self._sizes
        largest_N = errors_NC.max(axis=1)
        if is_chosen_N is not None:
            largest_N = np.where(is_chosen_N, largest_N, -1.0)
        order = np.argsort(-largest_N, kind="stable")[:NUM_CARDS]
        return [(int(row), int(errors_NC[row].argmax())) for row in order if largest_N[row] >= 0]

    def surprising(self) -> tuple[float, list[tuple[int, int]]]:
        """Return the least similarity of the third of the molecules that is most like the training molecules, and the
        largest errors of that third that are not among the `worst` of all; of values, errors in the largest quarter.
        """
        similarity_N = self.predicted.similarity
        assert similarity_N is not None, "the caller has asked"
        least = float(np.quantile(similarity_N, 2 / 3))
        is_near_N = similarity_N >= least
        is_near_N[[row for row, _ in self.worst()]] = False
        if self.predicted.loss == "regression":
            largest_N = self._sizes.max(axis=1)
            is_near_N &= largest_N >= np.quantile(np.maximum(largest_N, 0.0), 0.75)
        return least, self.worst(is_near_N)

    def cards(self, chosen: Iterable[tuple[int, int]]) -> list[Card]:
        """Return a card of each row: the molecule or text, truth, prediction and similarity."""
        return [self._card(row, output) for row, output in chosen]

    def _card(self, row: int, output: int) -> Card:
        rows, text = self.predicted, self.predicted.inputs[row]
        places = [f"{rows.places[row]} of the file"] if rows.places else []
        lines = [*self._describe(row, output), *places]
        if rows.similarity is not None:
            lines.insert(1, f"nearest training molecule: {rows.similarity[row]:.2f}")
        if not self.is_molecule:
            return Card(None, shorten(text, _TEXT_CHARACTERS), lines)
        return Card(draw_molecule(text), text, [*lines, shorten(text, _TEXT_CHARACTERS)])

    def _describe(self, row: int, output: int) -> list[str]:
        rows = self.predicted
        if rows.loss == "classes":
            truth, guess = int(rows.targets[row, 0]), int(rows.mean[row].argmax())
            return [
                f"true {rows.names[truth]} ({rows.mean[row, truth]:.3f}), predicted {rows.names[guess]} "
                f"({rows.mean[row, guess]:.3f})"
            ]
        name = f"{rows.names[output]}: " if len(rows.names) > 1 else ""
        true, predicted = float(rows.targets[row, output]), float(rows.mean[row, output])
        if rows.loss == "binary":
            return [f"{name}true {true:g}, probability {predicted:.3f}"]
        half = float(rows.half_widths[row, output])
        interval = ""
        if not math.isnan(half):
            ends = " to ".join(format_number(end, beside=predicted) for end in (predicted - half, predicted + half))
            interval = f", {100 * rows.level:g} % interval {ends}"
        return [f"{name}true {format_number(true)}, predicted {format_number(predicted)}{interval}"]


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
    by_distance = draw_errors(
        rows.errors, rows.predicted.similarity, folder, of_value, f"{split}, {results.split_words}"
    )
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
