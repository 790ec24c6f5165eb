"""The base of every config section and of every kind of recipe."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from exlm_cli.config.identity import Mark


class StrictModel(BaseModel):
    """Frozen, and refuses unknown keys: a misspelt key must never train at a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class Recipe(StrictModel):
    """What one command runs; each command that takes recipes has its kind, a child of this."""

    command: ClassVar[str]
    """The command that runs recipes of this kind, as in `exlm pretrain`."""
    folder: ClassVar[str] = ""
    """Where recipes of this kind are shipped, under `recipes/`; this class stands for any kind, anywhere."""
    groups: ClassVar[tuple[str, ...]] = ()
    """Folders inside it, in the order in which they are listed."""
    example: ClassVar[str]
    """A shipped recipe of this kind to build on, for hints."""
    decided_by: ClassVar[Mapping[str, str]] = {}
    """Keys that recipes of this kind set themselves whatever they are given, and what decides each, for hints."""

    name: Annotated[str, Mark.RECORD] = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="Names the run directory")
    purpose: Annotated[str, Mark.RECORD] = Field("", description="One line: what this recipe is for")
    paper: Annotated[str, Mark.RECORD] = Field("", description="Its place in the paper")

    @property
    def run_by(self) -> str:
        """The command that runs this recipe."""
        return self.command
