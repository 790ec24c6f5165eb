"""Checkpoints: atomic to write, checked when read, exact to resume. No pickle anywhere.

`checkpoints/step-N/` holds model.safetensors, optimizer.safetensors, state.json, and manifest.json with the size and
SHA-256 of the other three. It is written under a temporary name, fsynced and renamed. So a directory named `step-N` is
whole unless it was altered afterwards; an altered one is refused and the one before it is used.
`checkpoints/best-N/` is the same without the optimizer: the weights that scored best in validation.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, field_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from exlm_cli.errors import CheckpointError
from exlm_cli.files import JsonModel, fsync, json_bytes, read_json

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"


class LoopState(BaseModel):
    """Counters of a run, saved with every checkpoint.

    Attributes:
        elapsed_s: Time spent in steps; `model_s` is the part of it spent in the model and the optimiser.
        validate_s: Time spent in validations.
        interval_loss, interval_steps: Since the last row of the log.
        best_step, best_epoch, best_value: Of the best validation; `stale_validations` have followed it.
        is_stopped: Training stopped for lack of a better validation.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    elapsed_s: float = 0.0
    interval_loss: float = 0.0
    interval_steps: int = 0
    num_infeasible: int = 0
    num_tokens: int = 0
    model_s: float = 0.0
    validate_s: float = 0.0
    best_step: int | None = None
    best_epoch: int | None = None
    best_value: float | None = None
    stale_validations: int = 0
    is_stopped: bool = False


class CheckpointState(JsonModel):
    """`state.json` of `step-N`: counters, hashes that identify the run, figures of the last validation."""

    loop: LoopState
    identity: dict[str, str]
    validation: dict[str, float | None]

    @field_validator("loop", mode="before")
    @classmethod
    def _refuse_missing(cls, loop: Any) -> Any:
        missing = LoopState.model_fields.keys() - loop.keys() if isinstance(loop, dict) else ()
        if missing:
            raise ValueError(f"`{min(missing)}` is missing; a run of another version of exlm cannot be continued")
        return loop


class BestState(JsonModel):
    """`state.json` of `best-N`: the validation that made it the best."""

    step: int
    epoch: int
    value: float | None
    identity: dict[str, str]


class FileEntry(JsonModel):
    """Size and hash of a file."""

    bytes: int
    sha256: str


class Manifest(JsonModel):
    """`manifest.json`: the files of a checkpoint by name."""

    step: int
    files: dict[str, FileEntry]


def checkpoint_paths(run: Path) -> list[Path]:
    """Return the `step-N` of a run, newest first."""
    return _numbered(run, "step-")


def best_paths(run: Path) -> list[Path]:
    """Return the `best-N` of a run, newest first; more than one only until the next checkpoint is saved."""
    return _numbered(run, "best-")


def _numbered(run: Path, prefix: str) -> list[Path]:
    found = [p for p in (run / "checkpoints").glob(f"{prefix}*") if p.name.removeprefix(prefix).isdecimal()]
    return sorted(found, key=_step_of, reverse=True)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def save_checkpoint(
    run: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: CheckpointState,
    *,
    keep_last: int,
    resume_command: str,
) -> Path:
    """Write `checkpoints/step-N/`; of those up to step N keep only the newest `keep_last`.

    Args:
        run: Run directory.
        step: N.
        model: Its state dict is saved.
        optimizer: AdamW over parameters of `model`; its moments are saved by parameter name.
        state: Content of `state.json`.
        keep_last: Checkpoints to keep, this one included.
        resume_command: Command of the hint.

    Raises:
        CheckpointError: The file system refuses; nothing named `step-N` is left behind.

    A whole `step-N` that exists already (a run stopped right after saving) is kept as it is. One beyond N exists only
    because it was refused; it stays until the run reaches that step again.
    """
    final = run / "checkpoints" / f"step-{step}"
    if not (final.exists() and verify_checkpoint(final) is None):
        tensors = {MODEL_FILE: _model_tensors(model), OPTIMIZER_FILE: _optimizer_tensors(model, optimizer)}
        _write_whole(final, step, tensors, state, resume_command)
    up_to_it = [path for path in checkpoint_paths(run) if _step_of(path) <= step]
    for old in up_to_it[keep_last:]:
        shutil.rmtree(old)
    return final


