"""Identity of a recipe: the values that decide its results. A run is only continued with a recipe of the same identity.

A field that decides nothing has a mark beside its declaration, like `Annotated[int, Mark.RECORD]`.
"""

from collections.abc import Collection
from enum import Enum
from typing import Any

from pydantic import BaseModel

from exlm_cli.files import hash_json


class Mark(Enum):
    """Why a field is not part of a recipe's identity."""

    RECORD = "a name, the device, or how often to look and save: never part of it"
    INPUT = "names an input: no part of it beside a fingerprint of the data"
    COMPUTING = "how a step is computed, which changes it by rounding and the draws of dropout alone"


def identity_values(section: BaseModel, *, without: Collection[Mark] = ()) -> dict[str, Any]:
    """Return the values of a recipe or section that decide its results, as JSON.

    Args:
        section: The recipe or section.
        without: Marked fields to leave out besides `Mark.RECORD`.
    """
    left_out = {Mark.RECORD, *without}
    dumped = section.model_dump(mode="json")
    return {
        name: identity_values(value, without=without) if isinstance(value, BaseModel) else dumped[name]
        for name, field in type(section).model_fields.items()
        if left_out.isdisjoint(mark for mark in field.metadata if isinstance(mark, Mark))
        for value in [getattr(section, name)]
    }


def identity_of(recipe: BaseModel, *, without: Collection[Mark] = ()) -> str:
    """Return the SHA-256 of `identity_values`."""
    return hash_json(identity_values(recipe, without=without))
