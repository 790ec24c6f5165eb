"""Rows of a data set on the Hugging Face Hub, streamed; errors name the way to read local files instead."""

import hashlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from exlm_cli.data.cache import remember
from exlm_cli.data.rows.records import ColumnChoice, Record
from exlm_cli.errors import DataError, HubError
from exlm_cli.progress import Progress

_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(/(?P<config>[\w.-]+))?(@(?P<split>\w+))?")
_LOCAL_FILES_HINT = (
    "read files of your own with `--set data.train=FILE`; `--recipe text-medium` makes a smaller model of them in a "
    "night on two cores"
)


@dataclass(frozen=True)
class HubSource:
    """A data set on the Hub: `OWNER/NAME[/CONFIG][@SPLIT]`.

    Attributes:
        revision: The commit to read; none: the newest.
    """

    name: str
    config: str | None
    split: str
    revision: str | None = None

    @classmethod
    def parse(cls, given: str) -> Self:
        """Parse what follows `hub:`.

        Raises:
            DataError: It is not the name of a data set.
        """
        match = _NAME.fullmatch(given)
        if match is None:
            raise DataError(
                f"`hub:{given}`: expected `hub:OWNER/NAME`, `hub:OWNER/NAME/CONFIG`, either with `@SPLIT`",
                f"copy the name from the page of the data set; {_LOCAL_FILES_HINT}",
            )
        return cls(match["name"], match["config"], match["split"] or "train")

    def __str__(self) -> str:
        config = f"/{self.config}" if self.config else ""
        return f"hub:{self.name}{config}@{self.split}"


def iter_hub_records(
    source: HubSource, *, only: ColumnChoice | None = None, hint: str = _LOCAL_FILES_HINT
) -> Iterator[Record]:
    """Yield the rows of a Hub data set, all columns or one; `hint` tells what to do without the Hub.

    Raises:
        DataError: The Hub cannot be reached, or has no such data set, configuration, split or column; a file or folder
            has the name of the data set.
    """
    import datasets

    silence_client()
    if Path(source.name).exists():  # `datasets` would read that instead, whatever the revision
        raise DataError(
            f"`{source}`: {source.name} is also a file or folder in the current directory",
            f"start from another directory, or give the local one as ./{source.name}",
        )
    refused: tuple[type[Exception], ...] = (*hub_errors(), RuntimeError)  # a script, an archive that cannot be streamed
    try:
        rows: Any = datasets.load_dataset(
            source.name, source.config, split=source.split, revision=source.revision, streaming=True
        )
        if only is not None:
            # some formats do not declare their columns: the first row has them, if there is one
            names = list(rows.features or next(iter(rows), {}))
            rows = rows.select_columns([only.choose(str(source), names)]) if names else rows
        for number, values in enumerate(rows, start=1):
            yield Record(str(source), number, values, has_lines=False)
    except refused as error:
        raise _unreachable(source, error, hint) from error


def find_revision(source: HubSource, cache: Path, progress: Progress) -> str:
    """Return the commit of a Hub data set, or the one that `cache` remembers if the Hub cannot be reached.

    Raises:
        DataError: There is no such data set, or the Hub does not answer and no commit is remembered.
    """
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    silence_client()
    remembered = cache / "hub" / f"{hashlib.sha256(source.name.encode()).hexdigest()}.txt"
    try:
        revision = str(huggingface_hub.HfApi().dataset_info(source.name).sha)
    except RepositoryNotFoundError as error:
        raise DataError(f"`{source}`: the Hub has no public data set of that name", _LOCAL_FILES_HINT) from error
    except hub_errors() as error:
        if not remembered.is_file():
            raise _unreachable(source, error, _LOCAL_FILES_HINT) from error
        revision = remembered.read_text()
        progress.message(f"`{source}`: the Hub does not answer; using revision {revision} as last seen")
        return revision
    remember(remembered, revision.encode())
    return revision


def silence_client() -> None:
    """Switch off the lines and bars of the Hub's client about its retries and downloads, which would hide ours."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    disable_progress_bars()


def hub_errors() -> tuple[type[Exception], ...]:
    """Return what the Hub's client raises; the base of its network errors differs between versions."""
    from huggingface_hub.errors import HfHubHTTPError

    return (*HfHubHTTPError.__bases__, OSError, ValueError)


def _unreachable(source: HubSource, error: Exception, hint: str) -> HubError:
    reason = (str(error).strip().splitlines() or [repr(error)])[0].strip("'\"")
    return HubError(f"`{source}` cannot be read from the Hub: {reason}", hint)
