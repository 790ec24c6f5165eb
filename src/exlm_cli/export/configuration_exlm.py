"""Configuration of an exported ExLM; this file travels with the model."""

from types import SimpleNamespace
from typing import Any

from transformers import EsmConfig


class ExlmConfig(EsmConfig):  # type: ignore[misc]
    """Configuration of ESM with a section `exlm` on masks: their states, positions and transitions.

    Without remote code the same `config.json` is that of ESM, which reads inputs without masks.
    """

    exlm: dict[str, Any] | None = None

    def network(self) -> Any:
        """Return the section as the modules of exlm read it: fields by name, those of `transition` nested."""
        section = dict(self.exlm or {})
        transition = SimpleNamespace(**section.pop("transition"))
        return SimpleNamespace(**section, transition=transition)
