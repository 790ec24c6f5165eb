"""Intervals against their closed form, and the sentence that each outcome of a comparison gives."""

import math
import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

from exlm_cli.finetune.evaluation.intervals import resample_scores
from exlm_cli.finetune.evaluation.verdict import Resampled, choose_predictor, compare, describe_verdict, join_splits
from exlm_cli.finetune.results import Comparison, Predictors
from exlm_cli.finetune.scores import MODEL, PREDICTORS, RunScores, join_scores
from tests.unit.report.results import scored

SIZES = {"train": 800, "valid": 100, "test": 100}
ECFP4, RDKIT = "forest-ecfp4", "forest-rdkit2d"


def run_of(own: Any, other: Any = None, split_seed: int = 0, **changed: Any) -> Any:
    forests = None if other is None else {ECFP4: other}
    return scored("a", "csv", own, **{"forests": forests, "split_sizes": SIZES} | changed, split_seeds=(split_seed,))


def comparison(*runs: Any, rows: Any = None) -> Comparison:
    found = compare([run.results for run in runs], join_scores([run.scores for run in runs]), rows)
    assert found is not None
    return found


def verdict(*runs: Any, rows: Any = None) -> tuple[str, ...]:
    """Return what a verdict says behind the command that it begins with."""
    splits, scores = [run.results for run in runs], join_scores([run.scores for run in runs])
    first, *others = describe_verdict(splits, scores, compare(splits, scores, rows))
    assert first.startswith("Predict new rows with `exlm predict RUN FILE`")
    return tuple(others)


def splits_of(areas: list[float], forest: float) -> list[Any]:
    """Return a run of one seed for each split."""
    return [run_of({"roc_auc": [area]}, {"roc_auc": [forest]}, split_seed=i) for i, area in enumerate(areas)]


def rows_of(shift: float, num_rows: int = 200) -> Resampled:
    """Return rows with values that the model misses by 0.5 on average and the forest by `shift` more or less."""
    rng = np.random.default_rng(0)
    targets = rng.normal(size=(num_rows, 1))
    noise = np.where(np.arange(num_rows) % 2 == 0, 0.45, -0.55)[:, None]
    found = resample_scores("rmse", "regression", [targets + noise, targets + noise * (1 + shift)], targets)
    return Resampled({MODEL: found[0], ECFP4: found[1]}, num_rows)


def errors(of_model: float, of_forest: float, **changed: Any) -> Any:
    given: Any = {"loss": "regression", "is_greater_better": False, **changed}
    return run_of({"rmse": [of_model]}, {"rmse": [of_forest]}, **given)


@pytest.mark.parametrize(
    ("shift", "said"),
    [
        (0.5, "The model is better than ECFP4 + random forest"),
        (-0.5, "ECFP4 + random forest is better than the model"),
        (0.0, "There is no clear difference"),
        (None, "These test rows are too few to tell the model from ECFP4 + random forest"),
    ],
)
def test_a_verdict_on_one_split_is_decided_over_its_rows(shift, said):
    """Without resampled rows the model is far ahead, on too few."""
    run = errors(0.5, 5.0 if shift is None else 0.5 * (1 + shift))
    assert verdict(run, rows=None if shift is None else rows_of(shift))[0].startswith(said)


def test_a_gain_over_the_same_rows_has_a_narrower_interval_than_either_score():
    """Both miss the same rows by the same share, so the ratio of their errors is known and the errors are not."""
    rows, run = rows_of(0.1), errors(0.5, 0.55)
    (gain,) = comparison(run, rows=rows).intervals
    own = rows.interval
    assert own is not None
    assert (gain.over, gain.num, own.over, own.num) == ("rows", 200, "rows", 200)
    assert 0 < gain.low < 0.05 < gain.high
    assert gain.high - gain.low < 0.2 * (own.high - own.low)


def test_several_seeds_have_the_interval_of_a_single_one_beside_that_over_rows():
    run = run_of({"rmse": [0.5, 0.6, 0.55]}, {"rmse": [0.7, 0.7, 0.7]}, loss="regression", is_greater_better=False)
    found = comparison(run, rows=rows_of(0.5))
    assert [interval.over for interval in found.intervals] == ["rows", "seeds"]
    low, high = stats.t.interval(0.95, 2, 0.15, stats.sem([0.2, 0.1, 0.15]))
    assert (found.intervals[1].low, found.intervals[1].high, found.intervals[1].num) == pytest.approx((low, high, 3))


def test_a_verdict_is_on_the_mean_prediction():
    """What `exlm predict` gives, and not the mean of the seeds' scores."""
    found = comparison(run_of({"roc_auc": [0.6, 0.7]}, {"roc_auc": [0.6, 0.6]}, averages={"roc_auc": 0.8}))
    assert (found.of_model, found.of_baseline, found.gain) == (0.8, 0.6, pytest.approx(0.2))


def test_the_model_is_held_against_the_baseline_that_is_better_in_validation():
    """The other one is better on the test rows, which choose nothing."""
    run = run_of({"roc_auc": [0.9]}, forests={ECFP4: {"roc_auc": [0.8]}, RDKIT: {"roc_auc": [0.85]}})
    assert comparison(run).baseline == RDKIT
    table = run.scores.table
    in_validation = (table.split == "valid") & (table.model == ECFP4)
    for value, better, of_baseline in ((0.95, ECFP4, 0.8), (math.nan, RDKIT, 0.85)):
        scores = RunScores(table.assign(value=table.value.mask(in_validation, value)))
        found = compare([run.results], scores, None)
        assert found is not None
        assert (found.baseline, found.of_baseline) == (better, of_baseline)


