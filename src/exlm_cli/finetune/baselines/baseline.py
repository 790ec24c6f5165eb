"""Baselines on the model's rows: of molecules random forests and gradient boosting, of texts TF-IDF.

A baseline is one class: `fit` and `read` return one that has learned, which predicts and is written as plain arrays.

Axes: N rows of a split, C outputs, F features.
"""

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from exlm_cli.finetune.baselines.boosting import grow_boosting
from exlm_cli.finetune.baselines.forests import (
    MIN_PROBABILITY,
    Forests,
    TrainingRows,
    plain_forests,
    read_forests,
    write_forests,
)
from exlm_cli.finetune.baselines.tfidf import Tfidf, fit_tfidf, read_tfidf, write_tfidf
from exlm_cli.finetune.features import FeatureKind, Features, FeatureStore, feature_names
from exlm_cli.finetune.scores import BASELINE_NAMES
from exlm_cli.progress import Progress
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import DownstreamTask, FloatArray, Loss
from exlm_cli.tasks.rows.task import RowTask

NUM_TREES = 500
MAX_LABELLED_ROWS = {"smiles": 200_000, "text": 1_000_000}
"""Training rows times outputs above which no baseline is trained unless it is asked for: forests would take hours, a
linear model of texts minutes."""
MAX_FOREST_VALUES = 25_000
"""The same for values of molecules, whose trees end in single rows: 500 trees have 631 nodes a training row, of 72
bytes in scikit-learn and 24 in the run, twice while they are copied: 1.9 GB at 25,000 rows, 7.6 GB at 100,000."""


class Baseline(ABC):
    """What the model is compared with.

    Attributes:
        model: Its name in `scores.csv` and in `baselines/` of a run.
        file: Its file in the folder of a seed, `baselines/<model>/split-<split_seed>/seed-<seed>/`.
        has_seed: Whether the seed changes what it learns; else only the first seed's folder has its file.
    """

    model: str
    file: ClassVar[str]
    has_seed: ClassVar[bool]

    @property
    def name(self) -> str:
        """How reports name it."""
        return BASELINE_NAMES[self.model]

    @abstractmethod
    def fit(
        self, task: RowTask, seed: int, store: FeatureStore, progress: Progress, *, num_threads: int | None = None
    ) -> Self:
        """Return it trained on the training rows; nothing is chosen on the validation rows.

        Args:
            seed: Below 2**63, as in recipes.
            store: Features of molecules that are known, which grows.
            num_threads: Threads that train it; None: one for each core.
        """

    @abstractmethod
    def read(self, path: Path, hint: str, *, loss: Loss, num_outputs: int, num_texts: int, store: FeatureStore) -> Self:
        """Return it as `write` kept it.

        Args:
            hint: How to get the file back.
            loss, num_outputs, num_texts: Loss and C of the run; texts of a row.
            store: As for `fit`.

        Raises:
            CheckpointError: The file is missing or altered, or not of such a run.
        """

    @abstractmethod
    def predict(self, texts: Sequence[tuple[str, ...]], progress: Progress) -> FloatArray:
        """Return (N, C) probabilities or values of rows of one or two texts, or one SMILES."""

    @abstractmethod
    def write(self, path: Path) -> None:
        """Write it as plain arrays; raises `CheckpointError` if the file cannot be written."""


