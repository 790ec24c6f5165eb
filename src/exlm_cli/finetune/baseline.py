"""Baseline for molecules: ECFP4 fingerprints and a random forest, on the same rows as the model.

Axes: N molecules of a split, C outputs, K features.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data.molecules import fingerprints
from exlm_cli.finetune.results import LabelScores, Scores
from exlm_cli.progress import Progress
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import DownstreamTask, FloatArray, Split
from exlm_cli.tasks.rows.task import TableTask

NUM_TREES = 500
_MAX_FEATURES = "sqrt"
"""Bits tried at each split of a tree. With all of them, a regression of 800 molecules takes minutes."""
_MIN_PROBABILITY = 1e-12
"""A forest may be certain; its logit must be finite."""

Features = NDArray[Any]


def score_baseline(
    task: DownstreamTask,
    seed: int,
    progress: Progress,
    *,
    features: Callable[[Sequence[str]], Features] = fingerprints,
    num_trees: int = NUM_TREES,
    num_threads: int | None = None,
) -> tuple[Scores, LabelScores]:
    """Train a forest for each label on the training rows, and score it on the other splits.

    Nothing is chosen on the validation rows. A label with one class in its known training rows gets that class.

    Args:
        task: A task of molecules: MoleculeNet or a CSV.
        seed: Seed of the forests, below 2**63 as in recipes.
        features: Returns (N, K) features of N SMILES.
        num_threads: Threads that grow trees; None: one for each core.

    Returns:
        Metrics of `valid` and, if it exists, `test`, by split; those of each label, where there are several.
    """
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    assert isinstance(task, TableTask), "a task of molecules is a table"
    inputs = {split: features([smiles for (smiles,) in task.examples[split].texts]) for split in task.splits}
    outputs: dict[Split, list[FloatArray]] = {split: [] for split in task.splits if split != "train"}
    targets_NC = task.examples["train"].targets
    kind: Any = RandomForestRegressor if task.loss == "regression" else RandomForestClassifier
    with progress.bar("random forests", targets_NC.shape[1]) as bar:
        for index, target_N in enumerate(targets_NC.T):
            is_known = ~np.isnan(target_N)
            forest = None
            if is_known.any():
                forest = kind(
                    n_estimators=num_trees,
                    max_features=_MAX_FEATURES,
                    random_state=_forest_seed(seed),
                    n_jobs=num_threads or -1,
                )
                forest.fit(inputs["train"][is_known], target_N[is_known])
                forest.n_jobs = 1  # threads would add the trees' predictions up in an order of their own
            for split, columns in outputs.items():
                columns.append(_outputs(task, forest, inputs[split]))
            bar.update(index + 1)
    scores: Scores = {}
    labels: LabelScores = {}
    for split, columns in outputs.items():
        predicted_NC = metrics.to_probabilities(task.loss, np.concatenate(columns, axis=1))
        targets_NC = task.examples[split].targets
        scores[split] = dict(metrics.score_rows(task.loss, predicted_NC, targets_NC, task.target_scale))
        if of_labels := metrics.score_labels(task.loss, predicted_NC, targets_NC, task.output_names):
            labels[split] = {name: dict(of_label) for name, of_label in of_labels.items()}
    return scores, labels


def _forest_seed(seed: int) -> int:
    """Return a seed of the 32 bits that scikit-learn takes: the seed itself where it fits, else one drawn from it."""
    return seed if seed < 2**32 else int(np.random.SeedSequence(seed).generate_state(1)[0])


def _outputs(task: TableTask, forest: Any, inputs: Features) -> FloatArray:
    """Return (N, 1) values or logits of a label, (N, C) log-probabilities of classes."""
    if task.loss == "regression":
        values = forest.predict(inputs) if forest is not None else np.zeros(len(inputs))
        return cast(FloatArray, values[:, None])
    num_classes = len(task.output_names) if task.loss == "classes" else 2
    probabilities = np.zeros((len(inputs), num_classes))
    if forest is not None:
        probabilities[:, forest.classes_.astype(int)] = forest.predict_proba(inputs)
    log_probabilities = np.log(probabilities.clip(_MIN_PROBABILITY, 1.0))
    if task.loss == "classes":
        return cast(FloatArray, log_probabilities)
    return cast(FloatArray, log_probabilities[:, 1:] - log_probabilities[:, :1])
