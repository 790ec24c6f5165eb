"""Scores of a fine-tuning run: of its cells, of their mean prediction and of the baselines, and what they say.

`scores.csv`, `calibration.json` and at last `results.json` are written here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exlm_cli.config.finetune import NO_GRID, FinetuneRecipe, GridPoint
from exlm_cli.files import make_folder, write_json
from exlm_cli.finetune.baseline import BASELINES, Baseline, FeatureStore, predict_baseline
from exlm_cli.finetune.calibration import CALIBRATION_FILE, calibrate_answers, calibrate_run
from exlm_cli.finetune.model import describe_weights
from exlm_cli.finetune.plan import RunPlan, SplitPlan
from exlm_cli.finetune.results import (
    RESULTS_FILE,
    CellResult,
    GridChoice,
    RunResults,
    baseline_folder,
    best_cell_folder,
    count_known_rows,
    read_logits,
    read_seed_outputs,
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
from exlm_cli.finetune.trainer import describe_data
from exlm_cli.finetune.training_rows import similarity_to_training
from exlm_cli.finetune.verdict import compare, describe_verdict, interval_over_rows, join_splits, read_scored_rows
from exlm_cli.format import name_some, printable
from exlm_cli.progress import Progress
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


def conclude(plan: RunPlan, best: Mapping[int, GridPoint], progress: Progress) -> RunResults:
    """Score a run whose cells are done; write `scores.csv`, the calibration and at last `results.json`.

    Args:
        best: Grid point of each split that is reported.
        progress: Reports baselines.
    """
    features = FeatureStore()
    parts = [_score_split(plan, split, best[split.seed], features, progress) for split in plan.splits]
    splits, scores = [part.results for part in parts], join_scores([part.scores for part in parts])
    folder, first = plan.folder, plan.splits[0]
    results, data = join_splits(splits, scores), first.data
    rows = None
    if data.loss != "span" and len(splits) == 1:
        num_rows = len(data.scored[results.scored_split].scored_targets)
        scale_C = target_scale(data.train.targets)[1] if data.loss == "regression" else None
        rows = read_scored_rows(folder, results, num_rows, scale_C, scores.baselines)
    comparison = compare(splits, scores, rows)
    concluded = {
        "rows_interval": None if rows is None else interval_over_rows(results, rows),
        "comparison": comparison,
        "verdict": describe_verdict(splits, scores, comparison),
    }
    results = results.model_copy(update=concluded)
    if data.loss == "span":
        calibration = calibrate_answers(folder, results, data.scored["valid"])
    else:
        similarity = similarity_to_training(folder, first.task, progress) if data.loss == "regression" else None
        calibration = calibrate_run(folder, results, similarity)
    write_scores(folder, scores)
    write_json(folder / CALIBRATION_FILE, calibration)
    write_json(folder / RESULTS_FILE, results)
    update_run_json(folder, {"parameters": results.parameters, "train_time_s": results.elapsed_s})
    return results


def _score_split(
    plan: RunPlan, split: SplitPlan, best: GridPoint, features: FeatureStore, progress: Progress
) -> SplitScores:
    """Return what a split did, and the scores of its cells, of their average and of the baselines."""
    cells = {label: [cell.read() for cell in of_point] for label, of_point in split.cells.items()}
    rows = [
        row
        for label, of_point in cells.items()
        for cell in of_point
        for row in score_rows_of(Origin(MODEL, label, split.seed, cell.seed), cell.metrics, cell.labels)
    ]
    metric, is_greater_better = split.data.selection_metric, split.data.is_greater_better
    seed = best_seed(make_scores(rows), best.label, metric, is_greater_better=is_greater_better)
    results = _describe_results(plan, split, best, cells, seed, progress)
    average = Origin(MODEL, best.label, split.seed, AVERAGE)
    rows += score_rows_of(average, *_score_average(plan.folder, split, results))
    if plan.has_baseline:
        rows += [row for one in BASELINES for row in _score_baseline(plan, split, results, one, features, progress)]
    return SplitScores(results, make_scores(rows))


def _score_average(folder: Path, split: SplitPlan, results: RunResults) -> tuple[Scores, LabelScores]:
    """Score the mean prediction of the seeds, as `exlm predict` does; of spans, only validation logits are kept."""
    metrics: Scores = {}
    labels: LabelScores = {}
    for part, encoded in split.data.scored.items():
        outputs: SeedOutputs
        if results.loss == "span" and part != "valid":
            continue
        if results.loss == "span":
            lengths = [len(ids) for ids in encoded.token_ids]
            outputs = [read_logits(best_cell_folder(folder, results, seed), lengths) for seed in results.seeds]
        else:
            by_seed_KNC = read_seed_outputs(folder, results, part, split.task.split_indices[part].tolist())
            outputs = [list(to_outputs(results.loss, of_seed_NC)) for of_seed_NC in by_seed_KNC]
        metrics[part] = dict(encoded.score(outputs))
        if of_labels := encoded.score_labels(outputs):
            labels[part] = {name: dict(scores) for name, scores in of_labels.items()}
    return metrics, labels


def _score_baseline(
    plan: RunPlan,
    split: SplitPlan,
    results: RunResults,
    baseline: Baseline,
    features: FeatureStore,
    progress: Progress,
) -> Iterator[ScoreRow]:
    """Score a baseline with every seed, and the mean of its predictions; forests that are there are not trained again.

    Their predictions lie in `baselines/`, as those of the model in `cells/`.
    """
    task, recipe = split.task, plan.recipe
    assert isinstance(task, RowTask), "a task of molecules has rows"
    for seed in recipe.seeds:
        folder = baseline_folder(plan.folder, baseline.model, split.seed, seed)
        if not all((folder / f"predictions-{part}.csv").is_file() for part in split.data.scored):
            make_folder(folder)
            threads = recipe.train.num_threads
            found = predict_baseline(task, baseline, features, seed, progress, num_threads=threads)
            for part, predicted_NC in found.items():
                path = folder / f"predictions-{part}.csv"
                write_outputs(path, task.split_indices[part], task.output_names, predicted_NC)
    for part in split.data.scored:
        targets_NC, rows = task.examples[part].targets, task.split_indices[part].tolist()
        by_seed_KNC = read_seed_outputs(plan.folder, results, part, rows, baseline=baseline.model)
        every: list[tuple[int | str, FloatArray]] = list(zip(recipe.seeds, by_seed_KNC, strict=True))
        for name, predicted_NC in [*every, (AVERAGE, by_seed_KNC.mean(axis=0))]:
            metrics = score_rows(task.loss, predicted_NC, targets_NC, task.target_scale)
            labels = score_labels(task.loss, predicted_NC, targets_NC, task.output_names)
            origin = Origin(baseline.model, NO_GRID, split.seed, name)
            yield from score_rows_of(origin, {part: dict(metrics)}, {part: {n: dict(v) for n, v in labels.items()}})


def _describe_results(
    plan: RunPlan,
    split: SplitPlan,
    best: GridPoint,
    by_point: Mapping[str, Sequence[CellResult]],
    seed: int,
    progress: Progress,
) -> RunResults:
    """Return what one split did, without a verdict."""
    task, recipe = split.task, plan.recipe
    cells = by_point[best.label]
    thresholds = [t for cell in cells if (t := cell.metrics["valid"].get("f1_threshold")) is not None]
    every = [cell for of_point in by_point.values() for cell in of_point]
    has_grid = best.label != NO_GRID
    return RunResults(
        task=task.name,
        kind="finetune",
        recipe=recipe.name,
        init=describe_weights(plan.weights, recipe),
        parameters=cells[0].parameters,
        input_kind=task.input_kind,
        loss=task.loss,
        output_names=task.output_names,
        num_labels=len(task.output_names),
        split=printable(task.split_name),
        split_seeds=(split.seed,),
        split_sizes=task.split_sizes,
        known_rows={
            part: count_known_rows(task.loss, encoded.scored_targets, len(task.output_names))
            for part, encoded in split.data.scored.items()
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
        notes=tuple(map(printable, _notes(plan, split, cells, progress))),
        grid_best=GridChoice(label=best.label, values=best.values) if has_grid else None,
        grid=tuple(GridChoice(label=point.label, values=point.values) for point in split.points) if has_grid else (),
        no_answer_threshold=float(np.median(thresholds)) if thresholds else None,
    )


def _notes(plan: RunPlan, split: SplitPlan, cells: Sequence[CellResult], progress: Progress) -> tuple[str, ...]:
    task, data = split.task, split.data
    notes = describe_data(task, data)
    for part, encoded in data.scored.items():
        if "roc_auc" in cells[0].metrics[part]:
            rare = describe_rare_classes(task.loss, encoded.targets, task.output_names)
            few = f"{part}: with fewer than {FEW_ROWS} rows of a class, ROC-AUC and average precision say little"
            notes += [f"{few}: {name_some(rare)}"] if rare else []
    for note in dict.fromkeys(note for cell in cells for note in cell.notes):
        seeds = [str(cell.seed) for cell in cells if note in cell.notes]
        notes.append(f"{note} (seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)})")
    if task.input_kind == "smiles" and isinstance(task, RowTask) and not plan.recipe.task.has_canonical_smiles:
        notes.append(_check_spelling(plan.recipe, task, cells, progress))
    return tuple(notes)


def _check_spelling(recipe: FinetuneRecipe, task: RowTask, cells: Sequence[CellResult], progress: Progress) -> str:
    split: Split = "test" if "test" in task.splits else "valid"
    values = [cell.metrics[split][task.selection_metric] for cell in cells]
    known = [value for value in values if value is not None]
    score = sum(known) / len(known) if known else None
    return describe_spelling(task, split, score, recipe.seeds[0], progress, num_threads=recipe.train.num_threads)
