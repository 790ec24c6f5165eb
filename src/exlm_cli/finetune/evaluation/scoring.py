"""Scores of a fine-tuning run: of its cells, of their mean prediction and of the baselines, and what they say.

`scores.csv`, `rows.parquet`, `predictions-<part>.csv`, the calibrations and at last `results.json` are written here.

Axes: K seeds, N rows of a part, C outputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from exlm_cli.config.finetune import NO_GRID, GridPoint
from exlm_cli.files import make_folder, write_csv, write_json
from exlm_cli.finetune.baselines.baseline import Baseline, baselines_of, fit_baseline
from exlm_cli.finetune.cells.model import describe_weights
from exlm_cli.finetune.cells.trainer import describe_data
from exlm_cli.finetune.evaluation.calibration import (
    MIN_THIRDS_ROWS,
    Calibration,
    PredictedRows,
    calibration_file,
    fit_calibration,
    with_scores,
)
from exlm_cli.finetune.evaluation.intervals import RESAMPLED_METRICS, resample_scores
from exlm_cli.finetune.evaluation.verdict import (
    Resampled,
    best_baseline,
    choose_predictor,
    compare,
    describe_verdict,
    join_splits,
)
from exlm_cli.finetune.prediction.training_rows import similarity_to_training
from exlm_cli.finetune.predictions import (
    PREDICTIONS_FILE,
    PartRows,
    describe_part,
    join_rows,
    read_logits,
    read_seed_predictions,
    write_predictions,
    write_rows,
)
from exlm_cli.finetune.results import (
    RESULTS_FILE,
    CellResult,
    GridChoice,
    Predictors,
    RunResults,
    baseline_folder,
    best_cell_folder,
)
from exlm_cli.finetune.scores import (
    AVERAGE,
    BOTH,
    MODEL,
    PREDICTORS,
    Origin,
    Predictor,
    RunScores,
    ScoreRow,
    best_seed,
    join_scores,
    make_scores,
    score_rows_of,
    write_scores,
)
from exlm_cli.finetune.training import RunPlan, SplitPlan
from exlm_cli.format import name_some, printable
from exlm_cli.progress import Progress
from exlm_cli.run_dir import update_run_json
from exlm_cli.tasks.base import FloatArray, SeedOutputs, Split
from exlm_cli.tasks.metrics import (
    FEW_ROWS,
    count_telling_rows,
    describe_rare_classes,
    errors_beyond,
    target_scale,
)
from exlm_cli.tasks.rows.splits import split_fingerprint
from exlm_cli.tasks.rows.task import RowTask, truth_columns

MAX_PAIRS = 10**8
"""Pairs of a scored and a training molecule whose similarity is worked out for reports alone: some ten seconds."""


@dataclass(frozen=True)
class SplitOutcome:
    """What a split did, without a verdict, and its scores.

    Attributes:
        predicted: (K, N, C) predictions by name in `scores.csv` and part; of spans nothing.
        rows: The scored rows by part; of spans nothing.
    """

    plan: SplitPlan
    results: RunResults
    scores: RunScores
    predicted: dict[str, dict[Split, FloatArray]]
    rows: Mapping[Split, PartRows]


def score_run(plan: RunPlan, best: Mapping[int, GridPoint], progress: Progress) -> RunResults:
    """Score a run whose cells are done; write its scores, rows and calibrations, and at last `results.json`.

    Args:
        best: Grid point of each split that is reported.
        progress: Reports baselines.
    """
    outcomes = [_score_split(plan, split, best[split.seed], progress) for split in plan.splits]
    splits, scores = [one.results for one in outcomes], join_scores([one.scores for one in outcomes])
    folder, results = plan.folder, join_splits([one.results for one in outcomes], scores)
    resampled, notes = _resample(outcomes, scores)
    comparison = compare(splits, scores, resampled)
    concluded = {
        "notes": (*results.notes, *notes),
        "rows_interval": None if resampled is None else resampled.interval,
        "comparison": comparison,
        "predictors": choose_predictor(splits, scores),
        "verdict": describe_verdict(splits, scores, comparison),
    }
    results = results.model_copy(update=concluded)
    if results.loss != "span":
        _write_rows(plan, outcomes)
        for predictor in ("model",) if results.predictors is None else PREDICTORS:
            write_json(folder / calibration_file(predictor), calibrate_run(outcomes, predictor))
    write_scores(folder, scores)
    write_json(folder / RESULTS_FILE, results)
    update_run_json(folder, {"parameters": results.parameters, "train_time_s": results.elapsed_s})
    return results


def _resample(outcomes: Sequence[SplitOutcome], scores: RunScores) -> tuple[Resampled | None, list[str]]:
    """Return scores of the model and its baseline on resampled rows, each split's own, and notes.

    They are None for metrics that are not resampled, and, with a note, where too few rows tell one from the other.
    """
    results = outcomes[0].results
    metric, loss, part = results.selection_metric, results.loss, results.scored_split
    if loss == "span" or metric not in RESAMPLED_METRICS:
        return None, []
    targets = [one.plan.data.scored[part].scored_targets for one in outcomes]
    if count_telling_rows(loss, np.concatenate(targets)) < FEW_ROWS:
        of = "rows" if loss == "regression" else "rows of the rarer class"
        return None, [f"{part}: with fewer than {FEW_ROWS} {of}, {metric} has no 95 % interval over rows"]
    baseline = best_baseline(scores, results)
    names = [MODEL, *([] if baseline is None else [baseline])]
    drawn = []
    for number, (one, targets_NC) in enumerate(zip(outcomes, targets, strict=True)):
        predicted = [one.predicted[name][part].mean(axis=0)[: len(targets_NC)] for name in names]
        bounds_NC2 = one.plan.data.scored[part].bounds
        if bounds_NC2 is not None:  # as if the truth were 0 and the error were predicted
            predicted = [errors_beyond(of_model, bounds_NC2) for of_model in predicted]
            targets_NC = np.where(np.isnan(predicted[0]), np.nan, 0.0)
        scale_C = target_scale(one.plan.data.train.targets)[1] if loss == "regression" else None
        drawn.append(resample_scores(metric, loss, predicted, targets_NC, scale_C, seed=number))
    mean_MB = sum(drawn[1:], drawn[0]) / len(drawn)
    return Resampled(dict(zip(names, mean_MB, strict=True)), sum(map(len, targets))), []


def calibrate_run(outcomes: Sequence[SplitOutcome], predictor: Predictor) -> Calibration:
    """Fit a calibration to the validation rows of all splits, each as its own split predicts them, and score it.

    Validation rows of further splits that are test rows of the first are left out: its scores are on these.
    """
    first = outcomes[0]
    results, tested = first.results, first.rows.get("test")
    chosen, means = [], []
    for one in outcomes:
        rows = one.rows["valid"]
        kept = ~np.isin(rows.rows, () if tested is None else tested.rows)
        chosen.append(rows.only(kept))
        means.append(one.predicted[one.results.scored_as(predictor)]["valid"].mean(axis=0)[kept])
    calibration = fit_calibration(results.loss, np.concatenate(means), join_rows(chosen))
    if tested is None:
        return calibration
    by_seed_KNC = first.predicted[results.scored_as(predictor)]["test"]
    return with_scores(
        calibration,
        PredictedRows(
            **vars(tested), loss=results.loss, names=results.output_names, by_seed=by_seed_KNC, calibration=calibration
        ),
    )


def _write_rows(plan: RunPlan, outcomes: Sequence[SplitOutcome]) -> None:
    """Write the rows of all splits for reports, and those scored on the first with their predictions for people.

    Training rows are those of the first split alone.
    """
    first = outcomes[0]
    data = first.plan.data
    train: dict[Split, PartRows] = {"train": describe_part(data.rows["train"], data.train, None)}
    splits = {one.plan.seed: {**(train if one is first else {}), **one.rows} for one in outcomes}
    write_rows(plan.folder, data.loss, data.output_names, splits)
    for part, encoded in data.scored.items():
        truth = truth_columns(data.loss, data.output_names, encoded.targets, encoded.bounds)
        columns = _csv_columns(first.rows[part], truth, encoded.prediction_columns(first.predicted[MODEL][part]))
        path = plan.folder / f"predictions-{part}.csv"
        write_csv(path, list(columns), zip(*columns.values(), strict=True))


def _csv_columns(
    rows: PartRows, truth: dict[str, list[str]], predicted: dict[str, list[str]]
) -> dict[str, Sequence[object]]:
    """Return row, place, input, truth and predictions of scored rows, and how near molecules are to training rows."""
    known = {"place": rows.places, "input": rows.inputs}
    columns: dict[str, Sequence[object]] = {"row": rows.rows.tolist()}
    columns |= {name: cells for name, cells in known.items() if len(cells)}
    columns |= truth | predicted
    if rows.similarity is not None:
        columns["nearest_train_tanimoto"] = [f"{value:.4f}" for value in rows.similarity]
    return columns


def _score_split(plan: RunPlan, split: SplitPlan, best: GridPoint, progress: Progress) -> SplitOutcome:
    """Return what a split did, and the scores of its cells, of their average, of the baselines and of both."""
    cells = {label: [cell.read() for cell in of_point] for label, of_point in split.cells.items()}
    rows = [
        row
        for label, of_point in cells.items()
        for cell in of_point
        for row in score_rows_of(Origin(MODEL, label, split.seed, cell.seed), cell.metrics, cell.labels)
    ]
    data, metric = split.data, split.data.selection_metric
    seed = best_seed(make_scores(rows), best.label, metric, is_greater_better=data.is_greater_better)
    results = _describe_results(plan, split, best, cells, seed)
    if data.loss == "span":
        lengths = [len(ids) for ids in data.scored["valid"].token_ids]
        logits = [read_logits(best_cell_folder(plan.folder, results, seed), lengths) for seed in results.seeds]
        rows += _score(split, MODEL, best.label, {"valid": logits}, {})
        return SplitOutcome(split, results, make_scores(rows), {}, {})
    scored = {part: data.rows[part] for part in data.scored}
    predicted = {MODEL: read_seed_predictions(plan.folder, results, scored)}
    rows += _score(split, MODEL, best.label, predicted[MODEL], {})
    if plan.has_baseline:
        for baseline in baselines_of(split.task):
            _predict_baseline(plan, split, baseline, progress)
            predicted[baseline.model] = read_seed_predictions(plan.folder, results, scored, baseline=baseline.model)
            rows += _score(split, baseline.model, NO_GRID, predicted[baseline.model], dict(enumerate(results.seeds)))
        chosen = best_baseline(make_scores(rows), results)
        assert chosen is not None, "baselines were scored"
        _keep_fitted(plan, split, chosen, progress)
        predicted[BOTH] = {part: (predicted[MODEL][part] + predicted[chosen][part]) / 2 for part in scored}
        rows += _score(split, BOTH, NO_GRID, predicted[BOTH], dict(enumerate(results.seeds)))
        # `score_run` chooses, over all splits
        valid = dict.fromkeys(PREDICTORS)
        num_telling = count_telling_rows(data.loss, data.scored["valid"].scored_targets)
        predictors = Predictors(baselines=(chosen,), valid=valid, num_telling=num_telling, best="model")
        results = results.model_copy(update={"predictors": predictors})
    num_pairs = sum(map(len, scored.values())) * results.split_sizes["train"]
    needs_similarity = data.loss == "regression" or num_pairs <= MAX_PAIRS
    near = similarity_to_training(split.task, progress) if needs_similarity else {}
    described = {part: describe_part(data.rows[part], of_part, near.get(part)) for part, of_part in data.scored.items()}
    return SplitOutcome(split, results, make_scores(rows), predicted, described)


def _score(
    split: SplitPlan, model: str, label: str, by_part: Mapping[Split, SeedOutputs], seeds: Mapping[int, int]
) -> Iterator[ScoreRow]:
    """Yield the scores of the mean prediction, after those of single seeds.

    Args:
        seeds: Place of each seed that is scored alone; none of the model, whose cells have scored themselves.
    """
    for part, outputs in by_part.items():
        encoded = split.data.scored[part]
        every: list[tuple[int | str, SeedOutputs]]
        every = [(seed, outputs[place : place + 1]) for place, seed in seeds.items()]
        for name, of_seeds in (*every, (AVERAGE, outputs)):
            metrics, labels = encoded.score(of_seeds), encoded.score_labels(of_seeds)
            origin = Origin(model, label, split.seed, name)
            yield from score_rows_of(origin, {part: dict(metrics)}, {part: {n: dict(v) for n, v in labels.items()}})


def _predict_baseline(
    plan: RunPlan, split: SplitPlan, baseline: Baseline, progress: Progress, *, is_needed: bool = False
) -> None:
    """Train a baseline and predict the scored rows for every seed; what is there is not trained again.

    Its predictions lie in `baselines/`, as those of the model in `cells/`, and what it has learned beside them.

    Args:
        is_needed: Train it again where its own file is missing, not only where predictions are.
    """
    task, seeds, data = split.task, plan.recipe.seeds, split.data
    assert isinstance(task, RowTask), "only such a task has baselines"
    fitted = None
    for seed in seeds:
        folder = baseline_folder(plan.folder, baseline.model, split.seed, seed)
        is_kept = baseline.has_seed or seed == seeds[0]
        needed = [PREDICTIONS_FILE, *([baseline.file] if is_needed and is_kept else [])]
        if all((folder / name).is_file() for name in needed):
            continue
        make_folder(folder)
        if fitted is None or baseline.has_seed:
            num_threads = plan.recipe.train.num_threads
            fitted = fit_baseline(baseline, task, seed, plan.features, progress, num_threads=num_threads)
        if is_kept:
            fitted.write(folder / baseline.file)
        predicted = {part: fitted.predict(task.examples[part].texts, progress) for part in data.scored}
        write_predictions(folder, task.output_names, predicted, data.rows)


def _keep_fitted(plan: RunPlan, split: SplitPlan, chosen: str, progress: Progress) -> None:
    """Keep what the best baseline has learned, and delete what the others have."""
    for baseline in baselines_of(split.task):
        if baseline.model == chosen:
            _predict_baseline(plan, split, baseline, progress, is_needed=True)
            continue
        for seed in plan.recipe.seeds:
            (baseline_folder(plan.folder, baseline.model, split.seed, seed) / baseline.file).unlink(missing_ok=True)


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
        imitates=printable(task.split_imitates),
        split_seeds=(split.seed,),
        split_sizes=task.split_sizes,
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
    if data.loss == "regression" and task.input_kind == "smiles":
        notes += _describe_intervals(task.output_names, data.scored["valid"].targets)
    return tuple(notes)


def _describe_intervals(names: Sequence[str], targets_NC: FloatArray) -> list[str]:
    """Return a note on values with too few validation rows for intervals that widen with the distance."""
    known_C = np.count_nonzero(~np.isnan(targets_NC), axis=0)
    few = [f"`{name}` has {num:,}" for name, num in zip(names, known_C, strict=True) if num < MIN_THIRDS_ROWS]
    enough = f"from {MIN_THIRDS_ROWS} on, they are wider far from the training rows"
    return [f"intervals are equally wide for all rows, as {name_some(few)} validation rows; {enough}"] if few else []
