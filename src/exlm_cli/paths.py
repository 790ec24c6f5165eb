"""Paths that users give: `~`, and the cache folder. Standard library only, for those who use the alignment op alone."""

import os
from pathlib import Path

from exlm_cli.errors import DataError


def expand_path(given: str) -> Path:
    """Return a path with `~` or `~name` at its beginning replaced by that user's home folder.

    Raises:
        DataError: There is no such user or no home folder, or the path has a NUL character.
    """
    if "\0" in given:
        raise DataError(f"{given}: a path cannot hold a NUL character", "give the path without it")
    # not Path.expanduser: a Path forgets that ./~name was written with its dot
    expanded = os.path.expanduser(given)  # noqa: PTH111
    if given.startswith("~") and expanded == given:
        raise DataError(
            f"{given}: there is no home folder for `{given.partition('/')[0]}`",
            f"write the path in full, or as ./{given} where the name itself begins with `~`",
        )
    return Path(expanded)


def cache_root(configured: str | None) -> Path:
    """Return the cache folder: `configured`, $EXLM_CACHE_DIR, $XDG_CACHE_HOME/exlm or ~/.cache/exlm.

    Raises:
        DataError: The home folder that `~` or the default needs does not exist, or the path has a NUL character.
    """
    if configured is not None:
        return expand_path(configured)
    if own := os.environ.get("EXLM_CACHE_DIR"):
        return expand_path(own)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "exlm"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise DataError("there is no home folder to keep a cache in", "set EXLM_CACHE_DIR to a folder") from error
    return home / ".cache" / "exlm"
