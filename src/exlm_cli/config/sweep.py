"""The recipe of `exlm pretrain --sweep`: variants of one pre-training, as in Tables 2, 4 and 13. No torch here."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationInfo, field_validator

from exlm_cli.config.cells import CellPlan, CellsRecipe
from exlm_cli.config.keys import child_keys, find_field, nearest_key
from exlm_cli.config.overrides import changed_keys
from exlm_cli.config.pretrain import PretrainRecipe

_LABEL = r"[a-z0-9][a-z0-9._-]*"
_NOT_VARIED = {
    "name": "the label",
    "purpose": "the label",
    "paper": "the sweep's `paper`",
    "seed": "the sweep's `seeds`",
    "device": "the sweep's `device`",
}
"""Keys of a pre-training recipe that a sweep sets itself, and from what."""


class SweepRecipe(CellsRecipe):
    """Variants of one pre-training recipe, each of them that recipe with some values changed."""

    command: ClassVar[str] = "pretrain --sweep"
    folder: ClassVar[str] = "sweep"
    example: ClassVar[str] = "quickstart-ablations"

    variants: dict[str, dict[str, Any]] = Field(
        min_length=1, description="What each variant changes of `pretrain`, values by key; nothing: {}"
    )
    only: tuple[str, ...] = Field(
        (), description="Variants that are run, in this order, and those given by `--set`; empty: all"
    )

    @field_validator("variants")
    @classmethod
    def _check_variants(cls, variants: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for label, changes in variants.items():
            if not re.fullmatch(_LABEL, label):
                raise ValueError(
                    f"`variants`: {label!r} names no folder; accepted: lower-case letters, digits, `.`, `_`, `-`"
                )
            for key in changes:
                _check_key(label, key)
        return variants

    @field_validator("only")
    @classmethod
    def _check_only(cls, only: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        variants = info.data.get("variants", dict.fromkeys(only))
        if len(set(only)) < len(only):
            raise ValueError(f"`only` names a variant twice: {', '.join(only)}")
        for label in only:
            if label not in variants:
                near = difflib.get_close_matches(label, variants, n=1, cutoff=0.5)
                hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(variants)}"
                raise ValueError(f"no variant is called `{label}`; {hint}")
        return only

    def resume_command(self, run: Path) -> str:
        """Return what goes on with a run: a run directory says itself that it is a sweep's."""
        return f"exlm pretrain --resume {run}"

    def together_with(self, earlier: Self) -> Self:
        """Return this sweep with the variants, seeds and tasks that `earlier` has besides its own."""
        is_all = not self.only or not earlier.only
        return self._joined(earlier, {"only": () if is_all else tuple(dict.fromkeys((*earlier.only, *self.only)))})

    def plan_seed(self, seed: int) -> list[CellPlan]:
        """Return the variants, each `pretrain` with its changes."""
        return [self._variant(label, seed) for label in self.only or self.variants]

    def _variant(self, label: str, seed: int) -> CellPlan:
        changes = self.variants[label]
        purpose = {"purpose": f"Variant {label} of {self.name}", "paper": self.paper}
        plan = self._cell(label, label, f"seed {seed}", seed, {}, purpose | changes)
        return plan.model_copy(update={"about": _describe(plan.pretrain, self.pretrain) | {"changes": changes}})


def changed_values(common: PretrainRecipe, other: PretrainRecipe) -> dict[str, Any]:
    """Return the values, by dotted key, in which a recipe differs from another; what only names it aside."""
    before, after = (recipe.model_dump(mode="json", exclude=set(_NOT_VARIED)) for recipe in (common, other))
    return {key: now for key, (_, now) in changed_keys(before, after).items()}


def choose_variants(recipe: SweepRecipe, labels: Sequence[str]) -> SweepRecipe:
    """Return the same sweep with these variants alone.

    Raises:
        ValueError: One is not of the sweep, or named twice; pydantic's, which is a child.
    """
    return recipe.model_validate(recipe.model_dump() | {"only": tuple(labels)})


def _check_key(label: str, key: str) -> None:
    if key in _NOT_VARIED:
        raise ValueError(f"`variants.{label}` changes `{key}`, which {_NOT_VARIED[key]} decides")
    if find_field(PretrainRecipe, key) is None:
        near = nearest_key(PretrainRecipe, key)
        raise ValueError(
            f"`variants.{label}` has the unknown key `{key}`" + (f"; did you mean `{near}`?" if near else "")
        )
    inner = child_keys(PretrainRecipe, key)
    if inner:
        raise ValueError(f"`variants.{label}` replaces all of `{key}`; give single keys, like `{key}.{inner[0]}`")


def _describe(recipe: PretrainRecipe, common: PretrainRecipe) -> dict[str, Any]:
    """Return what tells variants apart in the paper's tables, and the budget of each."""
    steps, usual = recipe.train.max_steps, common.train.max_steps
    return {
        "objective": recipe.objective,
        "num_states_per_mask": recipe.masking.num_states_per_mask,
        "mask_ratio": recipe.masking.mask_ratio,
        "rope": recipe.model.rope,
        "alignment": recipe.model.alignment,
        "relative_steps": 1.0 if steps == usual else steps / usual if steps and usual else None,
        "batch_sequences": recipe.train.batch_sequences,
        "batch_tokens": recipe.train.batch_tokens,
    }
