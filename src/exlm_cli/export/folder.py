"""Folder of an exported model: written beside its place, loaded and compared with the run, then moved there."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from exlm_cli.errors import CheckpointError, ConfigError, ExlmError
from exlm_cli.export.card import Format, model_card
from exlm_cli.export.esm import esm_config, esm_tensors, refuse_inexpressible, tokenizer_files
from exlm_cli.export.onnx_model import MODEL_FILE, run_onnx, write_onnx
from exlm_cli.export.remote_code import AUTO_MAP, mask_tensors, network_config, remote_code
from exlm_cli.export.source import Source
from exlm_cli.files import folder_for_results, json_bytes, refusing, removed_on_failure, write_atomically
from exlm_cli.format import name_some, printable
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.progress import Progress

TOLERANCE = 1e-5
"""Largest accepted error of an output, as a share of the largest output."""
ROUNDING = 4
"""Or as a multiple of the run's own largest error: outputs that cancel to almost nothing are mostly rounding."""
_PACKAGES: dict[Format, tuple[str, ...]] = {"hf": ("transformers",), "onnx": ("onnx", "onnxscript", "onnxruntime")}


@dataclass(frozen=True)
class Comparison:
    """Outputs of the exported model beside those of the run.

    Attributes:
        num_sequences: Sequences compared.
        difference: Largest absolute difference of an output, from the run computed in float64.
        largest: Largest absolute output of the run.
    """

    num_sequences: int
    difference: float
    largest: float


@dataclass(frozen=True)
class ExportedFolder:
    """A finished export; `loaded_with` names what the comparison ran: classes of transformers, or ONNX Runtime."""

    files: tuple[Path, ...]
    loaded_with: tuple[str, ...]
    comparison: Comparison


def check_before_export(out: Path, form: Format = "hf", licence: str | None = None) -> None:
    """Check what can be checked before a run is read.

    Raises:
        CheckpointError: `out` is a file, a folder with files in it, or a mount point.
        ConfigError: The licence is malformed, or a package that the format needs is not installed.
    """
    check_licence(licence)
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        kind = "the folder is not empty" if out.is_dir() else "a file has that name"
        raise CheckpointError(f"{out}: {kind}", "choose another folder with `out=DIR`")
    place = Path(os.path.realpath(out))  # Path.resolve raises for a link to itself; Path(".") looks like a mount point
    if place.is_mount() or place == Path.cwd():
        kind = "a mount point" if place.is_mount() else "the current directory"
        raise CheckpointError(f"{out}: {kind}, which cannot be replaced", f"choose `out={out / 'model'}`")
    require_packages(form)


def check_licence(licence: str | None) -> None:
    """Check that a licence has the form of the Hub's identifiers; None: none is given.

    Raises:
        ConfigError: It does not have that form.
    """
    if licence is not None and not re.fullmatch(r"[A-Za-z0-9.+_-]+", licence):
        raise ConfigError(
            f"`licence={printable(licence)}`: expected an identifier of the Hub, like apache-2.0",
            "letters, digits, `.`, `-`, `+` and `_`",
        )


def require_packages(form: Format) -> None:
    """Check that the packages of a format are installed.

    Raises:
        ConfigError: One is not.
    """
    for package in _PACKAGES[form]:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{package} is not installed; it is needed to compare an export with its run",
                f'run `pip install ".[{form}]"` in your copy of the repository',
            )


def export_folder(
    source: Source,
    out: Path,
    progress: Progress,
    *,
    form: Format = "hf",
    licence: str | None = None,
    repo: str | None = None,
) -> ExportedFolder:
    """Write a folder that transformers or ONNX Runtime loads; only the [MASK]s of an ExLM need remote code.

    The folder appears only after it was loaded and gave the outputs of the run.

    Args:
        source: The model.
        out: The folder; absent or empty.
        progress: Receives messages.
        form: Its format.
        licence: Licence of the model, as its card names it.
        repo: OWNER/NAME on the Hub, where it goes there.

    Raises:
        ConfigError: ESM classes do not have such an encoder, the licence is malformed, or a package is not installed.
        CheckpointError: `out` is not empty, or a file cannot be written.
        ExlmError: The outputs differ; nothing is left behind.
    """
    check_before_export(out, form, licence)
    refuse_inexpressible(source.recipe)
    place = Path(os.path.realpath(out))
    temporary = place.with_name(f".{place.name}.writing-{os.getpid()}")
    with folder_for_results(place.parent, temporary), removed_on_failure(temporary):
        temporary.mkdir()
        if form == "onnx":
            with refusing(f"{temporary / MODEL_FILE}: the file could not be written"):
                write_onnx(source, temporary)
            _write_texts(source, temporary, {}, {})
            progress.message("comparing with the run in ONNX Runtime")
            comparison = compare_onnx(source, temporary)
        else:
            write_model(source, temporary)
            progress.message("comparing with the run in a fresh process")
            comparison = compare_outputs(source, temporary)
        card = model_card(source, comparison.difference, form=form, licence=licence, repo=repo)
        write_atomically(temporary / "README.md", card.encode())
        names = sorted(path.name for path in temporary.iterdir())
        temporary.replace(place)
    loaded_with = ("onnxruntime",) if form == "onnx" else tuple(source.examples())
    return ExportedFolder(tuple(out / name for name in names), loaded_with, comparison)


