"""Trees of scikit-learn: what they are trained on, and plain arrays of them, which a run keeps without pickle.

Axes: L labels or values, each with a forest of its own or none; N rows, n of them with a known label, F features, M
nodes of all trees, T trees of all forests, V numbers of a node.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data import BoolArray, IntArray
from exlm_cli.errors import CheckpointError
from exlm_cli.finetune.baselines.arrays import read_arrays, write_arrays
from exlm_cli.finetune.features import Features
from exlm_cli.progress import Progress
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import FloatArray
from exlm_cli.tasks.rows.task import RowTask

MIN_PROBABILITY = 1e-12
"""Trees may be certain, but their probabilities are none of 0 or 1."""
_BLOCK = 8192
"""Rows that go down the trees together."""
_TYPES = {
    "children": ("int32", 2),
    "feature": ("int32", 1),
    "threshold": ("float32", 1),
    "value": ("float64", 2),
    "tree_ends": ("int64", 1),
    "forest_ends": ("int64", 1),
    "fill": ("float32", 1),
}
"""Type and number of axes of each array of a file."""


@dataclass(frozen=True)
class TrainingRows:
    """Training rows of a task, and how trees are trained on them.

    Attributes:
        task: Has their targets and what they weigh.
        features: (N, F), without missing values.
        fill: (F,), what stood in for them.
        seed: Of 32 bits.
        num_threads: None: one for each core.
    """

    task: RowTask
    features: Features
    fill: Features
    seed: int
    progress: Progress
    num_threads: int | None = None

    def labels(self, name: str) -> Iterator[tuple[BoolArray, FloatArray, FloatArray | None]]:
        """Yield for each label or value, behind a bar, the N rows where it is known, its n values and their weights.

        Rows weigh as in the model's loss (`task.class_weights`), so that probabilities of trees and of the model are of
        the same classes, equally frequent or not.

        Args:
            name: For the bar.
        """
        rows = self.task.examples["train"]
        with self.progress.bar(name, rows.targets.shape[1]) as bar:
            for index, target_N in enumerate(rows.targets.T):
                is_known = ~np.isnan(target_N)
                own_n = None if rows.weights is None else rows.weights[is_known]
                target_n = target_N[is_known]
                weights_n = metrics.row_weights(self.task.loss, self.task.class_weights, target_n, index, own_n)
                yield is_known, target_n, weights_n
                bar.update(index + 1)


@dataclass(frozen=True)
class Forests:
    """A forest for each label, class column or value.

    Attributes:
        children: (M, 2) how far behind a node its left and its right child are, both 0 for a leaf. Children come after
            their parent, so no way leads back.
        feature: (M,) which a node asks about; 0 for a leaf.
        threshold: (M,) float32: a row goes left where its feature, float32, is at most this.
        value: (M, V) of a leaf: its mean, or its share of each class, 0 for other nodes.
        tree_ends: (T,) end of each tree in the nodes.
        forest_ends: (L,) end of each forest in the trees; one without trees predicts zeros.
        fill: (F,) what stands in for a missing feature.
    """

    children: NDArray[np.int32]
    feature: NDArray[np.int32]
    threshold: NDArray[np.float32]
    value: FloatArray
    tree_ends: IntArray
    forest_ends: IntArray
    fill: NDArray[np.float32]

    def predict(self, features_NF: NDArray[Any]) -> FloatArray:
        """Return (N, L, V) the means over the trees, added up in their order as scikit-learn does in one thread."""
        found_NLV = np.zeros((len(features_NF), len(self.forest_ends), self.value.shape[1]))
        for start in range(0, len(features_NF), _BLOCK):
            rows_nF = features_NF[start : start + _BLOCK].astype(np.float32)
            rows_nF = np.where(np.isnan(rows_nF), self.fill, rows_nF)
            for label, trees in enumerate(_ranges(self.forest_ends)):
                into_nV = found_NLV[start : start + _BLOCK, label]
                for tree in trees:
                    into_nV += self.value[self._leaves(rows_nF, tree)]
                into_nV /= max(1, len(trees))
        return found_NLV

    def _leaves(self, rows_nF: NDArray[np.float32], tree: int) -> IntArray:
        """Return (n,) the leaf that each row reaches."""
        at_n = np.full(len(rows_nF), self.tree_ends[tree - 1] if tree else 0)
        going = np.arange(len(rows_nF))
        while len(going):
            at = at_n[going]
            goes_right = rows_nF[going, self.feature[at]] > self.threshold[at]
            step = self.children[at, goes_right.astype(np.int8)]
            at_n[going] += step
            going = going[step > 0]
        return at_n


def _ranges(ends: IntArray) -> Iterator[range]:
    starts = [0, *ends[:-1].tolist()]
    return (range(start, end) for start, end in zip(starts, ends.tolist(), strict=True))


def plain_forests(grown: list[Any | None], num_classes: int | None, fill: NDArray[Any]) -> Forests:
    """Return fitted forests of scikit-learn as arrays.

    Args:
        grown: A `RandomForestRegressor` or `RandomForestClassifier` for each label; None: there was nothing to learn.
        num_classes: V classes, of which a classifier may know some; None: values.
        fill: (F,) what stood in for a missing feature.
    """
    trees = (
        () if forest is None else (_tree(each.tree_, forest, num_classes) for each in forest.estimators_)
        for forest in grown
    )
    return join_trees(trees, num_classes or 1, fill)


class Tree(NamedTuple):
    """A tree of M nodes, as in `Forests`; of a leaf only the value is read, of other nodes all but it."""

    children: NDArray[Any]
    feature: NDArray[Any]
    threshold: NDArray[Any]
    value: FloatArray
    is_inner: NDArray[np.bool_]


def _tree(tree: Any, forest: Any, num_classes: int | None) -> Tree:
    children = np.stack([tree.children_left, tree.children_right], axis=1) - np.arange(tree.node_count)[:, None]
    value = np.zeros((tree.node_count, num_classes or 1))
    value[:, slice(None) if num_classes is None else forest.classes_.astype(int)] = tree.value[:, 0, :]
    return Tree(children, tree.feature, tree.threshold, value, tree.children_left >= 0)


def join_trees(trees: Iterable[Iterable[Tree]], num_values: int, fill: NDArray[Any]) -> Forests:
    """Return L forests of trees in one.

    Args:
        num_values: V of every tree.
        fill: (F,) what stands in for a missing feature.
    """
    parts = {name: [empty] for name, empty in _empty(num_values).items()}
    sizes, num_trees = [], []
    for forest in trees:
        num_trees.append(0)
        for tree in forest:  # one after the other, since all trees in float64 would be large
            for name, kept in parts.items():
                kept.append(_kept(tree, name).astype(kept[0].dtype))
            sizes.append(len(tree.feature))
            num_trees[-1] += 1
    return Forests(
        **{name: np.concatenate(kept) for name, kept in parts.items()},
        tree_ends=np.cumsum(sizes, dtype=np.int64),
        forest_ends=np.cumsum(num_trees, dtype=np.int64),
        fill=fill.astype(np.float32),
    )


def _kept(tree: Tree, name: str) -> NDArray[Any]:
    """Return an array of a tree, 0 where it is not read."""
    array = _round_down(tree.threshold) if name == "threshold" else getattr(tree, name)
    is_read = ~tree.is_inner if name == "value" else tree.is_inner
    return np.where(is_read if array.ndim == 1 else is_read[:, None], array, 0)


def _empty(num_values: int) -> dict[str, NDArray[Any]]:
    return {
        "children": np.zeros((0, 2), np.int32),
        "feature": np.zeros(0, np.int32),
        "threshold": np.zeros(0, np.float32),
        "value": np.zeros((0, num_values)),
    }


def _round_down(threshold: FloatArray) -> NDArray[np.float32]:
    """Return the largest float32 that is at most each threshold: float32 features compare with it as before."""
    nearest = threshold.astype(np.float32)
    return np.where(nearest > threshold, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def write_forests(path: Path, forests: Forests) -> None:
    """Write forests as `.npz`.

    Raises:
        CheckpointError: The file cannot be written.
    """
    write_arrays(path, {name: getattr(forests, name) for name in _TYPES})


def read_forests(path: Path, hint: str, *, num_labels: int, num_values: int, num_features: int) -> Forests:
    """Return what `write_forests` wrote.

    Args:
        path: The file.
        hint: How to get it back.
        num_labels, num_values, num_features: L, V and F of the run.

    Raises:
        CheckpointError: The file is missing or altered, or its arrays are not those of such forests.
    """
    forests = Forests(**read_arrays(path, hint, _TYPES, "forests"))
    problem = _find_problem(forests, num_labels, num_values, num_features)
    if problem:
        raise CheckpointError(f"{path}: not the forests of this run: {problem}", hint)
    return forests


def _find_problem(forests: Forests, num_labels: int, num_values: int, num_features: int) -> str:
    """Return why predicting with these arrays would fail or not end; empty if it would not."""
    num_nodes, num_trees = len(forests.feature), len(forests.tree_ends)
    shapes = (len(forests.children), forests.children.shape[1], len(forests.threshold), *forests.value.shape)
    if shapes != (num_nodes, 2, num_nodes, num_nodes, num_values):
        return "arrays of different lengths"
    if len(forests.forest_ends) != num_labels or len(forests.fill) != num_features:
        return "other labels or features"
    for ends, total, least in ((forests.tree_ends, num_nodes, 1), (forests.forest_ends, num_trees, 0)):
        if (np.diff(ends, prepend=0) < least).any() or (ends[-1] if len(ends) else 0) != total:
            return "trees that do not follow each other"
    if ((forests.feature < 0) | (forests.feature >= max(1, num_features))).any():
        return "a feature that there is not"
    end_M = np.repeat(forests.tree_ends, np.diff(forests.tree_ends, prepend=0))
    behind_M2 = forests.children.astype(np.int64)
    is_leaf_M = (behind_M2 == 0).all(axis=1)
    stays_M = ((behind_M2 > 0) & (np.arange(num_nodes)[:, None] + behind_M2 < end_M[:, None])).all(axis=1)
    return "" if (is_leaf_M | stays_M).all() else "a child before its parent or in another tree"
