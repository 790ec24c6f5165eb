"""Arithmetic of `probe.py`: linear probes on vectors, cuts of the rows, and paired differences with their intervals.

Axes: R rows, F features, P properties, S seeds, N resamplings.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data.tokenizer import Tokenizer
from probing.targets import Numbers, ProbeData

TEST_SHARE = 0.2
"""Share of the rows that test the probes in a resampling; the others train them."""
NUM_COUNTED_TOKENS = 512
"""Most frequent tokens of the rows that `token_counts` counts; ridge regression takes time with their square."""

Features = NDArray[np.float32]
RowIndex = NDArray[np.int64]


Interval = tuple[float, float]


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences and its 95 % intervals.

    Attributes:
        over_resamplings: For these very runs: what varies is which rows train the probes. NaN for one resampling.
        over_seeds: For runs like these: what varies is the training of the models. None for one seed.
    """

    mean: float
    over_resamplings: Interval
    over_seeds: Interval | None


def probe_scores(features: Features, data: ProbeData, train: RowIndex, test: RowIndex) -> list[float]:
    """Return the score of each property: linear models are fitted to the training rows and scored on the others.

    Features are standardised. Ridge regression chooses its penalty by leave-one-out; logistic regression has L2 with
    C = 1, which matters little with far more rows than features. A property with one class among either rows is NaN.

    Args:
        features: (R, F).
        data: Its R targets and metrics.
        train, test: Rows.
    """
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.metrics import r2_score, roc_auc_score

    mean_F, std_F = features[train].mean(axis=0), features[train].std(axis=0)
    scaled = (features - mean_F) / np.where(std_F > 0, std_F, 1)
    fitted, asked = scaled[train].astype(np.float64), scaled[test].astype(np.float64)
    scores = np.full(len(data.properties), math.nan)
    is_number = np.array([metric == "r2" for metric in data.metrics])
    if is_number.any():
        ridge = RidgeCV(alphas=np.logspace(-2, 4, 7), alpha_per_target=True)
        predicted = ridge.fit(fitted, data.targets[train][:, is_number]).predict(asked)
        truth = data.targets[test][:, is_number]
        scores[is_number] = r2_score(truth, predicted.reshape(truth.shape), multioutput="raw_values")
    for index in np.flatnonzero(~is_number):
        target = data.targets[:, index]
        if min(len(set(target[train])), len(set(target[test]))) == 2:
            model = LogisticRegression(solver="newton-cholesky").fit(fitted, target[train])
            scores[index] = roc_auc_score(target[test], model.decision_function(asked))
    return [float(score) for score in scores]


def resampling(num_rows: int, index: int) -> tuple[RowIndex, RowIndex]:
    """Return training and test rows; the same for every run."""
    order = np.random.default_rng([0, index]).permutation(num_rows)
    num_test = round(TEST_SHARE * num_rows)
    return np.sort(order[num_test:]), np.sort(order[:num_test])


def paired_difference(scores_SN: Numbers, reference_SN: Numbers) -> Difference:
    """Return the mean of `scores - reference` and its 95 % intervals, by Student's t.

    Over resamplings, a value is the difference of means over seeds, and the variance is multiplied by
    1 + N * test / train, because resamplings share rows (Nadeau and Bengio 2003, "Inference for the generalization
    error", corrected resampled t-test). Over seeds, a value is the difference of means over resamplings.

    Args:
        scores_SN, reference_SN: Scores by seed and resampling; one of the two may have a single seed.
    """
    by_seed = scores_SN.mean(axis=1) - reference_SN.mean(axis=1)
    by_resampling = scores_SN.mean(axis=0) - reference_SN.mean(axis=0)
    return Difference(
        float(by_resampling.mean()),
        _interval(by_resampling, shared=TEST_SHARE / (1 - TEST_SHARE)),
        _interval(by_seed, shared=0.0) if len(by_seed) > 1 else None,
    )


def _interval(differences: Numbers, *, shared: float) -> Interval:
    """Return the 95 % interval of a mean whose variance is that of the differences times (1 / number + `shared`)."""
    from scipy.stats import t

    number = len(differences)
    if number < 2:
        return math.nan, math.nan
    half = t.ppf(0.975, number - 1) * differences.std(ddof=1) * math.sqrt(1 / number + shared)
    return float(differences.mean() - half), float(differences.mean() + half)


def token_counts(data: ProbeData, tokenizer: Tokenizer) -> list[Features]:
    """Return for each part of the rows log(1 + count) of the most frequent tokens."""
    counted = [[Counter(tokenizer.encode(text)) for text in part] for part in data.parts]
    totals: Counter[int] = sum((row for part in counted for row in part), Counter())
    frequent = [token for token, _ in totals.most_common(NUM_COUNTED_TOKENS)]
    return [np.log1p([[row[token] for token in frequent] for row in part]).astype(np.float32) for part in counted]


def join_parts(parts: Sequence[Features]) -> Features:
    """Return the features of each row: (R, F) its vector u, or (R, 4 F) u, v, |u - v| and u * v of a pair."""
    if len(parts) == 1:
        return parts[0]
    u, v = parts
    return np.concatenate([u, v, np.abs(u - v), u * v], axis=1)
