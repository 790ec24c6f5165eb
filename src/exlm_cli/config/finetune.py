"""Fine-tuning recipe: a task, settings of the model and its training, seeds, and a grid. No torch here."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from exlm_cli.config.base import Mark, Recipe, StrictModel, describe_finding
from exlm_cli.config.overrides import find_field, typed_value
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import LoopConfig, OptimConfig
from exlm_cli.config.tasks import (
    SUITES,
    CsvTaskConfig,
    SquadTaskConfig,
    TaskConfig,
    TaskFiles,
    check_task_name,
    given_keys,
    keys_of,
    suites_with,
)
from exlm_cli.config.yaml import show_value
from exlm_cli.errors import ConfigError

Seed = Annotated[int, Field(ge=0, lt=2**63)]


class FinetuneModelConfig(StrictModel):
    """Dropout of fine-tuning; the architecture is the checkpoint's."""

    dropout: float | None = Field(
        None, ge=0, lt=1, description="Meaning as in pre-training; none: the checkpoint's value"
    )
    attention_dropout: float | None = Field(
        None, ge=0, lt=1, description="Meaning as in pre-training; none: the checkpoint's value"
    )
    activation_dropout: float | None = Field(
        None, ge=0, lt=1, description="Meaning as in pre-training; none: the checkpoint's value"
    )
    pooler_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout before both layers of the task head")


class FinetuneTrainConfig(LoopConfig):
    """How long to train, how much at once, and what to keep."""

    max_epochs: int = Field(10, ge=1, le=100_000, description="Passes over the training rows")
    batch_sequences: int = Field(32, ge=1, description="Sequences of a step")
    patience: int | None = Field(
        None, ge=1, description="Stop after this many validations without a better one; none: never"
    )
    freeze_encoder: bool = Field(
        False, description="Train the task head alone; the encoder keeps the checkpoint's weights, without dropout"
    )
    microbatch_tokens: int = Field(16384, ge=8, description="Tokens, padding included, that go through at once")
    keep_last: Annotated[int, Mark.RECORD] = Field(
        1, ge=1, le=1000, description="Checkpoints to resume from; the best one is also kept"
    )


