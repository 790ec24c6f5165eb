"""What a training leaves on disk to be taken up again: checkpoints, and the best weights where a validation selects.

The files are those of `checkpoint`. Rank 0 alone writes and deletes.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from exlm_cli.distributed.ranks import Ranks
from exlm_cli.errors import CheckpointError
from exlm_cli.files import fsync
from exlm_cli.run_dir import MetricsLog
from exlm_cli.train.checkpoint import (
    BestState,
    CheckpointState,
    LoopState,
    best_paths,
    load_model_weights,
    load_optimizer_state,
    load_state,
    remove_older,
    remove_unfinished,
    save_checkpoint,
    save_weights,
)
from exlm_cli.train.optim import LossScale
from exlm_cli.train.task import TrainTask


class Saver:
    """Saves a training, and reads back what it continues from.

    Args:
        run: Run directory, or the folder of a cell.
        task: Its model and identity are saved.
        optimizer, loss_scale: Saved too; there is a scale in fp16 alone.
        metrics: Log of the run.
        keep_last: Checkpoints that stay.
        resume_command: For the hint of an error.
        ranks: Those that train together.
    """

    def __init__(
        self,
        run: Path,
        task: TrainTask[Any],
        optimizer: torch.optim.Optimizer,
        loss_scale: LossScale | None,
        metrics: MetricsLog,
        *,
        keep_last: int,
        resume_command: str,
        ranks: Ranks,
    ) -> None:
        self._run, self._task, self._metrics = run, task, metrics
        self._optimizer, self._loss_scale = optimizer, loss_scale
        self._keep_last, self._resume_command, self._ranks = keep_last, resume_command, ranks
        self._saved_best: int | None = None  # the best step that the newest checkpoint names

    def load(self, checkpoint: Path, changes: str) -> CheckpointState:
        """Read a verified checkpoint into model, optimizer and loss scale, and return its state.

        Raises:
            CheckpointError: It belongs to other data, another recipe or another version of exlm, as for
                `TrainingLoop.resume`.
        """
        saved = load_state(checkpoint)
        for name, value in self._task.identity.items():
            if saved.identity.get(name) != value:
                raise CheckpointError(
                    f"{checkpoint}: the {name} is not the one this run began with{changes if name == 'recipe' else ''}",
                    "an exact resume needs the same inputs and recipe; start a new run for changed ones",
                )
        load_model_weights(checkpoint, self._task.model)
        load_optimizer_state(checkpoint, self._task.model, self._optimizer)
        if self._loss_scale is not None and saved.loss_scale is not None:
            self._loss_scale.restore(saved.loss_scale)
        self._saved_best = saved.loop.best_step
        return saved

    def drop_later(self, state: LoopState) -> None:
        """Delete the rows of later steps, which are repeated, and what a process was killed over: files half written,
        old checkpoints half deleted.
        """
        if self._ranks.is_first:
            self._metrics.truncate_after(state.step or -1)  # what is validated before the first step is so again
            remove_older(self._run, state.step, self._keep_last)
            self._remove_unnamed_bests(state)
            remove_unfinished(self._run)

    def save(self, state: LoopState, validation: dict[str, float]) -> Path:
        """Write the checkpoint of a step, delete what is too old, and return its folder.

        Raises:
            CheckpointError: A file cannot be written; raised on every rank.
        """
        return self._ranks.on_rank_0(lambda: self._save(state, validation))

    def keep_best(self, state: LoopState) -> None:
        """Write the weights as the best ones, which `state` names.

        Raises:
            CheckpointError: As `save`.
        """
        self._ranks.on_rank_0(lambda: self._keep_best(state))

    def _save(self, state: LoopState, validation: dict[str, float]) -> Path:
        if self._metrics.path.exists():
            fsync(self._metrics.path)  # a resumption never writes the rows before its checkpoint again
        path = save_checkpoint(
            self._run,
            state.step,
            self._task.model,
            self._optimizer,
            CheckpointState(
                loop=state,
                loss_scale=None if self._loss_scale is None else self._loss_scale.state(),
                identity=self._task.identity,
                validation=dict(validation),
            ),
            keep_last=self._keep_last,
            resume_command=self._resume_command,
        )
        self._saved_best = state.best_step  # after the save: until then a resumption needs another best
        self._remove_unnamed_bests(state)
        return path

    def _keep_best(self, state: LoopState) -> None:
        content = BestState(step=state.step, epoch=state.epoch, value=state.best_value, identity=self._task.identity)
        final = self._run / "checkpoints" / f"best-{state.step}"
        save_weights(final, self._task.model, content, resume_command=self._resume_command)
        self._remove_unnamed_bests(state)

    def _remove_unnamed_bests(self, state: LoopState) -> None:
        """Delete all best weights but the newest, and those that the newest checkpoint names."""
        named = {f"best-{state.best_step}", f"best-{self._saved_best}"}
        for best in best_paths(self._run):
            if best.name not in named:
                shutil.rmtree(best)
