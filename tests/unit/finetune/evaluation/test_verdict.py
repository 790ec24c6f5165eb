"""Intervals against their closed form, and the sentence that each outcome of a comparison gives."""

import bisect
import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from exlm_cli.finetune.evaluation.intervals import ScoredRows
from exlm_cli.finetune.evaluation.verdict import compare, describe_verdict, interval_over_rows, join_splits
from exlm_cli.finetune.results import Comparison
from exlm_cli.finetune.scores import RunScores, join_scores
from exlm_cli.tasks.metrics import metric
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


def rows_of(shift: float, num_rows: int = 200) -> ScoredRows:
    """Return rows with values that the model misses by 0.5 on average and the forest by `shift` more or less."""
    rng = np.random.default_rng(0)
    targets = rng.normal(size=(num_rows, 1))
    noise = np.where(np.arange(num_rows) % 2 == 0, 0.45, -0.55)[:, None]
    return ScoredRows("regression", [targets + noise, targets + noise * (1 + shift)], targets, np.ones(1))


def errors(of_model: float, of_forest: float, **changed: Any) -> Any:
    given: Any = {"loss": "regression", "is_greater_better": False, **changed}
    return run_of({"rmse": [of_model]}, {"rmse": [of_forest]}, **given)


@pytest.mark.parametrize(
    ("shift", "said"),
    [
        (
            0.5,
            "The model is better than ECFP4 + random forest on these test rows: the model's gain in rmse is 0.2500, "
            "with a 95 % interval of ",
        ),
        (-0.5, "ECFP4 + random forest is better than the model on these test rows: "),
        (0.0, "There is no clear difference between the model and ECFP4 + random forest on these test rows: "),
    ],
)
def test_a_verdict_on_one_split_is_decided_over_its_rows(shift, said):
    sentence, left_open = verdict(errors(0.5, 0.5 * (1 + shift)), rows=rows_of(shift))
    assert sentence.startswith(said)
    assert sentence.endswith(" over the 200 rows.")
    assert left_open == (
        "This is one seed on one split with 100 test rows, and another may reverse it: `exlm finetune --resume RUN "
        "--seeds 1,2,3` trains more seeds, and a new run with `--split scaffold-balanced --num-replicates 5` tries "
        "five splits."
    )


def test_a_gain_over_the_same_rows_has_a_narrower_interval_than_either_score():
    """Both miss the same rows by the same share, so the ratio of their errors is known and the errors are not."""
    rows, run = rows_of(0.1), errors(0.5, 0.55)
    (gain,) = comparison(run, rows=rows).intervals
    own = interval_over_rows(run.results, rows)
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
    sentence, left_open = verdict(run, rows=rows_of(0.5))
    assert sentence.endswith(f" and {low:.4f} to {high:.4f} for a single one of 3 seeds.")
    assert left_open.startswith("This is 3 seeds on one split with 100 test rows")


def test_the_score_of_a_verdict_is_that_of_the_mean_prediction():
    """What `exlm predict` gives, and not the mean of the seeds' scores."""
    run = run_of({"roc_auc": [0.6, 0.7]}, {"roc_auc": [0.6, 0.6]}, averages={"roc_auc": 0.8})
    found = comparison(run)
    assert (found.of_model, found.of_baseline, found.gain) == (0.8, 0.6, pytest.approx(0.2))
    assert "the model's gain in roc_auc is 0.2000" in verdict(run)[0]


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
        (sentence, *_) = verdict(run_of({"roc_auc": own}, {"roc_auc": other}))
        assert sentence == (
            "roc_auc is not defined on these test rows, so the model cannot be compared with ECFP4 + random forest."
        )
    assert verdict(run_of({"roc_auc": [0.9]})) == ()


@pytest.mark.parametrize(
    ("split", "advice"),
    [
        ("scaffold", "a new run with `--split scaffold-balanced --num-replicates 5`"),
        ("random", "`exlm finetune --resume RUN --num-replicates 5`"),
    ],
)
def test_the_advice_of_a_verdict_is_accepted_by_the_split(split, advice):
    values = {"roc_auc": [0.80, 0.70, 0.75]}
    assert verdict(run_of(values, values, split=split))[1].endswith(f" may reverse it: {advice} tries five splits.")


@pytest.mark.parametrize("split", ["files", "column", "file", "official"])
def test_no_other_split_is_advised_where_the_user_gives_the_splits(split):
    """A csv task refuses `task.split` and `num_replicates` beside files, a column or a file of splits."""
    values = {"roc_auc": [0.80, 0.70, 0.75]}
    assert verdict(run_of(values, values, split=split))[1] == (
        "This is 3 seeds on one split with 100 test rows, and another may reverse it."
    )


