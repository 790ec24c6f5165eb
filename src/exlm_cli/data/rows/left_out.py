"""Rows that are not used, with the reason."""

from typing import NamedTuple


class LeftOut(NamedTuple):
    """A row that a task does not use.

    Attributes:
        file: It stands in.
        where: As errors name it: `train.tsv:7`, or `train.parquet, record 6`.
        text: What the model would have read.
        reason: Why it is not used.
    """

    file: str
    where: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"

    @property
    def row(self) -> str:
        """Its line or record, or where else in the file it stands."""
        return self.where.removeprefix(self.file).lstrip(":, ").removeprefix("record ")
