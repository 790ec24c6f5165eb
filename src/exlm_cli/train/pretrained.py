"""Pre-trained models: built from a recipe, or read from a run; the device they run on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from exlm_cli.bundled_models import bundled_name, local_path
from exlm_cli.config.base import Mark, UnfitValueError, describe_finding, identity_of, identity_values
from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.config.overrides import changed_keys
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import Alignment
from exlm_cli.data.tokenizer import TOKENIZER_FILE, Tokenizer
from exlm_cli.distributed.launch import ONE_PROCESS, Launch
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.format import format_number_of
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.progress import Progress, SilentProgress
from exlm_cli.run_dir import is_checkpoint, require_pretraining, require_run, resume_command, run_directory
from exlm_cli.train.checkpoint import (
    MODEL_FILE,
    CheckpointState,
    checkpoint_paths,
    load_model_weights,
    load_state,
    newest_good_checkpoint,
    read_manifest,
    require_origin,
    verify_checkpoint,
)
from exlm_cli.train.process import let_segments_expand

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
    require_run(run, "recipe.yaml", hint="make one with `exlm pretrain --recipe quickstart-text`", shown=path)
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
    sha256 = read_manifest(checkpoint).files[MODEL_FILE].sha256
    return Pretrained(model, tokenizer, recipe, checkpoint, state.loop.step, state.loop.num_tokens, sha256)


def load_pretrained_weights(path: Path, progress: Progress) -> Pretrained:
    """Read the weights that a training begins with, on the CPU: of a pre-training run, one of its checkpoints, or
    `bundled:NAME`.

    Raises:
        CheckpointError: `path` is neither, is damaged, or is a fine-tuning run.
    """
    path = local_path(path)
    require_pretraining(path)
    return load_pretrained(path, device="cpu", progress=progress)


def recorded_name(weights: Pretrained) -> str:
    """Return how a run records the checkpoint that it begins with.

    A path is absolute, because a resumption may start in another folder.
    """
    return bundled_name(weights.checkpoint) or str(weights.checkpoint.resolve())


def adopt_architecture(recipe: PretrainRecipe, start: Pretrained, progress: Progress) -> PretrainRecipe:
    """Return a recipe whose model can begin with the weights of another; a message says what that changes.

    The checkpoint decides what its encoder and tokenizer are, and between two ExLMs what the head of the DAG is; data,
    masks, objective, optimiser and dropout stay the recipe's.

    Raises:
        CheckpointError: The checkpoint reads other rows, or the recipe does not fit what it decides.
    """
    own, theirs = recipe.model, start.recipe.model
    if recipe.data.kind != start.recipe.data.kind:
        raise CheckpointError(
            f"{start.name} is a model of {start.recipe.data.kind}, and `data.kind` is {recipe.data.kind}",
            "give a checkpoint or a recipe of the other kind",
        )
    keys = ["num_layers", "num_heads", "width", "ffn_width", "rope", "rope_base", "learned_positions"]
    has_limit = theirs.learned_positions or theirs.backbone.family != "own"
    keys += ["max_length"] * has_limit
    changed: dict[str, Any] = {f"model.{key}": getattr(theirs, key) for key in keys}
    changed["model.backbone"] = theirs.backbone.model_dump()
    alignment = _adopted_alignment(recipe, start.recipe)
    if recipe.objective == "exlm":
        changed["model.alignment"] = alignment
        if alignment == "chain":
            changed["model.chain.starts_at"] = 0.0  # its encoder has learned
        if start.recipe.is_chain:
            changed["model.chain.num_classes"] = theirs.chain.num_classes
        if alignment in ("dag", "sparse_dag") and start.recipe.has_transitions:
            head = theirs.transition.model_dump(exclude={"balance", "start_strength"})
            changed |= {f"model.transition.{key}": value for key, value in head.items()}
    changed["tokenizer.vocab_size"] = start.tokenizer.vocab_size
    changed["tokenizer.special_tokens"] = start.tokenizer.special_tokens
    before = identity_values(recipe)
    try:
        adopted = recipe.changed(changed)
    except ValidationError as error:
        finding = error.errors()[0]
        cause = finding.get("ctx", {}).get("error")
        hint = cause.hint if isinstance(cause, UnfitValueError) else "set keys of the recipe that fit the checkpoint"
        raise CheckpointError(f"{recipe.name} with {start.name}: {describe_finding(finding)}", hint) from error
    shown = [
        f"`{key}` {now} instead of {then}"
        for key, (then, now) in changed_keys(before, identity_values(adopted)).items()
        if not key.startswith(("model.backbone", "tokenizer."))
    ]
    encoder = "" if own.backbone == theirs.backbone else f" with the encoder of a {theirs.backbone.family}"
    listed = f": {', '.join(shown)}" if shown else ""
    progress.message(f"beginning with {start.name}{encoder} and its tokenizer{listed}")
    return adopted


def _adopted_alignment(recipe: PretrainRecipe, start: PretrainRecipe) -> Alignment:
    """Return how states are tied to targets: the recipe's choice, unless the encoder reads masks in the other way."""
    if start.is_chain or start.model.backbone.family != "own":
        return "chain"
    return start.model.alignment if start.expands_input and recipe.is_chain else recipe.model.alignment


