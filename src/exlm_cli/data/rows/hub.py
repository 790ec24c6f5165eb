"""Rows of a data set on the Hugging Face Hub, streamed; where there is no network the error says what to do instead."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from exlm_cli.config.spelling import how_to_set
from exlm_cli.data.corpus.cache import replace_file
from exlm_cli.data.rows.readers import Row, RowKind, choose_column
from exlm_cli.errors import DataError
from exlm_cli.progress import Progress

_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(/(?P<config>[\w.-]+))?(@(?P<split>\w+))?")
LOCAL_FILES_HINT = f"to read local files instead, give {how_to_set('data.train', 'my.txt')}"


@dataclass(frozen=True)
class HubSource:
    """A data set on the Hub: `OWNER/NAME[/CONFIG][@SPLIT]`."""

    name: str
    config: str | None
    split: str

    @classmethod
    def parse(cls, given: str) -> Self:
        """Read what stands behind `hub:`.

        Raises:
            DataError: It is no data set name.
        """
        match = _NAME.fullmatch(given)
        if match is None:
            raise DataError(f"`hub:{given}`: expected `hub:OWNER/NAME`, `hub:OWNER/NAME/CONFIG`, either with `@SPLIT`")
        return cls(match["name"], match["config"], match["split"] or "train")

    def __str__(self) -> str:
        config = f"/{self.config}" if self.config else ""
        return f"hub:{self.name}{config}@{self.split}"


def iter_hub_rows(source: HubSource, kind: RowKind, column: str | None) -> Iterator[Row]:
    """Yield the rows of a Hub data set.

    Raises:
        DataError: The Hub cannot be reached, or has no such data set, configuration, split or column.
    """
    import datasets

    try:
        rows: Any = datasets.load_dataset(source.name, source.config, split=source.split, streaming=True)
        # some formats tell their columns only with the first row
        names = list(rows.features or next(iter(rows)))
        name = choose_column(str(source), names, kind, column)
        for number, record in enumerate(rows.select_columns([name]), start=1):
            value = record[name]
            if value is None or isinstance(value, str):
                yield Row(str(source), number, (value or "").strip())
            else:
                yield Row(str(source), number, str(value), problem="is not a string")
    except _hub_errors() as error:
        raise _unreachable(source, error) from error


def iter_hub_records(source: HubSource, hint: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Hub data set with all their columns.

    Args:
        source: The data set.
        hint: How to do without the Hub.

    Raises:
        DataError: The Hub cannot be reached, or has no such data set, configuration or split.
    """
    import datasets

    try:
        yield from datasets.load_dataset(source.name, source.config, split=source.split, streaming=True)
    except _hub_errors() as error:
        raise _unreachable(source, error, hint) from error


def find_revision(source: HubSource, cache: Path, progress: Progress) -> str:
    """Return the commit of a Hub data set; the one last seen where the Hub cannot be reached.

    Args:
        source: The data set.
        cache: Folder that remembers commits, so that what is in the cache already needs no network.
        progress: Told when the remembered commit is taken.

    Raises:
        DataError: The Hub does not give it, and it was never seen.
    """
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    remembered = cache / "hub" / f"{hashlib.sha256(source.name.encode()).hexdigest()}.txt"
    try:
        revision = str(huggingface_hub.HfApi().dataset_info(source.name).sha)
    except RepositoryNotFoundError as error:
        raise DataError(f"`{source}`: the Hub has no public data set of that name", LOCAL_FILES_HINT) from error
    except _hub_errors() as error:
        if not remembered.is_file():
            raise _unreachable(source, error) from error
        revision = remembered.read_text()
        progress.message(f"`{source}`: the Hub does not answer; taking revision {revision} as last seen")
        return revision
    replace_file(remembered, revision.encode())
    return revision


def _hub_errors() -> tuple[type[Exception], ...]:
    """What the Hub's client raises; its HTTP library, and so the base of network errors, differs between versions."""
    from huggingface_hub.errors import HfHubHTTPError

    return (*HfHubHTTPError.__bases__, OSError, ValueError)


def _unreachable(source: HubSource, error: Exception, hint: str = LOCAL_FILES_HINT) -> DataError:
    reason = (str(error).strip().splitlines() or [repr(error)])[0].strip("'\"")
    return DataError(f"`{source}` cannot be read from the Hub: {reason}", hint)
