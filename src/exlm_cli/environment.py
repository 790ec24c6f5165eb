"""What a result depends on besides its recipe: versions, commit, platform. Imports none of the packages it names."""

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


def describe_environment() -> dict[str, Any]:
    """Return what a result depends on besides its recipe: versions, commit, platform. Imports none of the packages."""
    return {
        "exlm_version": package_version("exlm-cli"),
        "torch_version": package_version("torch"),
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "git_commit": source_commit(),
    }


def package_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def source_commit() -> str | None:
    """Return the git commit this package runs from (`-dirty` where changed); None outside its repository."""
    git = shutil.which("git")
    here = Path(__file__)
    if git is None:
        return None
    # a wheel in a virtual environment inside somebody's repository is not that repository's code
    is_tracked = _git(git, here.parent, "ls-files", "--error-unmatch", here.name) is not None
    return (
        _git(git, here.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") if is_tracked else None
    )


def _git(git: str, folder: Path, *arguments: str) -> str | None:
    done = subprocess.run([git, "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