def test_scores_that_are_not_defined_are_no_comparison():
    for own, other in (([None], [0.7]), ([0.7], [None])):
        run = run_of({"roc_auc": own}, {"roc_auc": other})
        assert comparison(run).gain is None
        assert "is not defined" in verdict(run)[0]
    assert verdict(run_of({"roc_auc": [0.9]})) == ()


@pytest.mark.parametrize(
    ("split", "values", "advice"),
    [
        ("scaffold", [0.80, 0.70, 0.75], ["--split", "--num-replicates"]),
        ("random", [0.80, 0.70, 0.75], ["--resume", "--num-replicates"]),
        ("group", [0.75], ["--resume", "--seeds", "--resume", "--num-replicates"]),
        ("file", [0.80, 0.70, 0.75], []),
    ],
)
def test_the_advice_of_a_verdict_is_accepted_by_the_split(split, values, advice):
    """A csv task refuses `task.split` and `num_replicates` beside files, a column or a file of splits."""
    run = run_of({"roc_auc": values}, {"roc_auc": values}, split=split)
    assert re.findall(r"--[a-z-]+", verdict(run)[1]) == advice


def test_a_verdict_on_validation_rows_says_that_the_epoch_was_chosen_on_them():
    """Labels drawn by a coin gave a model with the best of 20 epochs a lead of 0.2 over the forest."""
    run = run_of({"roc_auc": [0.9]}, {"roc_auc": [0.5]}, split="column", split_sizes={"train": 800, "valid": 100})
    assert "which favours the model" in verdict(run)[0]


def test_splits_of_the_same_rows_widen_an_interval():
    """Deviation 0.1, gain 0.27; half-width 4.303 * 0.1 * sqrt(1/3 + 1/8) = 0.291."""
    runs = splits_of([0.67, 0.77, 0.87], 0.5)
    assert verdict(*runs)[0].startswith("There is no clear difference")
    (interval,) = comparison(*runs).intervals
    assert (interval.over, interval.num) == ("splits", 3)
    assert (interval.low, interval.high) == pytest.approx((0.27 - 0.2913, 0.27 + 0.2913), abs=1e-4)
    assert verdict(*splits_of([0.9, 0.9, 0.9], 0.7))[0].startswith("The model is better than ECFP4 + random forest")


def test_two_splits_are_judged_over_their_rows_and_too_few_for_an_interval_over_splits():
    """With equal scores in two splits an interval over them would have no width; with others it is 12.7 errors wide."""
    runs = [errors(0.5, 0.75, split_seed=i) for i in (0, 1)]
    assert [interval.over for interval in comparison(*runs, rows=rows_of(0.5)).intervals] == ["rows"]
    assert "--num-replicates 5" in verdict(*runs, rows=rows_of(0.5))[1]


@pytest.mark.parametrize(("counts", "best"), [([9], "both"), ([5, 4], "both"), ([5, 5], "baseline")])
def test_with_few_rows_of_a_class_in_validation_the_mean_of_both_predicts(counts, best):
    """Over all splits together; the forest is the best on them."""
    forests = {ECFP4: {"roc_auc": [0.9]}, "both": {"roc_auc": [0.8]}}
    runs = [run_of({"roc_auc": [0.7]}, forests=forests, split_seed=i) for i in range(len(counts))]
    known = [
        Predictors(baselines=(ECFP4,), valid=dict.fromkeys(PREDICTORS), num_telling=num, best="model") for num in counts
    ]
    splits = [run.results.model_copy(update={"predictors": of_run}) for run, of_run in zip(runs, known, strict=True)]
    found = choose_predictor(splits, join_scores([run.scores for run in runs]))
    assert (found.best, found.num_telling) == (best, sum(counts))


def test_where_no_validation_score_is_defined_none_is_called_the_best():
    run = run_of({"roc_auc": [None]}, forests={ECFP4: {"roc_auc": [None]}, "both": {"roc_auc": [None]}})
    known = Predictors(baselines=(ECFP4,), valid=dict.fromkeys(PREDICTORS), num_telling=30, best="model")
    split = run.results.model_copy(update={"predictors": known})
    first, *_ = describe_verdict([split], run.scores, None)
    assert "as roc_auc is not defined on" in first


def test_no_interval_of_a_bounded_score_leaves_its_range():
    """Average precision had an interval from -0.216 to 0.943 over five splits."""
    values = [0.05, 0.9, 0.1, 0.6, 0.2]
    runs = [run_of({"average_precision": [value]}, split_seed=i) for i, value in enumerate(values)]
    joined = join_splits([run.results for run in runs], join_scores([run.scores for run in runs]))
    found = joined.split_intervals["average_precision"]
    assert (found.low, 0.5 < found.high <= 1, found.over, found.num) == (0, True, "splits", 5)
    assert [interval.high for interval in comparison(*splits_of([1.0, 0.9, 0.1], 0.0)).intervals] == [1]
