"""Masked LMs and encoders of transformers as runs: `hf:FOLDER` or `hf:NAME` of the Hub, kept in the cache as a run
directory.

Such a run has no training: recipe, tokenizer and weights, as those of `exlm pretrain` at step 0. So every command reads
it. Of the folder, JSON, safetensors and ESM's list of tokens are read; no pickle is, and no code runs.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from torch import Tensor

from exlm_cli.config.base import describe_finding
from exlm_cli.config.input_paths import write_run_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import BackboneConfig
from exlm_cli.cost.meter import num_parameters
from exlm_cli.data.cache import locked
from exlm_cli.data.rows.hub import hub_errors, silence_client
from exlm_cli.data.rows.records import RowKind
from exlm_cli.data.tokenizer import TOKENIZER_FILE, Tokenizer, read_backend
from exlm_cli.errors import CheckpointError, TokenizerError
from exlm_cli.files import refusing, removed_on_failure
from exlm_cli.model.backbones import (
    FAMILIES,
    from_transformers,
    has_lm_head,
    model_values,
    plain_config,
    require_transformers,
)
from exlm_cli.model.exlm import ExlmModel
from exlm_cli.paths import cache_root, expand_path
from exlm_cli.progress import Progress
from exlm_cli.run_dir import read_run_json, update_run_json
from exlm_cli.train.checkpoint import CheckpointState, LoopState, save_weights
from exlm_cli.train.pretrained import build_model, load_pretrained, model_identity

SCHEME = "hf:"

_LAYOUT = "3"
"""Changes with what is kept of a model, so that copies of earlier versions are made again."""
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_CONFIG, _VOCABULARY, _WEIGHTS = "config.json", "vocab.txt", "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"
_SPECIAL_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_MOST_BYTES = 1 << 20
_USUAL_LENGTH = 512


def take_in(given: str, progress: Progress, kind: RowKind = "text") -> Path:
    """Return the run directory in the cache with the model of `hf:...`; make it if it is not there.

    An encoder without an LM head gets a new one, drawn at random; a message says so.

    Args:
        given: `hf:` and a folder, or a name of the Hub with or without `@REVISION`.
        progress: Reports the work.
        kind: What the model reads, which its files do not say.

    Raises:
        CheckpointError: There is no such model, it is of a family that exlm does not know, or its files are not those
            of a masked LM or an encoder in safetensors. Nothing is left behind.
        ConfigError: transformers is not installed.
        TokenizerError: Its tokenizer cannot be read or used.
    """
    require_transformers()
    name = given.removeprefix(SCHEME)
    folder = expand_path(name)
    is_local = folder.is_dir()
    if not is_local:
        folder = _download(given, name, progress)
    config = _read_object(given, folder / _CONFIG)
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise CheckpointError(
            f"`{given}`: a model of the family `{family[:40]}`; exlm knows {', '.join(FAMILIES)}",
            "give a masked LM or an encoder of one of these",
        )
    weights = _weight_files(given, folder)
    files = [folder / _CONFIG, *weights]
    files += [folder / one for one in (TOKENIZER_FILE, _VOCABULARY, *_SPECIAL_FILES) if (folder / one).is_file()]
    with refusing(f"`{given}`: its files cannot be read"):
        key = _hash([_LAYOUT, kind, str(given)], files)
    slug = re.sub(r"[^a-z0-9._]+", "-", (folder.resolve().name if is_local else name).lower()).strip("._-") or "model"
    cache = cache_root(None)
    place = cache / "hf-models" / f"{slug}-{key[:12]}"
    with locked(cache, f"hf-{key[:32]}", progress):
        if not place.is_dir():
            temporary = place.with_name(f".{place.name}.writing")
            with refusing(f"{place.parent}: the model could not be kept"):
                shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
                temporary.mkdir(parents=True)
            with removed_on_failure(temporary):
                _write_run(given, slug, family, config, folder, weights, kind, temporary)
                load_pretrained(temporary, device="cpu")
                with refusing(f"{place.parent}: the model could not be kept"):
                    temporary.replace(place)
            progress.message(f"`{given}`: a {family} encoder, kept in {place}")
    if new := read_run_json(place).new_part:
        progress.message(f"`{given}`: it has no {new}, so a new one fills masks only after a pre-training")
    return place


def _write_run(
    given: str,
    slug: str,
    family: str,
    config: Mapping[str, Any],
    folder: Path,
    weights: Iterable[Path],
    kind: RowKind,
    run: Path,
) -> None:
    backend, special_tokens = _read_tokenizer(given, folder, family)
    tokenizer = Tokenizer(backend, kind, f"`{given}`: {TOKENIZER_FILE}", special_tokens)
    with _naming(given):
        plain = plain_config(family, config)
        has_segments = tokenizer.has_segments and plain.get("type_vocab_size", 1) > 1
        backbone = BackboneConfig.model_validate(
            {
                "family": family,
                "config": json.dumps(plain),
                "segment_separator": tokenizer.sep_id if has_segments else None,
            }
        )
        model = model_values(backbone)
        length = min(_USUAL_LENGTH, model["max_length"])
        recipe = PretrainRecipe.model_validate(
            {
                "name": slug,
                "purpose": f"The model {given} of transformers, as it is published",
                "objective": "mlm",
                "device": "auto",
                "data": {"kind": kind, "sequence_length": length},
                "tokenizer": {"vocab_size": tokenizer.vocab_size, "special_tokens": special_tokens},
                "model": {"backbone": backbone, **model},
                "optim": {"lr": 1e-4},
                "train": {"max_steps": 1, "batch_sequences": 32, "microbatch_tokens": max(16384, length)},
            }
        )
    _check_ids(given, family, plain, tokenizer)
    tensors = _read_tensors(given, weights)
    has_head = has_lm_head(tensors, family)
    if has_head and config.get("tie_word_embeddings", True) is False:
        raise CheckpointError(
            f"`{given}`: its decoder is not tied to its token embedding", "give a masked LM with a tied decoder"
        )
    with _naming(given):
        with torch.device("meta"):  # a wrong size is refused before it is allocated
            from_transformers(tensors, ExlmModel(recipe, tokenizer.vocab_size), family)
        network = build_model(recipe, tokenizer, torch.device("cpu"))
        network.load_state_dict({**network.state_dict(), **from_transformers(tensors, network, family)})
    save_weights(
        run / "checkpoints/step-0",
        network,
        CheckpointState(loop=LoopState(), identity=model_identity(recipe, tokenizer), validation={}),
        resume_command=f"exlm pretrain --checkpoint {given}",
    )
    tokenizer.save(run / TOKENIZER_FILE)
    parameters = num_parameters(network)
    described = {"trained_on": f"what {given} was trained on", "new_part": None if has_head else "LM head"}
    update_run_json(run, {"command": "pretrain", "steps": 0, "parameters": parameters, **described})
    write_run_recipe(run, recipe)


@contextmanager
def _naming(given: str) -> Iterator[None]:
    """Name the model in an error about what its files say."""
    try:
        yield
    except ValidationError as error:
        finding = error.errors()[0]
        place = "".join(f"`{part}`: " for part in finding["loc"][-1:])
        raise CheckpointError(
            f"`{given}`: {_CONFIG}: {place}{describe_finding(finding)}", "take the file of its publisher"
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"`{given}`: {error.message}", error.hint) from error


def _hash(options: Iterable[str], files: Iterable[Path]) -> str:
    digest = hashlib.sha256("\0".join(options).encode(errors="surrogatepass"))
    for path in files:
        with path.open("rb") as file:
            digest.update(f"\0{path.name}\0".encode(errors="surrogatepass"))
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _download(given: str, name: str, progress: Progress) -> Path:
    """Return the folder with the files of a model of the Hub, in the cache of the Hub's client."""
    import huggingface_hub

    match = _NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(
            f"`{given}`: no such folder, and no name of the Hub", "give `hf:FOLDER` or `hf:OWNER/NAME[@REVISION]`"
        )
    silence_client()
    progress.message(f"fetching `{given}` from the Hub, unless its files are here already")
    try:
        found = huggingface_hub.snapshot_download(
            match["repo"],
            revision=match["revision"],
            allow_patterns=[_CONFIG, "model*.safetensors", _INDEX, TOKENIZER_FILE, _VOCABULARY, *_SPECIAL_FILES],
        )
    except hub_errors() as error:
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise CheckpointError(
            f"`{given}`: no such folder, and the Hub gives no such model: {reason}",
            "check the name and the network; for a folder, give its path",
        ) from error
    return Path(found)


