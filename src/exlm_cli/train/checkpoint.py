"""Checkpoints: atomic to write, checked when read, exact to resume. No pickle anywhere.

`checkpoints/step-N/` holds model.safetensors, optimizer.safetensors, state.json, and manifest.json with the size and
SHA-256 of the other three. It is written under a temporary name, fsynced and renamed. So a directory named `step-N` is
whole unless it was altered afterwards; an altered one is refused and the one before it is used.
`state.json` has hashes of the tokenizer and recipe of the training. Every reader compares the run's files with them.
`checkpoints/best-N/` is the same without the optimizer: the weights that scored best in validation. A `step-N` that
`exlm push` copied lacks the optimizer too.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from exlm_cli.errors import CheckpointError
from exlm_cli.files import ALTERED_HINT, JsonModel, absent_if_none, fsync, json_bytes, read_json, refusing, write_json

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
Count = Annotated[int, Field(ge=0, lt=2**31)]


class LoopState(BaseModel):
    """Counters of a run, saved with every checkpoint.

    Attributes:
        elapsed_s: Time spent in steps; `model_s` is the part of it spent in the model and the optimiser, and
            `data_wait_s` the part in which a step waited for a batch.
        num_overflows: Steps that moved no weights because their gradients overflowed in fp16.
        overflows_at_lowest: How many of the last steps did so in a row at the lowest loss scale.
        validate_s: Time spent in validations.
        interval_loss, interval_steps: Sum of losses and number of steps since the last row of the log.
        best_step, best_epoch, best_value: Step, epoch and metric of the best validation.
        stale_validations: Validations since the best one.
        is_stopped: Training stopped for lack of a better validation.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    step: Count = 0
    epoch: Count = 0
    step_in_epoch: Count = 0
    elapsed_s: float = Field(0.0, ge=0)
    interval_loss: float = 0.0
    interval_steps: Count = 0
    num_infeasible: Count = 0
    num_overflows: Count = 0
    overflows_at_lowest: Count = 0
    num_tokens: int = Field(0, ge=0, lt=2**63)
    model_s: float = Field(0.0, ge=0)
    data_wait_s: float = Field(0.0, ge=0)
    validate_s: float = Field(0.0, ge=0)
    best_step: Count | None = None
    best_epoch: Count | None = None
    best_value: float | None = None
    stale_validations: Count = 0
    is_stopped: bool = False

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        if (self.best_step is None) != (self.best_epoch is None) or (self.is_stopped and self.best_step is None):
            raise ValueError("`best_step` and `best_epoch` do not fit the other counters")
        return self


class LossScaleState(JsonModel):
    """The loss scale of fp16, and the steps since it last changed."""

    value: float = Field(gt=0)
    good_steps: int = Field(ge=0)


