"""A least-squares task of few steps, and the training loop on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exlm_cli.config.sections import LoopConfig, OptimConfig, TrainConfig
from exlm_cli.data.sampler import EpochPlan, plan_epoch
from exlm_cli.progress import SilentProgress
from exlm_cli.run_dir import MetricsLog
from exlm_cli.train.loop import TrainingLoop

NUM_SAMPLES = 22


class LeastSquares:
    """y = a'x with dropout, four samples a step in microbatches of `microbatch`."""

    def __init__(self, microbatch: int = 2) -> None:
        torch.manual_seed(0)
        self.model = self.module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.x = torch.randn(NUM_SAMPLES, 3)
        self.microbatch = microbatch
        self.identity = {"data fingerprint": "abc"}
        self.at_microbatch: Any = lambda number: None
        self.num_microbatches = 0
        self.shares_done: list[float] = []
        self.loss_of_sample: dict[int, float] = {}

    def plan(self, epoch: int) -> EpochPlan:
        lengths = np.full(NUM_SAMPLES, 5)
        return plan_epoch(lengths, seed=1, epoch=epoch, batch_sequences=4, batch_tokens=None, bucket_steps=1)

    def microbatches(self, indices: np.ndarray, epoch: int) -> Iterator[np.ndarray]:
        for start in range(0, len(indices), self.microbatch):
            self.num_microbatches += 1
            self.at_microbatch(self.num_microbatches)
            yield indices[start : start + self.microbatch]

    def begin_step(self, share_done: float) -> None:
        self.shares_done.append(share_done)

    def losses(self, batch: np.ndarray) -> Tensor:
        x = self.x[torch.from_numpy(batch)]
        losses = (self.model(x)[:, 0] - x.sum(1)).square()
        fixed = torch.tensor([self.loss_of_sample.get(int(i), 0.0) for i in batch])
        return torch.where(fixed == 0, losses, fixed)

    def count_tokens(self, batch: np.ndarray) -> int:
        return 5 * len(batch)

    def count_flops(self, batch: np.ndarray) -> float:
        return 300.0 * len(batch)

    def validate(self) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad():
            loss = float(self.losses(np.arange(NUM_SAMPLES)).mean())
        self.model.train()
        return {"loss": loss}


def build_loop(task: LeastSquares, run: Path, train: LoopConfig, optim: OptimConfig, **options: Any) -> TrainingLoop:
    command, log = "exlm pretrain --resume RUN", MetricsLog(run / "metrics.jsonl")
    common = {"seed": 5, "run": run, "metrics": log, "progress": SilentProgress(), "resume_command": command}
    return TrainingLoop(task, train, optim, **common, **options)


def loop_of(task: LeastSquares, run: Path, *, warmup_steps: int = 3, **train: Any) -> TrainingLoop:
    content = {
        "max_steps": 13, "batch_sequences": 4, "validate_every_steps": 5, "checkpoint_every_steps": 3,
        "log_every_steps": 2, "keep_last": 100,
    }  # fmt: skip
    optim = OptimConfig(lr=0.05, warmup_steps=min(warmup_steps, train.get("max_steps") or warmup_steps))
    return build_loop(task, run, TrainConfig.model_validate(content | train), optim)


def weights_of(task: LeastSquares) -> list[Tensor]:
    return [p.detach().clone() for p in task.model.parameters()]
