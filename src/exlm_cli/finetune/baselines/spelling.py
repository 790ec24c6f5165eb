"""Spelling check: what a run on SMILES as written may owe to the way its file writes molecules.

Axes: N molecules.
"""

import math
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from exlm_cli.finetune.baselines.baseline import ForestBaseline, describe_molecules, forest_predictions, grow_forests
from exlm_cli.finetune.features import FeatureSet, FeatureStore
from exlm_cli.format import format_number
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import DownstreamTask, Split
from exlm_cli.tasks.metrics import score_rows
from exlm_cli.tasks.rows.task import RowTask

NUM_TREES = 100
"""There are eight features, and 75,000 rows of 17 labels in MUV."""
_CLOSE = 0.05
"""Difference of two scores, or share of an error, within which spelling may explain the model's score."""
_COUNTED = tuple(map(re.compile, (r".", r"\[", r"@", r"=", r"\d", r"[bcnops]", r"\.", r"[+-](?=\d*\])")))


class _Spelling(ForestBaseline):
    """A forest on character counts; no report compares the model with it."""

    @property
    def name(self) -> str:
        """How its progress bar is called."""
        return "spelling check"


def character_counts(smiles: Sequence[str], progress: Progress | None = None) -> NDArray[np.float32]:
    """Return (N, 8): length, brackets, chirality marks, double bonds, digits, aromatic atoms, dots and charges."""
    del progress  # they take no time
    counts = [[len(pattern.findall(text)) for pattern in _COUNTED] for text in smiles]
    return np.array(counts, dtype=np.float32).reshape(len(smiles), len(_COUNTED))


def describe_spelling(
    task: DownstreamTask,
    split: Split,
    score: float | None,
    seed: int,
    progress: Progress,
    *,
    num_threads: int | None = None,
) -> str:
    """Return a note: the score of a random forest on character counts of the same SMILES, beside the model's.

    Args:
        task: A task of molecules that are read as written.
        split: Split that is scored.
        score: The model's, by the task's selection metric; None where it is not defined.
        seed: Seed of the forest.
        num_threads: Threads that grow trees; None: one for each core.
    """
    forest, store = _Spelling("spelling", FeatureSet("spelling", character_counts), "sqrt"), FeatureStore()
    data = describe_molecules(task, forest, store, progress)
    forests = grow_forests(data, seed, progress, num_trees=NUM_TREES, num_threads=num_threads)
    found_NC = forest_predictions(forests, task.loss, data.features[split])
    assert isinstance(task, RowTask), "a task of molecules has rows"
    metric = task.selection_metric
    of_forest = dict(score_rows(task.loss, found_NC, task.examples[split].targets, task.target_scale))[metric]
    if score is None or of_forest is None or math.isnan(of_forest):
        return f"spelling check: {metric} is not defined on these {split} rows"
    is_close = of_forest >= score - _CLOSE if task.is_greater_better else of_forest <= score * (1 + _CLOSE)
    note = (
        f"spelling check: a random forest on eight counts of characters of the SMILES as written has {split} {metric} "
        f"{format_number(of_forest)}, the model {format_number(score)}"
    )
    if not is_close:
        return note
    near = f"{_CLOSE:g}" if task.is_greater_better else f"{100 * _CLOSE:g} %"
    return (
        f"{note}: the model is not better by more than {near}, so its score may come from how the file writes "
        "molecules; leave out `task.canonical_smiles=false`"
    )
