"""What trees are trained on: features of the training rows, and label by label the rows where it is known."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from exlm_cli.data import BoolArray
from exlm_cli.finetune.features import Features
from exlm_cli.progress import Progress
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import FloatArray
from exlm_cli.tasks.rows.task import RowTask


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
