"""The recipe of `exlm repeat-mlm`: the grid of section 3, cells of repetitions k by mask ratio p. No torch here."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from exlm_cli.config.cells import CellPlan, CellsRecipe

Cell = tuple[Annotated[int, Field(ge=1, le=64)], Annotated[float, Field(gt=0, lt=1)]]

PAPER_RATIOS = (0.0225, 0.15, 0.387, 0.622, 0.789)
PAPER_CELLS: tuple[Cell, ...] = tuple(
    (k, p) for row, k in enumerate((1, 2, 4, 8)) for p in PAPER_RATIOS[row:]
)  # fmt: skip
"""The 14 cells of Figure 3."""

LEAST_SHARE = 1e-3
"""Smallest p^k that combinations of `--num-repeats` and `--mask-ratios` are trained for.

The grey corner of Figure 3, p^k of 0.05 % and less: hardly a token is lost, the loss is next to nothing, and training
is unstable (section 3.2).
"""


class RepeatMlmRecipe(CellsRecipe):
    """Every token repeated k times, then masked at ratio p; the rest is the same in all cells."""

    command: ClassVar[str] = "repeat-mlm"
    folder: ClassVar[str] = "repeat_mlm"
    example: ClassVar[str] = "quickstart-repeat-mlm"
    decided_by: ClassVar[Mapping[str, str]] = {
        **CellsRecipe.decided_by,
        "pretrain.masking.num_repeats": "`--num-repeats`, or `cells`",
        "pretrain.masking.mask_ratio": "`--mask-ratios`, or `cells`",
    }

    cells: tuple[Cell, ...] = Field(PAPER_CELLS, min_length=1, description="(repetitions k, mask ratio p) of each cell")
    least_corrupted_tokens: int | None = Field(
        None,
        ge=1,
        description="Cells that see fewer tokens masked in all copies than this in `pretrain.train.max_steps`, in "
        "sequences of full length, get more steps; none: the same steps in all, as in the paper",
    )

    @model_validator(mode="after")
    def _check_repeats(self) -> Self:
        if len(set(self.cells)) < len(self.cells):
            raise ValueError("`cells` names a cell twice")
        labels = [_label(k, p) for k, p in self.cells]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"`cells` has two whose folder would be {label}: six digits of p tell cells apart")
        if self.pretrain.objective != "mlm":
            raise ValueError("`pretrain.objective` must be mlm: Repeated MLM has no expanded states")
        if self.pretrain.masking.scheme != "bernoulli":
            raise ValueError(
                "`pretrain.masking.scheme` must be bernoulli: p^k needs every copy masked on its own (App. C)"
            )
        if self.least_corrupted_tokens is not None and self.pretrain.train.max_steps is None:
            raise ValueError("`least_corrupted_tokens` raises `pretrain.train.max_steps`, which is not given")
        return self

    def with_cells(self, cells: Sequence[Cell]) -> Self:
        """Return the same recipe with other cells, checked."""
        return self.model_validate(self.model_dump() | {"cells": cells})

    def together_with(self, earlier: Self) -> Self:
        """Return this recipe with the cells, seeds and tasks that `earlier` has besides its own."""
        return self._joined(earlier, {"cells": tuple(dict.fromkeys((*earlier.cells, *self.cells)))})

    def plan_seed(self, seed: int) -> list[CellPlan]:
        """Return the cells; positions and room for a sequence grow with k, as in Table 5."""
        pretrain = self.pretrain
        plans = []
        for k, p in self.cells:
            longest = (pretrain.data.sequence_length - 2) * k + 2
            changes = {
                "masking.num_repeats": k,
                "masking.mask_ratio": p,
                "model.max_length": max(pretrain.model.max_length, pretrain.data.sequence_length * k),
                "train.microbatch_tokens": max(pretrain.train.microbatch_tokens, longest),
                "train.max_steps": self._steps(k, p),
            }
            about = {"num_repeats": k, "mask_ratio": p}
            plans.append(self._cell(_label(k, p), f"k = {k}", f"{100 * p:g}%", seed, about, changes))
        return plans

    def _steps(self, k: int, p: float) -> int | None:
        steps = self.pretrain.train.max_steps
        if steps is None or self.least_corrupted_tokens is None:
            return steps
        length = self.pretrain.data.sequence_length - 2
        train = self.pretrain.train
        sequences = train.batch_sequences or (train.batch_tokens or 0) / (length * k + 2)
        return max(steps, math.ceil(self.least_corrupted_tokens / (sequences * length * p**k)))


def _label(k: int, p: float) -> str:
    return f"k{k}-p{p:g}"


def choose_cells(
    cells: Sequence[Cell], num_repeats: Sequence[int] | None, mask_ratios: Sequence[float] | None
) -> tuple[tuple[Cell, ...], tuple[Cell, ...]]:
    """Return the cells that are asked for, and those left out because they corrupt less than `LEAST_SHARE`.

    Args:
        cells: Of the recipe; where only one of the two is given, its cells with these values.
        num_repeats, mask_ratios: Every combination of them, where both are given.
    """
    if num_repeats is None or mask_ratios is None:
        kept = [
            (k, p)
            for k, p in cells
            if (num_repeats is None or k in num_repeats) and (mask_ratios is None or p in mask_ratios)
        ]
        return tuple(kept), ()
    combinations = [(k, p) for k in num_repeats for p in mask_ratios]
    return (
        tuple((k, p) for k, p in combinations if p**k >= LEAST_SHARE),
        tuple((k, p) for k, p in combinations if p**k < LEAST_SHARE),
    )