def test_a_verdict_on_validation_rows_says_that_the_epoch_was_chosen_on_them():
    """Labels drawn by a coin gave a model with the best of 20 epochs a lead of 0.2 over the forest."""
    sizes = {"train": 800, "valid": 100}
    run = run_of({"roc_auc": [0.9]}, {"roc_auc": [0.5]}, split="column", split_sizes=sizes)
    (sentence, *_) = verdict(run)
    assert sentence.startswith("The model is better than ECFP4 + random forest on these valid rows: the model's gain ")
    assert sentence.endswith(" The best epoch of the model was chosen on these rows, which favours the model.")


def test_splits_of_the_same_rows_widen_an_interval():
    """Deviation 0.1, gain 0.27; half-width 4.303 * 0.1 * sqrt(1/3 + 1/8) = 0.291."""
    of_splits = verdict(*splits_of([0.67, 0.77, 0.87], 0.5))
    assert [sentence.split(":")[0] for sentence in of_splits] == [
        "There is no clear difference between the model and ECFP4 + random forest",
        "The model is not clearly better than a random guess",
    ]
    (interval,) = comparison(*splits_of([0.67, 0.77, 0.87], 0.5)).intervals
    assert (interval.over, interval.num) == ("splits", 3)
    assert (interval.low, interval.high) == pytest.approx((0.27 - 0.2913, 0.27 + 0.2913), abs=1e-4)
    (sentence, *_) = verdict(*splits_of([0.9, 0.9], 0.7))
    assert sentence.startswith(
        "The model is better than ECFP4 + random forest: the model's gain in roc_auc is 0.2000, with a 95 % "
    )
    assert sentence.endswith(" over 2 splits.")


def test_no_interval_of_a_bounded_score_leaves_its_range():
    """Average precision had an interval from -0.216 to 0.943 over five splits."""
    runs = [
        run_of({"average_precision": [value], "rmse": [value]}, {"average_precision": [0.5]}, split_seed=i)
        for i, value in enumerate([0.05, 0.9, 0.1, 0.6, 0.2])
    ]
    scores = join_scores([run.scores for run in runs])
    found = join_splits([run.results for run in runs], scores).split_intervals
    assert (found["average_precision"].low, 0.5 < found["average_precision"].high <= 1) == (0.0, True)
    assert (found["rmse"].low, found["rmse"].over, found["rmse"].num) == (0, "splits", 5)
    assert join_splits([runs[0].results], runs[0].scores) == runs[0].results
    high_gain = [run_of({"roc_auc": [v]}, {"roc_auc": [0.0]}, split_seed=i) for i, v in enumerate([1.0, 0.1])]
    (interval,) = comparison(*high_gain).intervals
    assert (interval.low, interval.high) == (-1, 1)


def test_splits_are_joined_in_order():
    """A note that both have stands once; the interval is 0.8 ± 12.71 * 0.1414 * sqrt(1/2 + 100/1000)."""
    runs = [run_of({"roc_auc": [0.8, 0.6]}), run_of({"roc_auc": [0.9, 0.9]}, split_seed=1)]
    parts = [run.results.model_copy(update={"notes": (f"{i} rows", "short")}) for i, run in enumerate(runs)]
    joined = join_splits(parts, join_scores([run.scores for run in runs]))
    assert joined.split_seeds == (0, 1)
    assert joined.best_epochs == (3, 6, 3, 6)
    assert joined.elapsed_s == 2 * 3725.4
    assert joined.notes == ("short", "split 0: 0 rows", "split 1: 1 rows")
    assert set(joined.split_intervals) == {"roc_auc"}
    assert (joined.tokens_per_s, joined.outside_model_share) == (12345.6, 0.0123)


def test_a_model_that_guesses_is_told_so():
    assert verdict(run_of({"roc_auc": [0.5, 0.6, 0.4]})) == (
        "The model is not clearly better than a random guess: it has test roc_auc 0.5000, a random guess has 0.5, and "
        "on 100 rows, 50 of them of the rarest class, chance alone may reach 0.6160.",
        "This is 3 seeds on one split with 100 test rows, and another may reverse it: a new run with `--split "
        "scaffold-balanced --num-replicates 5` tries five splits.",
    )
    assert verdict(run_of({"roc_auc": [0.80, 0.82, 0.84]})) == ()
    flat = run_of({"rmse": [1.0, 1.0], "r2": [-0.1, 0.1]}, loss="regression", is_greater_better=False)
    assert "the mean of the training rows" in verdict(flat)[0]
    alike = run_of({"spearmanr": [0.01, -0.01]}, loss="regression", selection_metric="spearmanr")
    assert "spearmanr 0.0000, a random guess has 0" in verdict(alike)[0]


