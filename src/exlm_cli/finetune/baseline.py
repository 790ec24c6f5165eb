"""Baselines for molecules: random forests on ECFP4 fingerprints and on RDKit's 2D descriptors, on the model's rows.

Axes: N molecules of a split, C outputs, D features.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from exlm_cli.finetune.features import FEATURE_SETS, Features, FeatureSet, FeatureStore
from exlm_cli.finetune.forests import Forests, plain_forests
from exlm_cli.finetune.scores import BASELINE_NAMES
from exlm_cli.progress import Progress
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import DownstreamTask, FloatArray, Loss, Split
from exlm_cli.tasks.rows.task import RowTask

NUM_TREES = 500
MAX_LABELLED_ROWS = 200_000
"""Training rows times labels above which no baseline is trained unless it is asked for: forests would take hours."""
_MIN_PROBABILITY = 1e-12
"""A forest may be certain; its logit must be finite."""


@dataclass(frozen=True)
class Baseline:
    """Features of molecules, and how a forest uses them.

    Attributes:
        features: What it reads of a molecule.
        max_features: Features of a regression that are tried at each split of a tree, as scikit-learn names it; of
            classes it is their square root.
    """

    model: str
    features: FeatureSet
    max_features: str | float

    @property
    def name(self) -> str:
        """How reports name it."""
        return BASELINE_NAMES[self.model]


BASELINES = (
    # with all 2,048 bits at each split, a regression of 800 molecules takes minutes
    Baseline("forest-ecfp4", FEATURE_SETS["ecfp4"], "sqrt"),
    # a third is usual; on ESOL it is better than the square root
    Baseline("forest-rdkit2d", FEATURE_SETS["rdkit2d"], 1 / 3),
)


def is_affordable(task: DownstreamTask) -> bool:
    """Return whether baselines are for this task, and are trained in minutes."""
    is_table = isinstance(task, RowTask) and task.input_kind == "smiles"
    return is_table and task.split_sizes["train"] * len(task.output_names) <= MAX_LABELLED_ROWS


@dataclass(frozen=True)
class BaselineData:
    """The rows of a task as a baseline reads them.

    Attributes:
        features: (N, F) of each split, NaN where missing.
    """

    task: RowTask
    baseline: Baseline
    features: dict[Split, Features]


def describe_molecules(
    task: DownstreamTask, baseline: Baseline, store: FeatureStore, progress: Progress
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
    feature without a value gets the median of the training rows.

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
                    forest.fit(training_NF[is_known], target_N[is_known])
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
