"""Baselines on the model's rows: of molecules random forests, of texts TF-IDF with a linear model.

A baseline is trained, kept in a run and read again by the methods of `Baseline`, whatever it is.

Axes: N rows of a split, C outputs, D features.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from exlm_cli.finetune.baselines.forests import Forests, plain_forests, read_forests, write_forests
from exlm_cli.finetune.baselines.tfidf import Tfidf, fit_tfidf, read_tfidf, write_tfidf
from exlm_cli.finetune.features import FEATURE_SETS, Features, FeatureSet, FeatureStore
from exlm_cli.finetune.scores import BASELINE_NAMES
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import DownstreamTask, FloatArray, Loss, Split
from exlm_cli.tasks.rows.task import RowTask

NUM_TREES = 500
MAX_LABELLED_ROWS = {"smiles": 200_000, "text": 1_000_000}
"""Training rows times outputs above which no baseline is trained unless it is asked for: forests would take hours, a
linear model of texts minutes."""
MAX_FOREST_VALUES = 25_000
"""The same for values of molecules, whose trees end in single rows: 500 trees have 631 nodes a training row, of 72 bytes
in scikit-learn and 24 in the run, twice while they are copied. That is 1.9 GB at 25,000 rows and 7.6 GB at 100,000."""
_MIN_PROBABILITY = 1e-12
"""A forest may be certain; its logit must be finite."""


class FittedBaseline(ABC):
    """A baseline that was trained."""

    @abstractmethod
    def predict(self, texts: Sequence[tuple[str, ...]], progress: Progress) -> FloatArray:
        """Return (N, C) probabilities or values of rows of one or two texts, or one SMILES."""

    @abstractmethod
    def write(self, path: Path) -> None:
        """Write it as plain arrays; raises `CheckpointError` if the file cannot be written."""


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
    ) -> FittedBaseline:
        """Train it on the training rows.

        Args:
            seed: Below 2**63, as in recipes.
            store: Features of molecules that are known, which grows.
            num_threads: Threads that train it; None: one for each core.
        """

    @abstractmethod
    def read(
        self, path: Path, hint: str, *, loss: Loss, num_outputs: int, num_texts: int, store: FeatureStore
    ) -> FittedBaseline:
        """Return what `FittedBaseline.write` wrote.

        Args:
            hint: How to get the file back.
            loss, num_outputs, num_texts: Loss and C of the run; texts of a row.
            store: As for `fit`.

        Raises:
            CheckpointError: The file is missing or altered, or not of such a run.
        """


@dataclass(frozen=True)
class ForestBaseline(Baseline):
    """Features of molecules, and how a forest uses them.

    Attributes:
        features: What it reads of a molecule.
        max_features: Features of a regression that are tried at each split of a tree, as scikit-learn names it; of
            classes it is their square root.
    """

    model: str
    features: FeatureSet
    max_features: str | float
    file: ClassVar[str] = "forests.npz"
    has_seed: ClassVar[bool] = True

    def fit(
        self, task: RowTask, seed: int, store: FeatureStore, progress: Progress, *, num_threads: int | None = None
    ) -> "FittedForests":
        """Grow forests."""
        data = describe_molecules(task, self, store, progress)
        return FittedForests(self, grow_forests(data, seed, progress, num_threads=num_threads), task.loss, store)

    def read(
        self, path: Path, hint: str, *, loss: Loss, num_outputs: int, num_texts: int, store: FeatureStore
    ) -> "FittedForests":
        """Return forests of a file."""
        del num_texts  # a row is one molecule
        forests = read_forests(
            path,
            hint,
            num_labels=1 if loss == "classes" else num_outputs,
            num_values=num_forest_values(loss, num_outputs) or 1,
            num_features=self.features.work_out(["C"], SilentProgress()).shape[1],
        )
        return FittedForests(self, forests, loss, store)


@dataclass(frozen=True)
class FittedForests(FittedBaseline):
    """Forests and the features that they read."""

    baseline: ForestBaseline
    forests: Forests
    loss: Loss
    store: FeatureStore

    def predict(self, texts: Sequence[tuple[str, ...]], progress: Progress) -> FloatArray:
        """Return (N, C) probabilities or values of molecules."""
        features_NF = self.store.features(self.baseline.features, [smiles for (smiles,) in texts], progress)
        return forest_predictions(self.forests, self.loss, features_NF)

    def write(self, path: Path) -> None:
        """Write the forests."""
        write_forests(path, self.forests)


@dataclass(frozen=True)
class TfidfBaseline(Baseline):
    """TF-IDF of words and pairs of words, with logistic regression of labels and classes or ridge regression of values.

    It has no seed, and nothing is drawn.
    """

    model: str = "tfidf"
    file: ClassVar[str] = "tfidf.npz"
    has_seed: ClassVar[bool] = False

    def fit(
        self, task: RowTask, seed: int, store: FeatureStore, progress: Progress, *, num_threads: int | None = None
    ) -> "FittedTfidf":
        """Fit the linear models."""
        del seed, store, num_threads
        rows = task.examples["train"]
        num_outputs, weights = len(task.output_names), task.class_weights
        return FittedTfidf(fit_tfidf(task.loss, rows.texts, rows.targets, num_outputs, progress, class_weights=weights))

    def read(
        self, path: Path, hint: str, *, loss: Loss, num_outputs: int, num_texts: int, store: FeatureStore
    ) -> "FittedTfidf":
        """Return the linear models of a file."""
        del store
        return FittedTfidf(read_tfidf(path, hint, loss=loss, num_outputs=num_outputs, num_texts=num_texts))


@dataclass(frozen=True)
class FittedTfidf(FittedBaseline):
    """Linear models on TF-IDF."""

    fitted: Tfidf

    def predict(self, texts: Sequence[tuple[str, ...]], progress: Progress) -> FloatArray:
        """Return (N, C) probabilities or values of texts or pairs."""
        del progress  # it takes no time
        return self.fitted.predict(texts)

    def write(self, path: Path) -> None:
        """Write the vocabulary and the weights."""
        write_tfidf(path, self.fitted)


FORESTS = (
    # with all 2,048 bits at each split, a regression of 800 molecules takes minutes
    ForestBaseline("forest-ecfp4", FEATURE_SETS["ecfp4"], "sqrt"),
    # a third is usual; on ESOL it is better than the square root
    ForestBaseline("forest-rdkit2d", FEATURE_SETS["rdkit2d"], 1 / 3),
)
TFIDF = TfidfBaseline()
BASELINES: dict[str, Baseline] = {baseline.model: baseline for baseline in (*FORESTS, TFIDF)}
"""All of them by name."""


def baselines_of(task: DownstreamTask) -> tuple[Baseline, ...]:
    """Return the baselines of a task; none where a row is not one or two texts or a molecule, as in SQuAD."""
    if not isinstance(task, RowTask):
        return ()
    return FORESTS if task.input_kind == "smiles" else (TFIDF,)


def is_affordable(task: DownstreamTask) -> bool:
    """Return whether a task has baselines that take seconds, or for molecules minutes, and not gigabytes."""
    num_labelled = task.split_sizes["train"] * len(task.output_names)
    limit = MAX_LABELLED_ROWS[task.input_kind]
    if task.input_kind == "smiles" and task.loss == "regression":
        limit = min(limit, MAX_FOREST_VALUES)
    return bool(baselines_of(task)) and num_labelled <= limit


@dataclass(frozen=True)
class BaselineData:
    """The molecules of a task as a forest reads them.

    Attributes:
        features: (N, F) of each split, NaN where missing.
    """

    task: RowTask
    baseline: ForestBaseline
    features: dict[Split, Features]


def describe_molecules(
    task: DownstreamTask, baseline: ForestBaseline, store: FeatureStore, progress: Progress
) -> BaselineData:
    """Work out the features of all rows of a task of molecules.

    Args:
        store: Features that are known, which grows.
    """
    assert isinstance(task, RowTask), "a task of molecules has rows"
    texts = {split: [smiles for (smiles,) in task.examples[split].texts] for split in task.splits}
    # all splits at once, so that the work is spread evenly
    together = store.features(baseline.features, [text for split in task.splits for text in texts[split]], progress)
    ends = np.cumsum([len(texts[split]) for split in task.splits])[:-1]
    return BaselineData(task, baseline, dict(zip(task.splits, np.split(together, ends), strict=True)))


def grow_forests(
    data: BaselineData,
    seed: int,
    progress: Progress,
    *,
    num_trees: int = NUM_TREES,
    num_threads: int | None = None,
) -> Forests:
    """Train a forest for each label on the training rows.

    Nothing is chosen on the validation rows. A label with one class in its known training rows gets that class. A
    feature without a value gets the median of the training rows. Rows weigh as in the model's loss
    (`task.class_weights`), so that its probabilities and the model's are of the same classes, equally frequent or not.

    Args:
        seed: Seed of the forests, below 2**63 as in recipes.
        num_threads: Threads that grow trees; None: one for each core.
    """
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    task, baseline, training_NF = data.task, data.baseline, data.features["train"]
    fill_F = _medians(training_NF)
    training_NF = np.where(np.isnan(training_NF), fill_F, training_NF)
    targets_NC = task.examples["train"].targets
    kind: Any = RandomForestRegressor if task.loss == "regression" else RandomForestClassifier
    grown: list[Any | None] = []
    with progress.bar(baseline.name, targets_NC.shape[1]) as bar:
        for index, target_N in enumerate(targets_NC.T):
            is_known = ~np.isnan(target_N)
            forest = None
            if is_known.any():
                forest = kind(
                    n_estimators=num_trees,
                    max_features=baseline.max_features if task.loss == "regression" else "sqrt",
                    random_state=_forest_seed(seed),
                    n_jobs=num_threads or -1,
                )
                with warnings.catch_warnings():  # where labels are called classes, many of them are meant
                    warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
                    weights_n = metrics.row_weights(task.loss, task.class_weights, target_N[is_known], index)
                    forest.fit(training_NF[is_known], target_N[is_known], sample_weight=weights_n)
            grown.append(forest)
            bar.update(index + 1)
    return plain_forests(grown, num_forest_values(task.loss, len(task.output_names)), fill_F)


def num_forest_values(loss: Loss, num_outputs: int) -> int | None:
    """Return the classes that the forest of a label tells apart; None: it predicts a value."""
    return None if loss == "regression" else num_outputs if loss == "classes" else 2


def forest_predictions(forests: Forests, loss: Loss, features_NF: Features) -> FloatArray:
    """Return (N, C) probabilities or values of rows."""
    found_NLV = forests.predict(features_NF)
    if loss == "regression":
        return found_NLV[:, :, 0]
    logs_NLV = np.log(found_NLV.clip(_MIN_PROBABILITY, 1.0))
    logits_NC = logs_NLV[:, 0] if loss == "classes" else logs_NLV[:, :, 1] - logs_NLV[:, :, 0]
    return metrics.to_probabilities(loss, logits_NC)


def _medians(training_NF: Features) -> Features:
    """Return (F,) the medians of the training rows, 0 without one."""
    median_F = np.zeros(training_NF.shape[1], dtype=np.float32)
    if training_NF.dtype != np.uint8:
        known = ~np.isnan(training_NF).all(axis=0)
        median_F[known] = np.nanmedian(training_NF[:, known], axis=0)
    return median_F


def _forest_seed(seed: int) -> int:
    """Return a seed of the 32 bits that scikit-learn takes: the seed itself where it fits, else one drawn from it."""
    return seed if seed < 2**32 else int(np.random.SeedSequence(seed).generate_state(1)[0])