def begin_with(model: ExlmModel, start: Pretrained) -> str:
    """Load what a model has in common with another of the same architecture; return what stays as it was drawn."""
    parts: dict[str, tuple[nn.Module | None, nn.Module | None]] = {
        "the encoder": (model.encoder, start.model.encoder),
        "the LM head": (model.lm_head, start.model.lm_head),
        "the transition head": (model.transition, start.model.transition),
        "the chain head": (model.chain_head, start.model.chain_head),
    }
    new = []
    for name, (own, theirs) in parts.items():
        if own is None:
            continue
        state = {} if theirs is None else theirs.state_dict()
        shapes = {key: tensor.shape for key, tensor in own.state_dict().items()}
        if {key: tensor.shape for key, tensor in state.items()} == shapes:
            own.load_state_dict(state)
        else:
            new.append(name)
    return " and ".join(new)


def require_own_files(run: Path, checkpoint: Path, state: CheckpointState, recipe: PretrainRecipe) -> Tokenizer:
    """Return the tokenizer of a run; `recipe` is what its recipe.yaml holds.

    Raises:
        CheckpointError: recipe.yaml or tokenizer.json is not what the checkpoint was trained with.
        TokenizerError: tokenizer.json is not a tokenizer.
    """
    tokenizer = load_tokenizer(run, recipe)
    identity = model_identity(recipe, tokenizer)
    files = {"recipe": run / "recipe.yaml", "tokenizer": run / TOKENIZER_FILE}
    require_origin(checkpoint, state.identity, identity, files)
    return tokenizer


def load_tokenizer(run: Path, recipe: PretrainRecipe) -> Tokenizer:
    """Return the tokenizer in the directory of a run; `recipe` is that of pre-training.

    Raises:
        TokenizerError: tokenizer.json is not a tokenizer, or not one of the recipe.
    """
    return Tokenizer.load(run / TOKENIZER_FILE, recipe.data.kind, recipe.tokenizer.special_tokens)


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
            "device is `cuda`, but torch sees no CUDA device", "use `--device auto`, or run `exlm doctor` to see why"
        )
    if recipe.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    let_segments_expand()
    if launch.size == 1:
        return torch.device("cuda")
    if launch.local_size > torch.cuda.device_count():
        raise ConfigError(
            f"{launch.local_size} ranks were started on a node where torch sees {torch.cuda.device_count()} GPUs",
            "start one rank per GPU: `torchrun --nproc-per-node=GPUS`; `--device cpu` trains without GPUs",
        )
    return torch.device("cuda", launch.local_rank)


def describe_device(device: torch.device) -> str:
    """Return the name of a device for messages."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {format_number_of(torch.get_num_threads(), 'thread')}"