def test_accuracy_is_judged_by_the_matthews_correlation_where_it_is_scored():
    """The accuracy of a guess depends on the rows; its Matthews correlation is 0 for any number of classes."""
    own = {"accuracy": [0.9, 0.9, 0.9], "matthews_corrcoef": [0.5, 0.6, 0.7]}
    assert verdict(run_of(own, loss="classes")) == ()
    own["matthews_corrcoef"] = [-0.1, 0.1, 0.0]
    assert verdict(run_of(own, loss="classes"))[0] == (
        "The model is not clearly better than a random guess: it has test matthews_corrcoef 0.0000, a random guess has "
        "0, and on 100 rows, chance alone may reach 0.2010."
    )
    assert verdict(run_of({"accuracy": [0.1, 0.2]})) == ()


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
    assert verdict(scored("a", "csv", {metric: [chance + 1.001 * luck]}, **given)) == ()
    sentence, _ = verdict(scored("a", "csv", {metric: [chance + 0.999 * luck]}, **given))
    assert sentence.startswith("The model is not clearly better than ")
    lucky = min(1, chance + luck)
    assert sentence.endswith(f", and on {said}, chance alone may reach {lucky:.4f}.")
    sentence, _ = verdict(scored("a", "csv", {metric: [chance - 0.1]}, **given))
    assert sentence.startswith("The model is not clearly better than ")


def areas_of_guesses(num_negative: int, num_positive: int, num_guesses: int) -> Any:
    """Return ROC-AUC of random orders of the rows, from the ranks of the positive ones."""
    rows = np.tile(np.arange(num_negative + num_positive), (num_guesses, 1))
    ranks = np.random.default_rng(0).permuted(rows, axis=1)[:, :num_positive]
    return (ranks.sum(axis=1) - num_positive * (num_positive - 1) / 2) / (num_positive * num_negative)


def share_that_passes(metric: str, scores: Any, known: Any) -> float:
    """Return how often a guess is not told to be one; its three seeds agree."""
    given: Any = {"split": "official", "known_rows": {"test": known}}

    def passes(score: float) -> bool:
        return verdict(scored("a", "csv", {metric: [score - 1e-6, score, score + 1e-6]}, **given)) == ()

    ordered = sorted(scores.tolist())  # a greater score passes where a lesser one does
    return 1 - bisect.bisect_left(ordered, True, key=passes) / len(ordered)


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
    sentence, _ = verdict(scored("a", "glue/mnli", own, **given))
    assert sentence.endswith(", and on 9,815 rows, chance alone may reach 0.0202.")


def test_the_luck_of_unknown_rows_is_left_out():
    """A user's own task may have a score that does not come from its targets."""
    sentence, _ = verdict(run_of({"roc_auc": [0.4]}, known_rows={"test": ()}))
    assert sentence.endswith(", a random guess has 0.5.")
    assert verdict(run_of({"roc_auc": [0.6]}, known_rows={"test": ()})) == ()


def test_luck_is_that_of_the_split_that_has_a_score():
    without, scored_one = ({"test": known} for known in (((100, 0),), ((80, 20),)))
    splits = [
        run_of({"roc_auc": [None]}, known_rows=without),
        run_of({"roc_auc": [0.6]}, None, 1, known_rows=scored_one),
    ]
    (sentence,) = verdict(*splits)
    assert " on 100 rows, 20 of them of the rarest class, " in sentence


@pytest.mark.parametrize(
    ("split", "advice"),
    [
        ("scaffold", ": a new run with `--split scaffold-balanced --num-replicates 5` tries five splits."),
        ("random", ": `exlm finetune --resume RUN --num-replicates 5` tries five splits."),
        ("official", "."),
    ],
)
def test_seeds_that_agree_do_not_rule_out_the_luck_of_their_rows(split, advice):
    """RTE: 277 rows, Matthews' correlation 0.055 with every seed, two deviations of a guess are 0.12."""
    alike = {"matthews_corrcoef": [0.054, 0.055, 0.056]}
    sizes = {"split_sizes": {"train": 2490, "valid": 277, "test": 277}}
    given: Any = {"selection_metric": "matthews_corrcoef", "loss": "classes", "split": split}
    sentence, left_open = verdict(scored("a", "csv", alike, **sizes, **given))
    assert sentence.endswith(", and on 277 rows, chance alone may reach 0.1204.")
    assert left_open.endswith(f", and another may reverse it{advice}")
    splits = [
        scored("a", "csv", {"matthews_corrcoef": [area]}, split_seeds=(i,), **sizes, **given)
        for i, area in enumerate([0.05] * 9 + [0.06])
    ]
    assert verdict(*splits) == ()


@pytest.mark.parametrize(
    ("metric", "counts"),
    [("matthews_corrcoef", (1, 1)), ("matthews_corrcoef", (1, 2)), ("r2", (2,)), ("roc_auc", (1, 1))],
)
def test_luck_on_a_few_rows_gives_at_most_the_best_score(metric, counts):
    sentence, _ = verdict(scored("a", "csv", {metric: [0.9]}, known_rows={"test": (counts,)}))
    assert f"on {sum(counts)} rows" in sentence
    assert ", chance alone may reach 1.0000." in sentence
