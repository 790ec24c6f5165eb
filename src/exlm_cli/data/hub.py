"""Rows of a data set on the Hugging Face Hub, streamed; where there is no network the error says what to do instead."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from exlm_cli.data.readers import Row, RowKind, choose_column
from exlm_cli.errors import DataError

_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(/(?P<config>[\w.-]+))?(@(?P<split>\w+))?")
LOCAL_FILES_HINT = """to read local files instead, give `--set data.train='["my.txt"]'`"""


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
        name = choose_column(str(source), list(rows.features), kind, column)
        for number, record in enumerate(rows.select_columns([name]), start=1):
            value = record[name]
            if value is None or isinstance(value, str):
                yield Row(str(source), number, (value or "").strip())
            else:
                yield Row(str(source), number, str(value), problem="is not a string")
    except (OSError, ValueError) as error:
        raise unreachable(source, error) from error


def revision_of(source: HubSource) -> str:
    """Return the commit of a Hub data set.

    Raises:
        DataError: The Hub cannot be reached or has no such data set.
    """
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().dataset_info(source.name).sha)
    except (OSError, ValueError) as error:
        raise unreachable(source, error) from error


def unreachable(source: HubSource, error: Exception) -> DataError:
    """Return the error for a data set that the Hub does not give."""
    reason = str(error).strip().splitlines()
    return DataError(f"`{source}` cannot be read from the Hub: {reason[0] if reason else error!r}", LOCAL_FILES_HINT)
