"""Runs on the Hugging Face Hub: pushed beside their exported model, and read back from there.

A repository of a run holds what `exlm export` writes, for transformers, and the run itself under `run/`: its recipes,
tokenizer, results and weights without the optimizer. Paths in its recipes have lost their folders.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.input_paths import with_names_alone
from exlm_cli.config.load import dump_recipe, resumed_recipe
from exlm_cli.data.cache import locked
from exlm_cli.data.rows.hub import hub_errors, silence_client
from exlm_cli.data.tokenizer import TOKENIZER_FILE
from exlm_cli.errors import CheckpointError, ConfigError, ExlmError
from exlm_cli.export.folder import check_licence, export_folder, require_packages
from exlm_cli.export.source import Source
from exlm_cli.files import refusing, removed_on_failure
from exlm_cli.finetune.calibration import CALIBRATION_FILE, read_calibration
from exlm_cli.finetune.model import ENCODER_FILE, load_finetuned
from exlm_cli.finetune.results import RESULTS_FILE
from exlm_cli.finetune.scores import SCORES_FILE
from exlm_cli.finetune.training_rows import TRAINING_ROWS_FILE, read_training_rows
from exlm_cli.paths import cache_root
from exlm_cli.progress import Progress
from exlm_cli.run_dir import METRICS_FILE, RUN_FILE, SPLIT_FILE, read_run_json
from exlm_cli.train.checkpoint import checkpoint_paths, copy_weights
from exlm_cli.train.pretrained import load_pretrained

SCHEME = "hub:"
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_RUN = "run"
_FILES = frozenset(
    {
        RUN_FILE,
        METRICS_FILE,
        TOKENIZER_FILE,
        RESULTS_FILE,
        SCORES_FILE,
        CALIBRATION_FILE,
        SPLIT_FILE,
        TRAINING_ROWS_FILE,
    }
)
"""What readers of a run need; anything else in its folder is the user's own."""
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True)
class Pushed:
    """A pushed run: its page, and the commit that `hub:OWNER/NAME@COMMIT` reads."""

    url: str
    commit: str


def check_before_push(repo: str, licence: str | None) -> None:
    """Check what can be checked before a run is read.

    Raises:
        ConfigError, CheckpointError: The name or the licence is malformed, there is no token, or transformers is not
            installed.
    """
    import huggingface_hub
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # loaded on first use

    match = _NAME.fullmatch(repo)
    if match is None or match["revision"]:
        raise ConfigError(f"`{repo}`: expected OWNER/NAME, as on the Hub", "use only letters, digits, `-`, `_` and `.`")
    with _explaining(repo, None):
        validate_repo_id(repo)
    check_licence(licence)
    if huggingface_hub.get_token() is None:
        raise ConfigError(f"{repo}: pushing needs a token of the Hub, and there is none", _LOGIN)
    require_packages("hf")


def push_run(source: Source, repo: str, progress: Progress, *, is_private: bool, licence: str | None) -> Pushed:
    """Export a run, and upload the export and the run in one commit; an earlier run there is replaced.

    Raises:
        ConfigError: The model cannot be exported.
        CheckpointError: The Hub refuses or cannot be reached, `is_private` and the repository is public, or a file
            cannot be written.
        ExlmError: The exported model is not the run's.
    """
    api = _client()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        export_folder(source, folder, progress, licence=licence, repo=repo)
        copy_run(source, folder / _RUN)
        progress.message(f"uploading to {repo}")
        with _explaining(repo, None):
            api.create_repo(repo, private=is_private or None, exist_ok=True)  # None: as the organisation has it
            if is_private and not api.model_info(repo).private:
                hint = "make it private on its page of the Hub, or choose another name"
                raise CheckpointError(f"{repo} exists and is public; nothing was uploaded", hint)
            done = api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                commit_message=f"exlm push: {source.recipe.name}",
                delete_patterns=f"{_RUN}/*",
            )
    return Pushed(f"{api.endpoint}/{repo}", done.oid)


def copy_run(source: Source, out: Path, dtype: torch.dtype | None = None) -> None:
    """Copy what readers of a run need into a new folder; weights rounded to `dtype`, if one is given.

    Raises:
        CheckpointError: A file cannot be written.
    """
    run = source.run
    with refusing(f"{out}: the run could not be copied"):
        out.mkdir(parents=True)
        for path in sorted(run / name for name in _FILES if (run / name).is_file()):
            if path.suffix == ".json":
                (out / path.name).write_text(_without_folders(path.read_text(encoding="utf-8")), encoding="utf-8")
            else:
                shutil.copyfile(path, out / path.name)
        encoder = dump_recipe(with_names_alone(source.recipe))
        recipe = encoder
        if source.results is not None:
            (out / ENCODER_FILE).write_text(encoder, encoding="utf-8")
            recipe = dump_recipe(with_names_alone(resumed_recipe(run, FinetuneRecipe)))
        (out / "recipe.yaml").write_text(recipe, encoding="utf-8")
    for weights in source.weights:
        copy_weights(weights, out / weights.relative_to(run), dtype)


def _without_folders(text: str) -> str:
    """Return the JSON of a run with paths of a checkpoint cut to `RUN/checkpoints/step-N`."""
    if '"checkpoint"' not in text:
        return text
    content: dict[str, Any] = json.loads(text)
    for holder in (content, content.get("init")):
        if isinstance(holder, dict) and isinstance(holder.get("checkpoint"), str):
            holder["checkpoint"] = "/".join(Path(holder["checkpoint"]).parts[-3:])
    return f"{json.dumps(content, indent=1)}\n"


