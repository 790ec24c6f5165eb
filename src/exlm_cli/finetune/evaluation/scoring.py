"""Scores of a fine-tuning run: of its cells, of their mean prediction and of the baselines, and what they say.

`scores.csv`, `calibration.json` and at last `results.json` are written here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exlm_cli.config.finetune import NO_GRID, GridPoint
from exlm_cli.files import make_folder, write_json
from exlm_cli.finetune.baselines.baseline import Baseline, baselines_of
from exlm_cli.finetune.cells.model import describe_weights
from exlm_cli.finetune.cells.trainer import describe_data
from exlm_cli.finetune.evaluation.blend import best_share, blend
from exlm_cli.finetune.evaluation.calibration import (
    Calibration,
    ValidatedRows,
    calibrate_run,
    calibration_file,
)
from exlm_cli.finetune.evaluation.conformal import MIN_SCALED_ROWS
from exlm_cli.finetune.evaluation.verdict import (
    choose_predictor,
    compare,
    describe_verdict,
    first_best,
    interval_over_rows,
    join_splits,
    read_scored_rows,
)
from exlm_cli.finetune.plan import RunPlan, SplitPlan
from exlm_cli.finetune.prediction.training_rows import similarity_to_training
from exlm_cli.finetune.results import (
    RESULTS_FILE,
    CellResult,
    GridChoice,
    Predictors,
    RunResults,
    baseline_folder,
    best_cell_folder,
    count_known_rows,
    name_of_predictor,
    read_logits,
    read_seed_outputs,
)
from exlm_cli.finetune.scores import (
    AVERAGE,
    BOTH,
    MODEL,
    LabelScores,
    Origin,
    Predictor,
    RunScores,
    ScoreRow,
    Scores,
    best_seed,
    join_scores,
    make_scores,
    predictors_with,
    score_rows_of,
    write_scores,
)
from exlm_cli.format import name_some, printable
from exlm_cli.progress import Progress
from exlm_cli.run_dir import update_run_json
from exlm_cli.tasks.base import DownstreamTask, FloatArray, SeedOutputs, write_outputs
from exlm_cli.tasks.metrics import (
    FEW_ROWS,
    describe_rare_classes,
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
    parts = [_score_split(plan, split, best[split.seed], progress) for split in plan.splits]
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
        "predictors": choose_predictor(splits, scores),
        "verdict": describe_verdict(splits, scores, comparison),
    }
    results = results.model_copy(update=concluded)
    if data.loss != "span":
        likeness = [_likeness(split, progress) for split in plan.splits]
        for predictor in ("model",) if results.predictors is None else results.predictors.names:
            write_json(folder / calibration_file(predictor), _calibrate(plan, results, likeness, predictor))
    write_scores(folder, scores)
    write_json(folder / RESULTS_FILE, results)
    update_run_json(folder, {"parameters": results.parameters, "train_time_s": results.elapsed_s})
    return results


def _likeness(split: SplitPlan, progress: Progress) -> dict[str, FloatArray]:
    """Return the similarity to the training rows of each scored row of a split, where values are predicted."""
    return similarity_to_training(split.task, progress) if split.data.loss == "regression" else {}


def _calibrate(
    plan: RunPlan, results: RunResults, likeness: Sequence[Mapping[str, FloatArray]], predictor: Predictor
) -> Calibration:
    """Fit a calibration to the validation rows of all splits, each as its own split predicts them."""
    names = [name_of_predictor(predictor, of_split) for of_split in results.of_splits]
    more = []
    for split, of_split, name, near in zip(plan.splits, results.of_splits, names, likeness, strict=True):
        rows = split.task.split_indices["valid"].tolist()
        predicted_KNC = read_seed_outputs(plan.folder, of_split, "valid", rows, baseline=name)
        more.append(ValidatedRows(predicted_KNC, split.data.scored["valid"].targets, near.get("valid")))
    return calibrate_run(plan.folder, results, likeness[0], baseline=names[0], more=more[1:])


def _score_split(plan: RunPlan, split: SplitPlan, best: GridPoint, progress: Progress) -> SplitScores:
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
    results = _describe_results(plan, split, best, cells, seed)
    average = Origin(MODEL, best.label, split.seed, AVERAGE)
    metrics, labels = _score_average(plan.folder, split, results)
    rows += score_rows_of(average, metrics, labels)
    task = split.task
    if plan.has_baseline:
        for baseline in baselines_of(task):
            _predict_baseline(plan, split, baseline, progress)
            rows += _score_other(plan, split, results, baseline.model)
        chosen = _choose_baseline(task, make_scores(rows), metric)
        share = _predict_both(plan, split, results, chosen, progress)
        rows += _score_other(plan, split, results, BOTH)
        # `conclude` chooses, over all splits
        valid = dict.fromkeys(predictors_with(chosen.model))
        predictors = Predictors(baselines=(chosen.model,), shares=(share,), valid=valid, best="model")
        results = results.model_copy(update={"predictors": predictors})
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


def _predict_baseline(
    plan: RunPlan, split: SplitPlan, baseline: Baseline, progress: Progress, *, is_needed: bool = False
) -> None:
    """Train a baseline and predict the scored rows for every seed; what is there is not trained again.

    Its predictions lie in `baselines/`, as those of the model in `cells/`, and what it has learned beside them.

    Args:
        is_needed: Train it again where its own file is missing, not only where predictions are.
    """
    task, seeds = split.task, plan.recipe.seeds
    assert isinstance(task, RowTask), "only such a task has baselines"
    fitted = None
    for seed in seeds:
        folder = baseline_folder(plan.folder, baseline.model, split.seed, seed)
        is_kept = baseline.has_seed or seed == seeds[0]
        needed = [f"predictions-{part}.csv" for part in split.data.scored]
        needed += [baseline.file] if is_needed and is_kept else []
        if all((folder / name).is_file() for name in needed):
            continue
        make_folder(folder)
        if fitted is None or baseline.has_seed:
            fitted = baseline.fit(task, seed, plan.features, progress, num_threads=plan.recipe.train.num_threads)
        if is_kept:
            fitted.write(folder / baseline.file)
        for part in split.data.scored:
            predicted_NC = fitted.predict(task.examples[part].texts, progress)
            path = folder / f"predictions-{part}.csv"
            write_outputs(path, task.split_indices[part], task.output_names, predicted_NC)


def _choose_baseline(task: DownstreamTask, scores: RunScores, metric: str) -> Baseline:
    """Return the baseline that is better on the validation rows; the first of equals."""
    found = baselines_of(task)
    values = [scores.average("valid", metric, model=baseline.model).mean for baseline in found]
    return found[first_best(values, is_greater_better=task.is_greater_better)]


def _predict_both(plan: RunPlan, split: SplitPlan, results: RunResults, chosen: Baseline, progress: Progress) -> float:
    """Write the weighted mean of the model's and a baseline's predictions, and return the share of the model.

    The share is that of the mean predictions of the seeds. Only what this baseline has learned is kept.
    """
    task, seeds = split.task, plan.recipe.seeds
    _predict_baseline(plan, split, chosen, progress, is_needed=True)
    for other in baselines_of(task):
        for seed in seeds if other is not chosen else ():
            (baseline_folder(plan.folder, other.model, split.seed, seed) / other.file).unlink(missing_ok=True)
    by_part = {}
    for part in split.data.scored:
        rows = task.split_indices[part].tolist()
        model_KNC = read_seed_outputs(plan.folder, results, part, rows)
        by_part[part] = (model_KNC, read_seed_outputs(plan.folder, results, part, rows, baseline=chosen.model))
    of_model_NC, of_other_NC = (by_seed_KNC.mean(axis=0) for by_seed_KNC in by_part["valid"])
    share = best_share(task.loss, of_model_NC, of_other_NC, split.data.scored["valid"].targets)
    for index, seed in enumerate(seeds):
        folder = baseline_folder(plan.folder, BOTH, split.seed, seed)
        make_folder(folder)
        for part, (model_KNC, other_KNC) in by_part.items():
            path = folder / f"predictions-{part}.csv"
            both_NC = blend(share, model_KNC[index], other_KNC[index])
            write_outputs(path, task.split_indices[part], task.output_names, both_NC)
    return share


def _score_other(plan: RunPlan, split: SplitPlan, results: RunResults, model: str) -> Iterator[ScoreRow]:
    """Score what a baseline or the mean of both predicted with every seed, and the mean of its predictions."""
    for part, encoded in split.data.scored.items():
        rows = split.task.split_indices[part].tolist()
        by_seed_KNC = read_seed_outputs(plan.folder, results, part, rows, baseline=model)
        every: list[tuple[int | str, FloatArray]] = list(zip(plan.recipe.seeds, by_seed_KNC, strict=True))
        for name, predicted_NC in [*every, (AVERAGE, by_seed_KNC.mean(axis=0))]:
            outputs = [list(to_outputs(results.loss, predicted_NC))]
            metrics, labels = encoded.score(outputs), encoded.score_labels(outputs)
            origin = Origin(model, NO_GRID, split.seed, name)
            yield from score_rows_of(origin, {part: dict(metrics)}, {part: {n: dict(v) for n, v in labels.items()}})


def _describe_results(
    plan: RunPlan,
    split: SplitPlan,
    best: GridPoint,
    by_point: Mapping[str, Sequence[CellResult]],
    seed: int,
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
        notes=tuple(map(printable, _notes(split, cells))),
        points=(best.label,),
        grid_best=GridChoice(label=best.label, values=best.values) if has_grid else None,
        grid=tuple(GridChoice(label=point.label, values=point.values) for point in split.points) if has_grid else (),
        no_answer_threshold=float(np.median(thresholds)) if thresholds else None,
    )


def _notes(split: SplitPlan, cells: Sequence[CellResult]) -> tuple[str, ...]:
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
    if split.data.loss == "regression":
        notes += _describe_intervals(task.output_names, split.data.scored["valid"].targets)
    return tuple(notes)


def _describe_intervals(names: Sequence[str], targets_NC: FloatArray) -> list[str]:
    """Return a note on values with too few validation rows for intervals that widen with the distance."""
    known_C = np.count_nonzero(~np.isnan(targets_NC), axis=0)
    few = [f"`{name}` has {num:,}" for name, num in zip(names, known_C, strict=True) if num < MIN_SCALED_ROWS]
    enough = f"from {MIN_SCALED_ROWS} on, they are wider far from the training rows"
    return [f"intervals are equally wide for all rows, as {name_some(few)} validation rows; {enough}"] if few else []
