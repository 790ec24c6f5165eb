"""Baseline for molecules: ECFP4 fingerprints and a random forest, on the same rows as the model.

Axes: N molecules of a split, C outputs, K bits.
"""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from exlm_cli.errors import ConfigError
from exlm_cli.progress import Bar, Progress
from exlm_cli.tasks.base import DownstreamTask, FloatArray, Split
from exlm_cli.tasks.molecules import parse_molecule
from exlm_cli.tasks.row_task import TableTask

RADIUS = 2
"""Bonds around each atom; ECFP4 counts them on both sides."""
NUM_BITS = 2048
NUM_TREES = 500
_MIN_PROBABILITY = 1e-12
"""A forest may be certain; its logit must be finite."""

Fingerprints = NDArray[np.uint8]


def score_baseline(
    task: DownstreamTask, seed: int, progress: Progress, *, num_trees: int = NUM_TREES, num_jobs: int = -1
) -> dict[str, dict[str, float]]:
    """Train a forest for each label on the training rows, and score it on the other splits.

    Nothing is chosen on the validation rows. A label with one class among its known training rows predicts that class.

    Args:
        task: A task of molecules: MoleculeNet or a CSV.
        seed: Seed of the forests, below 2**63 as in recipes.
        progress: Shows how many labels are done.
        num_trees: Trees of each forest.
        num_jobs: Processor cores; -1: all. The scores do not depend on it.

    Returns:
        Metrics by split, `valid` and where there is one `test`.

    Raises:
        ConfigError: The rows of the task are not molecules of a table.
    """
    if not isinstance(task, TableTask) or task.input_kind != "smiles":
        raise ConfigError(f"the baseline is for molecules; {task.name} has none", "use `baseline=false`")
    features = {split: fingerprints([smiles for (smiles,) in task.examples[split].texts]) for split in task.splits}
    others: list[Split] = [split for split in task.splits if split != "train"]
    with progress.bar("random forests", task.examples["train"].targets.shape[1]) as bar:
        outputs = _fit_and_predict(task, features, others, bar, seed=seed, num_trees=num_trees, num_jobs=num_jobs)
    return {split: task.score(split, list(outputs[split])) for split in others}


def fingerprints(smiles: list[str]) -> Fingerprints:
    """Return (N, K) ECFP4 bits; every row must be a molecule (`parse_molecule`)."""
    from rdkit.Chem import rdFingerprintGenerator

    generator = rdFingerprintGenerator.GetMorganGenerator(radius=RADIUS, fpSize=NUM_BITS)
    bits = np.empty((len(smiles), NUM_BITS), dtype=np.uint8)
    for row, text in enumerate(smiles):
        molecule, _ = parse_molecule(text)
        assert molecule is not None, "the task holds molecules only"
        bits[row] = generator.GetFingerprintAsNumPy(molecule)
    return bits


def _fit_and_predict(
    task: TableTask,
    features: dict[Split, Fingerprints],
    others: list[Split],
    bar: Bar,
    *,
    seed: int,
    num_trees: int,
    num_jobs: int,
) -> dict[Split, FloatArray]:
    """Return (N, C) outputs of each split as the task scores them: logits, or values."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    targets_NC = task.examples["train"].targets
    kind: Any = RandomForestRegressor if task.loss == "regression" else RandomForestClassifier
    columns: dict[Split, list[FloatArray]] = {split: [] for split in others}
    for index in range(targets_NC.shape[1]):
        is_known = ~np.isnan(targets_NC[:, index])
        forest = None
        if is_known.any():
            forest = kind(n_estimators=num_trees, random_state=_forest_seed(seed), n_jobs=num_jobs)
            forest.fit(features["train"][is_known], targets_NC[is_known, index])
        for split in others:
            columns[split].append(_outputs(task, forest, features[split]))
        bar.update(index + 1)
    return {split: np.concatenate(found, axis=1) for split, found in columns.items()}


def _forest_seed(seed: int) -> int:
    """Return a seed of the 32 bits that scikit-learn takes: the seed itself where it fits, else one drawn from it."""
    return seed if seed < 2**32 else int(np.random.SeedSequence(seed).generate_state(1)[0])


def _outputs(task: TableTask, forest: Any, bits: Fingerprints) -> FloatArray:
    """Return (N, 1) values or logits of a label, (N, C) log-probabilities of classes."""
    if task.loss == "regression":
        values = forest.predict(bits) if forest is not None else np.zeros(len(bits))
        return cast(FloatArray, values[:, None])
    num_classes = len(task.output_names) if task.loss == "classes" else 2
    probabilities = np.zeros((len(bits), num_classes))
    if forest is not None:
        probabilities[:, forest.classes_.astype(int)] = forest.predict_proba(bits)
    log_probabilities = np.log(probabilities.clip(_MIN_PROBABILITY, 1.0))
    if task.loss == "classes":
        return cast(FloatArray, log_probabilities)
    return cast(FloatArray, log_probabilities[:, 1:] - log_probabilities[:, :1])
