"""Pre-trained models: built from a recipe, or read from a run; the device they run on."""

from dataclasses import dataclass
from pathlib import Path

import torch

from exlm_cli.bundled_models import bundled_name, local_path
from exlm_cli.config.base import Mark, identity_of
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.tokenizer import TOKENIZER_FILE, Tokenizer
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.format import format_number_of
from exlm_cli.launch import ONE_PROCESS, Launch
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import is_checkpoint, resume_command, run_directory
from exlm_cli.train.checkpoint import (
    CheckpointState,
    checkpoint_paths,
    load_model_weights,
    load_state,
    newest_good_checkpoint,
    read_manifest,
    require_origin,
    verify_checkpoint,
)

RESUMED_MARKS = frozenset({Mark.INPUT, Mark.COMPUTING})
"""Marks of the fields that a resumed pre-training may change; the data fingerprint stands for the inputs."""


@dataclass(frozen=True)
class Pretrained:
    """A model read from a run, in evaluation mode; the one of `untrained_model` is in training mode.

    Attributes:
        num_tokens: Input tokens of its training, repetition counted.
        sha256: Hash of the weights as they are on disk.
    """

    model: ExlmModel
    tokenizer: Tokenizer
    recipe: PretrainRecipe
    checkpoint: Path
    step: int
    num_tokens: int
    sha256: str

    @property
    def name(self) -> str:
        """The checkpoint as messages and results name it: `bundled:NAME`, or its path."""
        return bundled_name(self.checkpoint) or str(self.checkpoint)


def load_pretrained(path: Path, *, device: str = "auto", progress: Progress | None = None) -> Pretrained:
    """Read a model from a run directory, from one of its `checkpoints/step-N`, or from the package (`bundled:NAME`).

    Raises:
        CheckpointError: There is no whole checkpoint, or recipe.yaml or tokenizer.json is not what it was trained with.
        ConfigError: recipe.yaml is damaged, or there is no such device.
        TokenizerError: tokenizer.json is not a tokenizer.
    """
    progress = progress or SilentProgress()
    path = local_path(path)
    run = run_directory(path)
    if not (run / "recipe.yaml").is_file():
        raise CheckpointError(
            f"{path}: not a run directory or checkpoint; {run} has no recipe.yaml",
            "make one with `exlm pretrain --recipe quickstart-text`",
        )
    recipe = load_recipe(run / "recipe.yaml", [f"device={device}"])
    if is_checkpoint(path):
        if not path.is_dir():
            steps = ", ".join(found.name for found in checkpoint_paths(run)) or "none"
            raise CheckpointError(f"{path}: no such checkpoint", f"checkpoints of the run: {steps}")
        reason = verify_checkpoint(path)
        checkpoint = path if reason is None else None
    else:
        checkpoint = newest_good_checkpoint(run, progress.message)
        reason = "none of its checkpoints is intact" if checkpoint_paths(run) else "it has no checkpoint yet"
    if checkpoint is None:
        raise CheckpointError(
            f"{path} is refused: {reason}",
            f"continue the run with `{resume_command('pretrain', run)}`, or start a new one",
        )
    state = load_state(checkpoint)
    tokenizer = require_own_files(run, checkpoint, state, recipe)
    torch_device = pick_device(recipe)
    model = build_model(recipe, tokenizer, torch_device)
    load_model_weights(checkpoint, model)
    model.eval()
    sha256 = read_manifest(checkpoint).weights_sha256
    return Pretrained(model, tokenizer, recipe, checkpoint, state.loop.step, state.loop.num_tokens, sha256)


def require_own_files(run: Path, checkpoint: Path, state: CheckpointState, recipe: PretrainRecipe) -> Tokenizer:
    """Return the tokenizer of a run; `recipe` is what its recipe.yaml holds.

    Raises:
        CheckpointError: recipe.yaml or tokenizer.json is not what the checkpoint was trained with.
        TokenizerError: tokenizer.json is not a tokenizer.
    """
    tokenizer = Tokenizer.load(run / TOKENIZER_FILE, recipe.data.kind)
    identity = model_identity(recipe, tokenizer)
    files = {"recipe": run / "recipe.yaml", "tokenizer": run / TOKENIZER_FILE}
    require_origin(checkpoint, state.identity, identity, files)
    return tokenizer


def model_identity(recipe: PretrainRecipe, tokenizer: Tokenizer) -> dict[str, str]:
    """Return hashes of what decides a pre-trained model besides its data."""
    return {"recipe": identity_of(recipe, without=RESUMED_MARKS), "tokenizer": tokenizer.fingerprint}


def build_model(recipe: PretrainRecipe, tokenizer: Tokenizer, device: torch.device) -> ExlmModel:
    """Return the network of a recipe, with weights that depend on its seed alone."""
    torch.manual_seed(recipe.seed)
    return ExlmModel(recipe, tokenizer.vocab_size).to(device)


def pick_device(recipe: PretrainRecipe | FinetuneRecipe, launch: Launch = ONE_PROCESS) -> torch.device:
    """Return the device of a recipe; `auto` is CUDA if torch sees a device. Each rank of a node gets its own.

    Raises:
        ConfigError: `device` is `cuda` and torch sees no such device, or fewer than the ranks of this node.
    """
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device is `cuda`, but torch sees no CUDA device", "use `device=auto`, or run `exlm doctor` to see why"
        )
    if recipe.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if launch.size == 1:
        return torch.device("cuda")
    if launch.local_size > torch.cuda.device_count():
        raise ConfigError(
            f"{launch.local_size} ranks were started on a node where torch sees {torch.cuda.device_count()} GPUs",
            "start one rank per GPU: `torchrun --nproc-per-node=GPUS`; `device=cpu` trains without GPUs",
        )
    return torch.device("cuda", launch.local_rank)


def describe_device(device: torch.device) -> str:
    """Return the name of a device for messages."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {format_number_of(torch.get_num_threads(), 'thread')}"