def _read_object(given: str, path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of the folder; errors name the model and the file."""
    hint = f"a model of transformers has a {_CONFIG}, saved by `save_pretrained`"
    with refusing(f"`{given}`: {path.name} cannot be read"):
        if not path.is_file():
            raise CheckpointError(f"`{given}`: it has no {path.name}", hint)
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise CheckpointError(f"`{given}`: {path.name} has over {_MOST_BYTES:,} bytes", hint)
    try:
        value = json.loads(content.decode(errors="replace"))
    except (ValueError, RecursionError) as error:  # a long integer is a `ValueError`
        raise CheckpointError(f"`{given}`: {path.name} is not JSON: {error}", hint) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"`{given}`: {path.name} is not a JSON object", hint)
    return value


def _weight_files(given: str, folder: Path) -> list[Path]:
    """Return the safetensors of a folder: one file, or the parts that its index names."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        raise CheckpointError(
            f"`{given}`: it has no {_WEIGHTS}; weights in a .bin file are a pickle, which may run code when it is "
            "read, so they are not",
            "convert it where you trust it: `AutoModelForMaskedLM.from_pretrained(OLD).save_pretrained(NEW)` in Python",
        )
    parts = _read_object(given, folder / _INDEX).get("weight_map")
    names = sorted(set(map(str, parts.values()))) if isinstance(parts, dict) else []
    for name in names or [""]:
        if not re.fullmatch(r"[\w-]+\.safetensors", name, re.ASCII) or not (folder / name).is_file():
            raise CheckpointError(
                f"`{given}`: {_INDEX} names `{name[:60]}`, which is no safetensors file in its folder",
                "take the folder of its publisher",
            )
    return [folder / name for name in names]


