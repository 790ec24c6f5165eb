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
from pathlib import Path
from typing import Any

import torch

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.input_paths import with_names_alone
from exlm_cli.config.load import dump_recipe, resumed_recipe
from exlm_cli.data.rows.hub import hub_errors, silence_client
from exlm_cli.data.tokenizer import TOKENIZER_FILE
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.export.folder import check_licence, export_folder, require_packages
from exlm_cli.export.source import Source
from exlm_cli.files import refusing
from exlm_cli.finetune.baselines.baseline import BASELINES
from exlm_cli.finetune.prediction.training_rows import TRAINING_ROWS_FILE
from exlm_cli.finetune.results import ENCODER_FILE, RESULTS_FILE
from exlm_cli.finetune.scores import SCORES_FILE
from exlm_cli.progress import Progress
from exlm_cli.run_dir import METRICS_FILE, RUN_FILE, SPLIT_FILE, SPLITS_FOLDER
from exlm_cli.train.checkpoint import copy_weights

SCHEME = "hub:"
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_RUN = "run"
_FILES = (
    RUN_FILE,
    METRICS_FILE,
    TOKENIZER_FILE,
    RESULTS_FILE,
    SCORES_FILE,
    "calibration*.json",
    SPLIT_FILE,
    f"{SPLITS_FOLDER}/split-*.json",
    TRAINING_ROWS_FILE,
    *{f"baselines/*/split-*/seed-*/{baseline.file}" for baseline in BASELINES.values()},
)
"""What readers of a run need besides recipes and weights; anything else in its folder is the user's own."""
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
    import huggingface_hub

    silence_client()
    api = huggingface_hub.HfApi()
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
        for path in sorted(path for pattern in _FILES for path in run.glob(pattern)):
            copy = out / path.relative_to(run)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".json":
                copy.write_text(_without_folders(path.read_text(encoding="utf-8")), encoding="utf-8")
            else:
                shutil.copyfile(path, copy)
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
    """Return the run of `hub:OWNER/NAME[@REVISION]` in the cache of huggingface_hub, downloaded if it is not there.

    Without a network it is the newest copy, or the one of the given commit. Whoever reads the run checks its files.

    Raises:
        CheckpointError: The name is malformed; the Hub has no such run, refuses, or cannot be reached.
    """
    import huggingface_hub

    match = _NAME.fullmatch(given.removeprefix(SCHEME))
    if match is None:
        raise CheckpointError(
            f"`{given}`: expected `hub:OWNER/NAME` or `hub:OWNER/NAME@REVISION`",
            "copy the name from the page of the run",
        )
    progress.message(f"fetching `{given}`; what the cache has is not downloaded again")
    silence_client()
    with _explaining(given, match["revision"]):
        snapshot = huggingface_hub.snapshot_download(
            match["repo"], revision=match["revision"], allow_patterns=f"{_RUN}/*"
        )
    run = Path(snapshot) / _RUN
    if not (run / RUN_FILE).is_file():
        raise CheckpointError(f"`{given}`: no run of exlm", "`exlm push RUN OWNER/NAME` puts one there")
    return run


@contextmanager
def _explaining(given: str, revision: str | None) -> Iterator[None]:
    """Turn an error of the Hub's client into one line, without the token."""
    from huggingface_hub import errors

    broken: tuple[type[Exception], ...] = (*hub_errors(), RuntimeError)  # a RuntimeError where a large file breaks off
    try:
        yield
    except broken as error:
        # where the Hub did not answer, or refused, and the cache has nothing, the cause says it
        cause = (isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__) or error
        response = getattr(cause, "response", None)
        finding = ": the Hub refuses: " if response is not None else " cannot be read from or written to the Hub: "
        finding += _reason_of(cause)
        hint = "check the network, and that HF_HUB_OFFLINE is not set"
        if isinstance(cause, errors.GatedRepoError):
            finding, hint = ": access is restricted", f"ask for it on its page, then {_LOGIN}"
        elif isinstance(cause, errors.RevisionNotFoundError):
            finding, hint = f": there is no revision `{revision}`", "leave it out for the newest"
        elif isinstance(cause, errors.RepositoryNotFoundError):
            finding = ": the Hub has no such model, or does not show it to you"
            hint = f"check the name; where it is private, {_LOGIN}"
        elif isinstance(cause, errors.HFValidationError):
            finding = f" is not a name on the Hub: {_reason_of(cause)}"
            hint = "copy the name from the page of the run"
        elif isinstance(cause.__cause__, errors.BadRequestError):
            finding = f": the Hub refuses the model card: {_reason_of(cause)}"
            hint = "give a licence that the Hub knows, like apache-2.0 or mit"
        elif response is not None:
            hint = _LOGIN if response.status_code in (401, 403) else "try again later"
        raise CheckpointError(f"`{given}`{finding}", hint) from None


def _reason_of(error: BaseException) -> str:
    from huggingface_hub import get_token

    text = " ".join((getattr(error, "server_message", None) or str(error) or repr(error)).split())
    token = get_token()
    return text.replace(token, "***") if token else text
