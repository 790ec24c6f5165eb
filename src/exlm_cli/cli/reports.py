"""What several commands print and write: recipes, tables with their files, sweeps, training curves, predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_cli.cli import console
from exlm_cli.cli.runs import given_runs, name_runs
from exlm_cli.config.base import Recipe
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.errors import CheckpointError
from exlm_cli.files import folder_for_results
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.report.tables import ReportTable, write_tables
from exlm_cli.run_dir import METRICS_FILE, RUN_FILE, read_metrics, read_run_json, require_run, resume_command

if TYPE_CHECKING:
    from exlm_cli.experiments.results import SweepRun
    from exlm_cli.tasks.base import PredictionSummary


@dataclass(frozen=True)
class Output:
    """Output options.

    Attributes:
        formats: Formats in which the tables are also written, by their names in `report.tables`.
        folder: Folder of tables and figures; None: `report/` of the run.
        has_figures: Draw figures.
        as_json: Print JSON.
    """

    formats: Sequence[str] = ()
    folder: Path | None = None
    has_figures: bool = True
    as_json: bool = False


def emit_dry_run(recipe: Recipe, *, as_json: bool, checkpoint: Path | None = None) -> None:
    """Print a recipe with every key, if its inputs, its device and the checkpoint exist.

    Raises:
        CheckpointError: The checkpoint is no run.
        DataError: A file or folder is missing.
        ConfigError: There is no such device.
    """
    from exlm_cli.data.corpus.inputs import resolve_inputs
    from exlm_cli.tasks.registry import require_local_files

    if checkpoint is not None:
        given_runs([checkpoint], console.open_progress())
    match recipe:
        case PretrainRecipe() | SweepRecipe():
            data = recipe.data if isinstance(recipe, PretrainRecipe) else recipe.pretrain.data
            for key, inputs in (("data.train", data.train), ("data.valid", data.valid)):
                resolve_inputs(inputs, kind=data.kind, progress=SilentProgress(), key=key)
        case FinetuneRecipe():
            require_local_files(recipe.task)
    if isinstance(recipe, PretrainRecipe | FinetuneRecipe) and recipe.device == "cuda":
        from exlm_cli.train.pretrained import pick_device

        pick_device(recipe)
    console.emit_recipe(recipe, as_json=as_json)


def emit_report(
    tables: Sequence[ReportTable], figures: Sequence[Path], content: Mapping[str, Any], folder: Path, output: Output
) -> None:
    """Write tables in the formats asked for, and print them and the files, or `content` as JSON."""
    files = [*figures, *(write_tables(tables, folder, output.formats) if output.formats else [])]
    if output.as_json:
        return console.emit_json({**content, "files": files})
    console.emit_tables(tables)
    console.emit_files(files)


def emit_sweep(run: "SweepRun", output: Output, progress: Progress) -> None:
    """Write the report of a sweep, as far as it is done, and print its tables."""
    from exlm_cli.report.experiments.repeat_mlm import write_grid_report
    from exlm_cli.report.experiments.sweeps import write_sweep_report

    if run.num_done < run.num_cells:
        command = resume_command(run.recipe.run_by, run.folder)
        progress.message(f"{run.num_done} of {run.num_cells} cells are done; `{command}` does the others")
    folder = output.folder or run.folder / "report"
    write = write_grid_report if run.recipe.cells else write_sweep_report
    report = write(run.cells, folder, name=run.recipe.name, has_figures=output.has_figures)
    files = [*report.files, *write_tables(report.tables, folder, output.formats)]
    if output.as_json:
        return console.emit_json({"run_dir": run.folder, "files": files, **report.content})
    console.emit_tables(report.tables)
    console.emit_pairs({"run": run.folder, **{path.name: path for path in files if path.suffix != ".svg"}})


def draw_curves(runs: Sequence[Path], path: Path) -> list[Path]:
    """Draw the curves of runs to `path`, a name without suffix, and return the files.

    Raises:
        ConfigError: A run is given twice.
        CheckpointError: A run has no metrics.jsonl, or a file cannot be written.
        DataError: There is nothing to draw.
    """
    from exlm_cli.report.curves import plot_curves

    names = name_runs(runs)
    for run in runs:
        _require_metrics(run)
    rows_by_run = {name: read_metrics(run / METRICS_FILE) for name, run in zip(names, runs, strict=True)}
    described = {name: read_run_json(run) for name, run in zip(names, runs, strict=True) if (run / RUN_FILE).is_file()}
    known = {name: run.unigram_loss for name, run in described.items() if run.unigram_loss is not None}
    with folder_for_results(path.parent):
        return plot_curves(rows_by_run, path, unigram_losses=known)


def _require_metrics(run: Path) -> None:
    """Refuse a folder without curves; for a run of several models, name one that has them."""
    if (run / METRICS_FILE).is_file():
        return
    require_run(run, RUN_FILE, hint="give a run directory of `exlm pretrain`")
    inner = sorted(run.glob(f"cells/**/{METRICS_FILE}"))
    hint = f"give one of its models, such as {inner[0].parent}" if inner else "give a run that has begun to train"
    raise CheckpointError(f"{run}: this run has no curves of its own", hint)


def emit_predictions(summary: "PredictionSummary", *, as_json: bool) -> None:
    """Print how many rows were read, their scores, and the files."""
    from exlm_cli.report.finetuning.scores import label_scores_table

    counts: dict[str, int | str] = {"rows": summary.num_rows, "unreadable_rows": summary.num_unreadable}
    counts |= {"predicted_with": summary.predictor} if summary.predictor else {}
    known = {"rows_in_training_split": summary.num_in_training, "rows_in_validation_split": summary.num_in_validation}
    counts |= {name: count for name, count in known.items() if count}
    if as_json:
        scores: dict[str, Any] = {"metrics": summary.metrics, "metrics_without_known_rows": summary.metrics_of_new}
        scores |= {"labels": summary.labels} if summary.labels else {}
        return console.emit_json({"files": summary.files, **counts, **scores, "notes": summary.notes})
    without = {f"{name}_without_known_rows": value for name, value in summary.metrics_of_new.items()}
    console.emit_pairs({**counts, **summary.metrics, **without})
    if summary.labels:
        console.emit_tables([label_scores_table(summary.labels)])
    for note in summary.notes:
        console.emit_sentence(f"note: {note}")
    console.emit_files(summary.files)
