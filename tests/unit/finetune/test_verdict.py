"""Intervals against their closed form, and the sentence that each outcome of a comparison gives."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from exlm_cli.finetune.verdict import describe_verdict, mean_interval, summarise_splits
from tests.unit.report.results import baseline, scored

MODEL = {"roc_auc": [0.80, 0.82, 0.84]}
SIZES = {"train": 800, "valid": 100, "test": 100}


def results(own: Any, other: Any = None, **changed: Any) -> Any:
    given = {} if other is None else {"baseline": baseline(other)}
    return scored("a", "csv", own, **given, split_sizes=SIZES, **changed).results


def test_an_interval_is_that_of_students_t_and_of_nadeau_and_bengio():
    """Two values have one degree of freedom, whose 0.975 quantile is tan(0.475 pi); scipy has the same interval."""
    low, high = mean_interval([[1.0], [3.0]]) or (math.nan, math.nan)
    assert (high - low) / 2 == pytest.approx(math.tan(0.475 * math.pi) * math.sqrt(2) * math.sqrt(1 / 2))
    values = [0.1, 0.4, 0.35, 0.8]
    scale = stats.sem(values)
    assert mean_interval([[v] for v in values]) == pytest.approx(stats.t.interval(0.95, 3, 0.4125, scale))
    wide = mean_interval([[v, v] for v in values], overlap=1 / 8)
    assert wide == pytest.approx(stats.t.interval(0.95, 3, 0.4125, scale * math.sqrt((1 / 4 + 1 / 8) / (1 / 4))))
    assert mean_interval([[1.0, 2.0]]) is None


@pytest.mark.parametrize(
    ("model", "forest", "said"),
    [
        ([0.80, 0.82, 0.84], [0.70, 0.71, 0.73], "The model is better than ECFP4"),
        ([0.70, 0.71, 0.73], [0.80, 0.82, 0.84], "ECFP4 + random forest is better than the model"),
        ([0.80, 0.70, 0.75], [0.75, 0.76, 0.74], "No clear difference"),
        ([0.80], [0.70], "The model scores better here: test roc_auc 0.8000 against 0.7000. One seed"),
        ([0.60], [0.70], "ECFP4 + random forest scores better here"),
        ([1.0], [1.0], "Both score the same here"),
        ([None], [0.70], "roc_auc is not defined on these test rows"),
    ],
)
def test_a_verdict_names_the_better_one_or_none(model, forest, said):
    assert describe_verdict([results({"roc_auc": model}, {"roc_auc": forest})])[0].startswith(said)
    # an error is better where it is less
    swapped = results({"rmse": forest}, {"rmse": model}, loss="regression", is_greater_better=False)
    if None not in model:
        assert describe_verdict([swapped])[0].startswith(said.split(": test")[0])


@pytest.mark.parametrize(
    ("split", "advice"),
    [("scaffold", "`--split scaffold-balanced --num-replicates 5`"), ("random", "`--num-replicates 5`")],
)
def test_the_advice_of_a_verdict_is_accepted_by_the_split(split, advice):
    scores = {"roc_auc": [0.80, 0.70, 0.75]}
    assert f"; {advice} tries five." in describe_verdict([results(scores, scores, split=split)])[0]


@pytest.mark.parametrize("split", ["files", "column", "file", "official"])
def test_no_other_split_is_advised_where_the_user_gives_the_splits(split):
    """A csv task refuses `task.split` and `num_replicates` beside files, a column or a file of splits."""
    scores = {"roc_auc": [0.80, 0.70, 0.75]}
    assert describe_verdict([results(scores, scores, split=split)])[0].endswith("over 3 seeds of one split.")


def test_a_model_that_guesses_is_told_so():
    assert describe_verdict([results({"roc_auc": [0.5, 0.6, 0.4]})]) == (
        "The model is not clearly better than a random guess: test roc_auc 0.5000; a random guess scores 0.5. "
        "On 100 rows, chance alone may reach 0.6160; `--split scaffold-balanced --num-replicates 5` gives more "
        "evidence.",
    )
    assert describe_verdict([results(MODEL)]) == ()
    flat = results({"rmse": [1.0, 1.0], "r2": [-0.1, 0.1]}, loss="regression", is_greater_better=False)
    assert "the mean of the training rows" in describe_verdict([flat])[0]
    alike = results({"spearmanr": [0.01, -0.01]}, loss="regression", selection_metric="spearmanr")
    assert "spearmanr 0.0000; a random guess scores 0" in describe_verdict([alike])[0]


def test_accuracy_is_judged_by_the_matthews_correlation_where_it_is_scored():
    """The accuracy of a guess depends on the rows; its Matthews correlation is 0 for any number of classes."""
    own = {"accuracy": [0.9, 0.9, 0.9], "matthews_corrcoef": [0.5, 0.6, 0.7]}
    assert describe_verdict([results(own, loss="classes")]) == ()
    own["matthews_corrcoef"] = [-0.1, 0.1, 0.0]
    assert describe_verdict([results(own, loss="classes")]) == (
        "The model is not clearly better than a random guess: test matthews_corrcoef 0.0000; "
        "a random guess scores 0. On 100 rows, chance alone may reach 0.2010; "
        "`--split scaffold-balanced --num-replicates 5` gives more evidence.",
    )
    assert describe_verdict([results({"accuracy": [0.1, 0.2]})]) == ()


def deviation_of_areas(num_rows: int) -> float:
    """Return the standard deviation of ROC-AUC over all orders of as many rows of either class."""
    half = num_rows // 2
    areas = [(sum(ranks) - half * (half - 1) / 2) / half**2 for ranks in itertools.combinations(range(num_rows), half)]
    return float(np.std(areas))


def deviation_of_correlations(num_rows: int) -> float:
    """Return the standard deviation of Pearson's correlation over all orders of a column of numbers."""
    values = np.arange(num_rows) ** 1.5
    return float(np.std([np.corrcoef(values, order)[0, 1] for order in itertools.permutations(values)]))