def write_model(source: Source, folder: Path) -> None:
    """Write weights, config, tokenizer and, if needed, code for transformers into an existing folder.

    Raises:
        CheckpointError: A file cannot be written.
    """
    tensors = esm_tensors(source.recipe, source.model, source.tokenizer.pad_id)
    config: dict[str, Any] = {}
    code: dict[str, str] = {}
    if isinstance(source.model, ExlmModel) and source.is_masked_exlm:
        tensors |= mask_tensors(source.model)
        config = {"exlm": network_config(source.recipe, source.tokenizer.unk_id), "auto_map": AUTO_MAP}
        code = remote_code()
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    _write_texts(source, folder, config, code)


def _write_texts(source: Source, folder: Path, config: dict[str, Any], code: dict[str, str]) -> None:
    """Write the files of both formats, config and tokenizer, with additional config keys and code files."""
    whole = {
        **esm_config(source.recipe, source.tokenizer),
        "architectures": [source.class_name],
        **source.label_config(),
        **config,
    }
    write_atomically(folder / "config.json", json_bytes(whole))
    files = tokenizer_files(source.tokenizer, max_length=source.sequence_length, has_mask=source.predicts_masks)
    for name, content in {**files, **code}.items():
        write_atomically(folder / name, content.encode())


def compare_onnx(source: Source, folder: Path) -> Comparison:
    """Run the ONNX model and compare tokens and outputs with those of the run.

    Raises:
        ExlmError: They differ.
    """
    tokenizer: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(source.sequence_length)
    _require_tokens(source, [tokenizer.encode(*texts).ids for texts in source.texts()])
    token_ids = source.examples()[source.class_name]
    logits = run_onnx(folder, token_ids, source.tokenizer.pad_id)
    return compare(source, list(zip(token_ids, logits, strict=True)))


def compare_outputs(source: Source, folder: Path) -> Comparison:
    """Load a folder in a fresh process and compare tokens and outputs with those of the run.

    Raises:
        ExlmError: transformers fails, lacks weights, or tokens or outputs differ.
    """
    token_ids = source.examples()
    with tempfile.TemporaryDirectory() as scratch:
        logits_file = Path(scratch) / "logits.safetensors"
        inputs = Path(scratch) / "inputs.json"
        inputs.write_text(json.dumps({"texts": source.texts(), "token_ids": token_ids}), encoding="utf-8")
        said = _run_check(folder, inputs, logits_file)
        logits = load_file(logits_file)
    if said["missing"]:
        raise _refused(f"transformers finds no weights for {said['missing'][0]}")
    _require_tokens(source, said["token_ids"])
    pairs = [
        (ids, theirs) for name, batch in token_ids.items() for ids, theirs in zip(batch, logits[name], strict=True)
    ]
    return compare(source, pairs)


def compare(source: Source, pairs: Sequence[tuple[list[int], Tensor]]) -> Comparison:
    """Compare outputs with those of the run in float64 for the same token ids, padded to any length.

    Raises:
        ExlmError: They differ by more than `TOLERANCE` and `ROUNDING` allow.
    """
    errors, own_errors, sizes = [], [], []
    for ids, theirs in pairs:
        exact = source.outputs(ids, exact=True)
        exported = theirs.double() if exact.ndim == 1 else theirs[: len(ids)].double()
        errors.append((exported - exact).abs().max())
        own_errors.append((source.outputs(ids) - exact).abs().max())
        sizes.append(exact.abs().max())
    difference, own, largest = (float(torch.stack(each).max()) for each in (errors, own_errors, sizes))
    if not difference <= max(TOLERANCE * largest, ROUNDING * own):  # NaN is refused too
        raise _refused(f"outputs differ by {difference:.1e}, and the largest is {largest:.3g}")
    return Comparison(len(pairs), difference, largest)


def _require_tokens(source: Source, token_ids: Sequence[list[int]]) -> None:
    for texts, read in zip(source.texts(), token_ids, strict=True):
        if read != source.encode(*texts):
            raise _refused(f"the exported tokenizer splits `{name_some(texts)}` into other tokens than the run's")


def _run_check(folder: Path, inputs: Path, logits: Path) -> dict[str, Any]:
    words = [sys.executable, "-P", str(Path(__file__).with_name("check.py")), str(folder), str(inputs), str(logits)]
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    environment = {**os.environ, **quiet, "HF_MODULES_CACHE": str(inputs.parent / "modules")}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise _refused(f"transformers cannot load it: {last}")
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def _refused(reason: str) -> ExlmError:
    error = ExlmError(f"the exported model is not the run's: {reason}", "nothing was written; please report this")
    error.exit_code = 1
    return error
