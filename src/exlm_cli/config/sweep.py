"""Recipe of `exlm sweep`: variants of one pre-training run with several seeds. No torch here.

Variants are written by hand, as for Tables 2, 4 and 13, or generated: the Repeated-MLM grid of repetitions k by mask
ratio p (section 3).
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from exlm_cli.config.base import Recipe, describe_finding
from exlm_cli.config.finetune import CommonFinetuneRecipe, FinetuneRecipe, Seed
from exlm_cli.config.overrides import child_keys, find_field, nearest_key, typed_value
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import MaskRatio, OneOrRange
from exlm_cli.errors import ConfigError

TaskName = Annotated[str, Field(pattern=r"^[a-z0-9]+(/[a-z0-9-]+)?$")]
RepeatsAndRatio = tuple[Annotated[int, Field(ge=1, le=64)], MaskRatio]
"""(k, p): copies of every token, and the share of them that is masked."""

MIN_CORRUPTED_SHARE = 1e-3
"""Smallest p^k for which a combination of a k and a p is trained.

It leaves out the grey corner of Figure 3, p^k of 0.05 % and less: hardly any token is lost, the loss is close to zero,
and training is unstable (section 3.2).
"""

_LABEL = r"[a-z0-9][a-z0-9._-]*"
_NOT_VARIED = {
    "name": "the label",
    "purpose": "the label",
    "paper": "the sweep's `paper`",
    "seed": "the sweep's `seeds`",
    "device": "the sweep's `device`",
}
"""Keys of a pre-training recipe that a sweep sets itself, each with what decides it."""


@dataclass(frozen=True)
class SweepCell:
    """One variant with one seed: a pre-training run, and a fine-tuning run for each task.

    Attributes:
        label: Names the variant and its folder, like `exlm-k2` or `k4-p0.789`.
        changes: What the variant changes in the common recipe, by dotted key.
        pretrain: What is trained, seed included.
        finetune: One recipe for each task.
        mask_ratios: Mask ratios at which it is scored, its own first.
        measure_sequences: Validation sequences scored at each; none: all.
    """

    label: str
    changes: Mapping[str, Any]
    pretrain: PretrainRecipe
    finetune: tuple[FinetuneRecipe, ...]
    mask_ratios: tuple[OneOrRange, ...]
    measure_sequences: int | None

    @property
    def seed(self) -> int:
        """Seed of pre-training."""
        return self.pretrain.seed

    @property
    def name(self) -> str:
        """Its name in messages, and its folder under `cells/` of the run directory."""
        return f"{self.label}/seed-{self.seed}"

    @property
    def work(self) -> float:
        """Measure of pre-training time: a bound on the encoded positions; without `max_steps`, per step of an epoch."""
        train = self.pretrain.train
        sequences = train.batch_sequences or (train.batch_tokens or 0) / self.pretrain.repeated_length
        return (train.max_steps or train.max_epochs or 1) * sequences * self.pretrain.longest_input


class SweepRecipe(Recipe):
    """Variants of one pre-training recipe; each is that recipe with some values changed, trained with each seed."""

    command: ClassVar[str] = "sweep"
    groups: ClassVar[tuple[str, ...]] = ("sweep", "repeat_mlm")
    example: ClassVar[str] = "quickstart-ablations"
    decided_by: ClassVar[Mapping[str, str]] = {
        "pretrain.seed": "`--seeds LIST`",
        "pretrain.device": "`--device cpu`",
        "finetune.device": "`--device cpu`",
        "finetune.task.name": "`--task LIST`",
        "finetune.grid": "one value, like `--set finetune.optim.lr=1e-5`: cells are fine-tuned without a search",
    }
    decided_by_cells: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("pretrain.masking.num_repeats", "pretrain.masking.mask_ratio"), "`--set cells=[[1, 0.15], [2, 0.387]]`"
    )
    """Keys that `cells` decides in every variant."""

    seeds: tuple[Seed, ...] = Field((1,), min_length=1, description="Seeds of pre-training, each variant with each")
    tasks: tuple[TaskName, ...] = Field(
        (), description="Tasks every cell is fine-tuned on, like glue/mnli; empty: none"
    )
    measure_sequences: int | None = Field(
        None, ge=1, description="Validation sequences scored after training; none: all"
    )
    entropy_ratios: tuple[MaskRatio, ...] = Field(
        (), description="Other mask ratios at which the entropy of predictions is measured"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the models run")
    variants: dict[str, dict[str, Any]] = Field(
        default={}, description="What each variant changes in `pretrain`, values by key; {} for no change"
    )
    only: tuple[str, ...] = Field((), description="Variants that are run, in this order; empty: all")
    cells: tuple[RepeatsAndRatio, ...] = Field(
        (), description="Repeated MLM, in place of `variants`: one variant for each (repetitions k, mask ratio p)"
    )
    min_corrupted_tokens: int | None = Field(
        None,
        ge=1,
        description="For `cells`: least number of tokens masked in all copies; a cell that would see fewer in "
        "`pretrain.train.max_steps`, with full sequences, gets more steps; none: equal steps, as in the paper",
    )
    pretrain: PretrainRecipe = Field(description="What the variants have in common: a recipe of `exlm pretrain`")
    finetune: CommonFinetuneRecipe = Field(
        description="How cells are fine-tuned on each of `tasks`, with seeds of its own"
    )

    @property
    def run_by(self) -> str:
        """The command that runs this recipe: `repeat-mlm` for a grid of k and p, `sweep` for other variants."""
        return "repeat-mlm" if self.cells else self.command

    def plan(self) -> list[SweepCell]:
        """Return every variant with every seed: seed by seed, variants in the order of the recipe."""
        return [cell for seed in self.seeds for cell in self.plan_seed(seed)]

    def plan_seed(self, seed: int) -> list[SweepCell]:
        """Return every variant with one seed."""
        return [self._cell(label, changes, seed) for label, changes in self._changes().items()]

    def choose_cells(
        self, num_repeats: Sequence[int] | None, mask_ratios: Sequence[float] | None
    ) -> tuple[Self, list[RepeatsAndRatio]]:
        """Return a recipe with the chosen (k, p), and those left out because p^k is below `MIN_CORRUPTED_SHARE`.

        Args:
            num_repeats, mask_ratios: Every combination of them; where only one of the two is given, the recipe's cells
                with these values.

        Raises:
            ConfigError: No cell has one of the values, or every combination is left out.
        """
        given = {"--num-repeats": num_repeats, "--mask-ratios": mask_ratios}
        shown = " and ".join(f"`{option} {','.join(map(str, values))}`" for option, values in given.items() if values)
        own = f"the cells of {self.name} are " + ", ".join(f"({k}, {p:g})" for k, p in self.cells)
        if num_repeats and mask_ratios:
            pairs = [(k, p) for k in num_repeats for p in mask_ratios]
            kept = [(k, p) for k, p in pairs if p**k >= MIN_CORRUPTED_SHARE]
            if not kept:
                raise ConfigError(
                    f"{shown}: that corrupts less than {MIN_CORRUPTED_SHARE:.1%} of the tokens, p^k",
                    f"take a larger p or a smaller k; {own}",
                )
            return self._with_cells(kept, shown), [pair for pair in pairs if pair not in kept]
        position, chosen = (0, num_repeats) if num_repeats else (1, mask_ratios or ())
        absent = sorted({*chosen} - {cell[position] for cell in self.cells})
        if absent:
            raise ConfigError(
                f"{shown}: no cell of {self.name} has " + ", ".join(f"{value:g}" for value in absent),
                f"{own}; `--num-repeats LIST` and `--mask-ratios LIST` together train all combinations",
            )
        return self._with_cells([cell for cell in self.cells if cell[position] in chosen], shown), []

    def _with_cells(self, cells: list[RepeatsAndRatio], given: str) -> Self:
        try:
            return self.changed({"cells": cells})
        except ValidationError as error:
            found = describe_finding(error.errors()[0])
            raise ConfigError(f"{given}: {found}", "choose other values, or change the recipe") from None

    @field_validator("variants")
    @classmethod
    def _type_variants(cls, variants: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {
            label: {key: typed_value(PretrainRecipe, key, value) for key, value in changes.items()}
            for label, changes in variants.items()
        }

    @model_validator(mode="after")
    def _check_sweep(self) -> Self:
        if bool(self.variants) == bool(self.cells):
            raise ValueError("give either `variants` or `cells`, with one entry or more")
        for name in ("seeds", "tasks", "only", "cells"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"`{name}` {list(values)} has one of them twice")
        self._check_repeat_mlm() if self.cells else self._check_variants()
        self._check_tasks()
        self.plan_seed(self.seeds[0])
        return self

    def _check_variants(self) -> None:
        if self.min_corrupted_tokens is not None:
            raise ValueError("`min_corrupted_tokens` is for `cells`; variants set `train.max_steps` themselves")
        for label, changes in self.variants.items():
            if not re.fullmatch(_LABEL, label):
                raise ValueError(
                    f"`variants`: {label!r} names no folder; accepted: lower-case letters, digits, `.`, `_`, `-`"
                )
            for key in changes:
                _check_key(label, key)
        for label in self.only:
            if label not in self.variants:
                near = difflib.get_close_matches(label, self.variants, n=1, cutoff=0.5)
                hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(self.variants)}"
                raise ValueError(f"`only`: no variant is called `{label}`; {hint}")

    def _check_repeat_mlm(self) -> None:
        if self.only:
            raise ValueError("`only` chooses among `variants`; a grid of `cells` has none")
        if self.pretrain.objective != "mlm":
            raise ValueError("`pretrain.objective` must be mlm: Repeated MLM has no expanded states")
        if self.pretrain.masking.scheme != "bernoulli":
            raise ValueError(
                "`pretrain.masking.scheme` must be bernoulli: p^k needs every copy masked on its own (App. C)"
            )
        if self.min_corrupted_tokens is not None and self.pretrain.train.max_steps is None:
            raise ValueError("`min_corrupted_tokens` raises `pretrain.train.max_steps`, which is not given")

    def _check_tasks(self) -> None:
        """Refuse keys that no task uses, and files that several tasks would share."""
        names = self.tasks or (self.finetune.task.name,)
        self.finetune.task.refuse_unused(names)
        if len(self.tasks) > 1 and any(self.finetune.task.files.model_dump().values()):
            raise ValueError(
                f"`finetune.task.files` names the files of one task; there are {len(self.tasks)}: "
                f"{', '.join(self.tasks)}"
            )
        if not self.tasks:
            self._finetune(self.finetune.task.name)

    def _changes(self) -> dict[str, dict[str, Any]]:
        """Return what each variant changes; in a Repeated-MLM grid, positions and room for a sequence grow with k, as
        in Table 5.
        """
        if not self.cells:
            return {label: self.variants[label] for label in self.only or self.variants}
        length, room = self.pretrain.data.sequence_length, self.pretrain.train.microbatch_tokens
        return {
            _label(k, p): {
                "masking.num_repeats": k,
                "masking.mask_ratio": p,
                "model.max_length": max(self.pretrain.model.max_length, length * k),
                "train.microbatch_tokens": max(room, (length - 2) * k + 2),
                "train.max_steps": self._steps(k, p),
            }
            for k, p in self.cells
        }

    def _cell(self, label: str, changes: dict[str, Any], seed: int) -> SweepCell:
        named = {"purpose": f"Variant {label} of {self.name}", "paper": self.paper}
        pretrain = self._pretrain(label, seed, named | changes)
        return SweepCell(
            label=label,
            changes=changes,
            pretrain=pretrain,
            finetune=tuple(map(self._finetune, self.tasks)),
            mask_ratios=tuple(dict.fromkeys((pretrain.masking.mask_ratio, *self.entropy_ratios))),
            measure_sequences=self.measure_sequences,
        )

    def _steps(self, k: int, p: float) -> int | None:
        train, length = self.pretrain.train, self.pretrain.data.sequence_length - 2
        if train.max_steps is None or self.min_corrupted_tokens is None:
            return train.max_steps
        sequences = train.batch_sequences or (train.batch_tokens or 0) / (length * k + 2)
        if p**k < MIN_CORRUPTED_SHARE:
            raise ValueError(f"cell ({k}, {p:g}) corrupts less than {MIN_CORRUPTED_SHARE:.1%} of the tokens, p^k")
        return max(train.max_steps, math.ceil(self.min_corrupted_tokens / (sequences * length * p**k)))

    def _pretrain(self, label: str, seed: int, changes: Mapping[str, Any]) -> PretrainRecipe:
        """Return the common recipe with `changes`, values by dotted key."""
        shared = {"name": f"{self.name}-{label}", "seed": seed, "device": self.device}
        # a fixed number of threads: another number would change the order of sums, and so the results
        threads = {"train.num_threads": self.pretrain.train.num_threads or 1}
        try:
            return self.pretrain.changed({**shared, **threads, **changes})
        except ValidationError as error:
            finding = error.errors()[0]
            key = ".".join(map(str, finding["loc"]))
            while key and find_field(PretrainRecipe, key) is None:
                key = key.rpartition(".")[0]  # a place in a list, or which of the types of a key
            found = describe_finding(finding, f"`pretrain.{key}` is {finding['input']}; it")
            raise ValueError(f"cell {label}: {found}") from None

    def _finetune(self, task: str) -> FinetuneRecipe:
        train = self.finetune.train.model_dump() | {"num_threads": self.finetune.train.num_threads or 1}
        return self.finetune.of_task(task, {"device": self.device, "train": train})


def _check_key(label: str, key: str) -> None:
    """Refuse a change of a variant that is not a single key of a pre-training recipe."""
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


def _label(k: int, p: float) -> str:
    return f"k{k}-p{p}"
