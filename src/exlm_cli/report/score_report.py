"""Everything that evaluation draws and writes of runs: tables side by side, the paper's with them, curves."""

from collections.abc import Sequence
from pathlib import Path

from exlm_cli.experiments.scores import FinetunedRun, PretrainedScore, SeedPredictions, load_seed_predictions
from exlm_cli.report.paper_tables import paper_tables
from exlm_cli.report.score_figures import SplitPredictions, write_score_figures
from exlm_cli.report.score_tables import pretraining_table, task_tables
from exlm_cli.report.tables import ReportTable


def collect_tables(finetuned: Sequence[FinetunedRun], pretrained: Sequence[PretrainedScore]) -> list[ReportTable]:
    """Return every table there is to show of the runs."""
    own = [pretraining_table(pretrained)] if pretrained else []
    return [*own, *task_tables(finetuned), *paper_tables(finetuned)]


def draw_figures(runs: Sequence[FinetunedRun], out: Path | None) -> tuple[list[Path], list[str]]:
    """Draw the curves and confusion matrices of fine-tuned classifiers.

    Args:
        runs: Those of regression and of answers to questions have none.
        out: Folder; none: `report/` of each run.

    Returns:
        Files, and why there are none of a run.

    Raises:
        CheckpointError: Predictions are missing or altered, or the file system refuses.
    """
    drawn = []
    notes = []
    for run in runs:
        if run.results["loss"] not in ("binary", "classes"):
            continue
        predictions = load_seed_predictions(run)
        if predictions is None:
            notes.append(f"{run.name}: no curves: the run is older than they are, and kept no targets")
        else:
            drawn.append((run, _as_drawn(run, predictions)))
    files: list[Path] = []
    # when the predictions of all runs are known to be whole
    for run, predictions_of_run in drawn:
        split = run.scored_split
        stem = split if out is None else f"{run.name.replace('/', '-')}-{split}"
        files += write_score_figures(predictions_of_run, out or run.folder / "report", stem)
    return files, notes


def _as_drawn(run: FinetunedRun, predictions: SeedPredictions) -> SplitPredictions:
    num_seeds = len(predictions.probabilities)
    return SplitPredictions(
        predictions.probabilities,
        predictions.targets,
        tuple(run.results["output_names"]),
        run.results["loss"] == "classes",
        f"{run.name}: {run.results['task']}, {predictions.split}, {len(predictions.rows):,} rows, "
        f"{num_seeds} seed{'s' if num_seeds > 1 else ''}",
    )
