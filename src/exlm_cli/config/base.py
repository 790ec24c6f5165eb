"""The base of every config section."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Frozen, and refuses unknown keys: a misspelt key must never train at a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
