"""What a fine-tuning begins with: the encoder, tokenizer and recipe of a pre-training run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exlm_cli.config.describe import tokens_per_step
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.spelling import how_to_set
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.finetune.trainer import TaskData
from exlm_cli.model.heads import TaskModel
from exlm_cli.progress import Progress
from exlm_cli.run_dir import read_run_json
from exlm_cli.train.checkpoint import MANIFEST_FILE, MODEL_FILE, load_state
from exlm_cli.train.pretrained import load_pretrained


@dataclass(frozen=True)
class Initial:
    """A pre-trained model to fine-tune.

    Attributes:
        recipe: Of its pre-training.
        tokenizer: Its own.
        weights: State dict on the CPU.
        checkpoint: Where it comes from.
        step: Of pre-training.
        num_tokens: Input tokens of its pre-training, repetition counted.
        sha256: Of its weights.
    """

    recipe: PretrainRecipe
    tokenizer: Tokenizer
    weights: dict[str, Tensor]
    checkpoint: Path
    step: int
    num_tokens: int
    sha256: str

    def describe(self, recipe: FinetuneRecipe) -> dict[str, Any]:
        """Return `init` of results.json: what the weights were before fine-tuning, and the budget behind them."""
        is_scratch = recipe.init == "scratch"
        return {
            "checkpoint": None if is_scratch else str(self.checkpoint),
            "recipe": self.recipe.name,
            "objective": "scratch" if is_scratch else self.recipe.objective,
            "steps": 0 if is_scratch else self.step,
            "tokens": 0 if is_scratch else self.num_tokens,
            "num_states_per_mask": self.recipe.masking.num_states_per_mask,
            "num_repeats": self.recipe.masking.num_repeats,
            "mask_ratio": self.recipe.masking.mask_ratio,
        }

    def identity(self, recipe: FinetuneRecipe) -> str:
        """Return what identifies the weights a fine-tuning begins with."""
        return f"scratch {self.recipe.model_dump_json()}" if recipe.init == "scratch" else self.sha256


def load_initial(path: Path, progress: Progress) -> Initial:
    """Read a pre-training run, or one of its `checkpoints/step-N`.

    Raises:
        CheckpointError: It is none, is damaged, or is a fine-tuning run.
    """
    run = path.parent.parent if path.name.startswith("step-") and path.parent.name == "checkpoints" else path
    if read_run_json(run).get("command", "pretrain") != "pretrain":
        raise CheckpointError(
            f"{path}: a run of `exlm {read_run_json(run)['command']}`; fine-tuning begins with one of `exlm pretrain`",
            "give a pre-training run with `--checkpoint`; `exlm eval` scores a fine-tuned one",
        )
    pretrained = load_pretrained(path, device="cpu", progress=progress)
    manifest = json.loads((pretrained.checkpoint / MANIFEST_FILE).read_text(encoding="utf-8"))
    return Initial(
        pretrained.recipe,
        pretrained.tokenizer,
        pretrained.model.state_dict(),
        pretrained.checkpoint,
        pretrained.step,
        count_pretraining_tokens(pretrained.checkpoint, pretrained.recipe, pretrained.step),
        manifest["files"][MODEL_FILE]["sha256"],
    )


def build_task_model(
    initial: Initial, recipe: FinetuneRecipe, data: TaskData, seed: int, device: torch.device
) -> TaskModel:
    """Build the network of one seed: a head drawn from the seed, the encoder of the checkpoint or drawn as well."""
    torch.manual_seed(seed)
    model = TaskModel(initial.recipe, recipe.model, initial.tokenizer.vocab_size, data.num_outputs)
    if recipe.init == "checkpoint":
        model.load_encoder(initial.weights)
    return model.to(device)


def resolve_sequence_length(initial: Initial, recipe: FinetuneRecipe) -> int:
    """Return the tokens of a sequence before repetition.

    Raises:
        ConfigError: It needs more positions than the model takes, or does not fit into a microbatch.
    """
    length = recipe.task.sequence_length or initial.recipe.data.sequence_length
    num_repeats = initial.recipe.masking.num_repeats
    positions = (length - 2) * num_repeats + 2
    repeated = f" with every token {num_repeats} times" if num_repeats > 1 else ""
    if positions > initial.recipe.model.max_length:
        raise ConfigError(
            f"`task.sequence_length` {length}{repeated} needs {positions} positions; the model of "
            f"{initial.checkpoint} takes {initial.recipe.model.max_length}",
            f"it was pre-trained on {initial.recipe.data.sequence_length} tokens, which "
            f"{how_to_set('task.sequence_length', 'null')} takes over",
        )
    if positions > recipe.train.microbatch_tokens:
        raise ConfigError(
            f"`train.microbatch_tokens` {recipe.train.microbatch_tokens} does not hold one sequence of {positions}",
            "raise it or lower `task.sequence_length`",
        )
    return length


def count_pretraining_tokens(checkpoint: Path, recipe: PretrainRecipe, step: int) -> int:
    """Return what the checkpoint has counted; for one from before that was counted, an estimate from mean lengths."""
    counted = load_state(checkpoint)["loop"].get("num_tokens", 0)
    if counted:
        return int(counted)
    described = read_run_json(checkpoint.parent.parent)
    if recipe.train.batch_sequences is None or not described.get("train_sequences"):
        return step * tokens_per_step(recipe)
    mean = described["train_tokens"] / described["train_sequences"] * recipe.masking.num_repeats + 2
    return int(step * recipe.train.batch_sequences * mean)