@dataclass(frozen=True)
class TreeBaseline(Baseline):
    """Trees for each label or value of molecules.

    Attributes:
        features: What it reads of a molecule.
        forests, loss, store: What it has learned, of which task; and features that are known. None before.
    """

    model: str
    features: tuple[FeatureKind, ...]
    forests: Forests | None = None
    loss: Loss = "binary"
    store: FeatureStore | None = None
    file: ClassVar[str] = "forests.npz"
    has_seed: ClassVar[bool] = True

    @abstractmethod
    def grow(self, rows: TrainingRows) -> Forests:
        """Return trees that are trained on rows."""

    @abstractmethod
    def shape(self, loss: Loss, num_outputs: int) -> tuple[int, int]:
        """Return number of forests and of values of a leaf."""

    @abstractmethod
    def to_predictions(self, found_NLV: FloatArray) -> FloatArray:
        """Return (N, C) probabilities or values of what the trees give."""

    def fit(
        self, task: RowTask, seed: int, store: FeatureStore, progress: Progress, *, num_threads: int | None = None
    ) -> Self:
        """Grow trees."""
        fitted = replace(self, loss=task.loss, store=store)
        # the molecules of all splits at once, so that the work is spread evenly
        fitted.read_features([text for split in task.splits for (text,) in task.examples[split].texts], progress)
        training_NF = fitted.read_features([text for (text,) in task.examples["train"].texts], progress)
        fill_F = medians(training_NF)
        filled_NF = np.where(np.isnan(training_NF), fill_F, training_NF)
        rows = TrainingRows(task, filled_NF, fill_F, _seed_of_32_bits(seed), progress, num_threads)
        return replace(fitted, forests=self.grow(rows))

    def read_features(self, smiles: Sequence[str], progress: Progress) -> Features:
        """Return (N, F) features of molecules, NaN where one is missing."""
        assert self.store is not None, "it was fitted or read"
        parts = [self.store.features(kind, smiles, progress) for kind in self.features]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def read(self, path: Path, hint: str, *, loss: Loss, num_outputs: int, num_texts: int, store: FeatureStore) -> Self:
        """Return trees of a file."""
        del num_texts  # a row is one molecule
        num_labels, num_values = self.shape(loss, num_outputs)
        num_features = sum(len(feature_names(kind)) for kind in self.features)
        forests = read_forests(path, hint, num_labels=num_labels, num_values=num_values, num_features=num_features)
        return replace(self, forests=forests, loss=loss, store=store)

    def predict(self, texts: Sequence[tuple[str, ...]], progress: Progress) -> FloatArray:
        """Return (N, C) probabilities or values of molecules."""
        assert self.forests is not None, "it was fitted or read"
        features_NF = self.read_features([smiles for (smiles,) in texts], progress)
        return self.to_predictions(self.forests.predict(features_NF))

    def write(self, path: Path) -> None:
        """Write the trees."""
        assert self.forests is not None, "it was fitted or read"
        write_forests(path, self.forests)


@dataclass(frozen=True)
class ForestBaseline(TreeBaseline):
    """A random forest for each label or value.

    Attributes:
        max_features: Features of a regression that are tried at each split of a tree, as scikit-learn names it; of
            classes it is their square root.
    """

    max_features: str | float = "sqrt"

    def grow(self, rows: TrainingRows) -> Forests:
        """Grow random forests."""
        return grow_forests(self, rows)

    def shape(self, loss: Loss, num_outputs: int) -> tuple[int, int]:
        """Return a forest for all classes or each label or value; a leaf has a value, or shares of classes."""
        return 1 if loss == "classes" else num_outputs, num_values(loss, num_outputs) or 1

    def to_predictions(self, found_NLV: FloatArray) -> FloatArray:
        """Return shares of the trees' leaves, or means."""
        if self.loss == "regression":
            return found_NLV[:, :, 0]
        known_NLV = found_NLV.clip(MIN_PROBABILITY, 1.0)
        known_NLV /= known_NLV.sum(axis=2, keepdims=True)
        return known_NLV[:, 0] if self.loss == "classes" else known_NLV[:, :, 1]


@dataclass(frozen=True)
class BoostingBaseline(TreeBaseline):
    """Gradient boosting for each label or value, or for all classes."""

    def grow(self, rows: TrainingRows) -> Forests:
        """Boost trees."""
        return grow_boosting(self.name, rows)

    def shape(self, loss: Loss, num_outputs: int) -> tuple[int, int]:
        """Return a score for each label, value or class."""
        del loss
        return num_outputs, 1

    def to_predictions(self, found_NLV: FloatArray) -> FloatArray:
        """Return probabilities of the scores, or the scores."""
        return metrics.to_probabilities(self.loss, found_NLV[:, :, 0])


@dataclass(frozen=True)
class TfidfBaseline(Baseline):
    """TF-IDF of words and pairs of words, with logistic regression of labels and classes or ridge regression of values.

    It has no seed, and nothing is drawn. `fitted` is what it has learned, None before.
    """

    model: str = "tfidf"
    fitted: Tfidf | None = None
    file: ClassVar[str] = "tfidf.npz"
    has_seed: ClassVar[bool] = False

    def fit(
        self, task: RowTask, seed: int, store: FeatureStore, progress: Progress, *, num_threads: int | None = None
    ) -> Self:
        """Fit the linear models."""
        del seed, store, num_threads
        rows, num_outputs = task.examples["train"], len(task.output_names)
        found = fit_tfidf(
            task.loss,
            rows.texts,
            rows.targets,
            num_outputs,
            progress,
            class_weights=task.class_weights,
            weights_N=rows.weights,
        )
        return replace(self, fitted=found)

    def read(self, path: Path, hint: str, *, loss: Loss, num_outputs: int, num_texts: int, store: FeatureStore) -> Self:
        """Return the linear models of a file."""
        del store
        return replace(self, fitted=read_tfidf(path, hint, loss=loss, num_outputs=num_outputs, num_texts=num_texts))

    def predict(self, texts: Sequence[tuple[str, ...]], progress: Progress) -> FloatArray:
        """Return (N, C) probabilities or values of texts or pairs."""
        del progress  # it takes no time
        assert self.fitted is not None, "it was fitted or read"
        return self.fitted.predict(texts)

    def write(self, path: Path) -> None:
        """Write the vocabulary and the weights."""
        assert self.fitted is not None, "it was fitted or read"
        write_tfidf(path, self.fitted)


