"""Scores of a fine-tuning run: of its cells, of their mean prediction and of the baselines, and what they say.

`scores.csv`, `calibration.json` and at last `results.json` are written here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from exlm_cli.config.finetune import NO_GRID, GridPoint
from exlm_cli.files import make_folder, write_json
from exlm_cli.finetune.baseline import BASELINES, Baseline, predict_baseline
from exlm_cli.finetune.calibration import CALIBRATION_FILE, MIN_SCALED_ROWS, calibrate_answers, calibrate_run
from exlm_cli.finetune.cell import SplitRun
from exlm_cli.finetune.model import describe_weights
from exlm_cli.finetune.results import (
    RESULTS_FILE,
    CellResult,
    GridChoice,
    RunResults,
    baseline_folder,
    best_cell_folder,
    count_known_rows,
    read_logits,
    read_split_outputs,
)
from exlm_cli.finetune.scores import (
    AVERAGE,
    MODEL,
    LabelScores,
    Origin,
    RunScores,
    ScoreRow,
    Scores,
    best_seed,
    join_scores,
    make_scores,
    score_rows_of,
    write_scores,
)
from exlm_cli.finetune.spelling import describe_spelling
from exlm_cli.finetune.training_rows import similarity_to_training
from exlm_cli.finetune.verdict import compare, describe_verdict, interval_over_rows, join_splits, read_scored_rows
from exlm_cli.format import name_some, printable
from exlm_cli.run_dir import update_run_json
from exlm_cli.tasks.base import FloatArray, SeedOutputs, Split, write_outputs
from exlm_cli.tasks.metrics import (
    FEW_ROWS,
    describe_rare_classes,
    score_labels,
    score_rows,
    target_scale,
    to_outputs,
)
from exlm_cli.tasks.rows.splits import split_fingerprint
from exlm_cli.tasks.rows.task import RowTask


@dataclass(frozen=True)
class SplitScores:
    """What a split did, without a verdict, and its scores."""

    results: RunResults
    scores: RunScores


def score_split(run: SplitRun, best: GridPoint) -> SplitScores:
    """Return what a split did, and the scores of its cells, of their average and of the baselines."""
    cells = {point.label: [cell.read() for cell in run.cells(point)] for point in run.points}
    rows = [
        row
        for label, of_point in cells.items()
        for cell in of_point
        for row in score_rows_of(Origin(MODEL, label, run.split_seed, cell.seed), cell.metrics, cell.labels)
    ]
    task = run.data.task
    metric, is_greater_better = task.selection_metric, task.is_greater_better
    seed = best_seed(make_scores(rows), best.label, metric, is_greater_better=is_greater_better)
    results = _describe_results(run, best, cells, seed)
    average = Origin(MODEL, best.label, run.split_seed, AVERAGE)
    metrics, labels = _score_average(run, results)
    rows += score_rows_of(average, metrics, labels)
    if task.input_kind == "smiles" and isinstance(task, RowTask) and not run.recipe.task.has_canonical_smiles:
        of_average = metrics[results.scored_split][metric]
        results = results.model_copy(update={"notes": (*results.notes, _check_spelling(run, task, of_average))})
    if run.job.has_baseline:
        rows += [row for baseline in BASELINES for row in _score_baseline(run, results, baseline)]
    return SplitScores(results, make_scores(rows))


def conclude(run: SplitRun, parts: Sequence[SplitScores]) -> RunResults:
    """Write `scores.csv`, the calibration and at last `results.json`, and return it: the verdict is over all splits."""
    task, folder, splits = run.data.task, run.folder, [part.results for part in parts]
    results, scores = splits[0], join_scores([part.scores for part in parts])
    rows, valid = None, run.data.splits["valid"]
    if task.loss != "span" and len(splits) == 1:
        num_rows = len(run.data.splits[results.scored_split].scored_targets)
        scale_C = target_scale(run.data.splits["train"].targets)[1] if task.loss == "regression" else None
        rows = read_scored_rows(folder, results, num_rows, scale_C, scores.baselines)
    comparison = compare(splits, scores, rows)
    seeds = range(run.split_seed, run.split_seed + len(splits))
    concluded = {
        "rows_interval": None if rows is None else interval_over_rows(results, rows),
        "comparison": comparison,
        "replication": join_splits(splits, seeds) if len(splits) > 1 else None,
        "verdict": describe_verdict(splits, scores, comparison),
    }
    results = results.model_copy(update=concluded)
    if task.loss == "span":
        calibration = calibrate_answers(folder, results, valid)
    else:
        similarity = similarity_to_training(folder, task, run.job.progress) if task.loss == "regression" else None
        calibration = calibrate_run(folder, results, similarity)
    write_scores(folder, scores)
    write_json(folder / CALIBRATION_FILE, calibration)
    write_json(folder / RESULTS_FILE, results)
    update_run_json(folder, {"parameters": results.parameters, "train_time_s": results.elapsed_s})
    return results


def _score_average(run: SplitRun, results: RunResults) -> tuple[Scores, LabelScores]:
    """Score the mean prediction of the seeds, as `exlm predict` does; of spans, only validation logits are kept."""
    metrics: Scores = {}
    labels: LabelScores = {}
    for split, encoded in run.data.splits.items():
        outputs: SeedOutputs
        if split == "train" or (results.loss == "span" and split != "valid"):
            continue
        if results.loss == "span":
            lengths = [len(ids) for ids in encoded.token_ids]
            outputs = [read_logits(best_cell_folder(run.folder, results, seed), lengths) for seed in results.seeds]
        else:
            _, by_seed_KNC, _ = read_split_outputs(run.folder, results, split)
            outputs = [list(to_outputs(results.loss, of_seed_NC)) for of_seed_NC in by_seed_KNC]
        metrics[split] = dict(encoded.score(outputs))
        if of_labels := encoded.score_labels(outputs):
            labels[split] = {name: dict(scores) for name, scores in of_labels.items()}
    return metrics, labels


def _score_baseline(run: SplitRun, results: RunResults, baseline: Baseline) -> Iterator[ScoreRow]:
    """Score a baseline with every seed, and the mean of its predictions; forests that are there are not trained again.

    Their predictions lie in `baselines/`, as those of the model in `cells/`.
    """
    task, job = run.data.task, run.job
    assert isinstance(task, RowTask), "a task of molecules has rows"
    scored: list[Split] = [split for split in task.splits if split != "train"]
    for seed in run.recipe.seeds:
        folder = baseline_folder(run.folder, baseline.model, seed)
        if not all((folder / f"predictions-{split}.csv").is_file() for split in scored):
            make_folder(folder)
            threads = run.recipe.train.num_threads
            found = predict_baseline(task, baseline, job.features, seed, job.progress, num_threads=threads)
            for split, predicted_NC in found.items():
                path = folder / f"predictions-{split}.csv"
                write_outputs(path, task.split_indices[split], task.output_names, predicted_NC)
    for split in scored:
        targets_NC = task.examples[split].targets
        _, by_seed_KNC, _ = read_split_outputs(run.folder, results, split, baseline=baseline.model)
        every: list[tuple[int | str, FloatArray]] = list(zip(run.recipe.seeds, by_seed_KNC, strict=True))
        for name, predicted_NC in [*every, (AVERAGE, by_seed_KNC.mean(axis=0))]:
            metrics = score_rows(task.loss, predicted_NC, targets_NC, task.target_scale)
            labels = score_labels(task.loss, predicted_NC, targets_NC, task.output_names)
            origin = Origin(baseline.model, NO_GRID, run.split_seed, name)
            yield from score_rows_of(origin, {split: dict(metrics)}, {split: {n: dict(v) for n, v in labels.items()}})


def _describe_results(
    run: SplitRun, best: GridPoint, by_point: Mapping[str, Sequence[CellResult]], seed: int
) -> RunResults:
    task, recipe = run.data.task, run.recipe
    cells = by_point[best.label]
    thresholds = [t for cell in cells if (t := cell.metrics["valid"].get("f1_threshold")) is not None]
    every = [cell for of_point in by_point.values() for cell in of_point]
    has_grid = best.label != NO_GRID
    return RunResults(
        task=task.name,
        kind="finetune",
        recipe=recipe.name,
        init=describe_weights(run.job.weights, recipe),
        parameters=cells[0].parameters,
        input_kind=task.input_kind,
        loss=task.loss,
        output_names=task.output_names,
        num_labels=len(task.output_names),
        split=printable(task.split_name),
        split_sizes=task.split_sizes,
        known_rows={
            split: count_known_rows(task.loss, encoded.scored_targets, len(task.output_names))
            for split, encoded in run.data.splits.items()
            if split != "train"
        },
        max_rows=recipe.task.max_rows,
        max_valid_rows=recipe.task.max_valid_rows,
        split_sha256=split_fingerprint(task.split_indices),
        labels_sha256=task.labels_sha256,
        selection_metric=task.selection_metric,
        is_greater_better=task.is_greater_better,
        aggregate=recipe.aggregate,
        seeds=recipe.seeds,
        best_seed=seed,
        best_epochs=tuple(cell.best_epoch for cell in cells),
        elapsed_s=round(sum(cell.elapsed_s for cell in every), 3),
        tokens_per_s=round(sum(cell.tokens_per_s for cell in every) / len(every), 1),
        outside_model_share=round(sum(cell.outside_model_share for cell in every) / len(every), 4),
        # a skipped row or a title may have a lone surrogate, which no JSON file may hold
        notes=tuple(map(printable, _notes(run, cells))),
        grid_best=GridChoice(label=best.label, values=best.values) if has_grid else None,
        grid=tuple(GridChoice(label=point.label, values=point.values) for point in run.points) if has_grid else (),
        no_answer_threshold=float(np.median(thresholds)) if thresholds else None,
    )


def _notes(run: SplitRun, cells: Sequence[CellResult]) -> tuple[str, ...]:
    notes, task = run.data.notes(), run.data.task
    for split, encoded in run.data.splits.items():
        if "roc_auc" in cells[0].metrics.get(split, ()):
            rare = describe_rare_classes(task.loss, encoded.targets, task.output_names)
            few = f"{split}: with fewer than {FEW_ROWS} rows of a class, ROC-AUC and average precision say little"
            notes += [f"{few}: {name_some(rare)}"] if rare else []
    for note in dict.fromkeys(note for cell in cells for note in cell.notes):
        seeds = [str(cell.seed) for cell in cells if note in cell.notes]
        notes.append(f"{note} (seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)})")
    if task.loss == "regression":
        notes += _describe_intervals(task.output_names, run.data.splits["valid"].targets)
    return tuple(notes)


def _describe_intervals(names: Sequence[str], targets_NC: FloatArray) -> list[str]:
    """Return a note on values with too few validation rows for intervals that widen with the distance."""
    known_C = np.count_nonzero(~np.isnan(targets_NC), axis=0)
    few = [f"`{name}` has {num:,}" for name, num in zip(names, known_C, strict=True) if num < MIN_SCALED_ROWS]
    what = f"intervals that are wider far from the training rows need {MIN_SCALED_ROWS} validation rows"
    return [f"{what}; equally wide for all rows: {name_some(few)}"] if few else []


def _check_spelling(run: SplitRun, task: RowTask, score: float | None) -> str:
    split: Split = "test" if "test" in task.splits else "valid"
    threads = run.recipe.train.num_threads
    return describe_spelling(task, split, score, run.recipe.seeds[0], run.job.progress, num_threads=threads)
