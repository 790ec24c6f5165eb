"""Gradient boosting of scikit-learn on molecules, kept as the arrays of forests.

A raw score is a first guess plus the sum over the trees. So that `Forests`, which take means, give it, each leaf of T
trees has the first guess plus T times its value.

Axes: N rows, F features, L scores of a row: labels, values, or classes.
"""

from typing import Any

import numpy as np
from scipy.special import logit

from exlm_cli.finetune.baselines.forests import MIN_PROBABILITY, Forests, TrainingRows, Tree, join_trees
from exlm_cli.finetune.features import Features
from exlm_cli.tasks.base import FloatArray, Loss

NUM_ROUNDS = 300
SETTINGS = {"learning_rate": 0.05, "max_features": 0.2, "min_samples_leaf": 5, "max_leaf_nodes": 8}
"""Chosen on the validation rows of ESOL (docs/lab_notes/molecules.md)."""
_NEVER = float(logit(MIN_PROBABILITY))
"""Score of a label or class that no training row has."""


def grow_boosting(name: str, rows: TrainingRows) -> Forests:
    """Train a booster for each label or value, or one for all classes; `name` is for the bar."""
    from threadpoolctl import threadpool_limits

    loss = rows.task.loss
    kept_f = _splittable(rows.features)
    kept_Nf = rows.features[:, kept_f]
    grown: list[list[Tree]] = []
    with threadpool_limits(rows.num_threads, "openmp"):
        for is_known, target_n, weights_n in rows.labels(name):
            present = np.unique(target_n)
            fitted = None
            if len(present) > 1:
                fitted = _booster(loss, rows.seed).fit(kept_Nf[is_known], target_n, sample_weight=weights_n)
            grown += _scores_of(loss, fitted, present, kept_f, len(rows.task.output_names))
    return join_trees(grown, 1, rows.fill)


def _booster(loss: Loss, seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    kind: Any = HistGradientBoostingRegressor if loss == "regression" else HistGradientBoostingClassifier
    return kind(max_iter=NUM_ROUNDS, early_stopping=False, random_state=seed, **SETTINGS)


def _splittable(training_NF: Features) -> Features:
    """Return (f,) the features that can part a leaf's least rows from the others; others cost time and do nothing."""
    is_kept = [
        len(column) - np.unique(column, return_counts=True)[1].max() >= SETTINGS["min_samples_leaf"]
        for column in training_NF.T
    ]
    return np.flatnonzero(is_kept) if any(is_kept) else np.zeros(1, dtype=np.int64)


def _scores_of(
    loss: Loss, fitted: Any | None, present: FloatArray, kept_f: Features, num_outputs: int
) -> list[list[Tree]]:
    """Return the trees of each score that a booster gives; `present` are the values, labels or classes it has seen."""
    if fitted is None and loss != "classes":  # nothing known, or one value
        always = {"regression": float(present[0]), "binary": -_NEVER if present[0] else _NEVER} if len(present) else {}
        return [[_leaf(always[loss])] if always else []]
    scores = [] if fitted is None else [_trees(fitted, place, kept_f) for place in range(fitted.n_trees_per_iteration_)]
    if loss != "classes":
        return scores
    if len(present) < 3:  # one score, of the second against the first
        scores = [[], *scores]
    by_class = dict(zip(present.astype(int).tolist(), scores, strict=True))
    return [by_class.get(index, [_leaf(_NEVER)]) for index in range(num_outputs)]


def _trees(fitted: Any, place: int, kept_f: Features) -> list[Tree]:
    """Return the trees of one of a booster's scores."""
    first, rounds = float(np.ravel(fitted._baseline_prediction)[place]), fitted._predictors
    found = []
    for of_round in rounds:
        nodes = of_round[place].nodes
        is_inner = nodes["is_leaf"] == 0
        own = np.arange(len(nodes))
        found.append(
            Tree(
                np.stack([nodes[side].astype(np.int64) - own for side in ("left", "right")], axis=1),
                kept_f[np.where(is_inner, nodes["feature_idx"], 0)],
                nodes["num_threshold"],
                (first + len(rounds) * nodes["value"])[:, None],
                is_inner,
            )
        )
    return found


def _leaf(score: float) -> Tree:
    return Tree(np.zeros((1, 2)), np.zeros(1), np.zeros(1), np.array([[score]]), np.array([False]))
