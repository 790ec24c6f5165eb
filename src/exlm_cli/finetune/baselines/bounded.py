"""Training of baselines, whichever they are, on rows of which some have bounds instead of values."""

import copy
from dataclasses import replace

import numpy as np

from exlm_cli.finetune.baselines.baseline import Baseline
from exlm_cli.finetune.features import FeatureStore
from exlm_cli.progress import Progress
from exlm_cli.tasks.rows.task import RowTask


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
