"""Folder of an exported model: written beside its place, compared with the run in a fresh process, then moved there."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

from exlm_cli.errors import CheckpointError, ConfigError, ExlmError
from exlm_cli.export import check
from exlm_cli.export.card import model_card
from exlm_cli.export.esm import esm_config, esm_tensors, refuse_inexpressible
from exlm_cli.export.source import Source
from exlm_cli.export.tokenizer import tokenizer_files
from exlm_cli.files import folder_for_results, json_bytes, removed_on_failure, write_atomically
from exlm_cli.progress import Progress

TOLERANCE = 1e-5
"""Largest accepted difference of an output, as a share of the largest output."""


@dataclass(frozen=True)
class Comparison:
    """Outputs of the exported model beside those of the run.

    Attributes:
        num_sequences: Sequences compared.
        difference: Largest absolute difference of an output.
        largest: Largest absolute output of the run.
    """

    num_sequences: int
    difference: float
    largest: float


@dataclass(frozen=True)
class ExportedFolder:
    """A finished export."""

    files: tuple[Path, ...]
    class_name: str
    comparison: Comparison


def check_before_export(out: Path) -> None:
    """Check what can be checked before a run is read.

    Raises:
        CheckpointError: `out` is a file or a folder with files in it.
        ConfigError: transformers is not installed.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        kind = "the folder is not empty" if out.is_dir() else "a file has that name"
        raise CheckpointError(f"{out}: {kind}", "choose another folder with `out=DIR`")
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "an export is compared with its run in transformers, which is not installed",
            'install it with `pip install "exlm-cli[hf]"`',
        )


def export_folder(source: Source, out: Path, progress: Progress) -> ExportedFolder:
    """Write a folder that transformers loads without remote code.

    The folder appears only after a fresh process has loaded it and given the outputs of the run.

    Args:
        source: The model.
        out: The folder; absent or empty.
        progress: Receives messages.

    Raises:
        ConfigError: ESM classes do not have such an encoder, or transformers is not installed.
        CheckpointError: `out` is not empty, or the file system refuses.
        ExlmError: The outputs differ; nothing is left behind.
    """
    check_before_export(out)
    refuse_inexpressible(source.recipe)
    place = out.absolute()
    temporary = place.with_name(f".{place.name}.writing-{os.getpid()}")
    with folder_for_results(place.parent, temporary), removed_on_failure(temporary):
        temporary.mkdir()
        write_model(source, temporary)
        progress.message("comparing with the run in a fresh process")
        comparison = compare_outputs(source, temporary)
        write_atomically(temporary / "README.md", model_card(source, comparison.difference).encode())
        names = sorted(path.name for path in temporary.iterdir())
        temporary.replace(place)
    return ExportedFolder(tuple(out / name for name in names), source.class_name, comparison)


def write_model(source: Source, folder: Path) -> None:
    """Write weights, config and tokenizer into a folder that exists.

    Raises:
        CheckpointError: The file system refuses.
    """
    tensors = esm_tensors(source.recipe, source.model, source.tokenizer.pad_id)
    write_atomically(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    config = {
        **esm_config(source.recipe, source.tokenizer),
        "architectures": [source.class_name],
        **source.label_config(),
    }
    write_atomically(folder / "config.json", json_bytes(config))
    files = tokenizer_files(source.tokenizer, max_length=source.sequence_length, has_mask=source.predicts_masks)
    for name, content in files.items():
        write_atomically(folder / name, content.encode())


def compare_outputs(source: Source, folder: Path) -> Comparison:
    """Load a folder in a fresh process and compare tokens and outputs with those of the run.

    Raises:
        ExlmError: transformers fails, lacks weights, or tokens or outputs differ.
    """
    token_ids = source.example_ids()
    with tempfile.TemporaryDirectory() as scratch:
        logits_file = Path(scratch) / "logits.safetensors"
        inputs = Path(scratch) / "inputs.json"
        inputs.write_text(json.dumps({"texts": source.texts(), "token_ids": token_ids}), encoding="utf-8")
        said = _run_check(folder, source.class_name, inputs, logits_file)
        theirs = load_file(logits_file)["logits"].double()
    if said["missing"]:
        raise _refused(f"transformers finds no weights for {said['missing'][0]}")
    for text, read in zip(source.texts(), said["token_ids"], strict=True):
        if read != source.encode(text):
            raise _refused(f"the exported tokenizer reads `{text}` otherwise than the run's")
    difference = largest = 0.0
    for row, ids in enumerate(token_ids):
        ours = source.outputs(ids).double()
        exported = theirs[row] if ours.ndim == 1 else theirs[row, : len(ids)]
        difference = max(difference, float((exported - ours).abs().max()))
        largest = max(largest, float(ours.abs().max()))
    if not difference <= TOLERANCE * largest:  # NaN is refused too
        raise _refused(f"outputs differ by {difference:.1e}, and the largest is {largest:.3g}")
    return Comparison(len(token_ids), difference, largest)


def _run_check(folder: Path, class_name: str, inputs: Path, logits: Path) -> dict[str, Any]:
    words = [sys.executable, "-P", str(Path(check.__file__)), str(folder), class_name, str(inputs), str(logits)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
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