TREES: tuple[TreeBaseline, ...] = (
    # with all 2,048 bits at each split, a regression of 800 molecules takes minutes
    ForestBaseline("forest-ecfp4", ("ecfp4",)),
    # a third is usual; on ESOL it is better than the square root
    ForestBaseline("forest-rdkit2d", ("rdkit2d",), max_features=1 / 3),
    BoostingBaseline("boosting", ("rdkit2d", "ecfp4-counts")),
)
TFIDF = TfidfBaseline()
BASELINES: dict[str, Baseline] = {baseline.model: baseline for baseline in (*TREES, TFIDF)}
"""All of them by name."""


def baselines_of(task: DownstreamTask) -> tuple[Baseline, ...]:
    """Return the baselines of a task; none where a row is not one or two texts or a molecule, as in SQuAD."""
    if not isinstance(task, RowTask):
        return ()
    return TREES if task.input_kind == "smiles" else (TFIDF,)


def is_affordable(task: DownstreamTask) -> bool:
    """Return whether a task has baselines that take seconds, or for molecules minutes, and not gigabytes."""
    num_labelled = task.split_sizes["train"] * len(task.output_names)
    limit = MAX_LABELLED_ROWS[task.input_kind]
    if task.input_kind == "smiles" and task.loss == "regression":
        limit = min(limit, MAX_FOREST_VALUES)
    return bool(baselines_of(task)) and num_labelled <= limit


def fit_baseline(
    baseline: Baseline, task: RowTask, seed: int, store: FeatureStore, progress: Progress, *, num_threads: int | None
) -> Baseline:
    """Return a baseline trained on the training rows; arguments as for `Baseline.fit`.

    Where rows have bounds, it is trained twice: on the rows with values, and then on all. A row with a bound has the
    value that the first training predicts for it, which has not seen it, or its bound where that is on the wrong side.
    """
    fitted, rows = baseline.fit(task, seed, store, progress, num_threads=num_threads), task.examples["train"]
    if rows.bounds is None:
        return fitted
    low_NC, high_NC = np.moveaxis(rows.bounds, 2, 0)
    filled_NC = np.where(rows.is_known, fitted.predict(rows.texts, progress).clip(low_NC, high_NC), np.nan)
    filled = copy.copy(task)
    filled.examples = {**task.examples, "train": replace(rows, targets=filled_NC)}
    return baseline.fit(filled, seed, store, progress, num_threads=num_threads)


def grow_forests(baseline: ForestBaseline, rows: TrainingRows) -> Forests:
    """Train a forest for each label; a label with one class in its known training rows gets that class."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    loss = rows.task.loss
    kind: Any = RandomForestRegressor if loss == "regression" else RandomForestClassifier
    grown: list[Any | None] = []
    for is_known, target_n, weights_n in rows.labels(baseline.name):
        forest = None
        if is_known.any():
            forest = kind(
                n_estimators=NUM_TREES,
                max_features=baseline.max_features if loss == "regression" else "sqrt",
                random_state=rows.seed,
                n_jobs=rows.num_threads or -1,
            )
            with warnings.catch_warnings():  # where labels are called classes, many of them are meant
                warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
                forest.fit(rows.features[is_known], target_n, sample_weight=weights_n)
        grown.append(forest)
    return plain_forests(grown, num_values(loss, len(rows.task.output_names)), rows.fill)


def num_values(loss: Loss, num_outputs: int) -> int | None:
    """Return the classes that the forest of a label tells apart; None: it predicts a value."""
    return None if loss == "regression" else num_outputs if loss == "classes" else 2


def medians(training_NF: Features) -> Features:
    """Return (F,) the medians of the training rows, 0 without one."""
    median_F = np.zeros(training_NF.shape[1], dtype=np.float32)
    if training_NF.dtype != np.uint8:
        known = ~np.isnan(training_NF).all(axis=0)
        median_F[known] = np.nanmedian(training_NF[:, known], axis=0)
    return median_F


def _seed_of_32_bits(seed: int) -> int:
    """Return a seed of the 32 bits that scikit-learn takes: the seed itself where it fits, else one drawn from it."""
    return seed if seed < 2**32 else int(np.random.SeedSequence(seed).generate_state(1)[0])
