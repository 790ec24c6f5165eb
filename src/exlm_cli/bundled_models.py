"""Trained models inside the package: `bundled:NAME`, its folder, and what is said and recorded of it; names of copies.

Each is a run of `exlm pretrain` as `exlm push` writes it: recipe, tokenizer and weights, in 16 bits, without the
optimizer. Records name it, and never its path, so that they hold in every installation.
"""

import re
from pathlib import Path

from exlm_cli.errors import CheckpointError
from exlm_cli.format import name_some
from exlm_cli.run_dir import RUN_FILE, RUNS_ROOT, run_directory

SCHEME = "bundled:"
FOLDER = Path(__file__).parent / "pretrained"
LICENCE = "apache-2.0"
"""Of the package and so of its models, as the Hub names it."""
_COPY = re.compile(r".*/models--(?P<owner>[^/]+)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/run")
"""The run of a repository in the cache of huggingface_hub."""


def bundled_runs() -> list[Path]:
    """Return the run directories in the package; none where it was built without models."""
    return sorted(path.parent for path in FOLDER.glob(f"*/{RUN_FILE}"))


def is_bundled_name(given: str | Path) -> bool:
    """Return whether a run was given as `bundled:NAME`."""
    return str(given).startswith(SCHEME)


def local_path(given: str | Path) -> Path:
    """Return the folder of `bundled:NAME`; any other path as it is.

    Raises:
        CheckpointError: The package has no such model.
    """
    if not is_bundled_name(given):
        return Path(given)
    names = [f"`{SCHEME}{run.name}`" for run in bundled_runs()]
    for run in bundled_runs():
        if str(given) == SCHEME + run.name:
            return run
    known = f"it brings {name_some(names)}" if names else "this installation brings none"
    raise CheckpointError(
        f"`{given}`: no such model in the package; {known}",
        "give a run directory of `exlm pretrain`, or `hub:OWNER/NAME`",
    )


def bundled_name(path: Path) -> str | None:
    """Return `bundled:NAME` for a folder of the package or a checkpoint in it; None for any other path."""
    run = run_directory(path)
    return SCHEME + run.name if run.absolute().parent == FOLDER else None


def given_name(path: Path) -> str | None:
    """Return `bundled:NAME`, or `hub:OWNER/NAME@COMMIT` for a copy from the Hub; None for any other path."""
    copy = _COPY.fullmatch(run_directory(path).as_posix())
    return bundled_name(path) if copy is None else f"hub:{copy['owner']}/{copy['name']}@{copy['commit'][:12]}"


def report_folder(path: Path) -> Path:
    """Return the folder for reports on a run or checkpoint: its `report/`, or one under `runs/` for those of others."""
    name = given_name(path)
    run = run_directory(path) if name is None else RUNS_ROOT / re.sub("[:/@]", "-", name)
    return run / "report"
