"""Programs that pre-train a model on a text: how each is started and continued, and where it leaves what."""

import json
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from exlm_cli.run_dir import METRICS_FILE, read_metrics
from process_tree import StepLog, Watched, watch

SCRIPT = Path(__file__).with_name("train_with_transformers.py")


@dataclass(frozen=True)
class Plan:
    """What a run is asked for.

    Attributes:
        steps: Optimiser steps.
        sequences: Sequences of a step.
        seed: Of weights, order and masks.
        save_every: Steps between checkpoints; None: what the program does unasked.
    """

    steps: int
    sequences: int
    seed: int = 1
    save_every: int | None = None


@dataclass(frozen=True)
class Program(ABC):
    """A program that pre-trains a model on a text.

    Attributes:
        name: In the table.
        text: File to train on.
        cache: Folder of tokenised text.
    """

    name: str
    text: Path
    cache: Path

    @abstractmethod
    def start(self, run: Path, plan: Plan) -> list[str]:
        """Return the command of a new run."""

    @abstractmethod
    def go_on(self, run: Path, command: Sequence[str]) -> list[str]:
        """Return the command that continues a run from its last checkpoint, from the one that started it."""

    def environment(self) -> dict[str, str]:
        """Return the variables of its environment."""
        return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    @abstractmethod
    def step_log(self, run: Path) -> StepLog:
        """Return where a run writes down its steps."""

    @abstractmethod
    def checkpoints(self, run: Path) -> dict[int, Path]:
        """Return the complete checkpoints of a run by step."""

    @abstractmethod
    def weights(self, run: Path) -> dict[str, torch.Tensor]:
        """Return the weights at the end of a run."""

    @abstractmethod
    def usual_interval(self, run: Path) -> int:
        """Return the steps between checkpoints where nothing else is asked for."""

    def last(self, run: Path) -> tuple[int, Path] | None:
        """Return the last checkpoint of a run and its step."""
        return max(self.checkpoints(run).items(), default=None)

    def watch(self, command: Sequence[str], run: Path, interrupt: tuple[int, signal.Signals] | None = None) -> Watched:
        """Run a command of `start` or `go_on`."""
        return watch(command, self.environment(), log_of(run), self.step_log(run), interrupt)


@dataclass(frozen=True)
class ExlmProgram(Program):
    """`exlm pretrain` with a recipe."""

    recipe: str

    def start(self, run: Path, plan: Plan) -> list[str]:
        """Return the recipe's command with the values of the plan."""
        values = {
            "data.train": f"[{self.text}]",
            "data.cache_dir": self.cache,
            "train.num_threads": 1,
            "train.max_steps": plan.steps,
            "train.batch_sequences": plan.sequences,
            "train.log_every_steps": 1,
        }
        if plan.save_every:
            values["train.checkpoint_every_steps"] = plan.save_every
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "exlm_cli", "pretrain", "--recipe", self.recipe, "--seed", str(plan.seed)]
        return [*command, *sets, "--device", "cpu", "--out", str(run)]

    def go_on(self, run: Path, command: Sequence[str]) -> list[str]:
        """Return `exlm pretrain --resume RUN`, whose recipe is in the run."""
        return [*command[:4], "--resume", str(run)]

    def step_log(self, run: Path) -> StepLog:
        """Return the training rows of its metrics."""
        return StepLog(run / METRICS_FILE, b'"kind": "train"')

    def checkpoints(self, run: Path) -> dict[int, Path]:
        """Return the folders with a manifest, which is written last."""
        return numbered((run / "checkpoints").glob("step-*/manifest.json"))

    def weights(self, run: Path) -> dict[str, torch.Tensor]:
        """Return the weights of the checkpoint after the last step."""
        steps = max(int(row["step"]) for row in read_metrics(run / METRICS_FILE))
        return load_file(run / f"checkpoints/step-{steps}/model.safetensors")

    def usual_interval(self, run: Path) -> int:
        """Return the interval of the recipe."""
        return int(yaml.safe_load((run / "recipe.yaml").read_text())["train"]["checkpoint_every_steps"])


@dataclass(frozen=True)
class TrainerProgram(Program):
    """The script for the Trainer with a type of model."""

    model_type: str

    def start(self, run: Path, plan: Plan) -> list[str]:
        """Return the script's command with options of TrainingArguments."""
        values = {
            "text": self.text,
            "model_type": self.model_type,
            "tokenizer": self.cache / "tokenizer.json",
            "output_dir": run,
            "max_steps": plan.steps,
            "per_device_train_batch_size": plan.sequences,
            "logging_steps": 1,
            "seed": plan.seed,
        }
        if plan.save_every:
            values["save_steps"] = plan.save_every
        return [
            sys.executable,
            str(SCRIPT),
            *(word for key, value in values.items() for word in (f"--{key}", f"{value}")),
        ]

    def go_on(self, run: Path, command: Sequence[str]) -> list[str]:
        """Return the command of the start with the last checkpoint."""
        _, checkpoint = max(self.checkpoints(run).items())
        return [*command, "--resume_from_checkpoint", str(checkpoint)]

    def environment(self) -> dict[str, str]:
        """Return variables that keep all caches in one folder, too."""
        return {**super().environment(), "HF_HOME": str(self.cache), "HF_HUB_OFFLINE": "1"}

    def step_log(self, run: Path) -> StepLog:
        """Return the losses that it prints."""
        return StepLog(log_of(run), b"'loss': ")

    def checkpoints(self, run: Path) -> dict[int, Path]:
        """Return the folders with the Trainer's state."""
        return numbered(run.glob("checkpoint-*/trainer_state.json"))

    def weights(self, run: Path) -> dict[str, torch.Tensor]:
        """Return the weights that the script saves at its end."""
        return load_file(run / "model.safetensors")

    def usual_interval(self, run: Path) -> int:
        """Return the interval that the Trainer has in its state."""
        _, checkpoint = max(self.checkpoints(run).items())
        return int(json.loads((checkpoint / "trainer_state.json").read_text())["save_steps"])


def log_of(run: Path) -> Path:
    """Return the file that gets the output of a run."""
    return run.with_name(f"{run.name}.log")


def numbered(files: Iterator[Path]) -> dict[int, Path]:
    """Return the folders of files by the number at the end of their names."""
    return {int(file.parent.name.rpartition("-")[2]): file.parent for file in files}