class CheckpointState(JsonModel):
    """`state.json` of `step-N`: counters, hashes that identify the run, metrics of the last validation.

    Attributes:
        loss_scale: Of training in fp16.
    """

    loop: LoopState
    loss_scale: LossScaleState | None = absent_if_none()
    identity: dict[str, str]
    validation: dict[str, float | None]


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
    """Return the `best-N` of a run, newest first: two where the newest checkpoint names an earlier best, else one."""
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
        CheckpointError: A file cannot be written; nothing named `step-N` is left behind.

    An intact `step-N` that exists already (a run stopped right after saving) is kept. A checkpoint of a later step
    exists only if it was refused as damaged; it stays until the run reaches that step again.
    """
    final = run / "checkpoints" / f"step-{step}"
    if not final.exists() or verify_checkpoint(final) is not None:
        tensors = {MODEL_FILE: model.state_dict(), OPTIMIZER_FILE: _moments(model, optimizer)}
        _write_whole(final, tensors, state, resume_command)
    remove_older(run, step, keep_last)
    return final


def save_weights(final: Path, model: nn.Module, state: JsonModel, *, resume_command: str) -> Path:
    """Write weights without an optimizer, in place of those that are already there.

    Args:
        final: `checkpoints/best-N/` of a run, or `checkpoints/step-N/` of one that was not trained here.
        model, state, resume_command: As of `save_checkpoint`.

    Raises:
        CheckpointError: A file cannot be written.
    """
    _write_whole(final, {MODEL_FILE: model.state_dict()}, state, resume_command)
    return final


def remove_older(run: Path, step: int, keep_last: int) -> None:
    """Delete the `step-N` with N up to `step`, but for the newest `keep_last`.

    Raises:
        CheckpointError: One cannot be deleted.
    """
    up_to_it = [path for path in checkpoint_paths(run) if _step_of(path) <= step]
    for old in up_to_it[keep_last:]:
        with refusing(f"{old}: the old checkpoint cannot be deleted"):
            old.unlink() if old.is_symlink() else shutil.rmtree(old)


def _write_whole(
    final: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: JsonModel, resume_command: str
) -> None:
    """Write files of tensors, the state, and their manifest last, under a temporary name and rename them."""
    temporary = final.with_name(f".writing-{final.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, content in tensors.items():
            save_file({key: t.detach().cpu().contiguous() for key, t in content.items()}, temporary / name)
        (temporary / STATE_FILE).write_bytes(json_bytes(state))
        files = {name: _hash_and_fsync(temporary / name) for name in sorted([*tensors, STATE_FILE])}
        (temporary / MANIFEST_FILE).write_bytes(json_bytes(Manifest(step=_step_of(final), files=files)))
        fsync(temporary / MANIFEST_FILE)
        fsync(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        fsync(final.parent)
    except (OSError, SafetensorError) as error:
        # safetensors reports a full disk as its own error, which is not an OSError, with the reason in its text
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{final}: the checkpoint could not be written: {error}",
            f"free some space or make the folder writable, then continue with `{resume_command}`; earlier checkpoints "
            "are untouched",
        ) from error


def _hash_and_fsync(path: Path) -> FileEntry:
    """Wait until a file is on disk, and describe it."""
    entry = FileEntry(bytes=path.stat().st_size, sha256=_sha256(path))
    _apply_umask(path)
    fsync(path)
    return entry


def verify_checkpoint(path: Path) -> str | None:
    """Check size and SHA-256 of every file; return what is wrong, or None if the checkpoint is intact."""
    try:
        files = read_manifest(path).files
    except CheckpointError:
        return f"{MANIFEST_FILE} is missing or not readable"
    needed = {MODEL_FILE, STATE_FILE}
    if not needed <= files.keys() <= needed | (set() if path.name.startswith("best-") else {OPTIMIZER_FILE}):
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


def copy_weights(path: Path, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Copy a verified checkpoint without its optimizer, with a manifest of what is copied, into a new folder.

    Args:
        path: The checkpoint.
        folder: The copy.
        dtype: Round the weights to it; None: copy them bit by bit.

    Raises:
        CheckpointError: A weight is too large for `dtype`, or a file cannot be written.
    """
    manifest = read_manifest(path)
    files = {name: entry for name, entry in manifest.files.items() if name != OPTIMIZER_FILE}
    with refusing(f"{folder}: the checkpoint could not be copied"):
        folder.mkdir(parents=True)
        for name in files:
            if dtype is None or name == STATE_FILE:
                shutil.copyfile(path / name, folder / name)
                continue
            rounded = {key: tensor.to(dtype) for key, tensor in load_file(path / name).items()}
            large = [key for key, tensor in rounded.items() if not tensor.isfinite().all()]
            if large:
                raise CheckpointError(
                    f"{path / name}: `{large[0]}` holds values that {dtype} cannot", "copy it in another type"
                )
            save_file(rounded, folder / name)
            files[name] = _hash_and_fsync(folder / name)
    write_json(folder / MANIFEST_FILE, Manifest(step=manifest.step, files=files))