def save_best(run: Path, step: int, model: nn.Module, state: BestState, *, resume_command: str) -> Path:
    """Write `checkpoints/best-N/`, in place of one that is already there; arguments as of `save_checkpoint`.

    Raises:
        CheckpointError: The file system refuses.
    """
    final = run / "checkpoints" / f"best-{step}"
    _write_whole(final, step, {MODEL_FILE: _model_tensors(model)}, state, resume_command)
    return final


def _write_whole(
    final: Path, step: int, tensors: dict[str, dict[str, Tensor]], state: JsonModel, resume_command: str
) -> None:
    """Write files, their manifest last, under a temporary name and rename them."""
    temporary = final.with_name(f".writing-{final.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, content in tensors.items():
            save_file(content, temporary / name)
        (temporary / STATE_FILE).write_bytes(json_bytes(state))
        paths = sorted(temporary.iterdir())
        files = {path.name: FileEntry(bytes=path.stat().st_size, sha256=_sha256(path)) for path in paths}
        (temporary / MANIFEST_FILE).write_bytes(json_bytes(Manifest(step=step, files=files)))
        for path in temporary.iterdir():
            _open_to_all(path)
            fsync(path)
        fsync(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        fsync(final.parent)
    except (OSError, SafetensorError) as error:
        # safetensors reports a full disk as its own error, which is no OSError, with the reason in its text
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{final}: the checkpoint could not be written: {error}",
            f"free some space or make the folder writable, then continue with `{resume_command}`; earlier checkpoints "
            "are untouched",
        ) from error


def verify_checkpoint(path: Path) -> str | None:
    """Return why a checkpoint cannot be trusted, or None where every file is as it was written."""
    try:
        files = read_manifest(path).files
    except CheckpointError:
        return f"{MANIFEST_FILE} is missing or not readable"
    if set(files) != {MODEL_FILE, STATE_FILE} | (set() if path.name.startswith("best-") else {OPTIMIZER_FILE}):
        return f"{MANIFEST_FILE} does not list the files of a checkpoint"
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry.bytes:
            return f"{name} has {file.stat().st_size} bytes, {entry.bytes} were written"
        if _sha256(file) != entry.sha256:
            return f"{name} was altered: its SHA-256 is not the one that was written"
    return None


def newest_good_checkpoint(run: Path, on_refused: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint whose files are whole; report why each newer one is refused."""
    for path in checkpoint_paths(run):
        reason = verify_checkpoint(path)
        if reason is None:
            return path
        on_refused(f"{path} is refused: {reason}; trying the one before it")
    return None


def load_model_weights(path: Path, model: nn.Module) -> None:
    """Load `model.safetensors` of a verified checkpoint.

    Raises:
        CheckpointError: Names or shapes do not fit the model.
    """
    weights = load_file(path / MODEL_FILE)
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    given = {name: tuple(t.shape) for name, t in weights.items()}
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise CheckpointError(
                f"{path / MODEL_FILE}: `{name}` has shape {given.get(name)}, "
                f"the recipe's model has {expected.get(name)}",
                "the recipe.yaml or tokenizer.json beside the checkpoint is not the one it was trained with",
            )
    model.load_state_dict(weights)


def load_optimizer_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load AdamW's moments, by parameter name, onto the device of each parameter."""
    tensors = load_file(path / OPTIMIZER_FILE)
    for name, parameter in model.named_parameters():
        keys = {key for key in tensors if key.rpartition("/")[0] == name}
        # `step` stays a float32 tensor on the parameter's device, as fused AdamW keeps it
        optimizer.state[parameter] = {k.rpartition("/")[2]: tensors[k].to(parameter.device) for k in sorted(keys)}


def load_state(path: Path) -> CheckpointState:
    """Read `state.json` of a verified `step-N`.

    Raises:
        CheckpointError: Another version of exlm wrote it.
    """
    return read_json(path / STATE_FILE, CheckpointState, hint="start a new run")


def read_manifest(path: Path) -> Manifest:
    """Read `manifest.json` of a checkpoint.

    Raises:
        CheckpointError: It is missing or not readable.
    """
    return read_json(path / MANIFEST_FILE, Manifest)


def remove_unfinished(run: Path) -> None:
    """Delete what a killed process was writing."""
    for path in (run / "checkpoints").glob(".writing-*"):
        shutil.rmtree(path, ignore_errors=True)


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open_to_all(path: Path) -> None:
    """Give a file the mode the umask asks for; safetensors writes 0600 whatever it is."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)