def fetch_run(given: str, progress: Progress) -> Path:
    """Return the folder in the cache with the run of `hub:OWNER/NAME[@REVISION]`; download it if it is not there.

    A run is read and checked whole before it takes its place. Without a network it comes from the cache: the commit
    that is given in full, or without a revision the newest copy.

    Raises:
        CheckpointError: The name is malformed; the Hub has no such run, refuses, or cannot be reached; the files are
            not those that were pushed. Nothing is left behind.
    """
    match = _NAME.fullmatch(given.removeprefix(SCHEME))
    if match is None:
        raise CheckpointError(
            f"`{given}`: expected `hub:OWNER/NAME` or `hub:OWNER/NAME@REVISION`",
            "copy the name from the page of the run",
        )
    owner, name = match["repo"].split("/")
    cache = cache_root(None)
    copies = cache / "hub-runs" / owner
    api = _client()
    revision = match["revision"]
    if revision is not None and _COMMIT.fullmatch(revision) and (copies / f"{name}@{revision[:12]}").is_dir():
        return copies / f"{name}@{revision[:12]}"
    try:
        with _explaining(given, revision):
            info = api.model_info(match["repo"], revision=revision)
    except _UnreachableError:
        known = sorted(copies.glob(f"{name}@*"), key=lambda path: (path / RUN_FILE).stat().st_mtime_ns)
        if revision is not None or not known:
            raise
        progress.message(f"`{given}`: the Hub does not answer; taking {known[-1]}, the newest copy")
        return known[-1]
    commit = str(info.sha)
    files = [sibling.rfilename for sibling in info.siblings or () if sibling.rfilename.startswith(f"{_RUN}/")]
    if not _COMMIT.fullmatch(commit) or any(not _is_inside(file) for file in files):
        raise CheckpointError(
            f"`{given}` is refused: the Hub names a file or commit whose path is outside its folder",
            "do not use it, and report it to the Hub",
        )
    if f"{_RUN}/{RUN_FILE}" not in files:
        raise CheckpointError(f"`{given}`: no run of exlm", "`exlm push RUN OWNER/NAME` puts one there")
    place = copies / f"{name}@{commit[:12]}"
    with locked(cache, commit, progress):
        if not place.is_dir():
            temporary = copies / f".{place.name}.writing"
            with refusing(f"{copies}: the run could not be kept"):
                shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
                temporary.mkdir(parents=True)
            with removed_on_failure(temporary):
                _download(api, given, match["repo"], commit, files, temporary, progress)
                _check(given, temporary / _RUN)
                (temporary / _RUN).replace(place)
            shutil.rmtree(temporary)
    return place


def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return "\\" not in file and "\0" not in file and ".." not in path.parts and str(path) == file


def _download(api: Any, given: str, repo: str, commit: str, files: list[str], folder: Path, progress: Progress) -> None:
    progress.message(f"fetching `{given}`, commit {commit[:12]} ({len(files)} files)")
    with _explaining(given, commit):
        for file in files:
            api.hf_hub_download(repo, file, revision=commit, local_dir=folder)


def _check(given: str, run: Path) -> None:
    """Read a downloaded run whole: checksums, and that its files belong together."""
    try:
        if read_run_json(run).command == "pretrain":
            load_pretrained(next(iter(checkpoint_paths(run)), run), device="cpu")
        else:
            read_training_rows(run)
            load_finetuned(run, device="cpu")
            read_calibration(run)
    except ExlmError as error:
        raise CheckpointError(
            f"`{given}` is refused: {error.message.replace(str(run), _RUN)}",
            "its files are not those that were pushed: run the command again, or push the run again",
        ) from error


def _client() -> Any:
    import huggingface_hub

    silence_client()
    return huggingface_hub.HfApi()


class _UnreachableError(CheckpointError):
    """The Hub does not answer."""


@contextmanager
def _explaining(given: str, revision: str | None) -> Iterator[None]:
    """Turn an error of the Hub's client into one line, without the token."""
    from huggingface_hub import errors

    broken: tuple[type[Exception], ...] = (*hub_errors(), RuntimeError)  # a RuntimeError where a large file breaks off
    try:
        yield
    except errors.GatedRepoError:
        raise CheckpointError(f"`{given}`: access is restricted", f"ask for it on its page, then {_LOGIN}") from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"`{given}`: there is no revision `{revision}`", "leave it out for the newest") from None
    except errors.RepositoryNotFoundError:
        hint = f"check the name; where it is private, {_LOGIN}"
        raise CheckpointError(f"`{given}`: the Hub has no such model, or does not show it to you", hint) from None
    except errors.HFValidationError as error:
        hint = "copy the name from the page of the run"
        raise CheckpointError(f"`{given}` is not a name on the Hub: {_reason_of(error)}", hint) from None
    except errors.LocalEntryNotFoundError as error:  # in huggingface_hub before 1.0 a HfHubHTTPError without a response
        raise _unreachable(given, error) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = _LOGIN if status in (401, 403) else "try again later"
        raise CheckpointError(f"`{given}`: the Hub refuses: {_reason_of(error)}", hint) from None
    except broken as error:
        if isinstance(error.__cause__, errors.BadRequestError):
            hint = "give a licence that the Hub knows, like apache-2.0 or mit"
            raise CheckpointError(f"`{given}`: the Hub refuses the model card: {_reason_of(error)}", hint) from None
        raise _unreachable(given, error) from None


def _unreachable(given: str, error: Exception) -> _UnreachableError:
    hint = "check the network, and that HF_HUB_OFFLINE is not set"
    return _UnreachableError(f"`{given}`: the Hub cannot be reached: {_reason_of(error)}", hint)


def _reason_of(error: Exception) -> str:
    from huggingface_hub import get_token

    text = " ".join((getattr(error, "server_message", None) or str(error) or repr(error)).split())
    token = get_token()
    return text.replace(token, "***") if token else text