class FinetuneRecipe(Recipe):
    """Everything that a fine-tuning run depends on besides its checkpoint.

    A pre-training recipe has one `seed`, this one has `seeds`. Each seed decides the head's weights, the order of the
    data and the dropout of one fine-tuning; with `init: scratch` also all other weights.
    """

    command: ClassVar[str] = "finetune"
    groups: ClassVar[tuple[str, ...]] = ("csv", "moleculenet", "glue", "squad", "repeated-mlm")
    example: ClassVar[str] = "csv"

    seeds: tuple[Seed, ...] = Field((1, 2, 3), min_length=1, description="One fine-tuning run per seed")
    num_replicates: int = Field(
        1, ge=1, le=100, description="Number of splits: `task.split_seed` and the seeds that follow it"
    )
    aggregate: Literal["mean", "median"] = Field("mean", description="Statistic over seeds that is reported first")
    init: Literal["checkpoint", "scratch"] = Field(
        "checkpoint", description="`scratch`: the checkpoint's architecture and tokenizer, weights drawn from the seed"
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], Mark.RECORD] = Field("auto", description="Where the model runs")
    task: TaskConfig
    model: FinetuneModelConfig = FinetuneModelConfig()
    optim: OptimConfig
    train: FinetuneTrainConfig = FinetuneTrainConfig()
    grid: dict[str, tuple[Any, ...]] = Field(
        default={}, description="Values to try by key of `model`, `optim` or `train`; a search tries each combination"
    )

    @property
    def pools_mean(self) -> bool:
        """Whether the head reads means of the states of a row, not the state at [CLS]."""
        given = self.task.head_state
        return given == "mean" or (given == "auto" and self.train.freeze_encoder and self.task.input_kind == "text")

    @field_validator("grid")
    @classmethod
    def _type_grid(cls, grid: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        return {key: tuple(typed_value(cls, key, value) for value in values) for key, values in grid.items()}

    @model_validator(mode="after")
    def _check_across_sections(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"`seeds` {list(self.seeds)} names a seed twice")
        if self.num_replicates > 1 and not self.task.is_split_by_seed:
            raise ValueError(
                "`num_replicates` needs a split that `task.split_seed` changes: `--split random` or `group`, or "
                "`--split scaffold-balanced` for molecules"
            )
        if self.train.freeze_encoder and self.init == "scratch":
            raise ValueError(
                "`train.freeze_encoder` with `init: scratch` would keep an encoder that has learned nothing; "
                "`--recipe csv-encoder` trains the encoder of a table"
            )
        self.optim.check_steps(self.train.max_steps)
        return self

    def sequence_length(self, encoder: PretrainRecipe) -> int:
        """Return the most tokens of a row before repetition: what the task says, else as many as in pre-training."""
        return self.task.sequence_length or encoder.data.sequence_length


def usual_csv_recipe(overrides: Sequence[str]) -> str:
    """Return the name of the recipe of a table: texts have no descriptors, and only weights are frozen."""
    keys = {override.partition("=")[0].strip() for override in overrides}
    return "csv" if keys.isdisjoint({"task.text_column", "init"}) else "csv-encoder"


class SharedTaskConfig(CsvTaskConfig, SquadTaskConfig):
    """What the tasks of a sweep have in common: the keys of every suite, of which each task takes its own."""

    files: Annotated[TaskFiles, Mark.INPUT] = TaskFiles()

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        """Accept any values: `of_task` leaves them to the section of each task."""
        return self

    def of_task(self, name: str) -> dict[str, Any]:
        """Return the values of one task by key, without the keys that its suite does not have.

        Raises:
            ConfigError: There is no such task.
        """
        check_task_name(name)
        own = keys_of(SUITES[name.partition("/")[0]])
        content = {key: value for key, value in self.model_dump().items() if key in own}
        files = {key: value for key, value in content["files"].items() if f"files.{key}" in own}
        return content | {"name": name, "files": files}

    def refuse_unused(self, names: Sequence[str]) -> None:
        """Check that at least one task uses each key that differs from its default.

        Raises:
            ValueError: No task uses it; the message is for users.
        """
        suites = {name.partition("/")[0] for name in names}
        changed = self.model_dump(exclude_defaults=True, exclude={"name"})
        for key in given_keys(changed):
            using = suites_with(key)
            if suites.isdisjoint(using):
                do = "does" if len(names) == 1 else "do"
                raise ValueError(
                    f"`finetune.task.{key}` is for {' and '.join(using)}; {' and '.join(names)} {do} not use it"
                )


class CommonFinetuneRecipe(FinetuneRecipe):
    """How the variants of a sweep are fine-tuned, on whichever tasks the sweep names."""

    task: SharedTaskConfig

    @model_validator(mode="after")
    def _check_replicates(self) -> Self:
        if self.num_replicates > 1:
            raise ValueError("`finetune.num_replicates` is for `exlm finetune`: a sweep scores one split")
        return self

    def of_task(self, name: str, changes: dict[str, Any]) -> FinetuneRecipe:
        """Return the recipe of one task, with `changes` of sections or keys in place of the common values.

        Raises:
            ValueError: The common values do not go with this task; the message is for users.
        """
        try:
            content = self.model_dump() | {"name": name.replace("/", "-"), "task": self.task.of_task(name)} | changes
            return FinetuneRecipe.model_validate(content)
        except ConfigError as error:
            raise ValueError(f"`finetune`: {error.message}; {error.hint}") from None
        except ValidationError as error:
            raise ValueError(f"`finetune` on {name}: {describe_finding(error.errors()[0])}") from None


NO_GRID = "single"
"""Label of the only point where no grid is searched."""

_SECTIONS = ("model", "optim", "train")


@dataclass(frozen=True)
class GridPoint:
    """One combination of a grid.

    Attributes:
        label: Names its folder.
        values: By dotted key; empty where no grid is searched.
        recipe: With these values, and no grid of its own.
    """

    label: str
    values: dict[str, Any]
    recipe: FinetuneRecipe


def grid_points(recipe: FinetuneRecipe, *, use_grid: bool) -> list[GridPoint]:
    """Return every combination of the recipe's grid, the last key running fastest; without a grid the recipe itself.

    Raises:
        ConfigError: No grid to search; a key outside `model`, `optim` and `train`; a value that is not accepted; a
            value given twice.
    """
    bare = recipe.model_copy(update={"grid": {}})
    if not use_grid:
        return [GridPoint(NO_GRID, {}, bare)]
    if not recipe.grid:
        raise ConfigError(
            f"{recipe.name}: the recipe has no `grid` to search",
            "give one, for example `--set grid.optim.lr=[1e-5,2e-5,3e-5]`",
        )
    for key, values in recipe.grid.items():
        _check_axis(recipe.name, key, values)
    points = []
    for combination in itertools.product(*recipe.grid.values()):
        chosen = dict(zip(recipe.grid, combination, strict=True))
        points.append(GridPoint(_label(chosen), chosen, _with_values(bare, chosen)))
    return points


def _check_axis(name: str, key: str, values: tuple[Any, ...]) -> None:
    field = find_field(FinetuneRecipe, key)
    if field is None or "." not in key or key.partition(".")[0] not in _SECTIONS:
        raise ConfigError(
            f"{name}: `grid` has the key `{key}`; accepted: keys of {', '.join(f'`{s}`' for s in _SECTIONS)}",
            "for example `optim.lr`, `train.max_epochs`, `train.batch_sequences`",
        )
    shown = [_text(value) for value in values]
    if not shown or len(set(shown)) < len(shown):
        raise ConfigError(
            f"{name}: `grid` gives `{key}` the values [{', '.join(shown)}]", "give at least one, each of them once"
        )


def _with_values(recipe: FinetuneRecipe, chosen: dict[str, Any]) -> FinetuneRecipe:
    try:
        return recipe.changed(chosen)
    except ValidationError as error:
        finding = error.errors()[0]
        key = ".".join(map(str, finding["loc"]))
        raise ConfigError(
            f"{recipe.name}: grid point {_label(chosen)}: {describe_finding(finding, f'`{key}`')}",
            "change the values of `grid`",
        ) from None


def _label(chosen: dict[str, Any]) -> str:
    """Return `lr-2e-05_max_epochs-3`."""
    leaves = [key.partition(".")[2] for key in chosen]
    names = [leaf if leaves.count(leaf) == 1 else key for key, leaf in zip(chosen, leaves, strict=True)]
    texts = (re.sub(r"[^0-9A-Za-z.+-]+", "-", _text(value)).strip("-") for value in chosen.values())
    return "_".join(f"{name}-{text}" for name, text in zip(names, texts, strict=True))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return show_value(value)
