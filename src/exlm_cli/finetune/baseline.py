"""Baselines for molecules: random forests on ECFP4 fingerprints and on RDKit's 2D descriptors, on the model's rows.

Axes: N molecules of a split, C outputs, D features.
"""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from exlm_cli.finetune.features import FEATURE_SETS, Features, FeatureSet, FeatureStore
from exlm_cli.finetune.scores import BASELINE_NAMES
from exlm_cli.progress import Progress
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import DownstreamTask, FloatArray, Split
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


def predict_baseline(
    task: DownstreamTask,
    baseline: Baseline,
    store: FeatureStore,
    seed: int,
    progress: Progress,
    *,
    num_trees: int = NUM_TREES,
    num_threads: int | None = None,
) -> dict[Split, FloatArray]:
    """Train a forest for each label on the training rows, and predict the other splits.

    Nothing is chosen on the validation rows. A label with one class in its known training rows gets that class. A
    feature without a value gets the median of the training rows.

    Args:
        task: A task of molecules: MoleculeNet or a CSV.
        store: Features that are known, which grows.
        seed: Seed of the forests, below 2**63 as in recipes.
        num_threads: Threads that grow trees; None: one for each core.

    Returns:
        (N, C) probabilities or values for `valid` and, if it exists, `test`.
    """
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    assert isinstance(task, RowTask), "a task of molecules has rows"
    texts = {split: [smiles for (smiles,) in task.examples[split].texts] for split in task.splits}
    # all splits at once, so that the work is spread evenly
    together = store.features(baseline.features, [text for split in task.splits for text in texts[split]], progress)
    ends = np.cumsum([len(texts[split]) for split in task.splits])[:-1]
    features: dict[Split, Features] = dict(zip(task.splits, np.split(together, ends), strict=True))
    features = _without_gaps(features)
    outputs: dict[Split, list[FloatArray]] = {split: [] for split in task.splits if split != "train"}
    targets_NC = task.examples["train"].targets
    kind: Any = RandomForestRegressor if task.loss == "regression" else RandomForestClassifier
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
                forest.fit(features["train"][is_known], target_N[is_known])
                forest.n_jobs = 1  # threads would add the trees' predictions up in an order of their own
            for split, columns in outputs.items():
                columns.append(_outputs(task, forest, features[split]))
            bar.update(index + 1)
    return {
        split: metrics.to_probabilities(task.loss, np.concatenate(columns, axis=1))
        for split, columns in outputs.items()
    }


def _without_gaps(features: dict[Split, Features]) -> dict[Split, Features]:
    """Return features with the training rows' median, or 0 without one, in place of NaN."""
    if features["train"].dtype == np.uint8 or not any(np.isnan(of_split).any() for of_split in features.values()):
        return features
    known = ~np.isnan(features["train"]).all(axis=0)
    median_D = np.zeros(features["train"].shape[1], dtype=features["train"].dtype)
    median_D[known] = np.nanmedian(features["train"][:, known], axis=0)
    return {split: np.where(np.isnan(of_split), median_D, of_split) for split, of_split in features.items()}


def _forest_seed(seed: int) -> int:
    """Return a seed of the 32 bits that scikit-learn takes: the seed itself where it fits, else one drawn from it."""
    return seed if seed < 2**32 else int(np.random.SeedSequence(seed).generate_state(1)[0])


def _outputs(task: RowTask, forest: Any, features: Features) -> FloatArray:
    """Return (N, 1) values or logits of a label, (N, C) log-probabilities of classes."""
    if task.loss == "regression":
        values = forest.predict(features) if forest is not None else np.zeros(len(features))
        return cast(FloatArray, values[:, None])
    num_classes = len(task.output_names) if task.loss == "classes" else 2
    probabilities = np.zeros((len(features), num_classes))
    if forest is not None:
        probabilities[:, forest.classes_.astype(int)] = forest.predict_proba(features)
    log_probabilities = np.log(probabilities.clip(_MIN_PROBABILITY, 1.0))
    if task.loss == "classes":
        return cast(FloatArray, log_probabilities)
    return cast(FloatArray, log_probabilities[:, 1:] - log_probabilities[:, :1])