def load_model_weights(path: Path, model: nn.Module) -> None:
    """Load the weights of a verified checkpoint; float16, to which `copy_weights` rounds, is read as float32.

    Raises:
        CheckpointError: Names, shapes or dtypes do not fit the model, or a value is not finite.
    """
    state = model.state_dict()
    # float16, as models that travel in the package have, is exact in float32
    saved = {
        name: tensor.float() if tensor.dtype == torch.float16 else tensor
        for name, tensor in _read_tensors(path / MODEL_FILE).items()
    }
    for name in sorted(state.keys() | saved.keys()):
        found, expected = (_shape_of(tensors.get(name)) for tensors in (saved, state))
        if found != expected:
            raise CheckpointError(
                f"{path / MODEL_FILE}: `{name}` is {found}, in the recipe's model {expected}",
                "the recipe.yaml or tokenizer.json beside the checkpoint is not the one it was trained with",
            )
        if not saved[name].isfinite().all():
            raise CheckpointError(f"{path / MODEL_FILE}: `{name}` holds values that are not finite", ALTERED_HINT)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(saved[name])


def load_optimizer_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load AdamW's moments, by parameter name, onto the device of each parameter.

    Raises:
        CheckpointError: The checkpoint has none, or they are not those of the model's parameters.
    """
    if OPTIMIZER_FILE not in read_manifest(path).files:
        raise CheckpointError(
            f"{path}: it has no state of the optimizer, which `exlm push` leaves out",
            "a pushed run cannot be resumed; resume the original run instead",
        )
    moments: dict[str, dict[str, Tensor]] = {}
    for key, tensor in _read_tensors(path / OPTIMIZER_FILE).items():
        name, _, kind = key.rpartition("/")
        moments.setdefault(name, {})[kind] = tensor
    parameters = dict(model.named_parameters())
    for name, found in sorted(moments.items()):
        # `step` is a float32 tensor on the parameter's device, as fused AdamW keeps it
        parameter = parameters.get(name)
        expected = {"exp_avg": parameter, "exp_avg_sq": parameter, "step": torch.zeros(())}
        if parameter is None or {k: _shape_of(t) for k, t in found.items()} != {
            k: _shape_of(t) for k, t in expected.items()
        }:
            raise CheckpointError(
                f"{path}: the optimizer's state of `{name}` is not one of AdamW for this model", ALTERED_HINT
            )
        optimizer.state[parameter] = {kind: t.to(parameter.device, copy=True) for kind, t in found.items()}


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a verified file; they are views of it, to be copied."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: the tensors cannot be read: {error}", ALTERED_HINT) from error


def _shape_of(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def load_state(path: Path) -> CheckpointState:
    """Read `state.json` of a verified `step-N`.

    Raises:
        CheckpointError: Another version of exlm wrote it, or it is of another step.
    """
    state = read_json(path / STATE_FILE, CheckpointState, hint="start a new run")
    if state.loop.step != _step_of(path):
        raise CheckpointError(f"{path / STATE_FILE}: it is of step {state.loop.step}", ALTERED_HINT)
    return state


def read_manifest(path: Path) -> Manifest:
    """Read `manifest.json` of a checkpoint.

    Raises:
        CheckpointError: It is missing or not readable.
    """
    return read_json(path / MANIFEST_FILE, Manifest)


def require_origin(
    checkpoint: Path, saved: Mapping[str, str], own: Mapping[str, str], files: Mapping[str, Path]
) -> None:
    """Check that files of a run are those that a checkpoint was trained with, by content.

    Args:
        checkpoint: Its folder.
        saved: `identity` of its `state.json`, which the manifest covers.
        own: `identity` of the run.
        files: Name in `identity` -> the file of the run.

    Raises:
        CheckpointError: A file has another content; it names the file.
    """
    for name, file in files.items():
        if saved.get(name) != own[name]:
            finding = f"{file}: the {name} in it is not the one that {checkpoint} was trained with"
            raise CheckpointError(finding, ALTERED_HINT)


def remove_unfinished(run: Path) -> None:
    """Delete what a killed process was writing."""
    for path in (run / "checkpoints").glob(".writing-*"):
        shutil.rmtree(path, ignore_errors=True)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    assert len(found) == len(optimizer.state), "the optimizer has parameters that are not the model's"
    return {f"{name}/{key}": value for name, moments in found.items() for key, value in moments.items()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _apply_umask(path: Path) -> None:
    """Give a file the mode that the umask asks for; safetensors writes 0600 whatever the umask is.

    Some network disks refuse this, and have a mode of their own for all files.
    """
    umask = os.umask(0)
    os.umask(umask)
    with contextlib.suppress(PermissionError):
        path.chmod(0o666 & ~umask)