@pytest.mark.parametrize(
    ("metric", "num_rows", "chance", "luck"),
    [
        ("roc_auc", 10, 0.5, 2 * deviation_of_areas(10)),
        ("matthews_corrcoef", 6, 0.0, 2 * deviation_of_correlations(6)),
        ("spearmanr", 6, 0.0, 2 * deviation_of_correlations(6)),
        ("r2", 6, 0.0, (2 * deviation_of_correlations(6)) ** 2),
    ],
)
def test_one_seed_beats_a_guess_if_luck_does_not_explain_its_score(metric, num_rows, chance, luck):
    """The luck of a guess is counted over all orders of the rows."""
    sizes = {"split_sizes": {"train": 80, "valid": 10, "test": num_rows}}
    assert describe_verdict([scored("a", "csv", {metric: [chance + 1.001 * luck]}, **sizes).results]) == ()
    (sentence,) = describe_verdict([scored("a", "csv", {metric: [chance + 0.999 * luck]}, **sizes).results])
    assert sentence.startswith("The model is not clearly better than ")
    assert sentence.endswith(
        f" On {num_rows} rows, chance alone may reach {chance + luck:.4f}; `--seeds 1,2,3` gives more evidence."
    )
    (sentence,) = describe_verdict([scored("a", "csv", {metric: [chance - 0.1]}, **sizes).results])
    assert sentence.startswith("The model is not clearly better than ")


@pytest.mark.parametrize(
    ("split", "advice"),
    [
        ("scaffold", "`--split scaffold-balanced --num-replicates 5` gives more evidence."),
        ("random", "`--num-replicates 5` gives more evidence."),
        ("official", "more rows give more evidence."),
    ],
)
def test_seeds_that_agree_do_not_rule_out_the_luck_of_their_rows(split, advice):
    """RTE: 277 rows, Matthews' correlation 0.055 with every seed, two deviations of a guess are 0.12."""
    alike = {"matthews_corrcoef": [0.054, 0.055, 0.056]}
    sizes = {"split_sizes": {"train": 2490, "test": 277}}
    given: Any = {"selection_metric": "matthews_corrcoef", "loss": "classes", "split": split}
    (sentence,) = describe_verdict([scored("a", "csv", alike, **sizes, **given).results])
    assert sentence.endswith(f" On 277 rows, chance alone may reach 0.1204; {advice}")
    splits = [scored("a", "csv", {"matthews_corrcoef": [area]}, **sizes, **given).results for area in (0.05, 0.06)]
    assert describe_verdict([splits[0]] * 9 + [splits[1]]) == ()


@pytest.mark.parametrize(
    ("metric", "num_rows"), [("matthews_corrcoef", 1), ("matthews_corrcoef", 3), ("r2", 2), ("roc_auc", 2)]
)
def test_luck_on_a_few_rows_gives_at_most_the_best_score(metric, num_rows):
    sizes = {"split_sizes": {"train": 80, "valid": 10, "test": num_rows}}
    (sentence,) = describe_verdict([scored("a", "csv", {metric: [0.9]}, **sizes).results])
    assert f"On {num_rows:,} rows, chance alone may reach 1.0000;" in sentence


def test_splits_are_joined_in_order_and_each_counts_once():
    splits = [
        results({"roc_auc": [0.8, 0.6]}, {"roc_auc": [0.5, 0.5]}),
        results({"roc_auc": [0.9, 0.9]}, {"roc_auc": [0.5, 0.5]}),
    ]
    joined = summarise_splits(splits, (0, 1))
    assert joined.metrics["test"]["roc_auc"].values == (0.8, 0.6, 0.9, 0.9)
    assert joined.intervals["test"]["roc_auc"] == mean_interval([[0.7], [0.9]], overlap=1 / 8)
    assert joined.baseline is not None
    assert joined.baseline.metrics["test"]["roc_auc"].values == (0.5,) * 4
    assert "over 2 splits" in describe_verdict(splits)[0]


def test_splits_of_the_same_rows_widen_an_interval_and_seeds_of_one_split_do_not():
    """Deviation 0.1, gain 0.27; half-widths 4.303 * 0.1 * sqrt(1/3) = 0.248, 4.303 * 0.1 * sqrt(1/3 + 1/8) = 0.291."""
    areas = [0.67, 0.77, 0.87]
    (of_seeds,) = describe_verdict([results({"roc_auc": areas}, {"roc_auc": [0.5] * 3})])
    assert of_seeds.startswith("The model is better than ECFP4")
    of_splits = describe_verdict([results({"roc_auc": [area]}, {"roc_auc": [0.5]}) for area in areas])
    assert [sentence.split(":")[0] for sentence in of_splits] == [
        "No clear difference between the model and ECFP4 + random forest",
        "The model is not clearly better than a random guess",
    ]


def test_a_baseline_without_a_score_is_no_comparison():
    first, *_ = describe_verdict([results({"spearmanr": [0.8]}, {"spearmanr": [None]}, loss="regression")])
    assert first.startswith("spearmanr is not defined on these test rows")
