"""Folder of an exported model: written beside its place, loaded and compared with the run, then moved there."""

import importlib.util
import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save
from torch import Tensor

from exlm_cli.errors import CheckpointError, ConfigError, ExlmError
from exlm_cli.export.card import Format, model_card
from exlm_cli.export.convert import config_of, refuse_inexpressible, tensors_of, tokenizer_files
from exlm_cli.export.onnx_model import MODEL_FILE, run_onnx, write_onnx
from exlm_cli.export.source import Source
from exlm_cli.files import folder_for_results, json_bytes, refusing, removed_on_failure, write_atomically
from exlm_cli.format import name_some, printable
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
    """A finished export; `loaded_with` names what the comparison ran: a class of transformers, or ONNX Runtime."""

    files: tuple[Path, ...]
    loaded_with: str
    comparison: Comparison


def check_before_export(out: Path, form: Format = "hf", licence: str | None = None) -> None:
    """Check what can be checked before anything is written.

    Raises:
        CheckpointError: `out` is a file, a folder with files in it, or a mount point.
        ConfigError: The licence is malformed, or a package that the format needs is not installed.
    """
    check_licence(licence)
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        kind = "the folder is not empty" if out.is_dir() else "a file has that name"
        raise CheckpointError(f"{out}: {kind}", "choose another folder with `--out DIR`")
    place = out.resolve()  # Path(".") looks like a mount point
    if place.is_mount() or place == Path.cwd():
        kind = "a mount point" if place.is_mount() else "the current directory"
        raise CheckpointError(f"{out}: {kind}, which cannot be replaced", f"choose `--out {out / 'model'}`")
    require_packages(form)


def check_licence(licence: str | None) -> None:
    """Check that a licence has the form of the Hub's identifiers; None: none is given.

    Raises:
        ConfigError: It does not have that form.
    """
    if licence is not None and not re.fullmatch(r"[A-Za-z0-9.+_-]+", licence):
        raise ConfigError(
            f"`--license {printable(licence)}`: expected an identifier of the Hub, like apache-2.0",
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
    """Write a folder that transformers loads with its own classes, or ONNX Runtime.

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
    refuse_inexpressible(source, needs_class=form == "hf")
    place = out.resolve()
    temporary = place.with_name(f".{place.name}.writing-{os.getpid()}")
    with folder_for_results(place.parent, temporary), removed_on_failure(temporary):
        temporary.mkdir()
        if form == "onnx":
            with refusing(f"{temporary / MODEL_FILE}: the file could not be written"):
                write_onnx(source, temporary)
            _write_config_and_tokenizer(source, temporary)
            progress.message("comparing with the run in ONNX Runtime")
            comparison = compare_onnx(source, temporary)
        else:
            write_model(source, temporary)
            progress.message("comparing with the run in transformers")
            comparison = compare_outputs(source, temporary)
        card = model_card(source, comparison.difference, form=form, licence=licence, repo=repo)
        write_atomically(temporary / "README.md", card.encode())
        names = sorted(path.relative_to(temporary) for path in temporary.rglob("*") if path.is_file())
        temporary.replace(place)
    loaded_with = "onnxruntime" if form == "onnx" else source.class_name
    return ExportedFolder(tuple(out / name for name in names), loaded_with, comparison)


def write_model(source: Source, folder: Path) -> None:
    """Write weights, config and tokenizer for transformers, and pooling for sentence-transformers, into a folder.

    Raises:
        CheckpointError: A file cannot be written.
    """
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors_of(source).items()}
    write_atomically(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    _write_config_and_tokenizer(source, folder)
    pooling = {"word_embedding_dimension": source.recipe.model.width, "pooling_mode_mean_tokens": True}
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    with refusing(f"{folder / '1_Pooling'}: the folder could not be made"):
        (folder / "1_Pooling").mkdir()
    write_atomically(folder / "1_Pooling" / "config.json", json_bytes(pooling))
    write_atomically(folder / "modules.json", f"{json.dumps(modules, indent=1)}\n".encode())
    write_atomically(folder / "sentence_bert_config.json", json_bytes({"max_seq_length": source.sequence_length}))


def _write_config_and_tokenizer(source: Source, folder: Path) -> None:
    """Write the files of both formats: config and tokenizer."""
    write_atomically(folder / "config.json", json_bytes(config_of(source)))
    files = tokenizer_files(
        source.tokenizer,
        max_length=source.sequence_length,
        has_mask=source.fills_masks,
        has_segments=source.recipe.model.backbone.segment_separator is not None,
    )
    for name, content in files.items():
        write_atomically(folder / name, content.encode())


def compare_onnx(source: Source, folder: Path) -> Comparison:
    """Run the ONNX model and compare tokens and outputs with those of the run.

    Raises:
        ExlmError: They differ.
    """
    tokenizer: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(source.sequence_length)
    _require_tokens(source, [tokenizer.encode(*texts).ids for texts in source.texts()])
    token_ids = source.examples()
    outputs = run_onnx(folder, token_ids, source.tokenizer.pad_id)
    return compare(source, list(zip(token_ids, outputs, strict=True)))


def compare_outputs(source: Source, folder: Path) -> Comparison:
    """Load a folder with transformers and compare tokens and outputs with those of the run.

    Raises:
        ExlmError: transformers fails, lacks or does not know weights, or tokens or outputs differ.
    """
    import transformers

    token_ids, texts = source.examples(), source.texts()
    options = {} if source.has_head else {"add_pooling_layer": False}
    with _quiet_transformers():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            rows = [dict(tokenizer(*row, truncation=True)) for row in texts]
            read = [row["input_ids"] for row in rows]
            for ids in token_ids[len(rows) :]:  # segments are 0
                rows.append({name: [int(name == "attention_mask")] * len(ids) for name in rows[0]} | {"input_ids": ids})
            model, report = getattr(transformers, source.class_name).from_pretrained(
                folder, output_loading_info=True, **options
            )
            batch = tokenizer.pad(rows, return_tensors="pt")
            with torch.no_grad():
                outputs = model.eval()(**batch)[0]
        except Exception as error:  # of any kind: it is a library of many authors
            raise _refused(f"transformers cannot load it: {error}") from error
    wrong = {*report["missing_keys"], *report["unexpected_keys"]}
    if wrong:
        raise _refused(f"transformers and the export disagree about the weight {min(wrong)}")
    _require_tokens(source, read)
    return compare(source, list(zip(token_ids, outputs, strict=True)))


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers from printing bars and reports; what it finds is checked instead."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def compare(source: Source, pairs: Sequence[tuple[list[int], Tensor]]) -> Comparison:
    """Compare outputs with those of the run in float64 for the same token ids, padded to any length.

    Raises:
        ExlmError: They differ by more than `TOLERANCE` and `ROUNDING` allow.
    """
    errors, own_errors, sizes = [], [], []
    for ids, theirs in pairs:
        exact = source.outputs(ids, exact=True)
        # without padding, and without rows of the embedding that no token has
        exported = (theirs if exact.ndim == 1 else theirs[: len(ids), : exact.shape[1]]).double()
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


def _refused(reason: str) -> ExlmError:
    error = ExlmError(f"the exported model is not the run's: {reason}", "nothing was written; please report this")
    error.exit_code = 1
    return error
