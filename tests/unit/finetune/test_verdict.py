"""Intervals against their closed form, and the sentence that each outcome of a comparison gives."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from exlm_cli.finetune.verdict import describe_verdict, mean_interval, summarise_splits
from exlm_cli.tasks.metrics import metric
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
    assert describe_verdict([results(scores, scores, split=split)])[0].endswith(
        " over 3 seeds of one split. Other rows may reverse this."
    )


def test_a_verdict_on_one_split_is_one_on_its_rows():
    """The seeds share the rows; an interval over splits holds for other rows too."""
    forest = {"roc_auc": [0.70, 0.71, 0.73]}
    (of_one,) = describe_verdict([results(MODEL, forest)])
    assert of_one.startswith("The model is better than ECFP4 + random forest on these test rows: test roc_auc ")
    of_two, *_ = describe_verdict([results(MODEL, forest), results(MODEL, forest)])
    assert of_two.startswith("The model is better than ECFP4 + random forest: test roc_auc ")
    assert of_two.endswith(" over 2 splits.")


def test_a_verdict_on_validation_rows_says_that_the_epoch_was_chosen_on_them():
    """Labels drawn by a coin gave a model with the best of 20 epochs a lead of 0.2 over the forest."""
    with_test = results(MODEL, {"roc_auc": [0.5, 0.5, 0.5]}, split="column")
    (sentence,) = describe_verdict([with_test.model_copy(update={"metrics": {"valid": with_test.metrics["valid"]}})])
    assert sentence.startswith("The model is better than ECFP4 + random forest on these valid rows: valid roc_auc ")
    assert sentence.endswith(
        " over 3 seeds of one split. The best epoch of the model was chosen on these rows, which favours the model. "
        "Other rows may reverse this."
    )
    one_seed = results({"roc_auc": [0.9]}, {"roc_auc": [0.5]}, split="column")
    (sentence, *_) = describe_verdict([one_seed.model_copy(update={"metrics": {"valid": one_seed.metrics["valid"]}})])
    assert "against 0.5000. The best epoch of the model was chosen on these rows, " in sentence


def test_a_model_that_guesses_is_told_so():
    assert describe_verdict([results({"roc_auc": [0.5, 0.6, 0.4]})]) == (
        "The model is not clearly better than a random guess: test roc_auc 0.5000; a random guess scores 0.5. "
        "On 100 rows, 50 of them of the rarest class, chance alone may reach 0.6160; `--split scaffold-balanced "
        "--num-replicates 5` gives more evidence.",
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


def deviation_of_areas(n: int, m: int) -> float:
    """Return the standard deviation of ROC-AUC over all orders of n rows of one class and m of the other."""
    areas = [(sum(ranks) - n * (n - 1) / 2) / (n * m) for ranks in itertools.combinations(range(n + m), n)]
    return float(np.std(areas))


def deviation_of_correlations(num_rows: int) -> float:
    """Return the standard deviation of Pearson's correlation over all orders of a column of numbers."""
    values = np.arange(num_rows) ** 1.5
    return float(np.std([np.corrcoef(values, order)[0, 1] for order in itertools.permutations(values)]))


@pytest.mark.parametrize(
    ("metric", "known", "said", "chance", "luck"),
    [
        ("roc_auc", ((5, 5),), "10 rows, 5 of them of the rarest class", 0.5, 2 * deviation_of_areas(5, 5)),
        ("roc_auc", ((9, 3),), "12 rows, 3 of them of the rarest class", 0.5, 2 * deviation_of_areas(9, 3)),
        # the third label has no ROC-AUC, so the mean is over two
        ("roc_auc", ((9, 3), (2, 4), (6, 0)), "8 rows for each column on average", 0.5,
         deviation_of_areas(9, 3) + deviation_of_areas(2, 4)),
        ("matthews_corrcoef", ((4, 2),), "6 rows", 0.0, 2 * deviation_of_correlations(6)),
        ("matthews_corrcoef", ((4, 1), (1, 5), (4, 0)), "5 rows for each column on average", 0.0,
         deviation_of_correlations(5) + deviation_of_correlations(6)),
        ("spearmanr", ((6,),), "6 rows", 0.0, 2 * deviation_of_correlations(6)),
        ("r2", ((6,),), "6 rows", 0.0, (2 * deviation_of_correlations(6)) ** 2),
        ("r2", ((6,), (4,), (1,)), "4 rows for each column on average", 0.0,
         2 * (deviation_of_correlations(6) ** 2 + deviation_of_correlations(4) ** 2)),
    ],
)  # fmt: skip
def test_one_seed_beats_a_guess_if_luck_does_not_explain_its_score(metric, known, said, chance, luck):
    """The luck of a guess is counted over all orders of the rows; over labels, deviations are averaged."""
    given = {"known_rows": {"test": known}}
    assert describe_verdict([scored("a", "csv", {metric: [chance + 1.001 * luck]}, **given).results]) == ()
    (sentence,) = describe_verdict([scored("a", "csv", {metric: [chance + 0.999 * luck]}, **given).results])
    assert sentence.startswith("The model is not clearly better than ")
    lucky = min(1, chance + luck)
    assert sentence.endswith(f" On {said}, chance alone may reach {lucky:.4f}; `--seeds 1,2,3` gives more evidence.")
    (sentence,) = describe_verdict([scored("a", "csv", {metric: [chance - 0.1]}, **given).results])
    assert sentence.startswith("The model is not clearly better than ")