def _read_tensors(given: str, files: Iterable[Path]) -> dict[str, Tensor]:
    """Return the tensors of floating-point numbers in float32."""
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    tensor = file.get_tensor(name)
                    if not tensor.is_floating_point():
                        continue
                    if not tensor.isfinite().all():
                        raise CheckpointError(
                            f"`{given}`: {path.name}: `{name}` holds values that are not finite",
                            "take the file of its publisher",
                        )
                    tensors[name] = tensor.float()
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"`{given}`: {path.name} is not a whole safetensors file: {error}", "take the file of its publisher"
            ) from error
    return tensors


def _read_tokenizer(given: str, folder: Path, family: str) -> tuple[tokenizers.Tokenizer, tuple[str, ...]]:
    """Return the tokenizer of a folder and its special tokens: padding, start, end, mask, unknown."""
    special_tokens = _special_tokens(given, folder, family)
    path = folder / TOKENIZER_FILE
    hint = "`AutoTokenizer.from_pretrained(OLD).save_pretrained(FOLDER)` in Python writes one"
    if not path.is_file() and family == "esm" and (folder / _VOCABULARY).is_file():
        with refusing(f"`{given}`: {_VOCABULARY} cannot be read"):
            lines = (folder / _VOCABULARY).read_text(encoding="utf-8", errors="replace").splitlines()
        try:
            return esm_tokenizer([line.strip() for line in lines], special_tokens), special_tokens
        except ValueError as error:
            raise TokenizerError(f"`{given}`: {error}", "take the file of its publisher") from error
    if not path.is_file():
        raise TokenizerError(f"`{given}`: it has no {TOKENIZER_FILE}", hint)
    return read_backend(path), special_tokens


def _special_tokens(given: str, folder: Path, family: str) -> tuple[str, ...]:
    """Return the tokens by the maps in a folder, else those that the family's tokenizers have."""
    found: dict[str, str] = {}
    for name in _SPECIAL_FILES:
        values = _read_object(given, folder / name) if (folder / name).is_file() else {}
        for key in ("pad_token", "cls_token", "sep_token", "mask_token", "unk_token", "eos_token"):
            token = values.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found.setdefault(key, token)
    if "sep_token" not in found and "eos_token" in found:
        found["sep_token"] = found["eos_token"]  # ESM's
    keys = ("pad_token", "cls_token", "sep_token", "mask_token", "unk_token")
    return tuple(found.get(key, usual) for key, usual in zip(keys, FAMILIES[family].special_tokens, strict=True))


def _check_ids(given: str, family: str, config: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer whose ids are not those that the encoder looks for in its input."""
    looked_for = {"pad_token_id": tokenizer.pad_id} if FAMILIES[family].skips_positions else {}
    if config.get("token_dropout"):
        looked_for["mask_token_id"] = tokenizer.mask_id
    for key, own in looked_for.items():
        if config.get(key) != own:
            raise CheckpointError(
                f"`{given}`: `{key}` is {config.get(key)} in {_CONFIG}, and {own} in its tokenizer",
                "take both from the same model",
            )


def esm_tokenizer(tokens: Sequence[str], special_tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Return the tokenizer of ESM-2, which is published as a list of tokens alone: a letter of a protein is a token.

    It has the ids of transformers' `EsmTokenizer`; several unknown letters in a row are one token.

    Args:
        tokens: The lines of its vocab.txt; the id of a token is its place.
        special_tokens: Padding, start, end, mask, unknown.

    Raises:
        ValueError: A special token is not among the tokens, or no letter is.
    """
    vocabulary = {token: index for index, token in enumerate(tokens)}
    _, start, end, _, unknown = special_tokens
    missing = [token for token in special_tokens if token not in vocabulary]
    letters = "".join(f"\\{token}" if not token.isalnum() else token for token in tokens if len(token) == 1)
    if missing or not letters:
        raise ValueError(f"vocab.txt has no {', '.join(missing) or 'letters'}")
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(f"[{letters}]|[^{letters}]+"), "isolated")]
    )
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B {end}",
        special_tokens=[(start, vocabulary[start]), (end, vocabulary[end])],
    )
    return backend