def areas_of_guesses(num_negative: int, num_positive: int, num_guesses: int) -> Any:
    """Return ROC-AUC of random orders of the rows, from the ranks of the positive ones."""
    rows = np.tile(np.arange(num_negative + num_positive), (num_guesses, 1))
    ranks = np.random.default_rng(0).permuted(rows, axis=1)[:, :num_positive]
    return (ranks.sum(axis=1) - num_positive * (num_positive - 1) / 2) / (num_positive * num_negative)


def share_that_passes(metric: str, scores: Any, known: Any) -> float:
    """Return how often a guess is not told to be one; its three seeds agree."""
    given: Any = {"split": "official", "known_rows": {"test": known}}
    runs = (scored("a", "csv", {metric: [s - 1e-6, s, s + 1e-6]}, **given) for s in scores.tolist())
    passes = [describe_verdict([run.results]) == () for run in runs]
    return float(np.mean(passes))


@pytest.mark.parametrize("known", [(500, 500), (980, 20), (20, 980)])
def test_a_guess_passes_as_a_model_in_one_case_of_40(known):
    """Beyond two deviations on one side are 2.3 % of a normal distribution, whatever the share of positive rows."""
    areas = areas_of_guesses(*known, num_guesses=1000)
    assert 0.01 < share_that_passes("roc_auc", areas, (known,)) < 0.05
    assert 0.01 < share_that_passes("roc_auc", areas, (known,) * 5) < 0.05  # the same label five times


def test_a_guess_of_labels_that_do_not_agree_passes_less_often():
    known = ((980, 20), (60, 40), (150, 50))
    areas = np.mean([areas_of_guesses(*counts, num_guesses=1000) for counts in known], axis=0)
    assert share_that_passes("roc_auc", areas, known) < 0.05


def test_a_guess_of_more_than_two_classes_passes_less_often():
    """Matthews' correlation of shuffled classes."""
    rng, truth = np.random.default_rng(0), np.repeat([0, 1, 2], [40, 30, 20])
    scores = np.array([metric("matthews_corrcoef", truth, rng.permutation(truth)) for _ in range(500)])
    assert share_that_passes("matthews_corrcoef", scores, ((40, 30, 20),)) < 0.023


def test_the_mismatched_rows_of_mnli_do_not_make_luck_smaller():
    """Two deviations are 0.0202 on the 9,815 matched rows that are scored, and 0.0143 on all 19,647."""
    own = {"accuracy": [0.34] * 3, "matthews_corrcoef": [0.0190, 0.0191, 0.0192]}
    given: Any = {"loss": "classes", "split_sizes": {"train": 392_702, "valid": 19_647}}
    given["known_rows"] = {"valid": ((3_479, 3_123, 3_213),)}
    (sentence,) = describe_verdict([scored("a", "glue/mnli", own, **given).results])
    assert sentence.endswith(" On 9,815 rows, chance alone may reach 0.0202; more rows give more evidence.")


def test_the_luck_of_unknown_rows_is_left_out():
    """A user's own task may have a score that does not come from its targets."""
    (sentence,) = describe_verdict([results({"roc_auc": [0.4]}, known_rows={"test": ()})])
    assert sentence.endswith("; a random guess scores 0.5.")
    assert describe_verdict([results({"roc_auc": [0.6]}, known_rows={"test": ()})]) == ()


def test_luck_is_that_of_the_split_that_has_a_score():
    without, scored_one = ({"test": known} for known in (((100, 0),), ((80, 20),)))
    splits = [results({"roc_auc": [None]}, known_rows=without), results({"roc_auc": [0.6]}, known_rows=scored_one)]
    (sentence,) = describe_verdict(splits)
    assert " On 100 rows, 20 of them of the rarest class, " in sentence


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
    ("metric", "counts"),
    [("matthews_corrcoef", (1, 1)), ("matthews_corrcoef", (1, 2)), ("r2", (2,)), ("roc_auc", (1, 1))],
)
def test_luck_on_a_few_rows_gives_at_most_the_best_score(metric, counts):
    (sentence,) = describe_verdict([scored("a", "csv", {metric: [0.9]}, known_rows={"test": (counts,)}).results])
    assert f"On {sum(counts)} rows" in sentence
    assert ", chance alone may reach 1.0000;" in sentence


def test_splits_are_joined_in_order_and_each_counts_once():
    splits = [
        results({"roc_auc": [0.8, 0.6]}, {"roc_auc": [0.5, 0.5]}),
        results({"roc_auc": [0.9, 0.9]}, {"roc_auc": [0.5, 0.5]}),
    ]
    joined = summarise_splits(splits, (0, 1))
    assert joined.best_epochs == (3, 6, 3, 6)
    assert joined.elapsed_s == 2 * 3725.4
    assert (joined.tokens_per_s, joined.outside_model_share) == (12345.6, 0.0123)
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
